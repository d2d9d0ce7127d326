"""How far a measurement may be from a published number and still be called the same.

A margin is smaller than the effect the number is published for: half of the published difference to the nearest number that it is
compared with, at most half of the way to 1 for numbers that end there, and at most a cap for its kind. A quantity of several tables
has one margin, the smallest, the range of what is printed, the rounding of the coarsest and the error of the smallest sample.
"""

import re
from functools import cache

from equicam_paper.claims import DOMAINS, Claim, claims

CAPS = {
    "eq": 0.03, "share": 0.05, "correlation": 0.06, "percent": 5.0, "points": 1.0, "ratio": 0.5, "lift": 0.25, "mass": 0.02,
}  # fmt: skip
"""The largest margin by kind of quantity."""
ENDS_AT_ONE = ("eq", "share")  # kinds of quantities that cannot be above 1
KINDS = (
    (r"(app\.|clip\.|vitl\.)?gain", "percent"),
    (r".*\.add\.T|.*acc_seed_sd", "points"),
    (r"causal\..*ratio|peum\..*lift10|cost\.", "ratio"),
    (r"audit\.lift", "lift"),
    (r"cond\.gap", "eq"),
    (
        r".*(acc|stable_rate|flip_rate|\.stable$|frac\.T|cap\d\d)|.*augsc\.const|cos\.|const\.|peum\.random",
        "share",
    ),
    (r"audit\.|peum\.|cond\.corr|code\.readme", "correlation"),
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
    "audit.auroc.PEUM": "audit.auroc.confdrop", "audit.auroc.confdrop": "audit.auroc.flip", "audit.auroc.flip": "audit.auroc.confdrop",
    **{f"cond.{net}.Grad-CAM.Eq {some}": f"cond.{net}.Grad-CAM.Eq unconditional"
       for net in ("resnet50", "vgg16", "vit_b_16") for some in ("prediction-stable", "confidence-weighted")},
    "cond.bins.gc.lo": "cond.bins.gc.hi", "cond.bins.gc.hi": "cond.bins.gc.lo",
    "cos.feature.rot": "cos.feature.unrelated", "cos.logit.rot": "cos.logit.unrelated",
    **{f"label.{method}.{side}": f"label.uniform null.{side}"
       for method in ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM", "EquiGrad-CAM+PCF")
       for side in ("mass in disc 0deg", "mass in disc rotated mean")},
}  # fmt: skip
"""The number that a claim is read next to, besides those in the same column of its table."""
AS_FINE_AS = {
    f"cond.{net}.EquiGrad-CAM.Eq {some}": f"cond.{net}.EquiGrad-CAM.Eq unconditional"
    for net in ("resnet50", "vgg16", "vit_b_16")
    for some in ("prediction-stable", "confidence-weighted")
}
"""Numbers published as nearly the same as another one: their margin is at most that of the other."""
OWN_EFFECT = re.compile(
    r"gain\.|app\.gain|clip\.gain|vitl\.gain|matched\.(augsc\..*\.(margin|cross)|(Recipro-CAM|RISE)\.\w+$|recipro|.*inflation)"
    r"|const\.(imagenet|clip)|tsweep\..*\.add\.|audit\.diff|cond\.gap|cond\.max_move|cond\.corr|align\.locus|label\..*drop|causal\..*median_diff"
)
"""Claims that are a difference themselves: half of it is the margin."""
CHANGE_FROM = {
    "softgate.range": "softgate.ungated",
    **{f"blur.sigma{sigma}": "blur.sigma0" for sigma in (2, 4, 8, 16)},
}
"""Ranges published as hardly different from another number: their change from it is judged, paired by image."""
BASELINE, GATED = ("Grad-CAM", "Grad-CAM single view"), ("EquiGrad-CAM+PCF",)
OURS = ("EquiGrad-CAM", "Aligned feature-space (EquiGrad-CAM)")


@cache
def margin(claim: str) -> float:
    """Half of the published effect, capped by kind; for a quantity of several tables the smallest of theirs."""
    found = min(_margin(other) for other in _same_quantity(claim))
    return min(found, margin(AS_FINE_AS[claim])) if claim in AS_FINE_AS else found


@cache
def published_range(claim: str) -> tuple[float, float]:
    """The least and the largest number, or change, that the paper prints for what a claim is about."""
    if (other := COMPLEMENTS.get(claim)) is not None:
        low, high = published_range(other)
        return 1 - high, 1 - low
    values = [value for other in _same_quantity(claim) for value in other.values]
    if claim in CHANGE_FROM:
        (start,) = claims()[CHANGE_FROM[claim]].values
        return min(values) - start, max(values) - start
    return min(values), max(values)


def published_text(claim: str) -> str:
    """What the paper prints for a claim; of a change, both numbers that it is between."""
    known = claims()[claim]
    if claim not in CHANGE_FROM:
        return known.text
    low, high = (f"{change:+.{known.digits}f}" for change in published_range(claim))
    levels, _, sample = known.text.partition(" (")
    start = claims()[CHANGE_FROM[claim]].text.partition(" ")[0]
    return f"{low} to {high}: {levels} against {start} ({sample}"


