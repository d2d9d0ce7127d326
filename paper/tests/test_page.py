"""Provenance, kept rows, the page that is written from them, CSV, LaTeX and plots, and the runner of all experiments."""

import csv
import hashlib
import importlib
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
from safetensors.torch import save_file
from typer.testing import CliRunner

import equicam
import equicam_paper
from equicam.errors import EquicamError
from equicam.evaluate.statistics import Correlation, Estimate
from equicam.images.items import Item
from equicam.methods import METHODS
from equicam_paper import EXPERIMENTS, load_experiment, page, plots, reproduce
from equicam_paper import context as context_module
from equicam_paper.benchmarks import find_items
from equicam_paper.claims import claims
from equicam_paper.cli import app
from equicam_paper.context import Context, Evaluated, Evaluation
from equicam_paper.control import controls, judge_in_place
from equicam_paper.kept import read_kept, read_rows, write_rows
from equicam_paper.matched import Samples
from equicam_paper.page import answer_claims, counts, site_pages, why_not_run, write_page
from equicam_paper.provenance import (
    COMMIT,
    authors_draw,
    authors_slots,
    commit,
    content_digest,
    describe,
    draw_sample,
    provenance,
)
from equicam_paper.reproduce import run_experiment, zero_shot_classes
from equicam_paper.rows import VERDICTS, Both, Remark, Row, compare, not_run, number, with_verdict
from equicam_paper.tables import as_csv, as_latex, escape, interval
from stand_ins import estimate, kept, measured, small
from tests.conftest import Cnn, seeded

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs/reproduce/rows"
FACTS = {"version", "commit", "weights", "images", "device", "dtype", "compiled", "date", "n", "drawn"}
GC, EG, SC = (f"main.{name}.resnet50.eq" for name in ("Grad-CAM", "EquiGrad-CAM", "Score-CAM"))
VGG = "main.Grad-CAM.vgg16.eq"
NAN = float("nan")


@pytest.fixture
def folder(tmp_path):
    """Kept rows of one network: three claims of `main`, one of them on 300 images in a second folder."""
    main = kept(
        "main", measured(GC, 0.703, "grad-cam"), measured(EG, 0.8, "equigrad-cam"),
        measured("", 0.9, "coverage: a map that ignores the image"), not_run(VGG, Remark("network", {"network": "vgg16"})),
        not_run(SC, Remark("costly", {"passes": "2,048"})),
    )  # fmt: skip
    few = measured(GC, 0.5, "grad-cam", n=300), measured(SC, 0.494, "score-cam", n=300)
    write_rows(tmp_path / "rows/resnet50/main.json", main)
    write_rows(tmp_path / "rows/resnet50-costly/main.json", kept("main", *few, n=300, device="a GPU"))
    section = {"title": "A network", "commands": ["equicam-paper reproduce all"]}
    (tmp_path / "rows/resnet50/section.json").write_text(json.dumps(section))
    return tmp_path / "rows"


def page_of(folder):
    """The page that is written from kept rows."""
    target = folder.parent / "docs/reproduce.md"
    target.parent.mkdir(exist_ok=True)
    write_page(target, folder)
    return target.read_text()


def section_of(folder, name="resnet50", experiment=""):
    """The site's page of one folder of rows, or one table of it."""
    text = {one: text for one, _, text in site_pages(folder, folder.parent / "docs/reproduce")}[name]
    return text.split(f"(`{experiment}`)")[1].split("\n#")[0] if experiment else text


