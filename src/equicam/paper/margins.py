"""How far a measurement may be from a published number and still be called the same.

A margin must be smaller than the effect the number is published for: it is half of the published difference to the number
it is compared with, and never more than a cap for its kind of quantity. Numbers that the paper prints in several tables
have one margin, the smallest.
"""

import re
from functools import cache

from equicam.paper.claims import Claim, claims

CAPS = {
    "eq": 0.03, "share": 0.05, "correlation": 0.06, "percent": 5.0, "points": 1.0, "ratio": 0.5, "lift": 0.25, "mass": 0.02,
}  # fmt: skip
"""The largest margin by kind of quantity."""
SMALLEST = 0.005
"""A margin below this would ask for more than the printed digits and the published samples hold."""
KINDS = (
    (r"gain\.|clip\.gain|vitl\.gain", "percent"),
    (r".*\.add\.T|.*acc_seed_sd", "points"),
    (r"causal\..*ratio|peum\..*lift10|cost\.", "ratio"),
    (r"audit\.lift", "lift"),
    (r"audit\.|peum\.|cond\.corr|code\.readme", "correlation"),
    (r".*(acc|stable_rate|flip_rate|\.stable$|frac\.T|augsc\.const|cap\d\d)|cos\.|const\.", "share"),
    (r"label\.", "mass"),
)
"""The kind of a claim by its id; an Eq or an area otherwise."""
AGAINST = {
    **{f"causal.{net}.{region}.{frame}": f"causal.{net}.{other}.{frame}"
       for net in ("resnet50", "vgg16") for frame in ("d0", "dtheta", "asym")
       for region, other in (("drift", "random"), ("random", "drift"), ("agreement", "drift"))},
    **{f"tsweep.{net}.T{t}{end}": f"tsweep.{net}.T{other}{tail}" for net in ("resnet50", "vit_b_16")
       for t, end, other, tail in ((3, "", 4, ""), (4, "", 3, ""), (6, "", 18, ""), (18, "", 6, ""), (2, ".derived", 3, ""),
                                   (9, ".derived", 18, ""), (12, ".derived", 18, ""))},
    **{f"{start}.{a}": f"{start}.{b}" for start in ("faith.vit.Ins", "faith.vit.Del", "faith.r50.Ins", "vitl",
                                                   "cub.iou.resnet50", "cub.iou.vgg16", "cub.iou.vit_b_16",
                                                   "app.PatchCamelyon.seeds", "app.RESISC45.seeds")
       for a, b in (("gc", "eg"), ("eg", "gc"))},
    **{f"rotaug.{data}.{what} {a} aug": f"rotaug.{data}.{what} {b} aug" for data in ("PatchCamelyon", "RESISC45", "CUB")
       for what in ("GC Eq", "EG Eq", "acc") for a, b in (("no", "rot"), ("rot", "no"))},
    "audit.r.PEUM": "audit.r.pairwise CAM disagreement", "audit.r.pairwise CAM disagreement": "audit.r.PEUM",
    "audit.auroc.PEUM": "audit.auroc.confdrop", "cond.bins.gc.lo": "cond.bins.gc.hi", "cond.bins.gc.hi": "cond.bins.gc.lo",
    "cos.feature.rot": "cos.feature.unrelated", "cos.logit.rot": "cos.logit.unrelated",
}  # fmt: skip
"""The number that a claim is read next to, where the table's columns do not say."""
OWN_EFFECT = re.compile(
    r"gain\.|app\.gain|clip\.gain|vitl\.gain|matched\.(augsc\..*\.(margin|cross)|(Recipro-CAM|RISE)\.\w+$|recipro|.*inflation)"
    r"|const\.imagenet|audit\.diff|cond\.gap|cond\.max_move|cond\.corr|align\.locus|label\..*drop|causal\..*median_diff"
)
"""Claims that are a difference themselves: half of it is the margin."""
BASELINE, OURS = (
    ("Grad-CAM", "Grad-CAM single view"),
    ("EquiGrad-CAM", "Aligned feature-space (EquiGrad-CAM)"),
)


@cache
def margin(claim: str) -> float:
    """Half of the published effect, capped by kind; for a number of several tables the smallest of theirs."""
    known = claims()
    one = known[claim]
    return min(_margin(other) for other in known.values() if _same_quantity(one, other))


def _margin(claim: Claim) -> float:
    cap = CAPS[next((kind for form, kind in KINDS if re.match(form, claim.id)), "eq")]
    effect = _effect(claim)
    return cap if effect is None else min(cap, max(SMALLEST, effect / 2))


def _effect(claim: Claim) -> float | None:
    """The published difference to what a claim is compared with; None where the paper compares it with nothing."""
    if claim.id.startswith(
        "softgate."
    ):  # published as a gate that changes nothing: by less than its printed range
        return max(claims()["softgate.range"].values) - min(claims()["softgate.range"].values)
    if len(claim.values) != 1:
        return None
    (value,) = claim.values
    if OWN_EFFECT.match(claim.id):
        return abs(value)
    for name in (AGAINST.get(claim.id), *_same_column(claim)):
        other = claims().get(name or "")
        if other is not None and len(other.values) == 1:
            return abs(value - other.values[0])
    return None


def _same_column(claim: Claim) -> list[str]:
    """The claims about Grad-CAM, or for Grad-CAM about EquiGrad-CAM, in the same column of its table."""
    if not claim.method or f".{claim.method}" not in claim.id:
        return []
    others = OURS if claim.method in BASELINE else BASELINE
    return [claim.id.replace(f".{claim.method}", f".{other}", 1) for other in others]


def _same_quantity(a: Claim, b: Claim) -> bool:
    """Whether two tables print one number: the same value, of the same method on the same network or domain."""
    return a.id == b.id or (
        a.values == b.values and len(a.values) == 1 and a.domain == b.domain and _about(a) == _about(b)
    )


SHORT = {"GC": "Grad-CAM", "EG": "EquiGrad-CAM", "Grad-CAM single view": "Grad-CAM", "published Grad-CAM (main)": "Grad-CAM",
         "Aligned feature-space (EquiGrad-CAM)": "EquiGrad-CAM", "Unaligned output-space": "AugCAM unaligned"}  # fmt: skip


def _about(claim: Claim) -> tuple[str, str]:
    """The method, and the quantity's first word: Eq, Ins, Del, accuracy …"""
    words = claim.metric.replace("stage ", "").split()
    kind = next((word for word in words if word in ("Eq", "Ins", "Del", "acc", "accuracy")), claim.metric)
    return SHORT.get(claim.method, claim.method), "accuracy" if kind == "acc" else kind
