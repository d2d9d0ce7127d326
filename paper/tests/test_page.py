"""Provenance, kept rows, the page that is written from them, CSV, LaTeX and plots, and the runner of all experiments."""

import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import equicam
import equicam_paper
from conftest import small
from equicam.errors import EquicamError
from equicam.evaluate.statistics import Correlation, Estimate
from equicam.images.items import Item
from equicam.methods import METHODS
from equicam_paper import (
    EXPERIMENTS,
    alignment,
    blur,
    load_experiment,
    page,
    plots,
    reproduce,
    rotation_augmentation,
    run_all,
    soft_gate,
    triage,
)
from equicam_paper.benchmarks import find_items
from equicam_paper.claims import claims
from equicam_paper.cli import app
from equicam_paper.context import Context, Evaluated
from equicam_paper.control import controls, judge_in_place
from equicam_paper.draws import authors_draw, authors_slots, draw_sample
from equicam_paper.findings import findings
from equicam_paper.kept import KeptRows, read_rows, write_rows
from equicam_paper.matched import Samples
from equicam_paper.page import answer_claims, counts, read_kept, write_page
from equicam_paper.provenance import COMMIT, commit, content_digest, describe, provenance
from equicam_paper.reproduce import run_experiment, zero_shot_classes
from equicam_paper.rows import VERDICTS, Both, Remark, Row, compare, not_run, number, with_verdict
from equicam_paper.tables import as_csv, as_latex, escape, interval
from tests.conftest import Cnn, seeded

ROOT = Path(__file__).parents[2]
FACTS = {"version", "commit", "weights", "images", "device", "dtype", "compiled", "date", "n", "drawn"}
GC, EG = "main.Grad-CAM.resnet50.eq", "main.EquiGrad-CAM.resnet50.eq"


def estimate(value: float, n: int = 1000) -> Estimate:
    return Estimate(value, value - 0.004, value + 0.004, n)


def kept(experiment, *rows, n=1000, device="cpu", domain=""):
    """Rows as an experiment keeps them."""
    facts = {
        "version": "1",
        "commit": "abc",
        "torch": "2",
        "weights": "w" * 64,
        "data": "val",
        "images": "i" * 64,
        "n": n,
    }
    facts |= {
        "groups": None,
        "drawn": "all",
        "device": device,
        "dtype": "float32",
        "compiled": False,
        "date": "2026-01-01",
    }
    return KeptRows(experiment, "resnet50", domain, facts, rows)


def measured(claim, value, label, n=1000):
    return compare(claim, Both(estimate(value, n), estimate(value, n)), label=label)


@pytest.fixture
def folder(tmp_path):
    """Kept rows of one network: three claims of `main`, one of them on 300 images in a second folder."""
    main = kept(
        "main", measured(GC, 0.703, "grad-cam"), measured(EG, 0.8, "equigrad-cam"),
        measured("", 0.9, "coverage: a map that ignores the image"), not_run("main.Grad-CAM.vgg16.eq", Remark("network", {"network": "vgg16"})),
        not_run("main.Score-CAM.resnet50.eq", Remark("costly", {"passes": "2,048"})),
    )  # fmt: skip
    write_rows(tmp_path / "rows/resnet50/main.json", main)
    few = kept(
        "main",
        measured(GC, 0.5, "grad-cam", n=300),
        measured("main.Score-CAM.resnet50.eq", 0.494, "score-cam", n=300),
        n=300,
        device="a GPU",
    )
    write_rows(tmp_path / "rows/resnet50-costly/main.json", few)
    (tmp_path / "rows/resnet50/section.json").write_text(
        json.dumps({"title": "A network", "commands": ["equicam-paper reproduce all"]})
    )
    return tmp_path / "rows"


def test_rows_carry_their_provenance_and_are_read_back(context):
    done = run_experiment("alignment", context)
    text = done.path.read_text()
    found = read_rows(done.path)
    assert set(found.provenance) >= FACTS
    assert found.provenance["n"] == len(context.sample) == 3
    assert found.provenance["weights"] == context.weights_digest
    assert [row.verdict for row in found.rows] == [row.verdict for row in done.rows]
    for ours, theirs in zip(found.ran, (row for row in done.rows if row.verdict != "not run"), strict=True):
        assert (ours.claim, ours.label, ours.published, ours.note) == (
            theirs.claim,
            theirs.label,
            theirs.published,
            theirs.note,
        )
        assert ours.clean.value == pytest.approx(theirs.clean.value, rel=1e-5)
    assert len(text) < 600 * len(done.rows)
    assert text.count("\n") == len(done.rows) + 4  # a line per row


def test_the_digest_is_of_contents(tiles, tmp_path):
    items = find_items(tiles)[:2]
    before = content_digest(items)
    assert before == content_digest(items)
    other = tmp_path / "other.png"
    Image.open(items[0].path).rotate(90).save(other)
    assert content_digest([replace(items[0], path=other), items[1]]) != before
    assert content_digest([replace(items[0], path=tmp_path / "gone.png"), items[1]]) != before


def test_the_commit_is_given_or_found(monkeypatch):
    commit.cache_clear()
    monkeypatch.setenv(COMMIT, "0123abc")
    assert commit() == "0123abc"
    monkeypatch.delenv(COMMIT)
    commit.cache_clear()
    found = commit()
    commit.cache_clear()
    in_clone = (Path(__file__).parents[2] / ".git").exists()
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?", found) if in_clone else found is None


def test_the_authors_draw_is_theirs():
    """The digest of their 1,000 lists of ten."""
    text = json.dumps(authors_slots(1000), separators=(",", ":")).encode()
    assert (
        hashlib.sha256(text).hexdigest() == "f5f0a31ddc67d627245bfddbfddca9dc57e44db6bf57d7f1beb217cb67bcca90"
    )
    items = [Item(f"n{c:02}/img_{i:04}.JPEG", Path("x"), label=c) for c in range(12) for i in range(15)]
    chosen = authors_draw(items[::-1])
    assert [item.id for item in chosen[:2]] == [
        "n00/img_0009.JPEG",
        "n01/img_0010.JPEG",
    ]  # the first slot of each class
    assert len({item.id for item in chosen}) == 120
    assert draw_sample(items, 24, "authors") == chosen[:24]
    assert [item.label for item in draw_sample(items, 3, "authors")] == [0, 4, 8]
    with pytest.raises(EquicamError, match="15 images of every class"):
        authors_draw(items[:-1])


def test_every_claim_counts_once(folder):
    answers = answer_claims(read_kept(folder))
    assert len(answers) == len(claims()) == 371
    assert sum(counts(answers).values()) == 371
    assert answers[GC].verdict == "matches"  # on 1,000 images, not on 300
    assert answers[EG].verdict == "differs"
    assert answers["main.Score-CAM.resnet50.eq"].folder == "resnet50-costly"
    assert answers["main.Grad-CAM.vgg16.eq"].reason == "needs ImageNet weights of vgg16"
    assert "CUB-200-2011" in answers["cub.pg.vgg16"].reason


