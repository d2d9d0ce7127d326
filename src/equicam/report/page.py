"""The evidence report: one HTML file that needs nothing else, and the same numbers as JSON beside it.

Names, labels and reasons come from anybody's files: they are escaped as text, and characters that would move, hide or
reverse it are spelled out. The random arm of a triage is not told: who reviews may read this.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from equicam.auditing.log import Log
from equicam.auditing.manifest import Manifest
from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.auditing.signals import signal_values
from equicam.auditing.store import RunStore
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.reasons import SIGNALS, Reason, describe, from_rows
from equicam.report import plots, render
from equicam.report.explanation_files import MOST_SPREAD
from equicam.report.render import Pictures
from equicam.report.text import FLAGS, visible
from equicam.shards import json_ready, write_atomic

MOST_BAD = 100  # rows of the table of bad pictures
SILENT = {"blank", "constant", "none-kept"}  # flags under which PEUM says nothing
Evidence = Mapping[str, Any]
"""`verdict`, a sentence, and `lines`, sentences with numbers and intervals; other keys go to the JSON."""


@runtime_checkable
class Ranked(Protocol):
    """What a report asks of a triage."""

    @property
    def rows(self) -> pa.Table:
        """id, arm, rank, class, reasons."""

    @property
    def by(self) -> str:
        """What they are ranked by."""

    @property
    def guarantee(self) -> Any:
        """A dataclass with its `sentence` and the Eq below which a map is `unstable`."""

    @property
    def quality(self) -> Any:
        """A dataclass with its `sentence` and its `advice` on what to rank by, or None."""


@dataclass(frozen=True)
class Shown:
    """One picture of the queue as the page has it."""

    facts: dict[str, Any]  # what the JSON says of it
    pictures: Pictures


def write_report(
    run: RunStore, triage: Ranked, *, evidence: Mapping[str, Evidence] = {}, out: Path | None = None, top: int = 40
) -> Path:
    """RUN/report.html, or `out`, and the JSON beside it."""
    page = run.folder / "report.html" if out is None else Path(out)
    beside = page.with_suffix(".json")
    if page.suffix.lower() not in (".html", ".htm") or beside.name in ("manifest.json", "digests.json"):
        raise EquicamError(
            "a report", needs="a name that ends in .html, and leaves the run's own .json alone", got=valid_utf8(str(page)),
            fix="report.html",
        )  # fmt: skip
    spec, items = run.manifest, run.read_items()
    queue = triage.rows.filter(pc.equal(triage.rows["arm"], "queue")).sort_by("rank").to_pylist()
    readings = ReviewLog(run.folder)
    readings.refresh()
    shown = _shown(run, spec, items, queue[: max(0, top)], evidence, readings)
    facts = _facts(run, spec, items, queue, triage, readings) | {"queue": [one.facts for one in shown]}
    text = _environment().get_template("report.html.j2").render(
        facts=facts, shown=shown, plots=_plots(items, queue, triage, len(spec.angles)), manifest=_manifest(spec),
        folder=shlex.quote(valid_utf8(str(run.folder))), most_bad=MOST_BAD, most_spread=MOST_SPREAD, flags=FLAGS,
        scale=render.inline(render.scale_bar()), thinned=len(spec.angles) > render.MOST_VIEWS,
        named=partial(_named, classes=spec.classes), verdicts=VERDICTS, by=SIGNALS[triage.by],
    )  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(beside, json.dumps(json_ready(facts), indent=1, allow_nan=False).encode())
    write_atomic(page, text.encode())
    return page


def _facts(
    run: RunStore,
    spec: Manifest,
    items: pa.Table,
    queue: Sequence[Mapping[str, Any]],
    triage: Ranked,
    readings: ReviewLog,
) -> dict[str, Any]:
    """Every number of the report, but those of single pictures."""
    log = Log(run.folder)
    events, ok = log.events(), items.filter(pc.equal(items["status"], "ok"))
    bad = items.filter(pc.not_equal(items["status"], "ok"))
    columns = (
        signal_values(ok, "peum"),
        signal_values(ok, "disagreement"),
        _numbers(ok["flip_rate"]),
        _numbers(ok["eq"]),
    )
    peum, apart, flips, eq = (v[np.isfinite(v)] for v in columns)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest": spec.to_json() | {"angles": list(spec.angles)},
        "summary": {
            "pictures": spec.images,
            "done": items.num_rows,
            "ok": ok.num_rows,
            "bad": bad.num_rows,
            "queue": len(queue),
            "median_peum": float(np.median(peum)) if len(peum) else None,
            "median_disagreement": float(np.median(apart)) if len(apart) else None,
            "flipping": float((flips > 0).mean()) if len(flips) else None,
            "calibrated": len(eq),
        },
        "by": triage.by,
        "guarantee": asdict(triage.guarantee),
        "worth": None if triage.quality is None else asdict(triage.quality),
        "review": _review(readings, triage),
        "bad": [
            {
                "id": row["id"],
                "reason": describe(Reason.from_row({"code": row["reason"], "values": row["reason_values"]})),
            }
            for row in bad.select(["id", "reason", "reason_values"]).to_pylist()
        ],
        "log": {
            "events": len(events),
            "first": events[0].time if events else None,
            "latest": events[-1].time if events else None,
            "last_hash": log.last(),
            "problems": log.problems(),
        },
    }


def _review(readings: ReviewLog, triage: Ranked) -> dict[str, Any] | None:
    """What reviewers found, in both arms together with their numbers; no picture of the random arm is named."""
    if not readings.verdicts():
        return None
    from equicam.auditing.interrater import (
        summarise_reviews,  # intervals are slow to load, and most reports have none of these
    )

    arms = dict(zip(triage.rows["id"].to_pylist(), triage.rows["arm"].to_pylist(), strict=True))
    found = summarise_reviews(readings, arms)
    return None if found is None else found.to_json() | {"of": len(arms)}


def _plots(
    items: pa.Table, queue: Sequence[Mapping[str, Any]], triage: Ranked, views: int
) -> dict[str, Markup]:
    """The distributions; what plots hold is ours alone, so it is not escaped."""
    ok = items.filter(pc.equal(items["status"], "ok"))
    score, flips, eq = signal_values(ok, triage.by), _numbers(ok["flip_rate"]), _numbers(ok["eq"])
    queued, named = _among(ok, queue).to_numpy(), SIGNALS[triage.by]
    found = {"score": plots.score_histogram(score, queued, named=named)}
    found["flips"] = plots.flip_histogram(np.rint(views * flips[np.isfinite(flips)]).astype(np.int64), views)
    if (both := np.isfinite(score) & np.isfinite(eq)).any():
        line = 1 - float(triage.guarantee.unstable)
        found["drift"] = plots.against_drift(
            score[both], 1 - eq[both], queued[both], unstable=line, named=named
        )
    return {name: Markup(svg) for name, svg in found.items()}  # noqa: S704


def _shown(
    run: RunStore,
    spec: Manifest,
    items: pa.Table,
    queue: Sequence[Mapping[str, Any]],
    evidence: Mapping[str, Evidence],
    readings: ReviewLog,
) -> list[Shown]:
    ids = [row["id"] for row in queue]
    known = {row["id"]: row for row in items.filter(_among(items, queue)).to_pylist()}
    if absent := [name for name in ids if name not in known]:
        raise EquicamError(
            "a report", needs="a triage of this run", got=f"{visible(absent[0])!r}, which is not in it",
            fix="equicam triage RUN",
        )  # fmt: skip
    maps = run.maps(ids)
    return [
        Shown(
            _told(row, known[row["id"]], evidence, spec)
            | {
                "verdicts": _verdicts(readings, row["id"]),
                "notes": [asdict(n) for n in readings.notes(row["id"])],
            },
            render.pictured(known[row["id"]], maps.get(row["id"]), spec.angles, fetch=bool(run.moved)),
        )
        for row in queue
    ]


def _among(items: pa.Table, queue: Sequence[Mapping[str, Any]]) -> pa.ChunkedArray:
    return pc.is_in(items["id"], pa.array([row["id"] for row in queue], pa.string()))


def _told(
    ranked: Mapping[str, Any], row: Mapping[str, Any], evidence: Mapping[str, Evidence], spec: Manifest
) -> dict[str, Any]:
    flags = list(row["flags"] or [])
    same = (
        "label", "target", "confidence", "peum_score", "flip_rate", "views_kept", "eq", "view_confidence", "view_top1",
    )  # fmt: skip
    return {
        "id": row["id"],
        "rank": ranked["rank"],
        "class": _named(row["target"], spec.classes),
        **{name: row[name] for name in same},
        "disagreement": ranked.get("disagreement"),
        "flags": flags,
        "silent": bool(SILENT & {*flags})
        or (len(spec.angles) > 1 and row["views_kept"] is not None and row["views_kept"] <= 1),
        "reasons": [describe(reason) for reason in from_rows(ranked["reasons"])],
        "evidence": dict(evidence[row["id"]]) if row["id"] in evidence else None,
    }


def _verdicts(readings: ReviewLog, name: str) -> list[dict[str, Any]]:
    """Every verdict on a picture, changed ones too, and which stand."""
    stands = {v.number for v in readings.by_reviewer(name).values()}
    return [asdict(v) | {"stands": v.number in stands} for v in readings.verdicts(name)]


def _named(target: int | None, classes: Sequence[str] | None) -> str:
    known = target is not None and classes is not None and 0 <= target < len(classes)
    return classes[target] if known else f"class {target}"  # type: ignore[index]


def _manifest(spec: Manifest) -> dict[str, str]:
    """Every entry in words that fit a line or a few."""
    plain = spec.recipe.to_json() | spec.to_json()
    told = {
        name: "none" if value is None else str(value)
        for name, value in plain.items()
        if name not in ("recipe", "views")
    }
    classes = spec.classes or ()
    named = ", ".join(classes[:12]) + (", …" if len(classes) > 12 else "")
    told["classes"] = f"{len(classes)}: {named}" if classes else "not named"
    told["angles"] = ", ".join(f"{angle:g}°" for angle in spec.angles)
    told["versions"] = ", ".join(f"{name} {version}" for name, version in spec.versions)
    return told


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:{form}}"


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """As float64, NaN where there is none."""
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan).to_numpy())


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"visible": visible, "number": _number}
    return found
