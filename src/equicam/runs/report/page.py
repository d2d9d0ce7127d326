"""The evidence report: one HTML file that needs nothing else, and the same numbers in a JSON file next to it.

Names, labels and reasons come from foreign files: they are escaped as text, and characters that would move, hide or
reverse text are spelled out. No image is named as one of the control arm, because reviewers may read the report: it
lists every image of a small run alike, and shows those of the queue.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from equicam.drawing import plots
from equicam.drawing.text import FLAGS, RANDOM_EQ, SIGNAL_MEANINGS, verdict_meanings, visible
from equicam.drawing.view_curve import curve_order, view_curve
from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.overlay import MAX_DEVIATION, RgbImage
from equicam.reasons import SIGNALS, Reason, describe, from_rows, name_views
from equicam.runs.causal_result import read_causal
from equicam.runs.log import Log
from equicam.runs.manifest import Manifest
from equicam.runs.queue_files import ranked_columns
from equicam.runs.report import render
from equicam.runs.report.answer import COLUMNS as TABLE_COLUMNS
from equicam.runs.report.answer import MAX_TABLE_ROWS, image_table, steadiness_counts
from equicam.runs.report.examples import choose_examples, draw_thumbnails
from equicam.runs.report.rasters import PLACED, raster_overview
from equicam.runs.report.render import RenderedImages
from equicam.runs.report.rows import peum_scores, peum_undefined, share_below
from equicam.runs.signals import FLAT, queue_arm, reduce_views, signal_values
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog
from equicam.shards import json_ready, write_atomic
from equicam.steadiness import STEADY_FROM, judge_row

MAX_BAD_ROWS = 100  # of the table of bad images
COUNTED = ("reason", "reason_values", "flip_rate", "steadiness", "steadiness_reason")
"""The columns of all images that the report reads and triage does not."""


@runtime_checkable
class RankedQueue(Protocol):
    """The parts of a triage that a report uses."""

    @property
    def rows(self) -> pa.Table:
        """id, arm, rank, class, reasons."""

    @property
    def by(self) -> str:
        """The signal that ranks."""

    @property
    def unstable(self) -> Any:
        """A dataclass with its `sentence` and the stability `below` which a map is unstable."""

    @property
    def quality(self) -> Any:
        """A dataclass with its `sentence`, a `comparison` of signals, a `check` of stability and an `advice`, or None."""


@dataclass(frozen=True)
class Card:
    """One image of the queue as the page shows it."""

    facts: dict[str, Any]  # also in the JSON
    images: RenderedImages
    curve: Markup  # stability by view


def read_rows(store: RunStore) -> pa.Table:
    """The columns of all images that a report needs, and those that rank them."""
    columns = [*ranked_columns(store.manifest), *COUNTED, *(PLACED if store.manifest.tiling else ())]
    return store.read_items(list(dict.fromkeys(columns)), reduce=reduce_views)


def write_report(
    store: RunStore,
    triage: RankedQueue,
    *,
    out: Path | None = None,
    top: int = 40,
    items: pa.Table | None = None,
) -> Path:
    """Write RUN/report.html, or `out`, and the JSON of the same stem; `items` are those of `read_rows`, if they were read already."""
    page = store.folder / "report.html" if out is None else Path(out)
    json_file = page.with_suffix(".json")
    if page.suffix.lower() not in (".html", ".htm") or json_file.name in ("manifest.json", "digests.json"):
        raise EquicamError(
            "a report", "a name that ends in .html and does not overwrite the run's own .json", valid_utf8(str(page)),
            "report.html",
        )  # fmt: skip
    manifest = store.manifest
    items = read_rows(store) if items is None else items
    queue = queue_arm(triage.rows)
    log = ReviewLog(store.folder)
    log.refresh()
    cards = _cards(store, manifest, items, queue.slice(0, max(0, top)).to_pylist(), log)
    ranks = queue.select(["id", "rank"]).to_pylist() if manifest.tiling else []
    rasters = raster_overview(store, manifest, items, ranks, by=triage.by, cards=len(cards))
    facts = _facts(store, manifest, items, queue, triage, log) | {
        "rasters": None if rasters is None else rasters.facts,
        "queue": [card.facts for card in cards],
    }
    text = environment().get_template("report.html.j2").render(
        facts=facts, random_eq=RANDOM_EQ, cards=cards, plots=_plots(items, queue, triage, len(manifest.transforms)), flags=FLAGS,
        manifest=_manifest_lines(manifest), verify=_verify_command(store), max_bad_rows=MAX_BAD_ROWS,
        max_deviation=MAX_DEVIATION, scale=render.data_url(_colour_scale(cards)), steady_from=STEADY_FROM,
        max_table_rows=MAX_TABLE_ROWS, card_of={card.facts["id"]: n for n, card in enumerate(cards, start=1)},
        meanings=verdict_meanings(manifest.has_values), has_values=manifest.has_values,
        thinned=len(manifest.transforms) > render.MAX_TILES, class_name=manifest.output_name,
        verdicts=VERDICTS, rotations=all(one.is_rotation for one in manifest.transforms), ranked_by=SIGNALS[triage.by],
        curve_order=curve_order(manifest.transforms),
        signal_meaning=SIGNAL_MEANINGS[triage.by], rasters=rasters, examples=choose_examples(store, manifest, items),
        thumbnails=draw_thumbnails(store, manifest, items),
    )  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(json_file, json.dumps(json_ready(facts), indent=1, allow_nan=False).encode())
    write_atomic(page, text.encode())
    return page


def _facts(
    store: RunStore,
    manifest: Manifest,
    items: pa.Table,
    queue: pa.Table,
    triage: RankedQueue,
    log: ReviewLog,
) -> dict[str, Any]:
    """Every number of the report except those of single images."""
    event_log = Log(store.folder)
    events, ok = event_log.events(), items.filter(pc.equal(items["status"], "ok"))
    bad, causal = items.filter(pc.not_equal(items["status"], "ok")), read_causal(store)
    columns = {f"median_{name}": signal_values(ok, name) for name in SIGNALS}
    medians = {
        name: float(np.median(known)) if len(known := values[np.isfinite(values)]) else None
        for name, values in columns.items()
    }
    flips, eq = (v[np.isfinite(v)] for v in (_numbers(ok["flip_rate"]), _numbers(ok["eq"])))
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "manifest": manifest.to_json() | {"views": list(manifest.labels)},
        "summary": {
            "images": manifest.images,
            "done": items.num_rows,
            "ok": ok.num_rows,
            "bad": bad.num_rows,
            "queue": queue.num_rows,
            **medians,
            "flipping": float((flips > 0).mean()) if len(flips) else None,
            "calibrated": len(eq),
        },
        "steadiness": steadiness_counts(items),
        "images": image_table(store.read_items(TABLE_COLUMNS), manifest)
        if ok.num_rows <= MAX_TABLE_ROWS
        else None,
        "by": triage.by,
        "quotas": bool(getattr(triage, "quotas", None)),
        "ranks_skipped": queue["rank"].to_pylist() != [*range(1, queue.num_rows + 1)],
        "unchecked": _unchecked(manifest),
        "unstable": asdict(triage.unstable),
        "quality": None if triage.quality is None else asdict(triage.quality),
        "remainder": _remainder(log, triage, ok.num_rows),
        "review": _review(log, triage),
        "causal": None if causal is None else causal.to_json() | {"sentence": causal.sentence},
        "bad": [
            {"id": row["id"], "reason": describe(_reason(row))}
            for row in bad.select(["id", "reason", "reason_values"]).to_pylist()
        ],
        "log": {
            "events": len(events),
            "first": events[0].time if events else None,
            "latest": events[-1].time if events else None,
            "last_hash": event_log.last(),
            "problems": event_log.problems(),
        },
    }


def _verify_command(store: RunStore) -> str:
    """The command that checks the run, with the files it must name; without the sample where only Python has the model."""
    named = store.manifest.reload_options()
    options = ["--sample", "0"] if named is None else [text for pair in named.items() for text in pair]
    return shlex.join(["equicam", "verify", store.shown, *options])


def _colour_scale(cards: Sequence[Card]) -> RgbImage:
    """The colours of the overlays over the mean grey of the images shown."""
    greys = [card.images.grey for card in cards if card.images.grey is not None]
    return render.colour_scale(float(np.mean(greys)) if greys else render.NO_IMAGE_GREY)


def _unchecked(manifest: Manifest) -> list[str]:
    """Transforms that no view of the run has."""
    views = manifest.transforms
    known = {
        "rotation": any(one.key[0] for one in views),
        "reflection": any(one.mirrored for one in views),
        "translation": any(any(one.shift) for one in views),
        "scale": any(one.scale != 1 for one in views),
    }
    return [name for name, checked in known.items() if not checked]


def _moving(row: Mapping[str, Any]) -> Sequence[float]:
    """Stability by view; nothing for a flat map, which cannot move."""
    return () if FLAT & {*(row["flags"] or ())} else row["stability_by_view"] or ()


def _reason(row: Mapping[str, Any]) -> Reason:
    """Why an image is bad."""
    return Reason.from_row({"code": row["reason"], "values": row["reason_values"]})


def _review(log: ReviewLog, triage: RankedQueue) -> dict[str, Any] | None:
    """The reviewers' findings, both arms as numbers; no image of the control arm is named."""
    if not log.verdicts():
        return None
    # imported here: intervals load slowly, and most reports have no verdicts
    from equicam.runs.bounds import arms_now, summarise_reviews

    arms = arms_now(triage.rows)
    found = summarise_reviews(log, arms)
    if found is None:
        return None
    shown = sum(v.blind and not v.blind_class for v in log.verdicts())
    return found.to_json() | {"of": len(arms), "class_shown": shown}


