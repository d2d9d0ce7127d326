"""docs/reproduce.md from kept rows: counts, findings, a table a network; and for the site a page of every row of each."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from equicam.methods import METHODS
from equicam.shards import read_json, write_atomic
from equicam_paper import EXPERIMENTS, load_experiment
from equicam_paper.claims import METHODS as METHOD_NAMES
from equicam_paper.claims import claims, section_title
from equicam_paper.context import FORWARD_PASSES
from equicam_paper.control import controls, distinct
from equicam_paper.findings import findings
from equicam_paper.kept import ROTATED_SEEDS, Kept, KeptRows, read_kept
from equicam_paper.margins import CAPS
from equicam_paper.plots import FIGURES, random_weights_panels, write_page_plot
from equicam_paper.provenance import describe
from equicam_paper.rows import VERDICTS, Row
from equicam_paper.tables import interval, markdown, random_weights_tables

HERE = Path(__file__).parent
TEXTS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "page.toml").read_text())
ROTATED_TITLE = "Three fine-tunes with rotated images"
FIRST_TABLES = ("main", "domains")  # the experiments that the page's table of a network begins with
NEAREST = ("costly", "note", "command", "network")
"""Reasons of runs that came near to a claim, the nearest first: the right network, then the right domain."""


@dataclass(frozen=True)
class Answer:
    """The one row that answers a claim, and where it stands; no row where no run came near it."""

    experiment: str
    folder: str = ""
    row: Row | None = None

    @property
    def verdict(self) -> str:
        """The row's."""
        return self.row.verdict if self.row else "not run"


Answers = Mapping[str, Answer]


def write_page(page: Path, rows: Path) -> dict[str, int]:
    """Write the page, and the plots of the site's pages; returns the number of claims by verdict."""
    kept = read_kept(rows)
    answers = answer_claims(kept)
    text = Template((HERE / "page.md").read_text()).substitute(
        counts=_count_text(answers) + "".join(controls(kept)),
        caps=", ".join(f"{CAPS[kind]:g} for {words}" for kind, words in TEXTS["kinds"].items()),
        findings="\n".join(findings(kept)),
        networks=_networks(kept, answers),
    )
    plots = page.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    for folder, experiments in kept.items():
        for name, of in experiments.items():
            write_page_plot(of, plots / f"{folder}-{name}.png")
    write_atomic(page, text.encode())
    return counts(answers)


def site_pages(rows: Path, plots: Path) -> Iterator[tuple[str, str, str]]:
    """Name, short title and text of the pages that only the site has: one a section of rows, and what was not run."""
    kept = read_kept(rows)
    answers = answer_claims(kept)
    for folder, experiments in kept.items():
        about = read_json(path) if (path := rows / folder / "section.json").is_file() else {}
        yield folder, section_title(folder), _section(folder, experiments, about, answers, plots)
    yield "not-run", "Not run", _not_run(answers, kept)


def answer_claims(kept: Kept) -> dict[str, Answer]:
    """Every claim once: of several measurements the one of most images, else the row that came nearest."""
    found: dict[str, list[Answer]] = {name: [] for name in claims()}
    for folder, experiments in kept.items():
        for experiment, of in experiments.items():
            for row in of.rows:
                if row.claim in found:
                    found[row.claim].append(Answer(experiment, folder, row))
    return {name: max(rows, key=_nearness) if rows else _unanswered(name) for name, rows in found.items()}


def _unanswered(claim: str) -> Answer:
    return Answer(next(name for name in EXPERIMENTS if claim.startswith(load_experiment(name).answers)))


def _nearness(one: Answer) -> tuple[bool, int]:
    if one.verdict != "not run":
        return True, one.row.images if one.row else 0
    code = one.row.reason.code if one.row and one.row.reason else ""
    return False, -NEAREST.index(code) if code in NEAREST else -len(NEAREST)


def why_not_run(claim: str, answer: Answer) -> str:
    """Why a claim was not run, without its command."""
    reason = answer.row.reason if answer.row else None
    if reason is None:
        return f"needs {load_experiment(answer.experiment).needs}"
    kinds = {
        "network": f"needs ImageNet weights of {reason.values.get('network')}",
        "costly": "needs methods of many forward passes per map (`--costly`)",
        "command": f"needs networks fine-tuned on {claims()[claim].domain}",
        "images": f"needs images of {reason.values.get('about')}",
    }
    return kinds.get(reason.code) or reason.text


