"""docs/reproduce.md from kept rows: how many claims hold, what was found, a section per network, and what was not run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equicam.errors import EquicamError
from equicam.methods import METHODS
from equicam.shards import read_json, write_atomic
from equicam_paper import EXPERIMENTS, load_experiment
from equicam_paper.claims import METHODS as METHOD_NAMES
from equicam_paper.claims import NETWORKS, claims
from equicam_paper.context import FORWARD_PASSES
from equicam_paper.control import controls, distinct
from equicam_paper.findings import findings
from equicam_paper.kept import KeptRows, read_rows
from equicam_paper.page_text import COMMANDS, HEAD, LEGENDS, OPTIONS
from equicam_paper.plots import FIGURES, random_weights_panels, write_page_plot
from equicam_paper.provenance import describe
from equicam_paper.rows import VERDICTS, Remark, Row
from equicam_paper.tables import Matrix, interval, random_weights_tables

ROTATED_SEEDS = "seeds-rotated"
"""The seeds of the networks trained with rotated images: the same experiment on other weights."""
OTHER_FILES = ("section.json", "evaluations.json")
UNDECIDED = {
    "few": "too few images",
    "few-groups": "too few groups of images",
    "wide": "the interval reaches across the margin",
    "coarse": "the paper prints too few digits",
    "no-interval": "a number without an interval",
    "one-network": "published for three networks together",
    "other-sample": "published for the first classes alone",
    "one-training": "one fine-tune each, and how far fine-tunes differ is not published",
    "no-n": "published without an interval or a number of images",
    "other-input": "another input than the paper's",
}
"""Why nothing is decided, by the code of the remark."""
Kept = dict[str, dict[str, KeptRows]]
"""Rows by folder and experiment."""


@dataclass(frozen=True)
class Answer:
    """The one row that answers a claim, and where it stands."""

    verdict: str
    reason: str
    folder: str = ""
    experiment: str = ""
    row: Row | None = None


def write_page(page: Path, rows: Path) -> dict[str, int]:
    """Write the page and its plots; returns the number of claims by verdict."""
    kept = read_kept(rows)
    plots = page.parent / page.stem
    plots.mkdir(parents=True, exist_ok=True)
    answers = answer_claims(kept)
    text = HEAD + count_text(answers) + "".join(controls(kept)) + OPTIONS
    text += "## What was found beyond the paper\n\n" + "\n".join(findings(kept)) + "\n\n"
    for folder, experiments in kept.items():
        text += section(folder, experiments, rows / folder, answers, plots)
    write_atomic(page, (text + not_run(answers, kept)).encode())
    return counts(answers)


def read_kept(rows: Path) -> Kept:
    """Every file of rows, FOLDER/NAME.json, in the order of the experiments."""
    order = [*EXPERIMENTS, ROTATED_SEEDS]
    kept: Kept = {}
    for folder in sorted(path for path in rows.iterdir() if path.is_dir()) if rows.is_dir() else ():
        files = [path for path in folder.glob("*.json") if path.name not in OTHER_FILES]
        unknown = [path.stem for path in files if path.stem not in order]
        if unknown:
            raise EquicamError(str(folder), "files named as experiments", ", ".join(unknown), "removing them")
        files.sort(key=lambda path: order.index(path.stem))
        kept[folder.name] = {path.stem: read_rows(path) for path in files}
    if not any(kept.values()):
        raise EquicamError(
            f"rows {str(rows)!r}", "files NETWORK/NAME.json", "none", "equicam-paper reproduce all --rows FOLDER/NETWORK",
        )  # fmt: skip
    return dict(sorted(kept.items(), key=lambda pair: _place(*pair)))


def _place(folder: str, experiments: Mapping[str, KeptRows]) -> tuple[bool, int, str]:
    """Networks on ImageNet stand before those of domains, and the paper's, in its order, before others."""
    first = next(iter(experiments.values()), None)
    backbone = first.backbone if first else ""
    rank = NETWORKS.index(backbone) if backbone in NETWORKS else len(NETWORKS)
    return any(kept.domain for kept in experiments.values()), rank, folder


def answer_claims(kept: Kept) -> dict[str, Answer]:
    """Every claim once: of several measurements the one of most images, else the reason why there is none."""
    found: dict[str, list[Answer]] = {name: [] for name in claims()}
    for folder, experiments in kept.items():
        for experiment, of in experiments.items():
            for row in of.rows:
                if row.claim in found:
                    found[row.claim].append(
                        Answer(row.verdict, reason_kind(row.claim, row.reason), folder, experiment, row)
                    )
    return {name: _answer(name, rows) for name, rows in found.items()}