def test_rows_carry_their_provenance_and_are_read_back(context):
    done = run_experiment("alignment", context)
    text, found = done.path.read_text(), read_rows(done.path)
    assert set(found.provenance) >= FACTS
    assert found.provenance["n"] == len(context.sample) == 3
    assert found.provenance["weights"] == context.weights_digest
    assert [row.verdict for row in found.rows] == [row.verdict for row in done.rows]
    ran = [row for row in done.rows if row.verdict != "not run"]
    for ours, theirs in zip(found.ran, ran, strict=True):
        for name in ("claim", "label", "published", "note"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.clean.value == pytest.approx(theirs.clean.value, rel=1e-5)
    assert len(text) < 600 * len(done.rows)
    assert text.count("\n") == len(done.rows) + 4  # a line per row


def test_the_digest_is_of_contents(tiles, tmp_path):
    items = find_items(tiles)[:2]
    before = content_digest(items)
    assert before == content_digest(items)
    other = tmp_path / "other.png"
    Image.open(items[0].path).rotate(90).save(other)
    for path in (other, tmp_path / "gone.png"):
        assert content_digest([replace(items[0], path=path), items[1]]) != before


def test_the_commit_is_given_or_found(monkeypatch):
    commit.cache_clear()
    monkeypatch.setenv(COMMIT, "0123abc")
    assert commit() == "0123abc"
    monkeypatch.delenv(COMMIT)
    commit.cache_clear()
    found = commit()
    commit.cache_clear()
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?", found) if (ROOT / ".git").exists() else found is None


def test_the_authors_draw_is_theirs():
    """The digest of their 1,000 lists of ten."""
    text = json.dumps(authors_slots(1000), separators=(",", ":")).encode()
    expected = "f5f0a31ddc67d627245bfddbfddca9dc57e44db6bf57d7f1beb217cb67bcca90"
    assert hashlib.sha256(text).hexdigest() == expected
    items = [Item(f"n{c:02}/img_{i:04}.JPEG", Path("x"), label=c) for c in range(12) for i in range(15)]
    chosen = authors_draw(items[::-1])
    # the first slot of each class
    assert [item.id for item in chosen[:2]] == ["n00/img_0009.JPEG", "n01/img_0010.JPEG"]
    assert len({item.id for item in chosen}) == 120
    assert draw_sample(items, 24, "authors") == chosen[:24]
    assert [item.label for item in draw_sample(items, 3, "authors")] == [0, 4, 8]
    with pytest.raises(EquicamError, match="15 images of every class"):
        authors_draw(items[:-1])


def test_every_claim_counts_once(folder):
    answers = answer_claims(read_kept(folder))
    assert len(answers) == len(claims()) == sum(counts(answers).values()) == 371
    assert answers[GC].verdict == "matches"  # on 1,000 images, not on 300
    assert answers[EG].verdict == "differs"
    assert answers[SC].folder == "resnet50-costly"
    assert why_not_run(VGG, answers[VGG]) == "needs ImageNet weights of vgg16"
    assert "CUB-200-2011" in why_not_run("cub.pg.vgg16", answers["cub.pg.vgg16"])


def test_the_page_is_written_from_rows(folder, tmp_path):
    text, found = page_of(folder), counts(answer_claims(read_kept(folder)))
    assert f"**Of 371 claims, {found['matches']} match" in text
    assert f"{found['not run']} were not run" in text
    published, ours = "0.703 (n = 10,000, ten per class)", "0.703 [0.699, 0.707]"
    line = f"| grad-cam | {published} | {ours} | {ours} | 1000 | matches ± 0.03 |\n"
    assert text.count(line) == 1  # both sections of a network have one table
    assert "| score-cam | " in text
    section, costly = section_of(folder), section_of(folder, "resnet50-costly")
    assert section.startswith("# A network\n\n    equicam-paper reproduce all\n")
    assert "equicam 1 at abc" in section
    assert line in section
    assert "a GPU" in costly
    assert "counted on 1,000 images, `main` of resnet50" in costly  # one measurement, one verdict
    assert "![Table main: equivariance of every method](resnet50-main.png)" in section
    with Image.open(tmp_path / "docs/reproduce/resnet50-main.png") as plot:
        assert np.asarray(plot.convert("L")).std() > 10


def test_the_page_judges_another_network_in_the_place_of_the_papers(folder):
    """ResNet-50 stands first; the other network answers no claim, and the page says how it would be judged."""
    names = ("Grad-CAM single view", "Aligned feature-space (EquiGrad-CAM)")
    single, aligned = (f"align.{name}.resnet50.eq" for name in names)
    own = measured(single, 0.703, "grad-cam"), measured(aligned, 0.956, "equigrad-cam")
    write_rows(folder / "resnet50/alignment.json", kept("alignment", *own))
    other = measured("", 0.772, "grad-cam"), measured("", 0.957, "equigrad-cam")
    few = measured("", 0.703, "grad-cam", n=300), measured("", 0.7, "score-cam", n=300)
    for name, end, rows in (("main", "", other), ("alignment", "", other), ("main", "-costly", few)):
        found = kept(name, *rows, backbone="mobilenet_v2")
        write_rows(folder / f"mobilenet_v2{end}/{name}.json", found)
    assert list(read_kept(folder)) == ["resnet50", "resnet50-costly", "mobilenet_v2", "mobilenet_v2-costly"]
    text = page_of(folder)
    # Grad-CAM's in two tables, EquiGrad-CAM's, Score-CAM's
    assert "counted once each, these are 3 that match and 1 that differ." in text
    judged = "of 5 claims 2 match, 3 differ; with ResNet-50's own, 4 match, 1 differ."
    assert f"{judged} So 1 of the 4 matches (1 of 3 distinct ones)" in text
    assert f"ResNet-50: `{aligned}`." in text


def networks(label, value, **of):
    """A row of several networks with random weights."""
    facts = {"by_seed": [], "floor": NAN, "constant": 0.0} | of
    return replace(measured("", value, label), reason=Remark("networks", facts))


def test_the_page_has_a_line_per_method_of_random_weights(folder, tmp_path):
    of_networks = {"floor": -0.1, "constant": 0.27}
    given = networks("grad-cam, weights as given: Eq", 0.5)
    random = networks("grad-cam, all random: Eq", 0.6, by_seed=[0.0, 0.9], **of_networks)
    assert given.note == ""
    assert random.note.startswith("by seed 0.000, 0.900; unrelated images -0.100; 27% of the maps")
    dead = networks("grad-cam, all random: Eq", 0.6, by_seed=[NAN, 0.9], **of_networks)
    write_rows(tmp_path / "dead.json", kept("sanity", dead))
    assert read_rows(tmp_path / "dead.json").rows[0].note.startswith("by seed nan, 0.900")
    refused = networks("ablation-cam, all random: Eq", 0.5, by_seed=[NAN] * 2)
    refused = replace(refused, clean=Estimate(NAN, NAN, NAN, 0))
    alike = measured("", -0.2, "grad-cam, all random: Pearson with the map of the weights as given")
    rows = [given, random, measured("", 0.7, "equigrad-cam, all random: Eq"), refused, alike]
    left = replace(not_run(GC, Remark("note", {"text": "later"})), claim="", label="head random")
    write_rows(folder / "resnet50/sanity.json", kept("sanity", *rows, left))
    text = section_of(folder, experiment="sanity")
    steps = "| weights as given | head random | last quarter random | last half random | all random |"
    assert text.count(f"| method {steps}") == 2  # Eq, and what unrelated images reach
    for line in (
        "Eq, 1,000 images:",
        "| grad-cam | 0.500 [0.496, 0.504] |  |  |  | 0.600 [0.596, 0.604], by seed 0.000, 0.900 |",
        "| equigrad-cam |  |  |  |  | 0.700 [0.696, 0.704] |",
        "| ablation-cam |  |  |  |  | refused |",
        "| ablation-cam |  |  |  |  |  |",  # of unrelated images
        "| grad-cam |  |  |  | -0.200 [-0.204, -0.196] |",
        "| grad-cam |  |  |  |  | -0.100, 27% |",
        "\nlater.\n",
    ):
        assert line in text
    (others,) = re.findall(r"\nNot measured here: (.+?)\. ", text)
    assert set(others.split(", ")) == METHODS.keys() - {"grad-cam", "equigrad-cam", "ablation-cam"}
    assert "SSIM" not in text  # not measured
    latex = as_latex(rows, "Model randomisation", "equicam 1")
    assert latex.count("\\begin{table}") == 3
    assert latex.count("% equicam 1") == 1
    assert "& 0.500 [0.496, 0.504] &  &  &  & 0.600 [0.596, 0.604], by seed 0.000, 0.900 \\\\" in latex
    assert "by seed" not in as_latex([measured("", 0.5, "grad-cam")], "A", "B")


def test_the_terminal_shows_random_weights_a_line_per_method_and_cuts_no_name(context, monkeypatch, tmp_path):
    methods = [f"equigrad-cam{end}" for end in ("+pcf", "+soft", "-combined", "-fine")]
    labels = [f"{method}, {weights}: Eq" for method in methods for weights in plots.RANDOM_WEIGHTS]
    rows = tuple(measured("", 0.5, label) for label in labels)
    found = reproduce.Reproduction("Model randomisation", rows, tmp_path / "sanity.json", {})
    monkeypatch.setattr(reproduce, "run_experiment", lambda *_: found)
    command = ["reproduce", "sanity", "--data", str(context.data), "--model", "embedded"]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, command).output
    assert "…" not in shown
    assert all(shown.count(end) == 2 for end in ("pcf", "soft", "combined", "fine"))  # in two tables
    assert shown.count("\n") < 60