def test_the_page_is_written_from_rows(folder, tmp_path):
    target = tmp_path / "docs/reproduce.md"
    target.parent.mkdir()
    target.write_text("old")
    found = write_page(target, folder)
    text = target.read_text()
    assert sum(found.values()) == 371
    assert f"**Of 371 claims, {found['matches']} match" in text.split("## ")[0]
    assert f"{found['not run']} were not run" in text.split("## ")[0]
    assert "old" not in text.replace("fold", "")
    assert "## A network\n\n    equicam-paper reproduce all\n" in text
    assert "equicam 1 at abc" in text
    assert "a GPU" in text  # the provenance of the second section
    assert "counted on 1,000 images, `main` of resnet50" in text  # one measurement, one verdict
    assert (
        text.count(
            "| grad-cam | 0.703 (n = 10,000, ten per class) | 0.703 [0.699, 0.707] | 0.703 [0.699, 0.707] | 1000 | matches ± 0.03 |"
        )
        == 1
    )
    with Image.open(tmp_path / "docs/reproduce/resnet50-main.png") as plot:
        assert np.asarray(plot.convert("L")).std() > 10


def test_the_page_judges_another_network_in_the_place_of_the_papers(folder, tmp_path):
    """ResNet-50 stands first; the other network answers no claim, and the page says how it would be judged."""
    alignment_claims = (
        "align.Grad-CAM single view.resnet50.eq",
        "align.Aligned feature-space (EquiGrad-CAM).resnet50.eq",
    )
    write_rows(
        folder / "resnet50/alignment.json",
        kept("alignment", measured(alignment_claims[0], 0.703, "grad-cam"), measured(alignment_claims[1], 0.956, "equigrad-cam")),
    )  # fmt: skip
    for name in ("main", "alignment"):
        rows = [measured("", value, label) for label, value in (("grad-cam", 0.772), ("equigrad-cam", 0.957))]
        write_rows(folder / f"mobilenet_v2/{name}.json", replace(kept(name, *rows), backbone="mobilenet_v2"))
    few = [measured("", 0.703, "grad-cam", n=300), measured("", 0.7, "score-cam", n=300)]
    write_rows(folder / "mobilenet_v2-costly/main.json", replace(kept("main", *few), backbone="mobilenet_v2"))
    assert list(read_kept(folder)) == ["resnet50", "resnet50-costly", "mobilenet_v2", "mobilenet_v2-costly"]
    target = tmp_path / "page.md"
    write_page(target, folder)
    text = target.read_text()
    assert (
        "Several tables print the same number; counted once each, these are 3 that match and 1 that differ."
        in text
    )  # Grad-CAM's in two tables, EquiGrad-CAM's, Score-CAM's
    assert (
        "With MobileNetV2's measurements in the place of ResNet-50's, of 5 claims 2 match, 3 differ; with ResNet-50's own, 4 match, 1 differ. "
        f"So 1 of the 4 matches (1 of 3 distinct ones) do not tell the two networks apart, and say little about ResNet-50: `{alignment_claims[1]}` "
        in text
    )


def test_the_page_has_a_line_per_method_of_random_weights(folder, tmp_path):
    labels = ("grad-cam, weights as given", "grad-cam, all random", "equigrad-cam, all random")
    rows = [measured("", 0.5 + i / 10, f"{label}: Eq") for i, label in enumerate(labels)]
    of_networks = {"by_seed": [0.0, 0.9], "floor": -0.1, "constant": 0.27}
    rows[0] = replace(
        rows[0], reason=Remark("networks", {"by_seed": [], "floor": float("nan"), "constant": 0.0})
    )
    rows[1] = replace(rows[1], reason=Remark("networks", of_networks))
    assert rows[0].note == ""
    dead = replace(rows[1], reason=Remark("networks", of_networks | {"by_seed": [float("nan"), 0.9]}))
    write_rows(tmp_path / "dead.json", kept("sanity", dead))
    assert read_rows(tmp_path / "dead.json").rows[0].note.startswith("by seed nan, 0.900")
    assert (
        rows[1].note
        == "by seed 0.000, 0.900; unrelated images -0.100; 27% of the maps are constant and count 0"
    )
    refused = Estimate(*[float("nan")] * 3, 0)
    refusing = {"by_seed": [float("nan")] * 2, "floor": float("nan"), "constant": 0.0}
    rows.append(
        replace(
            measured("", 0.5, "ablation-cam, all random: Eq"),
            clean=refused,
            reason=Remark("networks", refusing),
        )
    )
    rows.append(measured("", -0.2, "grad-cam, all random: Pearson with the map of the weights as given"))
    left = replace(
        rows[0], label="head random", clean=None, as_published=None, verdict="not run", reason=Remark("note", {"text": "later"})
    )  # fmt: skip
    write_rows(folder / "resnet50/sanity.json", kept("sanity", *rows, left))
    write_page(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text().split("(`sanity`)")[1].split("\n#")[0]
    steps = "| weights as given | head random | last quarter random | last half random | all random |"
    assert text.count(f"| method {steps}") == 2  # Eq, and what unrelated images reach
    assert "Eq, 1,000 images:" in text
    assert "| grad-cam | 0.500 [0.496, 0.504] |  |  |  | 0.600 [0.596, 0.604], by seed 0.000, 0.900 |" in text
    assert "| equigrad-cam |  |  |  |  | 0.700 [0.696, 0.704] |" in text
    assert "| ablation-cam |  |  |  |  | refused |" in text
    assert "| ablation-cam |  |  |  |  |  |" in text  # of unrelated images
    assert "| grad-cam |  |  |  | -0.200 [-0.204, -0.196] |" in text
    assert "| grad-cam |  |  |  |  | -0.100, 27% |" in text
    assert "\nlater.\n" in text
    (left,) = re.findall(r"\nNot measured here: (.+?)\. ", text)
    assert set(left.split(", ")) == METHODS.keys() - {"grad-cam", "equigrad-cam", "ablation-cam"}
    assert "SSIM" not in text  # not measured
    latex = as_latex(rows, "Model randomisation", "equicam 1")
    assert latex.count("\\begin{table}") == 3
    assert latex.count("% equicam 1") == 1
    assert (
        "grad-cam & 0.500 [0.496, 0.504] &  &  &  & 0.600 [0.596, 0.604], by seed 0.000, 0.900 \\\\" in latex
    )
    assert "by seed" not in as_latex([measured("", 0.5, "grad-cam")], "A", "B")


def test_the_terminal_shows_random_weights_a_line_per_method_and_cuts_no_name(monkeypatch, tmp_path):
    methods = ("equigrad-cam+pcf", "equigrad-cam+soft", "equigrad-cam-combined", "equigrad-cam-fine")
    rows = tuple(
        measured("", 0.5, f"{method}, {weights}: Eq")
        for method in methods
        for weights in plots.RANDOM_WEIGHTS
    )
    found = reproduce.Reproduction("Model randomisation", rows, tmp_path / "sanity.json", {})
    monkeypatch.setattr(reproduce, "reproduce", lambda *_a, **_k: found)
    command = ["reproduce", "sanity", "--data", "images", "--model", "embedded"]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, command).output
    assert "…" not in shown
    assert all(
        shown.count(method.rsplit("-", 1)[-1].rsplit("+", 1)[-1]) == 2 for method in methods
    )  # in two tables
    assert shown.count("\n") < 60