def _remainder(log: ReviewLog, triage: RankedQueue, ok: int) -> dict[str, Any] | None:
    """What can be stated of the maps nobody opened; None if nothing is under review."""
    if not triage.rows.num_rows:
        return None
    from equicam.runs.bounds import bound_unopened, count_verdicts

    return bound_unopened(count_verdicts(log, triage.rows, ok)).to_json()


def _plots(items: pa.Table, queue: pa.Table, triage: RankedQueue, views: int) -> dict[str, Markup]:
    """The distributions; plots contain no foreign text, so they are not escaped."""
    ok = items.filter(pc.equal(items["status"], "ok"))
    signal, flips, eq = signal_values(ok, triage.by), _numbers(ok["flip_rate"]), _numbers(ok["eq"])
    queued, name = pc.is_in(ok["id"], queue["id"]).to_numpy(), SIGNALS[triage.by]
    below = float(triage.unstable.below)
    found = {"stability": plots.stability_histogram(signal_values(ok, "stability"), queued, unstable=below)}
    if triage.by != "stability":
        found["signal"] = plots.signal_histogram(signal, queued, name=name)
    found["flips"] = plots.flip_histogram(np.rint(views * flips[np.isfinite(flips)]).astype(np.int64), views)
    if (both := np.isfinite(signal) & np.isfinite(eq)).any():
        found["drift"] = plots.signal_against_drift(
            signal[both], 1 - eq[both], queued[both], unstable=1 - below, name=name
        )
    return {name: Markup(svg) for name, svg in found.items()}  # noqa: S704