def test_maps_that_are_all_constant_with_random_weights_are_named(folder):
    for method, said in (("rise-400", True), ("equigrad-cam", False)):
        shares = {method: 1.0, "grad-cam": 0.4}
        rows = [networks(f"{m}, all random: Eq", 1 - s, floor=0.0, constant=s) for m, s in shares.items()]
        sane = kept("sanity", *rows)
        write_rows(folder / "resnet50/sanity.json", sane)
        text = section_of(folder, experiment="sanity")
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
    assert all(load_experiment(name).title in plots.heading(kept(name)) for name in EXPERIMENTS)


def test_tables_with_another_provenance_and_commands_of_claims_about_costly_methods_say_so(folder):
    row = measured("", 0.5, "grad-cam")
    elsewhere = kept("alignment", row, device="another GPU")
    for one in (elsewhere, kept("blur", row)):
        write_rows(folder / f"resnet50/{one.experiment}.json", one)
        shown = describe(elsewhere.provenance) in section_of(folder, experiment=one.experiment)
        assert shown == (one is elsewhere)
    other = Remark("network", {"network": "vgg16"})
    rows = [not_run(f"main.{name}.vgg16.eq", other) for name in ("Grad-CAM", "Score-CAM")]
    write_rows(folder / "resnet50/main.json", kept("main", *rows))
    text = section_of(folder, "not-run")
    run = "about vgg16: `equicam-paper reproduce main --data ILSVRC2012/val --model vgg16"
    assert f"| `main` | 1 | {run} --n 10000` |" in text
    assert f"| `main` | 1 | {run} --costly --n 500` |" in text