@pytest.mark.parametrize(("method", "said"), [("rise-400", True), ("equigrad-cam", False)])
def test_maps_that_are_all_constant_with_random_weights_are_named(folder, tmp_path, method, said):
    def of(name, share):
        networks = Remark("networks", {"by_seed": [], "floor": 0.0, "constant": share})
        return replace(measured("", 1 - share, f"{name}, all random: Eq"), reason=networks)

    sane = kept("sanity", of(method, 1.0), of("grad-cam", 0.4))
    write_rows(folder / "resnet50/sanity.json", sane)
    write_page(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text().split("(`sanity`)")[1].split("\n#")[0]
    assert (f"Where all maps by {method} are constant" in text) == said
    figure = plots.compose(plots.panels_of(sane), "title")
    assert [one.get_text() for one in figure.axes[0].texts] == ["constant", ".60 ± .00"]


def test_plots_of_fine_tunes_and_of_costs_share_no_scale_with_other_numbers():
    labels = ("seed 0", "seed 1", "seed 2", "mean", "spread")
    rows = [measured("", 0.5, f"grad-cam, {label}") for label in labels]
    each, spread = plots.panels_of(kept("seeds", *rows, measured("", 0.8, "accuracy, spread in points")))
    assert [name for name, _ in each.rows] == [f"grad-cam, {label}" for label in labels[:4]]
    assert [name for name, _ in spread.rows] == ["grad-cam"]
    cost = kept("cost", measured("", 9.0, "T = 18 over one Grad-CAM", n=100))
    assert "n =" not in plots.heading(cost)
    assert "n = 1,000" in plots.heading(kept("main"))
    (times,) = plots.panels_of(cost)
    assert times.title == "time of a map, median of 100 rounds"


def test_commands_of_claims_about_costly_methods_say_so(folder, tmp_path):
    other = Remark("network", {"network": "vgg16"})
    rows = [not_run(f"main.{name}.vgg16.eq", other) for name in ("Grad-CAM", "Score-CAM")]
    write_rows(folder / "resnet50/main.json", kept("main", *rows))
    write_page(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text().split("## Not run here")[1]
    run = "about vgg16: `equicam-paper reproduce main --data ILSVRC2012/val --model vgg16"
    assert f"| `main` | 1 | {run} --n 10000` |" in text
    assert f"| `main` | 1 | {run} --costly --n 500` |" in text


def test_the_page_of_this_repository_is_what_its_rows_say(tmp_path, monkeypatch):
    monkeypatch.setattr(
        page, "write_page_plot", lambda kept, path: path if kept.experiment in plots.ON_PAGE else None
    )
    write_page(tmp_path / "reproduce.md", ROOT / "docs/reproduce/rows")
    text = (tmp_path / "reproduce.md").read_text()
    assert text == (ROOT / "docs/reproduce.md").read_text(), (
        "equicam-paper reproduce --page docs/reproduce.md"
    )
    shown = set(re.findall(r"]\(reproduce/(.+?\.png)\)", text))
    assert shown
    assert shown == {path.name for path in (ROOT / "docs/reproduce").glob("*.png")}


KEPT = sorted(path for path in (ROOT / "docs/reproduce/rows").glob("*/*.json") if path.stem != "section")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_rows_have_the_verdicts_of_the_present_rule(path, tmp_path):
    """The page judges them again: whoever counts in the files finds what the page says."""
    write_rows(tmp_path / path.name, read_rows(path))
    assert (tmp_path / path.name).read_text() == path.read_text(), "read_rows and write_rows"


def test_the_kept_rows_have_a_negative_control():
    kept_rows = read_kept(ROOT / "docs/reproduce/rows")
    judged = list(judge_in_place(kept_rows["resnet50"], kept_rows["mobilenet_v2"]))
    assert len(judged) > 30
    assert sum(one.other.verdict == "differs" for one in judged) > sum(
        one.other.verdict == "matches" for one in judged
    )
    sections = [(kept_rows[f"resnet50{end}"], kept_rows[f"mobilenet_v2{end}"]) for end in ("", "-costly")]
    own = {row.claim for mine, _ in sections for one in mine.values() for row in one.ran if row.within}
    compared = {one.own.claim for pair in sections for one in judge_in_place(*pair)}
    assert compared < own
    (text,) = controls(kept_rows)
    assert f"of {len(compared)} claims" in text
    assert f"{len(own - compared)} more claims that an interval decides have no counterpart." in text


def test_small_numbers_are_not_shown_as_0():
    nan = float("nan")
    assert interval(Estimate(2.1e-7, nan, nan, 8)) == "2e-07"
    assert interval(Estimate(0.0, nan, nan, 8)) == "0.000"
    assert interval(Estimate(-0.0004, -0.001, 0.0002, 8)) == "-0.000 [-0.001, 0.000]"
    assert interval(Estimate(0.0005, nan, nan, 8), 2) == "0.0005"


def test_a_row_that_counts_elsewhere_says_where_and_nothing_about_its_own_verdict(folder, tmp_path):
    """A constant counts in one table alone, and a small sample's interval decides nothing beside a large one's."""
    constant = with_verdict("const.T", Both(number(18), None), "by definition", label="T = 18")
    write_rows(folder / "resnet50/constants.json", kept("constants", constant))
    write_rows(
        folder / "mobilenet_v2/constants.json", replace(kept("constants", constant), backbone="mobilenet_v2")
    )
    wide = Estimate(0.703, 0.66, 0.74, 300)
    few = compare(GC, Both(wide, wide), label="grad-cam", reason="of few images")
    assert few.verdict == "undecided"
    assert "margin" in few.note
    write_rows(folder / "resnet50-costly/main.json", kept("main", few, n=300))
    write_page(tmp_path / "page.md", folder)
    text = (tmp_path / "page.md").read_text()
    assert "| counted in `constants` of resnet50 |" in text
    costly = text.split("counted on 1,000 images, `main` of resnet50")[1].split("###")[0]
    assert "- grad-cam: of few images\n" in costly
    assert "margin" not in costly.split("## ")[0]


def test_a_page_needs_rows(tmp_path):
    with pytest.raises(EquicamError, match=r"NETWORK/NAME\.json"):
        write_page(tmp_path / "page.md", tmp_path)
    (tmp_path / "resnet50").mkdir()
    (tmp_path / "resnet50/main.json").write_text('{"rows": [{"verdict": "good"}]}')
    with pytest.raises(EquicamError, match="as `equicam-paper reproduce` writes them"):
        read_kept(tmp_path)
    assert not (tmp_path / "page.md").exists()
    result = CliRunner().invoke(app, ["reproduce", "--page", str(tmp_path / "page.md")])
    assert result.exit_code == 2
    assert "--rows" in result.output


def test_table_with_another_provenance_says_so(folder, tmp_path):
    other = kept("alignment", measured("", 0.5, "grad-cam"), device="another GPU")
    write_rows(folder / "resnet50/alignment.json", other)
    write_rows(folder / "resnet50/blur.json", kept("blur", measured("", 0.5, "grad-cam")))
    write_page(tmp_path / "page.md", folder)
    assert describe(other.provenance) in (tmp_path / "page.md").read_text().split("(`alignment`)")[1]


def difference(label, value, half=0.004, n=1000):
    found = Estimate(value, value - half, value + half, n)
    return compare("", Both(found, found), label=label)


SKILL = "{}: skill above the floor"


@pytest.mark.parametrize(("unaligned", "said"), [(0.05, True), (0.002, False), (-0.05, False)])
def test_findings_on_averaging_without_alignment_follow_the_paired_interval(unaligned, said):
    rows = [measured("", v, m) for m, v in (("grad-cam", 0.7), ("aug-cam", 0.75), ("equigrad-cam", 0.98))]
    rows += [
        measured("", v, SKILL.format(m))
        for m, v in (("grad-cam", 0.6), ("aug-cam", 0.5 if said else 0.599), ("equigrad-cam", 0.97))
    ]
    rows.append(difference(alignment.UNALIGNED, unaligned))
    (text,) = findings({"mobilenet_v2": {"alignment": kept("alignment", *rows)}})
    assert ("By raw Eq, averaging without alignment is above Grad-CAM with MobileNetV2" in text) == said
    assert ("By skill it is worse than not averaging with MobileNetV2" in text) == said


@pytest.mark.parametrize(("as_it_is", "word"), [(0.42, "higher"), (0.712, ""), (0.9, "lower")])
def test_the_finding_on_rise_follows_its_intervals(as_it_is, word):
    rows = [
        measured("", 0.5, "rise"),
        measured("", as_it_is, "rise"),
        measured("", 0.715, "rise, stretched to [0, 1]"),
    ]
    (text,) = findings({"resnet50-costly": {"main": kept("main", *rows)}})
    for one in ("higher", "lower"):
        assert (f"Stretched, its Eq by their protocol is {one} with ResNet-50" in text) == (one == word)
    assert ("part of what is published as drift of RISE" in text) == (word == "higher")
    assert ("changes its Eq with no network" in text) == (not word)
    assert f"| ResNet-50 | {as_it_is:.3f} | 0.715 | 0.715 |" in text  # of two rows the one on all classes
    assert list(findings({"resnet50-costly": {"main": kept("main", *rows[:2])}})) == []


def rotated_training(**of):
    """Rows of `rotation-augmentation`: each difference with its value for every fine-tune, and their mean."""
    names = rotation_augmentation
    labels = {
        "raises": names.TRAINED_ABOVE_PLAIN,
        "ahead": names.ALIGNED_ABOVE_TRAINED,
        "adds": names.ALIGNED_AND_TRAINED,
    }
    eq = {"GC Eq no aug": 0.6, "GC Eq rot aug": 0.59, "EG Eq no aug": 0.9, "EG Eq rot aug": 0.95}
    rows = [measured("", v, label) for label, v in eq.items()]
    for name, values in of.items():
        rows.append(difference(labels[name], float(np.mean(values))))
        if len(values) > 1:
            rows += [difference(f"{labels[name]}, seed {i}", one) for i, one in enumerate(values)]
    seeds = max(map(len, of.values()))
    rows += [measured("", 0.5 + 0.1 * i, f"GC Eq no aug, seed {i}") for i in range(seeds) if seeds > 1]
    return kept("rotation-augmentation", *rows)


@pytest.mark.parametrize(
    ("raises", "ahead", "adds"),
    [
        ((-0.01, -0.02), (0.3, 0.2), (0.05, 0.1)),
        ((0.1, 0.2), (-0.1, -0.2), (0.05, 0.0)),
        ((0.1, -0.02), (0.3, -0.1), (0.2, 0.3)),
    ],
)
def test_findings_on_rotated_training_follow_every_fine_tune(raises, ahead, adds):
    (text,) = findings(
        {
            "aerial-resnet50": {
                "rotation-augmentation": rotated_training(raises=raises, ahead=ahead, adds=adds)
            }
        }
    )
    above = [all(v > 0.004 for v in values) for values in (raises, ahead, adds)]
    assert f"rotated training raises Grad-CAM's own Eq in {int(above[0])} of 1. " in text
    where = "" if above[1] else " (not on ResNet-50, aerial)"
    assert f"stays below EquiGrad-CAM without it in {int(above[1])} of 1{where}. " in text
    assert f"EquiGrad-CAM adds to rotated training in {int(above[2])} of 1; " in text
    assert "| ResNet-50, aerial | 2 | 0.600 (0.500–0.600) | 0.590 |" in text


@pytest.mark.parametrize("share", [0.05, 0.28])
def test_the_finding_on_rotated_training_says_where_maps_are_constant(share):
    several = rotated_training(raises=(0.1, 0.2), ahead=(0.3, -0.2), adds=(0.1, 0.1))
    blank = kept("triage", measured("", share, triage.CONSTANT))
    text, _signals = findings({"aerial-resnet50": {"rotation-augmentation": several, "triage": blank}})
    assert ("without rotated training, ResNet-50, aerial: 28%" in text) == (share > 0.1)
    assert "were not counted" not in text
    (text,) = findings({"aerial-resnet50": {"rotation-augmentation": several}})
    assert "Constant maps were not counted in these tables on ResNet-50, aerial." in text


def test_one_fine_tune_is_listed_and_counted_nowhere():
    several = rotated_training(raises=(0.1, 0.2), ahead=(0.3, 0.2), adds=(0.1, 0.1))
    one = rotated_training(raises=(-0.1,), ahead=(-0.3,), adds=(-0.1,))
    (text,) = findings(
        {
            "aerial-resnet50": {"rotation-augmentation": several},
            "aerial-vgg16": {"rotation-augmentation": one},
        }
    )
    assert "stays below EquiGrad-CAM without it in 1 of 1. " in text
    assert (
        "listed and not counted: fine-tunes differ by more than the interval of one says (VGG-16, aerial)"
        in text
    )
    assert "| VGG-16, aerial | 1 | 0.600 |" in text


def test_findings_on_random_weights_and_gates_follow_the_numbers():
    random = {
        "grad-cam, weights as given": 0.7,
        "equigrad-cam, weights as given": 0.97,
        "equigrad-cam, all random": 0.98,
    }
    sane = kept("sanity", *(measured("", v, f"{label}: Eq") for label, v in random.items()))
    without = kept("sanity", measured("", 0.7, "grad-cam, weights as given: Eq"))
    (text,) = findings({"vgg16": {"sanity": without}, "resnet50": {"sanity": sane}})
    assert (
        "above that of the trained network, by intervals that do not overlap, in 1 of 1, up to 0.980 (ResNet-50, ImageNet, trained 0.970)"
        in text
    )
    assert list(findings({"vgg16": {"sanity": without}})) == []


@pytest.mark.parametrize(("change", "beyond"), [(-0.02, True), (-0.006, False), (0.02, True)])
def test_the_finding_on_the_soft_gate_follows_the_paired_interval(change, beyond):
    gates = kept("soft-gate", difference(soft_gate.CHANGE, change), difference(soft_gate.CHANGE_FIRST, 0.001))
    (text,) = findings({"resnet50": {"soft-gate": gates}})
    moved = "ResNet-50" if beyond else "no network"
    assert "at most 0.004 on the first 200 classes" in text
    assert f"with no network on the first fifth of the classes, and with {moved} on all classes." in text
    assert ("is load-bearing with ResNet-50." in text) == beyond
    assert ("is not shown to be load-bearing." in text) == (not beyond)
    both = [
        f"{v:+.3f} [{v - 0.004:+.3f}, {v + 0.004:+.3f}]" for v in (0.001, change) for _ in plots.PROTOCOLS
    ]
    assert f"| ResNet-50 | {' | '.join(both)} |" in text


def test_findings_on_changes_need_images_and_changes():
    """A change on few images is no change, and a table without changes is no finding."""
    few, level = difference(soft_gate.CHANGE_FIRST, -0.02, n=12), measured("", 0.96, "γ = 0")
    (text,) = findings({"resnet50": {"soft-gate": kept("soft-gate", few, level)}})
    assert "with no network on the first fifth of the classes." in text
    assert "on all classes" not in text
    (text,) = findings(
        {
            "resnet50": {
                "soft-gate": kept(
                    "soft-gate",
                    replace(
                        few, clean=replace(few.clean, n=200), as_published=replace(few.as_published, n=200)
                    ),
                    level,
                )
            }
        }
    )
    assert "with ResNet-50 on the first fifth of the classes." in text
    assert list(findings({"resnet50": {"soft-gate": kept("soft-gate", level)}})) == []


@pytest.mark.parametrize(
    ("random", "words"), [(0.98, "in 1 of 1, up to 0.980"), (0.5, "in none of 1, at most 0.500")]
)
def test_the_finding_on_random_weights_can_say_no(random, words):
    networks = Remark("networks", {"by_seed": [0.5, 0.6], "floor": 0.1, "constant": 0.0})
    row = replace(measured("", random, "equigrad-cam, all random: Eq"), reason=networks)
    sane = kept("sanity", measured("", 0.97, "equigrad-cam, weights as given: Eq"), row)
    (text,) = findings({"resnet50": {"sanity": sane}})
    assert f"by intervals that do not overlap, {words} (" in text
    assert "the mean of 2 random networks." in text
    assert "constant, which count 0" not in text


@pytest.mark.parametrize(("change", "beyond"), [(0.02, True), (0.005, False), (-0.02, True)])
def test_the_finding_on_blur_follows_the_paired_interval(change, beyond):
    rows = [difference(blur.CHANGE.format(sigma), change if sigma == 16 else 0.001) for sigma in (4, 16, 32)]
    main = kept("main", measured("", 0.7, "grad-cam"), measured("", 0.95, "equigrad-cam"))
    found = findings({"resnet50": {"blur": kept("blur", *rows), "main": main}})
    (text,) = [one for one in found if "smoothing" in one]
    assert f"with the whole interval, with {'ResNet-50' if beyond else 'no network'}." in text
    assert "flat, within 0.002" in text
    assert text.rstrip().endswith("| 0.250 |")
    levels = kept("blur", measured("", 0.7, "grad-cam"))
    assert list(findings({"resnet50": {"blur": levels}})) == []


def test_findings_need_images():
    few = [difference(alignment.UNALIGNED, 0.3, n=4), measured("", 0.7, "grad-cam", n=4)]
    assert list(findings({"resnet50": {"alignment": kept("alignment", *few)}})) == []


def test_findings_need_groups():
    """A thousand images of few patients say nothing."""
    row = difference(alignment.UNALIGNED, 0.3)
    for groups, expected in ((5, 0), (24, 1)):
        rows = replace(row, clean=replace(row.clean, groups=groups), as_published=None)
        assert len(list(findings({"resnet50": {"alignment": kept("alignment", rows)}}))) == expected


def test_a_difference_that_was_not_measured_is_no_finding():
    eq = {"GC Eq no aug": 0.6, "GC Eq rot aug": 0.59, "EG Eq no aug": 0.9, "EG Eq rot aug": 0.95}
    rows = [measured("", v, label) for label, v in eq.items()]
    unknown = Estimate(0.0, float("nan"), float("nan"), 1000)
    for more in ([], [compare("", Both(unknown, None), label=rotation_augmentation.TRAINED_ABOVE_PLAIN)]):
        (text,) = findings(
            {"aerial-resnet50": {"rotation-augmentation": kept("rotation-augmentation", *rows, *more)}}
        )
        assert "does not raise" not in text
        assert "stays below" not in text


def test_the_finding_on_signals_has_angles_off_the_grid():
    label = "worst tenth found in a tenth"
    ends = ("", ", by disagreement of the views", ", by 1 − stability")
    rows = [measured("", 0.6, "r of PEUM with 1 − Eq")]
    rows += [measured("", 0.2 + i / 10, label + end) for i, end in enumerate(ends)]
    rows += [measured("", 0.5 + i / 10, f"{label}{end}, off the grid") for i, end in enumerate(ends)]
    (text,) = findings({"aerial-resnet50": {"triage": kept("triage", *rows)}})
    assert "| ResNet-50, aerial | 1 | 0.60 | 20% | 30% | 40% | 50% | 60% | 70% |" in text
    panels = plots.panels_of(kept("triage", *rows, measured("", 0.1, f"{label}, seed 0")))
    assert [[name for name, _ in panel.rows] for panel in panels] == [
        [f"found in a tenth{end}" for end in ends]
    ] * 2


@pytest.mark.parametrize(("found", "constant"), [(0.05, 0.25), (0.099, 0.05), (0.3, 0.0)])
def test_the_finding_on_signals_names_chance_and_constant_maps(found, constant):
    rows = [measured("", found, "worst tenth found in a tenth"), measured("", constant, triage.CONSTANT)]
    (text,) = findings({"aerial-resnet50": {"triage": kept("triage", *rows)}})
    where = " (below chance)" if found == 0.05 else ""
    assert (f"not with every fine-tune, on ResNet-50, aerial{where}. " in text) == (found < 0.1)
    assert ("(ResNet-50, aerial: 25% are, as the mean" in text) == (constant == 0.25)
    assert ("lower what PEUM finds where there are any" in text) == (found < 0.1)
    assert "were not counted" not in text
    (text,) = findings({"aerial-resnet50": {"triage": kept("triage", *rows[:1])}})
    assert "Constant maps were not counted in these tables on ResNet-50, aerial. " in text
    assert "lower what PEUM finds" not in text


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ((0.5, 0.4, 0.3), ""),
        ((0.5, 0.4, 0.1), "above with 2 of 3"),
        ((0.5, 0.1, 0.05), "above with 1 of 3, below with 1"),
        ((0.1, 0.05, 0.05), "above with 0 of 3, below with 2"),
    ],
)
def test_the_finding_on_signals_names_chance_of_single_fine_tunes(seeds, words):
    label = "worst tenth found in a tenth"
    rows = [
        measured("", 0.3, label),
        *(measured("", one, f"{label}, seed {i}") for i, one in enumerate(seeds)),
    ]
    (text,) = findings({"aerial-resnet50": {"triage": kept("triage", *rows)}})
    assert (f"not with every fine-tune, on ResNet-50, aerial ({words}). " in text) == bool(words)
    assert ("not above chance" in text) == bool(words)


