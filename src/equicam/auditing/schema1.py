"""Runs that equicam 0.1.0 wrote (schema 1): their names translated to ours on reading.

Such a run can be read, reported, reviewed, verified and ranked. It stores no stability, which `Run.triage` measures on
its maps; and it cannot be resumed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from equicam.steadiness import judge_row

NOT_STORED = {
    "stability": pa.float64(),
    "stability_by_view": pa.list_(pa.float32()),
    "output": pa.float32(),
    "x": pa.float64(),
    "y": pa.float64(),
    "side": pa.float64(),
    "steadiness": pa.string(),
    "steadiness_reason": pa.string(),
}
"""Columns of the items that 0.1.0 did not write."""
ITEMS = {
    "prob": "confidence",
    "top5_prob": "top5_confidence",
    "peum": "peum_score",
    "kept": "views_kept",
    "prob_by_view": "view_confidence",
    "top1_by_view": "view_top1",
    "agree_by_view": "view_agreement",
    "frame": "input_box",
}
MAPS = {"planes": "view_maps", "planes_scale": "view_maps_scale"}
SAMPLE = {"part": "shard", "calibrated": "calibration"}
TRIAGE = {"prob": "confidence", "peum": "peum_score"}
REASONS = pa.list_(pa.struct([("code", pa.string()), ("values", pa.string())]))


def translate_manifest(found: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest of schema 1 with our names; its options become the recipe."""
    recipe = {
        "method": found["method"],
        "views": found["angles"],
        "fill": found["fill"],
        "as_published": found["as_published"],
        "tau": found.get("tau"),
        "gamma": found.get("gamma"),
        "compiled": found.get("compiled", False),
        "seed": found["seed"],
        # 0.1.0 stored only the type the network ran in; another than float32 or float64 was autocast
        "dtype": found["dtype"] if found["dtype"] in ("float16", "bfloat16") else None,
    }
    same = ("model", "weights", "weights_from", "layer", "layout", "classes", "dtype", "device", "source")
    kept = {name: found[name] for name in (*same, "split", "data", "versions", "schema")}
    renamed = {
        "method_description": found["method_is"],
        "preprocessing": found["preprocess"],
        "shard_size": found["part"],
        "calibration_size": found["calibrate"],
        "images": found["pictures"],
    }
    return kept | renamed | {"recipe": recipe}


def translate_items(table: pa.Table) -> pa.Table:
    """Rows of images: columns renamed, sentences as reasons with the code "text"."""
    table = rename(table, ITEMS)
    if "reason" in table.column_names:
        sentences = table["reason"].to_pylist()
        values = [None if s is None else json.dumps({"text": s}, ensure_ascii=False) for s in sentences]
        codes = [None if s is None else "text" for s in sentences]
        at = table.column_names.index("reason")
        table = table.set_column(at, "reason", pa.array(codes, pa.string()))
        table = table.add_column(at + 1, "reason_values", pa.array(values, pa.string()))
    return table


def fill_stability(
    items: pa.Table, measured: pa.Table, labels: Sequence[str], presented: int | None
) -> pa.Table:
    """Rows with the stability that was measured later, by id, and the steadiness that follows from it."""
    known = {row["id"]: row for row in measured.to_pylist()}
    for name in ("stability", "stability_by_view"):
        values = pa.array([known.get(one, {}).get(name) for one in items["id"].to_pylist()], NOT_STORED[name])
        items = items.set_column(items.column_names.index(name), name, values)
    rows = items.select(["stability_by_view", "view_top1", "flags", "status"]).to_pylist()
    judged = [judge_row(row, labels, presented) if row["status"] == "ok" else None for row in rows]
    words = [one and one.word for one in judged], [one and one.reason.code for one in judged]
    for name, column in zip(("steadiness", "steadiness_reason"), words, strict=True):
        items = items.set_column(items.column_names.index(name), name, pa.array(column, pa.string()))
    return items


def wrote_triage(table: pa.Table) -> bool:
    """Whether 0.1.0 wrote this queue: its reasons are sentences."""
    kind = table.schema.field("reasons").type if "reasons" in table.column_names else pa.null()
    return pa.types.is_list(kind) and bool(pa.types.is_string(kind.value_type))


def translate_triage(table: pa.Table) -> pa.Table:
    """A queue, translated if 0.1.0 wrote it: names and sentences."""
    if not wrote_triage(table):
        return table
    table = rename(table, TRIAGE)
    cells = [
        [{"code": "text", "values": json.dumps({"text": s}, ensure_ascii=False)} for s in some or ()]
        for some in table["reasons"].to_pylist()
    ]
    return table.set_column(table.column_names.index("reasons"), "reasons", pa.array(cells, REASONS))


def rename(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """The table with columns renamed."""
    return table.rename_columns([names.get(name, name) for name in table.column_names])


def old_columns(columns: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Our column names as schema 1 has them."""
    old = {new: name for name, new in names.items()}
    wanted = [old.get(name, name) for name in columns]
    return list(dict.fromkeys("reason" if name == "reason_values" else name for name in wanted))