def test_the_page_of_this_repository_is_what_its_rows_say(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "write_page_plot", lambda _kept, _path: None)
    write_page(tmp_path / "reproduce.md", ROWS)
    text = (tmp_path / "reproduce.md").read_text()
    assert text == (ROOT / "docs/reproduce.md").read_text(), "equicam-paper reproduce --page …"
    assert text.count("\n") <= 300
    pages = {name: text for name, _, text in site_pages(ROWS, ROWS.parent)}
    assert pages.keys() == {path.name for path in ROWS.iterdir()} | {"not-run"}
    shown = {name for text in pages.values() for name in re.findall(r"]\((\S+\.png)\)", text)}
    assert shown == {path.name for path in ROWS.parent.glob("*.png")}
    ran = [row for path in KEPT for row in read_rows(path).ran if path.stem != "sanity"]
    lines = sum(text.count("\n| ") for name, text in pages.items() if name != "not-run")
    assert lines > len(ran) > 1000  # a line for each row, and heads


KEPT = sorted(path for path in ROWS.glob("*/*.json") if path.stem != "section")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_rows_have_the_verdicts_of_the_present_rule(path, tmp_path):
    """The page judges them again: whoever counts in the files finds what the page says."""
    write_rows(tmp_path / path.name, read_rows(path))
    assert (tmp_path / path.name).read_text() == path.read_text(), "read_rows and write_rows"


def test_the_kept_rows_have_a_negative_control():
    kept_rows = read_kept(ROWS)
    judged = list(judge_in_place(kept_rows["resnet50"], kept_rows["mobilenet_v2"]))
    assert len(judged) > 30
    verdicts = [one.other.verdict for one in judged]
    assert verdicts.count("differs") > verdicts.count("matches")
    sections = [(kept_rows[f"resnet50{end}"], kept_rows[f"mobilenet_v2{end}"]) for end in ("", "-costly")]
    own = {row.claim for mine, _ in sections for one in mine.values() for row in one.ran if row.within}
    compared = {one.own.claim for pair in sections for one in judge_in_place(*pair)}
    assert compared < own
    (text,) = controls(kept_rows)
    assert f"of {len(compared)} claims" in text
    assert f"{len(own - compared)} more claims that an interval decides have no counterpart." in text