def counts(answers: Answers) -> dict[str, int]:
    """Claims by verdict."""
    found = Counter(one.verdict for one in answers.values())
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def _count_text(answers: Answers) -> str:
    """The count by verdict, and why claims were not run or not decided."""
    of = {verdict: {n: one for n, one in answers.items() if one.verdict == verdict} for verdict in VERDICTS}
    listed = ", ".join(f"{n} {TEXTS['counted'][verdict][n != 1]}" for verdict, n in counts(answers).items())
    text = f"**Of {len(answers)} claims, {listed}.** A claim counts once, by its measurement on most images."
    if of["matches"] or of["differs"]:
        same, other = distinct(of["matches"]), distinct(of["differs"])
        text += f" Several tables print the same number; counted once each, these are {same} that match and {other} that differ."
    not_run = [why_not_run(name, one) for name, one in of["not run"].items()]
    undecided = [_why(one.row) for one in of["undecided"].values()]
    return f"{text}\n\n" + _reasons("not run", not_run) + _reasons("undecided", undecided)


def _reasons(verdict: str, reasons: Iterable[str]) -> str:
    lines = [[reason, str(n)] for reason, n in Counter(reasons).most_common()]
    return markdown([f"{verdict}: why", "claims"], lines) if lines else ""


def _why(row: Row | None) -> str:
    """Why a claim is undecided, in a few words."""
    why = row.why if row else None
    return TEXTS["undecided"].get(why.code, why.text) if why else "another reason, in its table"


def _networks(kept: Kept, answers: Answers) -> str:
    """A table a network: the rows of its first table, whatever they cost, and every claim of another that differs."""
    found: dict[str, dict[str, list[str]]] = {}
    for folder, experiments in kept.items():
        lines = found.setdefault(section_title(folder.removesuffix("-costly")), {})
        for name, of in experiments.items():
            for row in of.ran:
                label, wanted = row.label, not row.label.endswith((", insertion", ", deletion"))
                if name not in FIRST_TABLES:
                    elsewhere = _counted_elsewhere(row, folder, name, answers)
                    label, wanted = (
                        f"`{name}`: {label}",
                        row.verdict in ("differs", "artefact") and not elsewhere,
                    )
                if wanted:
                    lines.setdefault(label, [label, *_cells(row), _verdict(row)])
    return "\n".join(f"## {title}\n\n{_narrow([*lines.values()])}" for title, lines in found.items() if lines)


def _narrow(lines: list[list[str]]) -> str:
    """A table of rows, without the published numbers where there are none."""
    shown = range(len(COLUMNS)) if any(line[-1] != "measured" for line in lines) else (0, 2, 3, 4)
    return markdown([COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in lines]).rstrip() + "\n"


COLUMNS = ("what", "published", "by their protocol", "by ours", "n", "verdict")


def _cells(row: Row) -> list[str]:
    return [row.published, interval(row.as_published), interval(row.clean), str(row.images or "")]


def _verdict(row: Row) -> str:
    if row.verdict == "matches" and row.margin:
        return f"matches ± {row.margin:.2g}"
    return f"**{row.verdict}**" if row.verdict in ("differs", "artefact") else row.verdict


def _section(
    folder: str, experiments: Mapping[str, KeptRows], about: Mapping[str, Any], answers: Answers, plots: Path
) -> str:
    """A network: its title, commands and provenance, and a table per experiment."""
    text = f"# {about.get('title', folder)}\n\n"
    text += "".join(f"    {line}\n" for line in about.get("commands", ())) + "\n" * ("commands" in about)
    text += f"{about['remark']}\n\n" if "remark" in about else ""
    shown = {name: of for name, of in experiments.items() if of.ran and name not in FIGURES}
    ran = {name: (of, describe(of.provenance)) for name, of in shown.items()}
    usual = Counter(origin for _, origin in ran.values()).most_common(1)
    text += f"{usual[0][0]}.\n\n" if usual else ""
    for name, (of, origin) in ran.items():
        title = ROTATED_TITLE if name == ROTATED_SEEDS else load_experiment(name).title
        text += f"## {title} (`{name}`)\n\n" + (f"{origin}.\n\n" if origin != usual[0][0] else "")
        plot = f"{folder}-{name}.png"
        text += f"![{title}]({plot})\n\n" if (plots / plot).is_file() else ""
        text += f"{TEXTS['legends'][name]}\n\n" if name in TEXTS["legends"] else ""
        text += _random_weights(of) if name == "sanity" else _table(name, of, folder, answers)
    return text