def test_plots_of_trainings_show_every_fine_tune():
    rows = [
        measured("", 0.6, "GC Eq no aug"),
        measured("", 0.9, "EG Eq rot aug"),
        measured("", 0.8, "acc no aug"),
    ]
    rows += [measured("", 0.5 + 0.1 * i, f"GC Eq no aug, seed {i}") for i in range(3)]
    eq, right = plots.panels_of(kept("rotation-augmentation", *rows))
    assert [name for name, _ in eq.rows] == [
        "Grad-CAM,\nunrotated training",
        "EquiGrad-CAM,\nrotated training",
    ]
    assert [name for name, _ in right.rows] == ["unrotated training"]
    axes = plots.compose([eq], "title").axes[0]
    ours, theirs = (line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()))
    assert [*ours.get_ydata()] == [*theirs.get_ydata()] == pytest.approx([0.5, 0.6, 0.7])
    assert {*ours.get_xdata(), *theirs.get_xdata()} == {-0.2, 0.2}  # on the bars that are their mean
    assert not right.fine_tunes


def test_the_finding_on_ignoring_the_image_can_say_no():
    ignores = "coverage: a map that ignores the image"
    for value, word in ((0.9, "rewards"), (0.5, "does not reward"), (0.704, "does not reward")):
        rows = [
            measured("", 0.7, "grad-cam"),
            measured("", value, ignores),
            measured("", 0.95, "equigrad-cam"),
        ]
        (text,) = findings({"resnet50": {"main": kept("main", *rows)}})
        assert f"The zero-filled full square {word} ignoring the image" in text