def test_small_numbers_are_not_shown_as_0():
    for *found, digits, text in (
        (2.1e-7, NAN, NAN, 3, "2e-07"),
        (0.0, NAN, NAN, 3, "0.000"),
        (-0.0004, -0.001, 0.0002, 3, "-0.000 [-0.001, 0.000]"),
        (0.0005, NAN, NAN, 2, "0.0005"),
    ):
        assert interval(Estimate(*found, 8), digits) == text


def test_a_row_that_counts_elsewhere_says_where_and_nothing_about_its_own_verdict(folder):
    """A constant counts in one table alone, and a small sample's interval decides nothing beside a large one's."""
    constant = with_verdict("const.T", Both(number(18), None), "by definition", label="T = 18")
    for backbone in ("resnet50", "mobilenet_v2"):
        rows = kept("constants", constant, backbone=backbone)
        write_rows(folder / f"{backbone}/constants.json", rows)
    wide = Estimate(0.703, 0.66, 0.74, 300)
    few = compare(GC, Both(wide, wide), label="grad-cam", reason="of few images")
    assert few.verdict == "undecided"
    assert "margin" in few.note
    write_rows(folder / "resnet50-costly/main.json", kept("main", few, n=300))
    assert "| counted in `constants` of resnet50 |" in section_of(folder, "mobilenet_v2")
    costly = section_of(folder, "resnet50-costly", "main").split("`main` of resnet50")[1]
    assert "- grad-cam: of few images\n" in costly
    assert "margin" not in costly


def test_a_page_needs_rows(tmp_path):
    with pytest.raises(EquicamError, match=r"NETWORK/NAME\.json"):
        write_page(tmp_path / "page.md", tmp_path)
    (tmp_path / "resnet50").mkdir()
    (tmp_path / "resnet50/main.json").write_text('{"rows": [{"verdict": "good"}]}')
    with pytest.raises(EquicamError, match="as `equicam-paper reproduce` writes them"):
        read_kept(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "--page", str(tmp_path / "page.md")])
    assert (result.exit_code, "--rows" in result.output) == (2, True)
    assert not (tmp_path / "page.md").exists()


def test_plots_of_trainings_show_every_fine_tune():
    values = {"GC Eq no aug": 0.6, "EG Eq rot aug": 0.9, "acc no aug": 0.8}
    values |= {f"GC Eq no aug, seed {i}": 0.5 + 0.1 * i for i in range(3)}
    rows = [measured("", value, label) for label, value in values.items()]
    eq, right = plots.panels_of(kept("rotation-augmentation", *rows))
    named = ["Grad-CAM,\nunrotated training", "EquiGrad-CAM,\nrotated training"]
    assert [name for name, _ in eq.rows] == named
    assert [name for name, _ in right.rows] == ["unrotated training"]
    axes = plots.compose([eq], "title").axes[0]
    ours, theirs = (line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()))
    assert [*ours.get_ydata()] == [*theirs.get_ydata()] == pytest.approx([0.5, 0.6, 0.7])
    assert {*ours.get_xdata(), *theirs.get_xdata()} == {-0.2, 0.2}  # on the bars that are their mean
    assert not right.fine_tunes


def test_kept_rows_are_judged_again(tmp_path):
    """A verdict that somebody edited, or that another rule gave, is not believed."""
    path = tmp_path / "main.json"
    write_rows(path, kept("main", measured(GC, 0.703, "grad-cam", n=20), measured(EG, 0.8, "equigrad-cam")))
    assert [row.verdict for row in read_rows(path).rows] == ["undecided", "differs"]
    path.write_text(path.read_text().replace('"undecided"', '"matches"').replace('"differs"', '"matches"'))
    found = read_rows(path).rows
    assert [row.verdict for row in found] == ["undecided", "differs"]
    assert found[0].why.code == "few"
    # those of another network answer nothing, also those that an earlier rule kept as answers
    by_definition = Row("decomp.reproduces", "in two ways", "0.003", None, estimate(0.001), "by definition")
    rows = measured(GC, 0.703, "grad-cam"), by_definition
    write_rows(path, kept("main", *rows, backbone="mobilenet_v2"))
    found = read_rows(path).rows
    assert [row.claim for row in found] == ["", GC, "", "decomp.reproduces"]
    assert [row.verdict for row in found] == ["measured", "not run"] * 2
    assert "of resnet50" in found[0].published


