"""`equicam audit`, its document, and its gates: limits that a run must keep, as shares or counts."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from equicam.cli import options
from equicam.cli.loading import load_on_engine
from equicam.cli.recipe_file import Settings
from equicam.console import (
    FAILED,
    GATE_FAILED,
    answer,
    complain,
    exit_on_error,
    note,
    plural,
    say,
    show_progress,
)
from equicam.errors import EquicamError

if TYPE_CHECKING:
    from equicam.audit.run import Run

_GATES = "Gates"
_MAX_BAD = "Exit with 3 if more images than this could not be explained: 5% or a number."
_MIN_STEADY = "Exit with 3 if fewer maps than this are steady: 80% or a number."


def audit(
    source: options.Source,
    out: Annotated[Path, Option(help="Folder of the run; resumed if it exists.")],
    model: options.ModelName = "embedded",
    weights: options.Weights = None,
    layer: options.Layer = None,
    method: options.MethodName = None,
    views: options.Views = None,
    target: options.Target = None,
    n: options.SampleSize = None,
    device: options.Devices = None,
    recipe: options.RecipeFile = None,
    save_recipe: options.SaveRecipe = None,
    tile: options.Tile = None,
    mpp: options.Mpp = None,
    mpp_is: options.MppIs = None,
    stride: options.Stride = None,
    bands: options.Bands = None,
    max_bad: Annotated[
        str | None, Option(metavar="SHARE", help=_MAX_BAD, show_default=False, rich_help_panel=_GATES)
    ] = None,
    min_steady: Annotated[
        str | None, Option(metavar="SHARE", help=_MIN_STEADY, show_default=False, rich_help_panel=_GATES)
    ] = None,
) -> None:
    """Explain every image of a source into a run that can be resumed, ranked, reported and verified.

    With --tile the source is one or more slides or georeferenced rasters, and each of their windows is an image.

    Run the same command again to resume. An image that cannot be decoded becomes a row with a reason. Ctrl-C finishes
    the current shard first. Exits with 1 if no image could be explained, and with 3 if a gate failed.

    Example: `equicam audit slides/ --model resnet50 --weights mine.safetensors --tile 224 --mpp 0.5 --out run`
    """
    with (
        exit_on_error(interrupted=f"; the same command resumes ({out})"),
        show_progress("listing", unit="files") as progress,
    ):
        import equicam
        from equicam.images.sources import list_source
        from equicam.readers.names import absolute_weights

        gates = parse_gates(max_bad, min_steady)
        settings = Settings.of(
            recipe, recipe={"method": method, "views": views}, model={"layer": layer},
            tiling={"tile": tile, "mpp": mpp, "mpp_is": mpp_is, "stride": stride, "bands": bands},
        )  # fmt: skip
        chosen, tiling, window = settings.recipe, settings.tiling, settings.voi
        of_run = settings.sections["run"]
        settings.save(save_recipe)
        # before the model, which takes long
        listed = list_source(source, split=of_run.get("split"), frames=tiling is None, tick=progress.advance)
        if tiling is None:
            refuse_unreachable(gates, len(listed) if n is None else min(n, len(listed)))
        loaded, engine = load_on_engine(settings, model, weights, device, tiled=True)
        run = equicam.audit(
            source, loaded, out, recipe=chosen, target=target, tiling=tiling, n=n, voi=window, listed=listed,
            **{name: of_run[name] for name in ("split", "calibrate", "shard_size", "workers") if name in of_run},
            weights_from=absolute_weights(weights), engine=engine,
            progress=partial(progress.update, title="auditing", unit="images"),
            listing=partial(progress.update, title="listing", unit="rasters"), notice=note,
        )  # fmt: skip
        refuse_unreachable(gates, run.manifest.images)
        document = audit_document(run, gates)
    answer("audit", document)
    print_audit(document)
    if not document["explained"]:
        complain(f"no image could be explained, of {document['images']:,}")
        raise Exit(FAILED)
    if sentence := failed_gate(document["gates"]):
        complain(sentence)
        raise Exit(GATE_FAILED)
    if len(run.manifest.transforms) > 1:
        note(f"next: equicam triage {shlex.join([str(out), '--budget', '10%'])}")
    else:
        note("a run with one view cannot be ranked: it has no other view to disagree with; try --views 6")


def audit_document(run: "Run", gates: "Sequence[Gate]") -> dict[str, Any]:
    """How many images were explained, why others were not, and whether the gates hold."""
    from equicam.reasons import Reason, describe
    from equicam.steadiness import count_words

    items = run.read_items(["id", "status", "reason", "reason_values", "steadiness"])
    reasons = Counter(
        row["reason"] for row in items.select(["status", "reason"]).to_pylist() if row["status"] != "ok"
    )
    words = {word.replace(" ", "_"): count for word, count in count_words(items).items()}
    bad, first = reasons.total(), None
    if bad:
        row = items.slice(items["status"].index("bad").as_py(), 1).to_pylist()[0]
        reason = Reason.from_row({"code": row["reason"], "values": row["reason_values"]})
        first = {"id": row["id"], "reason": describe(reason)}
    counts = {"images": items.num_rows, "explained": items.num_rows - bad, "bad": bad} | words
    return {
        "run": str(run.folder),
        **counts,
        "reasons": dict(reasons.most_common()),
        "first_bad": first,
        "layer": run.manifest.layer,
        "gates": [gate.check(counts) for gate in gates],
    }


def print_audit(document: Mapping[str, Any]) -> None:
    """Print how many images were explained."""
    say(
        f"{plural(document['explained'], 'image')} explained, {document['bad']:,} could not be; layer {document['layer']}; "
        f"run {document['run']}"
    )
    if document["explained"]:
        say(
            f"maps: {document['steady']:,} steady, {document['unsteady']:,} unsteady, {document['cannot_say']:,} cannot be judged"
        )
    if document["reasons"]:
        reasons = ", ".join(f"{code} {count:,}" for code, count in document["reasons"].items())
        say(f"could not be explained, by reason: {reasons}")
    if first := document["first_bad"]:
        say(f"{'the first' if document['bad'] > 1 else 'that is'} {first['id']}: {first['reason']}")


@dataclass(frozen=True)
class Gate:
    """A limit as it was typed: a count, or a share of all images or of all explained ones."""

    option: str  # --max-bad or --min-steady
    text: str
    limit: float
    is_share: bool

    def check(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Its count, the number it is of, and whether it holds."""
        at_most = self.option == "--max-bad"
        count, of = (counts["bad"], counts["images"]) if at_most else (counts["steady"], counts["explained"])
        # compared as whole numbers times 100: 5 of 100 keep 5%
        value, limit = (100 * count, self.limit * of) if self.is_share else (count, self.limit)
        holds = value <= limit if at_most else value >= limit
        return {"option": self.option, "limit": self.text, "count": count, "of": of, "holds": holds}