def test_kept_rows_are_judged_again(tmp_path):
    """A verdict that somebody edited, or that another rule gave, is not believed."""
    path = tmp_path / "main.json"
    write_rows(path, kept("main", measured(GC, 0.703, "grad-cam", n=20), measured(EG, 0.8, "equigrad-cam")))
    assert [row.verdict for row in read_rows(path).rows] == ["undecided", "differs"]
    path.write_text(path.read_text().replace('"undecided"', '"matches"').replace('"differs"', '"matches"'))
    found = read_rows(path).rows
    assert [row.verdict for row in found] == ["undecided", "differs"]
    assert found[0].why.code == "few"


def test_kept_rows_of_another_network_answer_nothing(tmp_path):
    """Also those that an earlier rule kept as answers."""
    path = tmp_path / "main.json"
    by_definition = Row("decomp.reproduces", "in two ways", "0.003", None, estimate(0.001), "by definition")
    write_rows(
        path, replace(kept("main", measured(GC, 0.703, "grad-cam"), by_definition), backbone="mobilenet_v2")
    )
    found = read_rows(path).rows
    assert [(row.claim, row.verdict) for row in found] == [
        ("", "measured"), (GC, "not run"), ("", "measured"), ("decomp.reproduces", "not run"),
    ]  # fmt: skip
    assert "of resnet50" in found[0].published