def _answer(claim: str, found: list[Answer]) -> Answer:
    if ran := [one for one in found if one.verdict != "not run"]:
        return max(ran, key=lambda one: one.row.images if one.row else 0)
    if found:
        return min(found, key=lambda one: _nearness(one.row))
    name = next(name for name in EXPERIMENTS if claim.startswith(load_experiment(name).answers))
    return Answer("not run", f"needs {load_experiment(name).needs}", "", name)


def _nearness(row: Row | None) -> int:
    """Reasons of the run that came nearest to a claim come first: the right network, then the right domain."""
    code = row.reason.code if row and row.reason else ""
    return {"costly": 0, "note": 1, "command": 2, "network": 3}.get(code, 4)


def reason_kind(claim: str, reason: Remark | None) -> str:
    """Why a claim was not run, without its command."""
    if reason is None:
        return ""
    kinds = {
        "network": f"needs ImageNet weights of {reason.values.get('network')}",
        "costly": "needs methods of many forward passes per map (`--costly`)",
        "command": f"needs networks fine-tuned on {claims()[claim].domain}",
        "images": f"needs images of {reason.values.get('about')}",
    }
    return kinds.get(reason.code) or reason.text


def counts(answers: Mapping[str, Answer]) -> dict[str, int]:
    """Claims by verdict."""
    found = Counter(one.verdict for one in answers.values())
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def count_text(answers: Mapping[str, Answer]) -> str:
    """The count by verdict, and the claims that were not run by reason."""
    words = {
        "matches": ("matches", "match"), "differs": ("differs", "differ"), "artefact": ("is an artefact", "are artefacts"),
        "undecided": ("is undecided", "are undecided"), "by definition": ("is a constant or an identity", "are constants or identities"),
        "measured": ("is stated in words, with no number to compare", "are stated in words, with no number to compare"),
        "not run": ("was not run", "were not run"),
    }  # fmt: skip
    listed = ", ".join(f"{n} {words[verdict][n != 1]}" for verdict, n in counts(answers).items())
    text = f"**Of {len(answers)} claims, {listed}.** "
    text += "A claim counts once, by its measurement on most images; rows of networks and images that the paper does not have are not counted. A number may differ because weights and images do: each section says which it has.\n\n"
    matched, differing = (
        distinct(name for name, one in answers.items() if one.verdict == verdict)
        for verdict in ("matches", "differs")
    )
    if matched or differing:
        of_both = f"counted once each, these are {matched} that match and {differing} that differ"
        text = f"{text.rstrip()} Several tables print the same number; {of_both}.\n\n"
    why = Counter(one.reason for one in answers.values() if one.verdict == "not run")
    undecided = Counter(_why(one.row) for one in answers.values() if one.verdict == "undecided")
    return text + _reasons("not run", why) + _reasons("undecided", undecided)


def _reasons(verdict: str, found: Counter[str]) -> str:
    lines = "".join(f"| {_cell(reason)} | {n} |\n" for reason, n in found.most_common())
    return f"| {verdict}: why | claims |\n|---|---|\n{lines}\n" if lines else ""


def _why(row: Row | None) -> str:
    """Why a claim is undecided, in a few words."""
    if row is None or row.why is None:
        return "another reason, in its table"
    return UNDECIDED.get(row.why.code, row.why.text)


def section(
    folder: str, experiments: Mapping[str, KeptRows], rows: Path, answers: Mapping[str, Answer], plots: Path
) -> str:
    """A network: its title, commands and provenance, and a table per experiment."""
    about = read_json(rows / "section.json") if (rows / "section.json").is_file() else {}
    text = f"## {about.get('title', folder)}\n\n"
    text += "".join(f"    {line}\n" for line in about.get("commands", ())) + "\n" * ("commands" in about)
    text += f"{about['remark']}\n\n" if "remark" in about else ""
    ran = {name: kept for name, kept in experiments.items() if kept.ran and name not in FIGURES}
    usual = Counter(describe(kept.provenance) for kept in ran.values()).most_common(1)
    common = usual[0][0] if usual else ""
    text += f"{common}.\n\n" if common else ""
    for name, kept in ran.items():
        text += table(name, kept, folder, answers, plots, common)
    return text