def _table(name: str, kept: KeptRows, folder: str, answers: Answers) -> str:
    """The rows of an experiment that were run; a claim that another row answers has no verdict here."""
    lines, notes = [], []
    for row in kept.ran:
        elsewhere = _counted_elsewhere(row, folder, name, answers)
        lines.append([row.label, *_cells(row), elsewhere or _verdict(row)])
        if note := row.note if not elsewhere else row.reason.text if row.reason else "":
            notes.append(f"- {row.label}: {note}\n")
    return markdown(COLUMNS, lines) + "".join(dict.fromkeys(notes)) + "\n" * bool(notes)


def _random_weights(kept: KeptRows) -> str:
    """A table for each measure, a line per method: more numbers than a table of claims can show. Nothing is published."""
    text = "".join(
        f"{one.title}:\n\n"
        + markdown(["method", *one.columns], [[name, *row] for name, row in one.rows.items()])
        for one in random_weights_tables(kept.ran)
    )
    panels = random_weights_panels(kept.ran)
    constant = {method for panel in panels for method, _ in panel.constant}
    if by_probability := {"rise", "rise-400", "recipro-cam"} & constant:
        text += f"Where all maps by {' and '.join(sorted(by_probability))} are constant, a random network's logits are too small to change the probability that they read.\n\n"
    measured = {name for panel in panels for name, _ in panel.rows}
    if others := [name for name in METHODS if name not in measured]:
        text += f"Not measured here: {', '.join(others)}. Methods of attention need a transformer, the others `--costly`, with `--max-passes` no smaller than their passes per map.\n\n"
    left = dict.fromkeys(row.note for row in kept.rows if row.verdict == "not run" and row.note)
    return text + "".join(f"{note}.\n\n" for note in left)


def _counted_elsewhere(row: Row, folder: str, experiment: str, answers: Answers) -> str:
    """Where the table is that has the answer to a row's claim; empty if it is this one."""
    answer = answers.get(row.claim)
    if answer is None or answer.row is None or (answer.folder, answer.experiment) == (folder, experiment):
        return ""
    n = answer.row.images
    return f"counted {f'on {n:,} images, ' if n else 'in '}`{answer.experiment}` of {answer.folder}"


def _not_run(answers: Answers, kept: Kept) -> str:
    """The commands that run what was not run."""
    left = {name: one for name, one in answers.items() if one.verdict == "not run"}
    lines = Counter((one.experiment, _command(name, one)) for name, one in left.items())
    begun = {name for experiments in kept.values() for name in experiments} | {name for name, _ in lines}
    lines |= {(name, _typed(name)): 0 for name in EXPERIMENTS if name not in begun}
    order = sorted(lines.items(), key=lambda pair: [*EXPERIMENTS].index(pair[0][0]))
    return (
        "# Not run here\n\nFigures of images show images, which are not ours to publish. Every experiment is tested on stand-ins of the same layout.\n\n"
    ) + markdown(
        ("experiment", "claims", "command, or why there is none"),
        [[f"`{name}`", str(n or ""), command] for (name, command), n in order],
    )


def _typed(experiment: str) -> str:
    return f"`equicam-paper reproduce {experiment} {TEXTS['commands'].get(experiment, '')}`"


def _command(claim: str, one: Answer) -> str:
    """The command that runs a claim, as one types it, or the reason why there is none."""
    reason = one.row.reason if one.row else None
    if reason is None:
        return _typed(one.experiment)
    values, run = reason.values, f"equicam-paper reproduce {one.experiment} --data ILSVRC2012/val"
    if reason.code == "network":
        costly = METHOD_NAMES.get(claims()[claim].method) in FORWARD_PASSES
        how = "--costly --n 500" if costly else "--n 10000"
        return f"about {values['network']}: `{run} --model {values['network']} {how}`"
    if reason.code == "costly":
        return f"{values['passes']} forward passes per map: `{run} --costly --n 500`"
    return f"about {values['of']}: `{values['command']}`" if reason.code == "command" else reason.text