def test_provenance_names_other_weights_and_images(context, out):
    """Weights of --extra and parts of the sample, where an experiment used them, and only there."""
    context.evaluated.clear()
    context.evaluate(["grad-cam"])
    assert "evaluated" not in provenance(context)
    context.evaluate(["grad-cam"], items=context.sample[:2])
    found = provenance(context)
    part = content_digest(context.sample[:2])
    assert found["evaluated"] == [{"weights": context.weights_digest, "images": part, "n": 2}]
    assert f"and 2 with digest `{part[:12]}`" in describe(found)
    context.evaluated.clear()
    context.evaluated.add(Evaluated("e" * 64, context.data_digest, len(context.sample)))
    text = describe(provenance(context))
    assert "weights `eeeeeeeeeeee`;" in text
    assert context.weights_digest[:12] not in text
    context.evaluated.clear()
    named = replace(context, model=replace(context.model, name="nets/mine.py:build"))
    assert describe(provenance(named)).startswith("`mine.py:build`, equicam")


def test_csv_and_latex():
    row = Row(
        "", "=γ_1 & 50 % of |x|", "0.5", estimate(0.25), None, "measured", Remark("note", {"text": 'a, "b"'})
    )
    (line,) = csv.DictReader(io.StringIO(as_csv([row])))
    assert line["what"] == "'=γ_1 & 50 % of |x|"
    assert (line["clean_value"], line["clean_n"], line["as_published_value"]) == ("0.25", "1000", "")
    assert line["note"] == 'a, "b"'
    text = as_latex([row, not_run(GC, "why")], "A & B", "equicam 1")
    assert (
        r"=$\gamma$\_1 \& 50 \% of \textbar{}x\textbar{} & 0.5 &  & 0.250 [0.246, 0.254] & measured \\"
        in text
    )
    for command in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{A \& B. "):
        assert command in text
    assert text.count("\\\\\n") == 2
    labels = {claim.label for claim in claims().values()} | {claim.text for claim in claims().values()}
    assert {sign for label in labels for sign in escape(label) if ord(sign) > 126} == set()


@pytest.mark.parametrize("name", ["drift-confidence", "peum-audit", "alignment"])
def test_an_experiment_writes_its_plot_in_three_formats(context, out, name):
    run_experiment(name, context)
    for kind, begins in (("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")):
        assert (out / f"{name}.{kind}").read_bytes().startswith(begins)
    svg = (out / f"{name}.svg").read_text()
    assert "(a) " in svg  # panels have letters
    if name != "alignment":
        assert "r = " in svg
    with Image.open(out / f"{name}.png") as plot:
        assert plot.info["dpi"][0] == pytest.approx(200, abs=1)
        assert np.asarray(plot.convert("L")).std() > 10
    assert (out / f"{name}.csv").read_text().startswith("claim,what,published,")
    assert "\\bottomrule" in (out / f"{name}.tex").read_text()


def test_correlations_have_p_where_rows_are_independent():
    known = Correlation(0.5, 0.4, 0.6, -30.2, 100)
    assert plots.correlation_text(known) == "r = 0.50 [0.40, 0.60], p = $10^{-30}$\nn = 100 images"
    assert "p =" not in plots.correlation_text(replace(known, log10_p=float("nan")))
    assert "p =" not in plots.correlation_text(replace(known, n=12))  # too few for p and interval to agree


def test_the_text_of_a_scatter_covers_no_mark():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(2, 2000))
    panel = plots.Scatter("a", "x", "y", x, y, Correlation(0.5, 0.4, 0.6, -30.2, 100))
    figure = plots.compose([panel, panel], "title")
    figure.canvas.draw()
    for axes in figure.axes:
        (text,) = axes.texts
        box = text.get_window_extent()
        marks = axes.transData.transform(np.column_stack([x, y]))
        assert not any(box.contains(*mark) for mark in marks)
        assert box.x1 <= axes.get_window_extent().x1
        assert box.y1 <= axes.get_window_extent().y1