def test_provenance_names_the_precision_and_other_weights_and_images(context):
    """Weights of --extra and parts of the sample, where an experiment used them, and only there."""
    other = provenance(replace(context, options={"dtype": torch.bfloat16, "compiled": True}))
    assert (other["dtype"], other["compiled"]) == ("bfloat16", True)
    context.evaluated.clear()
    context.evaluate(["grad-cam"])
    found = provenance(context)
    assert "evaluated" not in found
    assert (found["dtype"], found["compiled"], found["device"]) == ("float64", False, "cpu")
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
    remark = Remark("note", {"text": 'a, "b"'})
    row = Row("", "=γ_1 & 50 % of |x|", "0.5", estimate(0.25), None, "measured", remark)
    (line,) = csv.DictReader(io.StringIO(as_csv([row])))
    assert line["what"] == "'=γ_1 & 50 % of |x|"
    assert (line["clean_value"], line["clean_n"], line["as_published_value"]) == ("0.25", "1000", "")
    assert line["note"] == 'a, "b"'
    text = as_latex([row, not_run(GC, "why")], "A & B", "equicam 1")
    line = r"=$\gamma$\_1 \& 50 \% of \textbar{}x\textbar{} & 0.5 &  & 0.250 [0.246, 0.254] & measured \\"
    assert line in text
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
    assert name == "alignment" or "r = " in svg
    assert (out / f"{name}.csv").read_text().startswith("claim,what,published,")


KNOWN = Correlation(0.5, 0.4, 0.6, -30.2, 100)


def test_correlations_have_p_where_rows_are_independent():
    assert plots.correlation_text(KNOWN) == "r = 0.50 [0.40, 0.60], p = $10^{-30}$\nn = 100 images"
    for other in (replace(KNOWN, log10_p=NAN), replace(KNOWN, n=12)):  # too few for p and interval to agree
        assert "p =" not in plots.correlation_text(other)


def test_the_text_of_a_scatter_covers_no_mark():
    x, y = np.random.default_rng(0).uniform(size=(2, 2000))
    panel = plots.Scatter("a", "x", "y", x, y, KNOWN)
    figure = plots.compose([panel, panel], "title")
    figure.canvas.draw()
    for axes in figure.axes:
        (text,) = axes.texts
        box, frame = text.get_window_extent(), axes.get_window_extent()
        marks = axes.transData.transform(np.column_stack([x, y]))
        assert not any(box.contains(*mark) for mark in marks)
        assert (box.max <= frame.max).all()


def test_the_runner_goes_on_after_a_failure(context, tmp_path, monkeypatch):
    real = reproduce.run_experiment

    def failing(name, of):
        if name == "blur":
            raise RuntimeError("out of memory")
        return real(name, of)

    monkeypatch.setattr(reproduce, "run_experiment", failing)
    lines = []
    here = replace(context, out=tmp_path / "out")
    found = list(reproduce.run_all(here, ("blur", "hooks"), rows=tmp_path / "rows", progress=lines.append))
    assert [(one.name, one.reason) for one in found] == [("blur", "out of memory"), ("hooks", "")]
    assert found[1].seconds > 0
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {"hooks.json"}
    assert len(lines) == 2
    with pytest.raises(EquicamError, match="tables"):
        list(reproduce.run_all(here, ("tables",)))


def test_the_runner_stops_in_time(context, tmp_path, monkeypatch):
    def endless(name, _of):
        while True:
            torch.zeros(1).sum()

    monkeypatch.setattr(reproduce, "run_experiment", endless)
    begin = monotonic()
    found = list(reproduce.run_all(replace(context, out=tmp_path), ("blur", "cost"), until=begin + 0.3))
    assert monotonic() - begin < 5
    assert "resumes" in found[0].reason
    assert "not begun" in found[1].reason