def _cards(
    store: RunStore,
    manifest: Manifest,
    items: pa.Table,
    queue: Sequence[Mapping[str, Any]],
    log: ReviewLog,
) -> list[Card]:
    ids = [row["id"] for row in queue]
    rows = store.rows(ids)
    if absent := [name for name in ids if name not in rows]:
        raise EquicamError(
            "a report", "a triage of this run", f"{visible(absent[0])!r}, which is not in it", "equicam triage RUN",
        )  # fmt: skip
    maps, scores = store.maps(ids), peum_scores(items)
    return [
        Card(
            _image_facts(ranked, rows[name], manifest, scores)
            | {"verdicts": _verdicts(log, name), "notes": [asdict(n) for n in log.notes(name)]},
            render.render_images(
                rows[name], maps.get(name), manifest.transforms, manifest, fetch=name in store.moved
            ),
            view_curve(manifest.transforms, _moving(rows[name])),
        )
        for name, ranked in zip(ids, queue, strict=True)
    ]


def _image_facts(
    ranked: Mapping[str, Any],
    row: Mapping[str, Any],
    manifest: Manifest,
    scores: NDArray[np.float64],
) -> dict[str, Any]:
    judged = judge_row(row, manifest.labels, manifest.presented)
    undefined = peum_undefined(row, views=len(manifest.transforms))
    copied = (
        "label", "target", "confidence", "output", "peum_score", "flip_rate", "views_kept", "eq", "view_confidence", "view_top1",
    )  # fmt: skip
    return {
        "id": row["id"],
        "rank": ranked["rank"],
        "class": manifest.output_name(row["target"]),
        **{name: row[name] for name in copied},
        **{name: ranked.get(name) for name in ("stability", "risk")},
        "stability_by_view": row["stability_by_view"],
        "flags": list(row["flags"] or []),
        "steadiness": judged.word,
        "steadiness_reason": describe(judged.reason),
        "peum_undefined": undefined,
        "peum_above": None if undefined else share_below(scores, row["peum_score"]),
        "reasons": [describe(reason) for reason in from_rows(ranked["reasons"])],
    }


def _verdicts(log: ReviewLog, name: str) -> list[dict[str, Any]]:
    """Every verdict on an image, including those that were changed later."""
    standing = {v.number for v in log.by_reviewer(name).values()}
    return [asdict(v) | {"stands": v.number in standing} for v in log.verdicts(name)]


def _manifest_lines(manifest: Manifest) -> dict[str, str]:
    """Every entry as text that fits a line or a few."""
    plain = manifest.recipe.to_json() | manifest.to_json()
    lines = {
        name: "none" if value is None else str(value)
        for name, value in plain.items()
        if name not in ("recipe", "views")
    }
    classes = manifest.classes or ()
    names = ", ".join(classes[:12]) + (", …" if len(classes) > 12 else "")
    lines["classes"] = f"{len(classes)}: {names}" if classes else "without names"
    lines["views"] = name_views(manifest.labels, len(manifest.labels))
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in manifest.versions)
    return lines


def _format_number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:{form}}"


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A column as float64, NaN for null."""
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan).to_numpy())


@cache
def environment() -> Environment:
    """The templates of pages, with the filters that make foreign text safe."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"visible": visible, "number": _format_number}
    return found