def test_every_plot_has_its_experiments_title():
    for name in EXPERIMENTS:
        assert load_experiment(name).title in plots.heading(kept(name))


def test_the_runner_goes_on_after_a_failure(context, tmp_path, monkeypatch):
    real = run_all.run_experiment

    def failing(name, of):
        if name == "blur":
            raise RuntimeError("out of memory")
        return real(name, of)

    monkeypatch.setattr(run_all, "run_experiment", failing)
    lines = []
    here = replace(context, out=tmp_path / "out")
    found = list(run_all.run_all(here, ("blur", "hooks"), rows=tmp_path / "rows", progress=lines.append))
    assert [(one.name, one.reason) for one in found] == [("blur", "out of memory"), ("hooks", "")]
    assert found[1].seconds > 0
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"hooks.json"}
    assert len(lines) == 2
    with pytest.raises(EquicamError, match="tables"):
        list(run_all.run_all(here, ("tables",)))


def test_the_runner_stops_in_time(context, tmp_path, monkeypatch):
    def endless(name, _of):
        while True:
            torch.zeros(1).sum()

    monkeypatch.setattr(run_all, "run_experiment", endless)
    begin = monotonic()
    found = list(run_all.run_all(replace(context, out=tmp_path), ("blur", "cost"), until=begin + 0.3))
    assert monotonic() - begin < 5
    assert "resumes" in found[0].reason
    assert "not begun" in found[1].reason


def test_the_shared_evaluation_serves_most_experiments(context, monkeypatch):
    run_all._share(context)
    monkeypatch.setattr("equicam_paper.context.evaluate", lambda *_a, **_k: pytest.fail("computed again"))
    for name in ("main", "alignment", "conditional", "strata", "drift-confidence", "angles", "peum-audit"):
        assert list(load_experiment(name).run(context))


def test_the_command_runs_all_and_answers_in_json(context, tmp_path):
    command = [
        "reproduce",
        "all",
        "--data",
        str(context.data),
        "--n",
        "1",
        "--model",
        "embedded",
        "--backbone",
        "resnet50",
    ]
    command += [
        "--only",
        "hooks,localisation",
        "--out",
        str(tmp_path),
        "--rows",
        str(tmp_path / "rows/resnet50"),
    ]
    result = CliRunner().invoke(app, [*command, "--json", "--quiet"])
    assert result.exit_code == 1  # the images have no boxes
    found = json.loads(result.stdout)
    schema = json.loads((Path(equicam_paper.__file__).parent / "schemas/reproduce.json").read_text())
    jsonschema.validate(found, schema)
    assert [one["name"] for one in found["outcomes"]] == ["hooks", "localisation"]
    assert "boxes" in found["outcomes"][1]["reason"]
    written = CliRunner().invoke(
        app,
        [
            "reproduce",
            "--page",
            str(tmp_path / "p.md"),
            "--rows",
            str(tmp_path / "rows"),
            "--json",
            "--quiet",
        ],
    )
    answer = json.loads(written.stdout)
    jsonschema.validate(answer, schema)
    assert sum(answer["claims"].values()) == 371


def test_costly_methods_have_a_limit(context):
    methods = ["grad-cam", "recipro-cam", "score-cam", "rise"]
    assert context.affordable(methods) == ["grad-cam"]
    assert replace(context, costly=True).affordable(methods) == methods
    assert replace(context, costly=True, max_passes=2048).affordable(methods) == methods[:3]