def test_the_shared_evaluation_serves_most_experiments(context, monkeypatch):
    reproduce.share(context)
    monkeypatch.setattr("equicam_paper.context.evaluate", lambda *_a, **_k: pytest.fail("computed again"))
    for name in ("main", "alignment", "conditional", "strata", "drift-confidence", "angles", "peum-audit"):
        assert list(load_experiment(name).run(context))


def test_the_command_runs_all_and_answers_in_json(context, tmp_path):
    schema = json.loads((Path(equicam_paper.__file__).parent / "schemas/reproduce.json").read_text())

    def answer(*options):
        result = CliRunner().invoke(app, ["reproduce", *map(str, options), "--json", "--quiet"])
        found = json.loads(result.stdout)
        jsonschema.validate(found, schema)
        return result.exit_code, found

    rows, model = tmp_path / "rows", ("--model", "embedded", "--backbone", "resnet50")
    given = ("--data", context.data, "--n", 1, *model, "--out", tmp_path, "--rows", rows / "resnet50")
    code, found = answer("all", *given, "--only", "hooks,localisation")
    hooks, localisation = found["outcomes"]
    assert (code, hooks["name"], localisation["name"]) == (1, "hooks", "localisation")
    assert "boxes" in localisation["reason"]  # the images have none
    _, found = answer("--page", tmp_path / "p.md", "--rows", rows)
    assert sum(found["claims"].values()) == 371