@cache
def rounding(claim: str) -> float:
    """Half a unit of the last printed digit, of several tables that of the fewest; for a change of two numbers twice."""
    half = 0.5 * 10.0 ** -min(other.digits for other in _same_quantity(claim))
    return 2 * half if claim in CHANGE_FROM else half


@cache
def published_images(claim: str) -> int | None:
    """On how many images a quantity was measured, the fewest of several tables; None where no table says."""
    known = [other.images for other in _same_quantity(claim) if other.images is not None]
    return min(known, default=None)


def _kind(claim: str) -> str:
    return next((kind for form, kind in KINDS if re.match(form, claim)), "eq")


def _margin(claim: Claim) -> float:
    kind = _kind(claim.id)
    bounds = [CAPS[kind]]
    if (effect := _effect(claim)) is not None:
        bounds.append(effect / 2)
    if kind in ENDS_AT_ONE and claim.values and 0.5 < max(claim.values) < 1:
        bounds.append((1 - max(claim.values)) / 2)
    return min(bounds)


def _effect(claim: Claim) -> float | None:
    """The least published difference to what a claim is compared with, if anything."""
    if claim.id == "softgate.ungated":  # published next to a gate that changes nothing
        claim = claims()["softgate.range"]
    if claim.id in CHANGE_FROM:
        return max(claim.values) - min(claim.values)
    if len(claim.values) != 1:
        return None
    (value,) = claim.values
    if OWN_EFFECT.match(claim.id):
        return abs(value)
    others = [claims().get(name) for name in (AGAINST.get(claim.id, ""), *_same_column(claim))]
    published = [other.values[0] for other in others if other and len(other.values) == 1]
    return min((abs(value - other) for other in published), default=None)


def _same_column(claim: Claim) -> list[str]:
    """Claims in its column: about Grad-CAM, for Grad-CAM about EquiGrad-CAM; by Eq also about views filtered or not."""
    if not claim.method or f".{claim.method}" not in claim.id:
        return []
    others: tuple[str, ...] = OURS if claim.method in BASELINE else BASELINE
    if claim.metric == "Eq" and claim.domain not in DOMAINS:  # in the domains the paper finds no difference
        others += GATED * (claim.method in OURS) + OURS * (claim.method in GATED)
    return [claim.id.replace(f".{claim.method}", f".{other}", 1) for other in others]


WHOLE = {"Eq", "Eq unconditional", "Eq T18", "Eq base", "Eq class-spread 2000", "Eq full 10k", 'Eq "after re-run"', "GC Eq no aug",
         "EG Eq no aug", "Ins", "Del", "test accuracy", "acc no aug", "Eq, class-spread run", "Eq, prefix 2000", "Eq prefix 2000",
         "Eq on the Recipro-CAM indices", "Eq on the RISE indices"}  # fmt: skip
"""Metrics over all pairs of all images, whatever a table calls them."""
KEPT = {"fraction of rotations with top-1 unchanged", 'stable rate "after re-run"', "stable rate, prefix"}
"""Names of the share of pairs that keep the top-1."""
SHORT = {"GC": "Grad-CAM", "EG": "EquiGrad-CAM", "Grad-CAM single view": "Grad-CAM", "published Grad-CAM (main)": "Grad-CAM",
         "final map": "Grad-CAM", "Grad-CAM blurred sigma=0": "Grad-CAM",
         "Aligned feature-space (EquiGrad-CAM)": "EquiGrad-CAM", "Unaligned output-space": "AugCAM unaligned", "acc": "classifier"}  # fmt: skip
"""One name for a method that tables call differently."""
STAGES_OF_EQ = ("final map", "published Grad-CAM (main)")
"""Stages of the decomposition that are Grad-CAM's map itself."""
COMPLEMENTS = {"cond.resnet50.flip_rate": "cond.resnet50.stable_rate"}  # claims that are 1 − another one
Quantity = tuple[str, str, str, str]
FIRST = "first classes"


@cache
def quantity(claim: str) -> Quantity | str:
    """What a claim measures: network or domain, method, metric and sample; its own id where no other table has it.

    Samples over all classes count as one for Eq, which the paper prints as one number; how often the top-1 is kept differs.
    """
    one = claims()[COMPLEMENTS.get(claim, claim)]
    kind = _metric(one)
    if not kind or len(one.values) != 1:
        return one.id
    sample = FIRST if one.of_first_classes else one.sample.partition(" ")[0] if kind == "kept" else ""
    return one.domain, SHORT.get(one.method, one.method), kind, sample


def _metric(claim: Claim) -> str:
    """A metric that several tables print, by one name; empty for any other."""
    if claim.id.startswith("cost.T"):  # the ends of a printed range
        return claim.id.rpartition(" ")[0]
    if claim.metric in KEPT:
        return "kept"
    if claim.metric in WHOLE or claim.method in STAGES_OF_EQ:
        return next(word for word in ("Eq", "Ins", "Del", "acc") if word in claim.metric)
    return ""


@cache
def _same_quantity(claim: str) -> tuple[Claim, ...]:
    """The claims of all tables about one quantity."""
    about = quantity(claim)
    return tuple(c for c in claims().values() if quantity(c.id) == about and c.id not in COMPLEMENTS)
