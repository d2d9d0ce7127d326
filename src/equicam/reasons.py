"""Why an image was refused, ranked or flagged, as data: code and values here, sentences where a person reads them.

Programs compare codes. `describe` is the only place that writes a sentence from a reason.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equicam.errors import not_one_of

# the signals that rank images, as sentences name them
SIGNALS = {"stability": "stability", "peum": "PEUM", "risk": "risk"}
PEUM_NOTE = (
    "PEUM (per-image explanation uncertainty) is the variance of the views' aligned maps, mean over pixels; "
    "it depends on the number of views"
)
"""What is printed where PEUM is."""
_encode = json.JSONEncoder(ensure_ascii=False).encode  # made once: there are hundreds of thousands of reasons


@dataclass(frozen=True)
class Reason:
    """A code that programs compare, and the values its sentence is written from."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.code not in _SENTENCES:
            raise not_one_of("a reason", _SENTENCES, self.code, '"text"')

    def to_row(self) -> dict[str, str]:
        """As a cell of a table: the code, and the values as JSON."""
        return {"code": self.code, "values": _encode(dict(self.values))}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> "Reason":
        """The reason `to_row` wrote; a code of another version becomes its values as text."""
        values = json.loads(row["values"] or "{}")
        if row["code"] not in _SENTENCES:
            return Reason("text", {"text": f"{row['code']} {json.dumps(values)}"})
        return Reason(row["code"], values)


def describe(reason: Reason) -> str:
    """The sentence for a person."""
    sentence = _SENTENCES[reason.code]
    return sentence.format_map(reason.values) if isinstance(sentence, str) else sentence(reason.values)


def from_rows(rows: Iterable[Mapping[str, Any]] | None) -> list[Reason]:
    """The reasons of a cell of a triage table."""
    return [Reason.from_row(row) for row in rows or ()]


def _percentile(v: Mapping[str, Any]) -> str:
    name, value, side = SIGNALS[v["signal"]], v["value"], "lower" if v["signal"] == "stability" else "higher"
    return f"{name} {value:.3g}: {side} than on {v['above_percent']} % of the images"


def name_views(labels: Sequence[str], most: int) -> str:
    """The first of these labels of views, and how many more; semicolons keep those apart that have commas of their own."""
    mark = "; " if any("," in label for label in labels[:most]) else ", "
    return mark.join(labels[:most]) + (f" and {len(labels) - most} more" if len(labels) > most else "")


def _prediction_changes(v: Mapping[str, Any]) -> str:
    count, others = len(v["views"]), _other_views(v["of"])
    return f"the prediction changes in {count} of {others}: {name_views(v['views'], 3)}"


def _other_views(of: int) -> str:
    return f"{of - 1} other view{'s' * (of != 2)}"  # the presented view is one of them, and cannot change


def _least_alike(v: Mapping[str, Any]) -> str:
    """The views with the lowest correlations, three of them by name."""
    pairs = zip(v["views"], v["correlations"], strict=True)
    return name_views([f"{view} (r = {r:.2f})" for view, r in pairs], 3)


def _views_disagree(v: Mapping[str, Any]) -> str:
    subject, verb = ("view", "disagrees") if len(v["views"]) == 1 else ("views", "disagree")
    return f"the {subject} {_least_alike(v)} {verb} with the others on the place"


def _map_moves(v: Mapping[str, Any]) -> str:
    moved, others = len(v["views"]), v["of"] - 1  # the presented view is compared with the others
    share = f"all {others} other views" if moved == others else f"{moved} of {others} other views"
    return f"the map moves in {share if others > 1 else 'the other view'}: {_least_alike(v)}"


def _follows(v: Mapping[str, Any]) -> str:
    text = f"the network's own map follows the image: {_STABILITY}; {_LOWEST}".format_map(v)
    if v.get("changed"):
        text += f"; the prediction changes in {v['changed']} of {_other_views(v['of'])}"
    return text


def _tested(v: Mapping[str, Any]) -> str:
    """The images of a causal test; a run may have fewer than it needs."""
    if v["of"] >= v["requested"]:
        return f"on {v['images']:,} random images"
    count = f"all {v['of']:,}" if v["images"] == v["of"] else f"{v['images']:,} of {v['of']:,}"
    return f"on {count} images (fewer than {v['requested']:,})"


def _effect(v: Mapping[str, Any]) -> str:
    effect, low, high, random = (f"{round(v[k], 3) + 0.0:+.3f}" for k in ("effect", "low", "high", "random"))
    interval = "" if math.isnan(v["low"]) else f" [{low}, {high}]"
    return (
        f"{_tested(v)}, blurring what drifts, minus blurring as much elsewhere, costs {effect}{interval} of the "
        f"probability ({random} with random weights)"
    )


_STABILITY = "stability {stability:.2f} ± {uncertainty:.2f}"
_LOWEST = "lowest correlation {lowest:.2f}, with the view {view}"
_SENTENCES: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    # a bad image
    "unreadable": lambda v: str(v["message"] or v["error"]),
    "killed-decoder": "decoding it killed the process: the file is not safe to open",
    "decoding-timeout": "decoding it takes more than {seconds:g} s",
    "out-of-memory": "decoding it takes more memory than one image may",
    "not-finite": "preprocessing made NaN or infinity of it",
    "refused": "{what} needs {needs}, got {got}; try {fix}",
    # an image in the queue
    "blank": "the map is blank: nothing in the image raises what is explained",
    "constant": "the map is constant",
    "none-kept": "no view kept the prediction with enough confidence: this is the presented view alone, and its PEUM "
    "of 0 means nothing",
    "one-kept": "only one view kept the prediction with enough confidence, and its PEUM of 0 means nothing",
    "low-coverage": "some cells are covered by no view",
    "edge": "views reach beyond the image, where it is reflected",
    "odd-size": "odd size: the image is not square or the feature grid does not divide it, so rotations are less exact",
    "orientation-unread": "the EXIF orientation cannot be read: the map is of the image as stored",
    "signal-percentile": _percentile,
    "signal-undefined": lambda v: f"{SIGNALS[v['signal']]} is undefined here",
    "prediction-changes": _prediction_changes,
    "map-moves": _map_moves,
    "views-disagree": _views_disagree,
    # how steady a map is
    "follows": _follows,
    "moves": f"the network's own map does not follow the image: {_STABILITY}, below {{limit:g}}; {_LOWEST}",
    "too-close": f"{_STABILITY}: {{limit:g}} lies within the uncertainty",
    "too-few-views": lambda v: (
        f"too few views: {v['views'] or 'none'} besides the presented one, {v['needed']} are needed"
    ),
    "low-confidence": "low confidence (p = {confidence:.2f})",
    # whether the network uses what drifts
    "signal": lambda v: f"Signal, because the network uses what drifts: {_effect(v)}.",
    "noise": lambda v: f"Noise, because the network does not use what drifts: {_effect(v)}.",
    "undecided": lambda v: f"The test could not tell: {_effect(v)}.",
    "as-random": lambda v: f"The test could not tell, because random weights pass it too: {_effect(v)}.",
    "no-effect": lambda v: (
        f"The test could not tell: {_tested(v)}, blurring a tenth of the image, wherever, changes the probability by "
        f"less than {v['least']:g}."
    ),
    "all-blank": lambda v: f"The test could not tell: {_tested(v)}, every map is blank.",
    # a code of another version
    "text": "{text}",
}
"""By code: text with places for its values, or a function of them."""