@pytest.fixture
def script(monkeypatch):
    """scripts/reproduce_all.py as a fresh module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "reproduce_all", raising=False)
    return importlib.import_module("reproduce_all")


def test_costly_methods_have_a_limit_and_the_script_runs_rise(context, script):
    methods = ["grad-cam", "recipro-cam", "score-cam", "rise"]
    assert context.affordable(methods) == ["grad-cam"]
    assert replace(context, costly=True).affordable(methods) == methods
    assert replace(context, costly=True, max_passes=2048).affordable(methods) == methods[:3]
    costly = replace(context, costly=True, max_passes=script.MAX_PASSES)
    assert costly.affordable(["rise", "aug-score-cam"]) == ["rise"]
    assert reproduce.costly_passes(costly)["main"] == 8 * (2048 + 8000 + 50)


def test_a_zero_shot_model_takes_the_names_of_the_classes():
    items = [Item("a", Path("a"), label="river"), Item("b", Path("b"), label="dense_residential")]
    assert zero_shot_classes("open_clip:ViT-B-16/openai", items) == ["dense_residential", "river"]
    assert zero_shot_classes("resnet50", items) is None
    assert zero_shot_classes("open_clip:RN50", [replace(items[0], label=3)]) is None


def test_matched_runs_with_another_dtype(tiles, out):
    """In one folder, and without taking the kept evaluation of the other."""
    model = equicam.wrap(seeded(Cnn).float(), layer="trunk", preprocess=lambda image: small(image).float())
    plain = Context(model, tiles, out)
    both = (plain, replace(plain, options={"dtype": torch.bfloat16}))
    one, other = (Samples(of, "ours").eq("prefix4000", "grad-cam").value for of in both)
    assert one == pytest.approx(other, abs=0.1)
    assert one != other


def test_methods_of_many_passes_are_kept_on_their_own(context, tmp_path):
    context = replace(context, out=tmp_path)
    both = context.evaluate(["recipro-cam", "grad-cam"])
    whole = equicam.evaluate(context.model, context.sample, methods=["grad-cam", "recipro-cam"])
    assert both.table.num_rows == whole.num_rows > 0
    for method in ("grad-cam", "recipro-cam"):
        assert both.eq(method).value == pytest.approx(Evaluation(whole).eq(method).value)
    files = {path.name for path in context.out.glob("evaluation-*.parquet")}
    assert len(files) == 2
    context.evaluate(["grad-cam", "grad-cam++", "recipro-cam"])
    assert len({path.name for path in context.out.glob("evaluation-*.parquet")} - files) == 1


@pytest.mark.parametrize("costly", [False, True])
def test_costly_sections_compile_only_methods_of_many_passes(context, tmp_path, monkeypatch, costly):
    def evaluate(*given, methods, compiled=False, **options):
        chosen.update(dict.fromkeys(methods, compiled))
        return real(*given, methods=methods, **options)

    chosen, real = {}, context_module.evaluate
    monkeypatch.setattr(context_module, "evaluate", evaluate)
    context = replace(context, out=tmp_path, costly=costly, options={"compiled": True})
    context.evaluate(["grad-cam", "recipro-cam"])
    assert chosen == {"grad-cam": not costly, "recipro-cam": True}


def test_kept_scores_are_of_one_code_and_its_options(context, tmp_path, monkeypatch):
    """Scores in files are taken by the same code, weights and options, and by no other."""
    context = replace(context, out=tmp_path, costly=True)

    def folders(one):
        with one.masked_scores():
            equicam.explain(one.model, one.open_some(1), method="rise-400")
        return {path.parent.name for path in tmp_path.rglob("*.pt")}

    first = folders(context)
    assert len(first) == 1
    assert folders(context) == first
    assert len(folders(replace(context, options={"dtype": None}))) == 2
    monkeypatch.setattr(context_module, "commit", lambda: "another")
    assert len(folders(context)) == 3


def test_the_script_tunes_runs_and_resumes(script, tuned, tiles, tmp_path, monkeypatch, capsys):
    """A section of a domain: fine-tunes that are there are taken, experiments that fail are counted."""
    arch, files = tuned
    made = []

    def train(_data, _arch, out, **options):
        made.append((Path(out).name, options["seed"], options["rotation_augment"]))
        state = equicam.load(arch, weights=files["plain"]).module.state_dict()
        Path(out).mkdir(parents=True)
        facts = {"measured": json.dumps({"images": 6, "accuracy": 0.5, "balanced": 0.5})}
        tensors = {key: value.contiguous() for key, value in state.items()}
        save_file(tensors, Path(out) / "weights.safetensors", metadata=facts)

    monkeypatch.setattr(script, "finetune", train)
    monkeypatch.setattr(script, "ARCHITECTURES", {"resnet50": ("Tiny", arch, "start.safetensors")})
    monkeypatch.setattr(script, "open_context", lambda data, out, **o: script.Context(
        equicam.load(arch, weights=o["weights"]), data, out, backbone=o["backbone"], domain=o["domain"], extra=o["extra"]))  # fmt: skip
    out, rows = tmp_path / "out", tmp_path / "rows"
    plan = script.Plan(tiles.parent, tmp_path, out, rows, None, 3, None, ("triage",), False, None, None)
    monkeypatch.setattr(script, "DATA", {tiles.name: ("tiles", "synthetic patches")})
    assert script.run_section(f"{tiles.name}-resnet50", plan) == 0
    assert made == [(f"plain{seed}", seed, False) for seed in range(3)]  # `triage` is over seeds
    section = rows / f"{tiles.name}-resnet50"
    assert {path.name for path in section.iterdir()} == {"section.json", "triage.json"}
    assert script.run_section(f"{tiles.name}-resnet50", plan) == 0
    assert len(made) == 3  # taken from the folder
    assert "triage" in capsys.readouterr().out
    assert read_kept(rows)
    found = read_rows(section / "triage.json").rows
    assert set(VERDICTS) >= {row.verdict for row in found}
    assert any(row.label.endswith(", seed 2") for row in found)
    # on ImageNet, whose weights are always the same, rows that are there are not measured again
    left = []
    monkeypatch.setattr(script, "imagenet_section", lambda *_: (None, ("title", [])))
    monkeypatch.setattr(script, "run_experiments", lambda _context, _plan, _rows, names: left.append(names))
    plan = replace(plan, only=("triage", "main"))
    (rows / "mobilenet_v2").mkdir()
    (rows / "mobilenet_v2" / "main.json").touch()
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
def test_a_fine_tune_that_fails_leaves_the_others(script, tmp_path, capsys, at_once):
    plan = script.Plan(tmp_path, tmp_path, tmp_path, tmp_path, None, 3, None, (), False, None, None, at_once)
    there = tmp_path / "there.safetensors"
    there.touch()
    files = {("plain", 0): there, ("rotated", 0): tmp_path / "missing/weights", ("plain", 1): there}
    assert script.tune_all(plan, "no-such-data", "resnet18", "start.safetensors", files) == 1
    assert "fine-tune rotated0 failed: " in capsys.readouterr().out