def parse_gates(max_bad: str | None, min_steady: str | None) -> list[Gate]:
    """The gates that were given."""
    gates = []
    for option, text, share in (("--max-bad", max_bad, "5%"), ("--min-steady", min_steady, "80%")):
        if text is None:
            continue
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip(), re.ASCII)
        if found is None or (found[2] and float(found[1]) > 100) or (not found[2] and "." in found[1]):
            needs = "a share from 0% to 100%, or a number of images"
            raise EquicamError(option, needs, repr(text), f"{option} {share}")
        gates.append(Gate(option, text.strip(), float(found[1]), bool(found[2])))
    return gates


def refuse_unreachable(gates: Sequence[Gate], images: int) -> None:
    """Refuse a count above the number of images: --min-steady could never hold, and --max-bad never fail."""
    for gate in gates:
        if not gate.is_share and gate.limit > images:
            share = f"{gate.text}%" if gate.limit <= 100 else "80%" if gate.option == "--min-steady" else "5%"
            needs = f"a number of images up to {images:,}, as many as there are, or a share"
            raise EquicamError(gate.option, needs, gate.text, f"{gate.option} {share}")


def failed_gate(checked: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence on the gates that do not hold; None where all do."""
    sentences = []
    for one in checked:
        what = "images could not be explained" if one["option"] == "--max-bad" else "maps are steady"
        share = f" ({100 * one['count'] / one['of']:.1f} %)" if one["of"] else ""
        if not one["holds"]:
            sentences.append(
                f"the gate {one['option']} {one['limit']} failed: {one['count']:,} of {one['of']:,} {what}{share}"
            )
    return "; ".join(sentences) or None