def test_the_script_runs_rise(context, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import reproduce_all as script

    costly = replace(context, costly=True, max_passes=script.MAX_PASSES)
    assert costly.affordable(["rise", "aug-score-cam"]) == ["rise"]
    assert run_all._costly_passes(costly)["main"] == 8 * (2048 + 8000 + 50)


def test_a_zero_shot_model_takes_the_names_of_the_classes():
    items = [Item("a", Path("a"), label="river"), Item("b", Path("b"), label="dense_residential")]
    assert zero_shot_classes("open_clip:ViT-B-16/openai", items) == ["dense_residential", "river"]
    assert zero_shot_classes("resnet50", items) is None
    assert zero_shot_classes("open_clip:RN50", [replace(items[0], label=3)]) is None


def test_matched_runs_with_another_dtype(tiles, out):
    """In one folder, and without taking the kept evaluation of the other."""
    model = equicam.wrap(seeded(Cnn).float(), layer="trunk", preprocess=lambda image: small(image).float())
    plain = Context(model, tiles, out)
    found = [
        Samples(one, "ours").eq("prefix4000", "grad-cam")
        for one in (plain, replace(plain, options={"dtype": torch.bfloat16}))
    ]
    assert found[0].value == pytest.approx(found[1].value, abs=0.1)
    assert found[0].value != found[1].value


def test_methods_of_many_passes_are_kept_on_their_own(context, tmp_path):
    from equicam_paper import context as module

    context = replace(context, out=tmp_path)
    both = context.evaluate(["recipro-cam", "grad-cam"])
    whole = equicam.evaluate(context.model, context.sample, methods=["grad-cam", "recipro-cam"])
    assert both.table.num_rows == whole.num_rows > 0
    for method in ("grad-cam", "recipro-cam"):
        assert both.eq(method).value == pytest.approx(module.Evaluation(whole).eq(method).value)
    files = {path.name for path in context.out.glob("evaluation-*.parquet")}
    assert len(files) == 2
    context.evaluate(["grad-cam", "grad-cam++", "recipro-cam"])
    assert len({path.name for path in context.out.glob("evaluation-*.parquet")} - files) == 1


@pytest.mark.parametrize("costly", [False, True])
def test_costly_sections_compile_only_methods_of_many_passes(context, tmp_path, monkeypatch, costly):
    from equicam_paper import context as module

    def evaluate(*given, methods, compiled=False, **options):
        chosen.update(dict.fromkeys(methods, compiled))
        return real(*given, methods=methods, **options)

    chosen, real = {}, module.evaluate
    monkeypatch.setattr(module, "evaluate", evaluate)
    context = replace(context, out=tmp_path, costly=costly, options={"compiled": True})
    context.evaluate(["grad-cam", "recipro-cam"])
    assert chosen == {"grad-cam": not costly, "recipro-cam": True}


def test_kept_scores_are_of_one_code_and_its_options(context, tmp_path, monkeypatch):
    """Scores in files are taken by the same code, weights and options, and by no other."""
    from equicam_paper import context as module

    context = replace(context, out=tmp_path, costly=True)

    def folders(one):
        with one.masked_scores():
            equicam.explain(one.model, one.open_some(1), method="rise-400")
        return {path.parent.name for path in tmp_path.rglob("*.pt")}

    first = folders(context)
    assert len(first) == 1
    assert folders(context) == first
    assert len(folders(replace(context, options={"dtype": None}))) == 2
    monkeypatch.setattr(module, "commit", lambda: "another")
    assert len(folders(context)) == 3


def test_provenance_names_the_precision(context):
    found = provenance(context)
    assert (found["dtype"], found["compiled"], found["device"]) == ("float64", False, "cpu")
    other = provenance(replace(context, options={"dtype": torch.bfloat16, "compiled": True}))
    assert (other["dtype"], other["compiled"]) == ("bfloat16", True)


def test_the_script_tunes_runs_and_resumes(tuned, tiles, tmp_path, monkeypatch, capsys):
    """A section of a domain: fine-tunes that are there are taken, experiments that fail are counted."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("reproduce_all", None)
    import reproduce_all as script

    arch, files = tuned
    made = []

    def train(_data, _arch, out, **options):
        made.append((Path(out).name, options["seed"], options["rotation_augment"]))
        state = equicam.load(arch, weights=files["plain"]).module.state_dict()
        from safetensors.torch import save_file

        Path(out).mkdir(parents=True)
        facts = {"measured": json.dumps({"images": 6, "accuracy": 0.5, "balanced": 0.5})}
        save_file(
            {k: v.contiguous() for k, v in state.items()}, Path(out) / "weights.safetensors", metadata=facts
        )

    monkeypatch.setattr(script, "finetune", train)
    monkeypatch.setattr(script, "DATA", {"tiles": ("tiles", "synthetic patches")})
    monkeypatch.setattr(script, "ARCHITECTURES", {"resnet50": ("Tiny", arch, "start.safetensors")})
    monkeypatch.setattr(script, "open_context", lambda data, out, **o: script.Context(
        equicam.load(arch, weights=o["weights"]), data, out, backbone=o["backbone"], domain=o["domain"], extra=o["extra"]))  # fmt: skip
    plan = script.Plan(
        tiles.parent,
        tmp_path,
        tmp_path / "out",
        tmp_path / "rows",
        None,
        3,
        None,
        ("triage",),
        False,
        None,
        None,
    )
    monkeypatch.setattr(script, "DATA", {tiles.name: ("tiles", "synthetic patches")})
    assert script.run_section(f"{tiles.name}-resnet50", plan) == 0
    assert made == [(f"plain{seed}", seed, False) for seed in range(3)]  # `triage` is over seeds
    rows = tmp_path / "rows" / f"{tiles.name}-resnet50"
    assert {path.name for path in rows.iterdir()} == {"section.json", "triage.json"}
    assert script.run_section(f"{tiles.name}-resnet50", plan) == 0
    assert len(made) == 3  # taken from the folder
    assert "triage" in capsys.readouterr().out
    assert page.read_kept(tmp_path / "rows")
    assert set(VERDICTS) >= {row.verdict for row in read_rows(rows / "triage.json").rows}
    assert any(row.label.endswith(", seed 2") for row in read_rows(rows / "triage.json").rows)
    # on ImageNet, whose weights are always the same, rows that are there are not measured again
    left = []
    monkeypatch.setattr(script, "imagenet_section", lambda *_: (None, ("title", [])))
    monkeypatch.setattr(script, "run_experiments", lambda _context, _plan, _rows, names: left.append(names))
    plan = replace(plan, only=("triage", "main"))
    (tmp_path / "rows" / "mobilenet_v2").mkdir()
    (tmp_path / "rows" / "mobilenet_v2" / "main.json").touch()
    script.run_section("mobilenet_v2", plan)
    script.run_section("mobilenet_v2", replace(plan, again=True))
    assert left == [("triage",), ("triage", "main")]


LOADERS_START_BY = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from reproduce_all import use_default_start_method


def start_method():
    return multiprocessing.get_start_method()


if __name__ == "__main__":
    for first in (None, use_default_start_method):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), first) as pool:
            print(pool.submit(start_method).result())
    print(start_method())
"""


def test_fine_tunes_side_by_side_load_images_as_one_alone_does(tmp_path):
    (tmp_path / "run.py").write_text(LOADERS_START_BY)
    paths = os.pathsep.join(str(ROOT / name) for name in ("scripts", "src", "paper/src"))
    run = subprocess.run(
        [sys.executable, tmp_path / "run.py"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )  # fmt: skip
    as_it_is, found, alone = run.stdout.split()
    assert as_it_is == "spawn" != alone
    assert found == alone


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_fine_tune_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys, at_once):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("reproduce_all", None)
    import reproduce_all as script

    plan = script.Plan(tmp_path, tmp_path, tmp_path, tmp_path, None, 3, None, (), False, None, None, at_once)
    there = tmp_path / "there.safetensors"
    there.touch()
    files = {
        ("plain", 0): there,
        ("rotated", 0): tmp_path / "missing" / "weights.safetensors",
        ("plain", 1): there,
    }
    assert script.tune_all(plan, "no-such-data", "resnet18", "start.safetensors", files) == 1
    assert "fine-tune rotated0 failed: " in capsys.readouterr().out
