"""The evidence report: one HTML file that needs nothing else, and the same numbers in a JSON file next to it.

Names, labels and reasons come from foreign files: they are escaped as text, and characters that would move, hide or
reverse text are spelled out. No image is named as one of the control arm, because reviewers may read the report: it
lists every image of a small run alike, and shows those of the queue.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from equicam.drawing import plots
from equicam.drawing.text import FLAGS, RANDOM_EQ, SIGNAL_MEANINGS, verdict_meanings, visible
from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.overlay import MAX_DEVIATION
from equicam.reasons import SIGNALS, Reason, describe, from_rows, name_views
from equicam.runs.causal_result import read_causal
from equicam.runs.log import Log
from equicam.runs.manifest import Manifest
from equicam.runs.queue_files import ranked_columns
from equicam.runs.report.facts import COLUMNS as TABLE_COLUMNS
from equicam.runs.report.facts import (
    MAX_TABLE_ROWS,
    image_table,
    load_templates,
    peum_undefined,
    steadiness_counts,
)
from equicam.runs.report.rasters import PLACED, raster_overview
from equicam.runs.report.render import ImageDrawing, colour_scale
from equicam.runs.signals import queue_arm, reduce_views, signal_values
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog
from equicam.shards import json_ready, write_atomic
from equicam.steadiness import STEADY_FROM, judge_row

if TYPE_CHECKING:
    from equicam.runs.triage import Triage

TEMPLATES = Path(__file__).parent / "templates"
MAX_EXAMPLES = 4  # of steady maps, and of unsteady ones
MAX_THUMBNAILS = 200  # images of the table of all images; more would make the page slow
EXAMPLE: dict[str, Any] = {"side": 160, "tile": 64, "most": 6}
THUMBNAIL: dict[str, Any] = {"side": 72, "quality": 55}
COUNTED = ("reason", "reason_values", "flip_rate", "steadiness", "steadiness_reason")
"""The columns of all images that the report reads and triage does not."""


def read_rows(store: RunStore) -> pa.Table:
    """The columns of all images that a report needs, and those that rank them."""
    columns = [*ranked_columns(store.manifest), *COUNTED, *(PLACED if store.manifest.tiling else ())]
    return store.read_items(list(dict.fromkeys(columns)), reduce=reduce_views)


def write_report(
    store: RunStore,
    triage: "Triage",
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
    manifest, log = store.manifest, ReviewLog(store.folder)
    items = read_rows(store) if items is None else items
    ok, queue = items.filter(pc.equal(items["status"], "ok")), queue_arm(triage.rows)
    log.refresh()
    cards = _cards(store, queue.slice(0, max(0, top)).to_pylist(), log)
    ranks = queue.select(["id", "rank"]).to_pylist() if manifest.tiling else []
    rasters = raster_overview(store, items, ranks, by=triage.by, cards=len(cards))
    facts = _facts(store, items, ok, queue, triage, log) | {
        "rasters": None if rasters is None else rasters.facts,
        "queue": [of_image for of_image, _ in cards],
    }
    named = manifest.reload_options()
    options = ["--sample", "0"] if named is None else [text for pair in named.items() for text in pair]
    greys = [one.pixels.mean() for _, one in cards if not isinstance(one.pixels, str)]
    text = load_templates(TEMPLATES).get_template("report.html.j2").render(
        facts=facts, random_eq=RANDOM_EQ, cards=cards, plots=_plots(ok, queue, triage, len(manifest.transforms)), flags=FLAGS,
        view_names=name_views(manifest.labels, len(manifest.labels)), verify=shlex.join(["equicam", "verify", store.shown, *options]),
        max_deviation=MAX_DEVIATION, scale=colour_scale(greys), steady_from=STEADY_FROM, max_table_rows=MAX_TABLE_ROWS,
        meanings=verdict_meanings(manifest.has_values), has_values=manifest.has_values,
        class_name=manifest.output_name, verdicts=VERDICTS, rotations=all(one.is_rotation for one in manifest.transforms), ranked_by=SIGNALS[triage.by],
        transforms=manifest.transforms, signal_meaning=SIGNAL_MEANINGS[triage.by], rasters=rasters,
        examples=choose_examples(store, ok), thumbnails=draw_thumbnails(store, ok),
    )  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(json_file, json.dumps(json_ready(facts), indent=1, allow_nan=False).encode())
    write_atomic(page, text.encode())
    return page


def _facts(
    store: RunStore, items: pa.Table, ok: pa.Table, queue: pa.Table, triage: "Triage", log: ReviewLog
) -> dict[str, Any]:
    """Every number of the report except those of single images."""
    manifest, event_log, causal = store.manifest, Log(store.folder), read_causal(store)
    events, bad = event_log.events(), items.filter(pc.not_equal(items["status"], "ok"))
    values = {name: signal_values(ok, name) for name in SIGNALS}
    known = {name: column[np.isfinite(column)] for name, column in values.items()}
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
            **{f"median_{name}": float(np.median(v)) if len(v) else None for name, v in known.items()},
            "flipping": float((flips > 0).mean()) if len(flips) else None,
            "calibrated": len(eq),
        },
        "steadiness": steadiness_counts(items),
        "images": image_table(store.read_items(TABLE_COLUMNS), manifest)
        if ok.num_rows <= MAX_TABLE_ROWS
        else None,
        "by": triage.by,
        "quotas": bool(triage.quotas),
        "ranks_skipped": queue["rank"].to_pylist() != [*range(1, queue.num_rows + 1)],
        "unchecked": _unchecked(manifest),
        "unstable": asdict(triage.unstable),
        "quality": None if triage.quality is None else asdict(triage.quality),
        **_reviewed(log, triage, ok.num_rows),
        "causal": None if causal is None else causal.to_json() | {"sentence": causal.sentence},
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
            "last_hash": event_log.last(),
            "problems": event_log.problems(),
        },
    }


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


def _reviewed(log: ReviewLog, triage: "Triage", ok: int) -> dict[str, Any]:
    """What can be stated of the maps nobody opened, and what reviewers found, both arms as numbers; None without either.

    No image of the control arm is named.
    """
    found: dict[str, Any] = {"remainder": None, "review": None}
    if triage.rows.num_rows:
        # imported here: intervals load slowly
        from equicam.runs.bounds import arms_now, bound_unopened, count_verdicts, summarise_reviews

        found["remainder"] = bound_unopened(count_verdicts(log, triage.rows, ok)).to_json()
        arms = arms_now(triage.rows)
        if (review := summarise_reviews(log, arms)) is not None:
            shown = sum(v.blind and not v.blind_class for v in log.verdicts())
            found["review"] = review.to_json() | {"of": len(arms), "class_shown": shown}
    return found


def _plots(ok: pa.Table, queue: pa.Table, triage: "Triage", views: int) -> dict[str, Markup]:
    """The distributions; plots contain no foreign text, so they are not escaped."""
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
    store: RunStore, queue: Sequence[Mapping[str, Any]], log: ReviewLog
) -> list[tuple[dict[str, Any], ImageDrawing]]:
    """The facts of each image of the queue, which are also in the JSON, and its maps."""
    images, cards = _draw(store, [row["id"] for row in queue]), []
    for ranked in queue:
        name = ranked["id"]
        if name not in images:
            raise EquicamError(
                "a report",
                "a triage of this run",
                f"{visible(name)!r}, which is not in it",
                "equicam triage RUN",
            )
        standing = {v.number for v in log.by_reviewer(name).values()}
        facts = _image_facts(ranked, images[name].row, store.manifest) | {
            "verdicts": [asdict(v) | {"stands": v.number in standing} for v in log.verdicts(name)],
            "notes": [asdict(n) for n in log.notes(name)],
        }
        cards.append((facts, images[name]))
    return cards


def _image_facts(ranked: Mapping[str, Any], row: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
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
        "peum_above": None if undefined else ranked["peum_above"],
        "reasons": [describe(reason) for reason in from_rows(ranked["reasons"])],
    }


def _draw(store: RunStore, ids: Sequence[str], **options: Any) -> dict[str, ImageDrawing]:
    """The images and maps of these rows, by id."""
    rows, maps = store.rows(ids), store.maps(ids)
    return {
        name: ImageDrawing(rows[name], maps.get(name), store.manifest, name in store.moved, **options)
        for name in ids
        if name in rows
    }


def choose_examples(store: RunStore, ok: pa.Table) -> dict[str, list[ImageDrawing]] | None:
    """A few steady maps, or those with the highest stability, and a few unsteady ones; None where no map could be judged.

    Arms play no part: another draw of the control arm gives the same examples.
    """
    known = ok.filter(pc.is_valid(ok["stability"])).select(["id", "stability", "steadiness"])
    steady, unsteady = (known.filter(pc.equal(known["steadiness"], word)) for word in ("steady", "unsteady"))
    if not steady.num_rows and not unsteady.num_rows:
        return None
    chosen = {"best": (steady if steady.num_rows else known, "descending"), "worst": (unsteady, "ascending")}
    found = {}
    for name, (rows, order) in chosen.items():
        first = pc.select_k_unstable(rows, MAX_EXAMPLES, [("stability", order), ("id", "ascending")])
        images = _draw(store, rows.take(first)["id"].to_pylist(), **EXAMPLE)
        found[name] = [one for one in images.values() if one.maps is not None]
    return found


def draw_thumbnails(store: RunStore, ok: pa.Table) -> dict[str, str]:
    """The network's own map over every explained image, by id; none where there are too many images for one page."""
    images = _draw(store, ok["id"].to_pylist(), **THUMBNAIL) if ok.num_rows <= MAX_THUMBNAILS else {}
    own = {name: one.presented or one.fused for name, one in images.items()}
    return {name: url for name, url in own.items() if url is not None}


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A column as float64, NaN for null."""
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan).to_numpy())