def table(
    name: str, kept: KeptRows, folder: str, answers: Mapping[str, Answer], plots: Path, common: str
) -> str:
    """The rows of an experiment that were run; a claim that another row answers has no verdict here."""
    title = "Three fine-tunes with rotated images" if name == ROTATED_SEEDS else load_experiment(name).title
    text = f"### {title} (`{name}`)\n\n"
    if (own := describe(kept.provenance)) != common:
        text += f"{own}.\n\n"
    if (plot := write_page_plot(kept, plots / f"{folder}-{name}.png")) is not None:
        text += f"![{title}]({plots.name}/{plot.name})\n\n"
    text += LEGENDS.get(name, "")
    if name == "sanity":
        return text + random_weights(kept)
    text += "| what | published | by their protocol | by ours | n | verdict |\n|---|---|---|---|---|---|\n"
    notes = []
    for row in kept.ran:
        theirs, ours = interval(row.as_published), interval(row.clean)
        elsewhere = _counted_elsewhere(row, folder, name, answers)
        text += f"| {_cell(row.label)} | {_cell(row.published)} | {theirs} | {ours} | {row.images or ''} | {elsewhere or _verdict(row)} |\n"
        if note := row.note if not elsewhere else row.reason.text if row.reason else "":
            notes.append(f"- {row.label}: {note}")
    return text + "\n" + "".join(f"{line}\n" for line in dict.fromkeys(notes)) + "\n" * bool(notes)


def random_weights(kept: KeptRows) -> str:
    """A table for each measure, a line per method: more numbers than a table of claims can show. Nothing is published."""
    text = "".join(map(_as_markdown, random_weights_tables(kept.ran)))
    panels = random_weights_panels(kept.ran)
    by_probability = {"rise", "rise-400", "recipro-cam"} & {
        method for panel in panels for method, _ in panel.constant
    }
    if by_probability:
        text += f"Where all maps by {' and '.join(sorted(by_probability))} are constant, a random network's logits are too small to change the probability that they read.\n\n"
    measured = {name for panel in panels for name, _ in panel.rows}
    if others := [name for name in METHODS if name not in measured]:
        text += f"Not measured here: {', '.join(others)}. Methods of attention need a transformer, the others `--costly`, with `--max-passes` no smaller than their passes per map.\n\n"
    left = dict.fromkeys(row.note for row in kept.rows if row.verdict == "not run" and row.note)
    return text + "".join(f"{note}.\n\n" for note in left)


def _as_markdown(matrix: Matrix) -> str:
    lines = "".join(f"| {name} | {' | '.join(row)} |\n" for name, row in matrix.rows.items())
    return f"{matrix.title}:\n\n| method | {' | '.join(matrix.columns)} |\n|{'---|' * (len(matrix.columns) + 1)}\n{lines}\n"


def _counted_elsewhere(row: Row, folder: str, experiment: str, answers: Mapping[str, Answer]) -> str:
    """Where the table is that has the answer to a row's claim; empty if it is this one."""
    answer = answers.get(row.claim)
    if answer is None or answer.row is None or (answer.folder, answer.experiment) == (folder, experiment):
        return ""
    n = answer.row.images
    return f"counted {f'on {n:,} images, ' if n else 'in '}`{answer.experiment}` of {answer.folder}"


def _verdict(row: Row) -> str:
    if row.verdict == "matches" and row.margin:
        return f"matches ± {row.margin:.2g}"
    return f"**{row.verdict}**" if row.verdict in ("differs", "artefact") else row.verdict


def not_run(answers: Mapping[str, Answer], kept: Kept) -> str:
    """The commands that run what was not run."""
    lines = Counter((one.experiment, _command(one)) for one in answers.values() if one.verdict == "not run")
    begun = {name for experiments in kept.values() for name in experiments} | {name for name, _ in lines}
    for name in EXPERIMENTS:
        if name not in begun:
            lines[name, f"`equicam-paper reproduce {name} {COMMANDS.get(name, '')}`"] = 0
    order = sorted(lines.items(), key=lambda pair: [*EXPERIMENTS].index(pair[0][0]))
    text = "".join(f"| `{name}` | {n or ''} | {_cell(command)} |\n" for (name, command), n in order)
    return (
        "## Not run here\n\nFigures of images show images, which are not ours to publish. Every experiment is tested on stand-ins of the same layout.\n\n"
        f"| experiment | claims | command, or why there is none |\n|---|---|---|\n{text}"
    )


def _command(one: Answer) -> str:
    """The command that runs a claim, as one types it, or the reason why there is none."""
    run = f"equicam-paper reproduce {one.experiment} --data ILSVRC2012/val"
    reason = one.row.reason if one.row else None
    if one.row is None or reason is None:
        return f"`equicam-paper reproduce {one.experiment} {COMMANDS.get(one.experiment, '')}`"
    values, method = reason.values, METHOD_NAMES.get(claims()[one.row.claim].method)
    if reason.code == "network":
        how = "--costly --n 500" if method in FORWARD_PASSES else "--n 10000"
        return f"about {values['network']}: `{run} --model {values['network']} {how}`"
    if reason.code == "costly":
        return f"{values['passes']} forward passes per map: `{run} --costly --n 500`"
    if reason.code == "command":
        return f"about {values['of']}: `{values['command']}`"
    return reason.text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
