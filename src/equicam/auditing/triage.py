"""Which maps to look at first: a queue by PEUM or disagreement, a blind random arm to check it, and what both are worth.

Rank 1 is the most uncertain picture. Where the signal says nothing (a blank or constant map; for PEUM, no view or one
view kept) a picture is not certain: it stands before the highest. Ties are in an order drawn from the seed, not by name.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.auditing.signal_quality import Worth, worth
from equicam.auditing.signals import NAMES, measured, refuse_unknown, scored
from equicam.errors import EquicamError
from equicam.evaluation.statistics import Floats, Indices
from equicam.shards import json_ready

ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),  # queue, or control
        pa.field("rank", pa.int32(), nullable=False),  # among all ok pictures; 1 is the most uncertain
        pa.field("place", pa.int32(), nullable=False),  # the order of review, in which the arms are mixed
        pa.field("by", pa.string()),  # what it is ranked by: peum, or disagreement
        pa.field("peum", pa.float64()),
        pa.field("disagreement", pa.float64()),
        pa.field("target", pa.int32()),
        pa.field("class", pa.string()),
        pa.field("prob", pa.float32()),
        pa.field("flags", pa.list_(pa.string())),
        pa.field("reasons", pa.list_(pa.string())),
    ]
)
_WORDS = {
    "blank": "the map is blank: no positive evidence for the class",
    "constant": "the map is constant",
    "none-kept": "no view kept the prediction with enough confidence: this is the presented view alone, and its PEUM "
    "of 0 means nothing",
    "low-coverage": "some cells no view has seen",
    "odd-size": "odd size: the picture is not square or the feature grid does not divide it, so turns are less exact",
}
_ONE_KEPT = "only one view kept the prediction with enough confidence, and its PEUM of 0 means nothing"


@dataclass(frozen=True)
class Guarantee:
    """λ = the ⌊α (n_u + 1)⌋-th smallest score of n_u unstable: reviewing scores ≥ λ misses at most α of them.

    That is P(score < λ | unstable) ≤ α over draws of calibrated and new pictures that are exchangeable; λ = ∞ where
    only pictures whose score says nothing are needed. The score is what the queue is ranked by.
    """

    alpha: float
    unstable: float  # an explanation is unstable when its Eq is below
    calibrated: int
    unstable_found: int
    threshold: float | None
    needed: int | None  # pictures with a score ≥ λ or one that says nothing
    needed_share: float | None
    sentence: str


@dataclass(frozen=True)
class Triage:
    """What to review, in order of place, and what that is worth."""

    rows: pa.Table
    by: str  # what they are ranked by
    guarantee: Guarantee
    worth: Worth | None  # None: nothing is calibrated
    budget: int
    ok: int
    bad: int
    quotas: dict[str, int]  # places of the queue by class; classes of one name together
    seed: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined or infinite."""
        told = {name: getattr(self, name) for name in ("by", "budget", "ok", "bad", "quotas", "seed")}
        told |= {"guarantee": asdict(self.guarantee), "worth": self.worth and asdict(self.worth)}
        found: dict[str, Any] = json_ready(told | {"rows": self.rows.to_pylist()})
        return found


def triage(
    items: pa.Table,
    *,
    by: str = "peum",
    budget: str | int = "10%",
    control: int | float = 0.20,
    alpha: float = 0.10,
    unstable: int | float = 0.5,
    quotas: bool = True,
    angles: Sequence[int | float],
    classes: Sequence[str] | None = None,
    seed: int = 0,
) -> Triage:
    """Deal `budget` reviews to the most uncertain `by` PEUM or disagreement and, `control` of them, to a blind random arm."""
    ok = items.filter(pc.field("status") == "ok").sort_by("id")
    refuse_unknown(by, ok)
    if len(angles) < 2:
        raise EquicamError(
            "triage",
            needs="a run of several views",
            got=f"one view, which has no {NAMES[by]} to rank by",
            fix="equicam audit --views 6",
        )
    if not 0 <= control < 1:
        raise EquicamError("control", needs="a share from 0 to below 1", got=control, fix="control=0.20")
    if not 0 < alpha < 1:
        raise EquicamError("alpha", needs="a share between 0 and 1", got=alpha, fix="alpha=0.10")
    if not -1 < unstable <= 1:
        raise EquicamError(
            "unstable", needs="an Eq, above −1 and at most 1", got=unstable, fix="unstable=0.5"
        )
    rng = np.random.default_rng(_entropy(seed, ok["id"].to_pylist()))
    scores, target = {name: scored(ok, name) for name in NAMES}, ok["target"].fill_null(-1).to_numpy()
    score = scores[by]
    order = np.lexsort((rng.permutation(len(score)), -score))
    reviews = _reviews(budget, len(score))
    blind = _controls(reviews, len(score), control)
    places = dealt(Counter(target.tolist()), reviews - blind) if quotas else {}
    queue = _by_class(order, target, places)
    # what whole shares leave over goes on by rank, whatever the class
    queue = np.concatenate([queue, order[~np.isin(order, queue)][: reviews - blind - len(queue)]])
    drawn = rng.choice(np.setdiff1d(order, queue), blind, replace=False)
    chosen = rng.permutation(np.concatenate([queue, drawn]))
    eq, named = ok["eq"].to_numpy(), Counter[str]()
    for one in target[queue].tolist() if quotas else ():
        named[_named(one, classes)] += 1
    return Triage(
        rows=_rows(ok, order, chosen, set(queue.tolist()), score, by, angles, classes),
        by=by,
        guarantee=_guarantee(score, eq, queue, alpha=alpha, unstable=unstable, by=by),
        worth=worth(scores, eq, queue, by=by, share=reviews / max(len(score), 1), unstable=unstable),
        budget=reviews,
        ok=len(score),
        bad=items.num_rows - len(score),
        quotas=dict(named),
        seed=seed,
    )


def dealt(counts: dict[int, int], places: int) -> dict[int, int]:
    """The whole places each class has a right to by its share of the pictures; with many classes that may be none."""
    total = max(sum(counts.values()), 1)
    return {one: places * count // total for one, count in sorted(counts.items())}


def _entropy(seed: int, ids: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *ids]).encode()).digest())


def _reviews(budget: str | int, ok: int) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%?)", str(budget).strip())
    number = Fraction(found[1]) if found else Fraction(0)
    if found and found[2] and 0 < number <= 100:
        return math.ceil(number * ok / 100)
    if found and not found[2] and number >= 1 and number.denominator == 1:
        return min(int(number), ok)
    raise EquicamError(
        "the budget", needs="a share from above 0% to 100%, or a number of pictures from 1", got=repr(budget), fix='"10%"'
    )  # fmt: skip


def _controls(reviews: int, ok: int, control: int | float) -> int:
    """How many reviews go to the random arm: none where all are reviewed anyway, and never all."""
    if reviews == ok or control == 0:
        return 0
    return min(max(math.floor(control * reviews + 0.5), int(reviews >= 5)), reviews - 1)


def _by_class(order: Indices, target: NDArray[Any], places: dict[int, int]) -> Indices:
    left, queue = dict(places), []
    for i in order.tolist():
        if left.get(int(target[i]), 0):
            left[int(target[i])] -= 1
            queue.append(i)
    return np.array(queue, dtype=np.intp)


def _named(target: int | None, classes: Sequence[str] | None) -> str:
    if target is None or classes is None or not 0 <= target < len(classes):
        return str(target)
    return classes[target]


def _rows(
    ok: pa.Table,
    order: Indices,
    chosen: Indices,
    queue: set[int],
    score: Floats,
    by: str,
    angles: Sequence[int | float],
    classes: Sequence[str] | None,
) -> pa.Table:
    rank = np.argsort(order) + 1
    lower = 100 * np.searchsorted(np.sort(score), score) // max(len(score), 1)
    rows, apart = ok.take(chosen).to_pylist(), measured(ok, "disagreement")
    for place, (i, row) in enumerate(zip(chosen.tolist(), rows, strict=True), start=1):
        row |= {"arm": "queue" if i in queue else "control", "rank": rank[i], "place": place, "by": by}
        row |= {"class": _named(row["target"], classes), "peum": json_ready(row["peum"])}
        row["disagreement"] = json_ready(float(apart[i]))
        row["flags"] = row["flags"] or []
        row["reasons"] = _reasons(row, by, angles, None if np.isinf(score[i]) else int(lower[i]))
    return pa.Table.from_pylist([{name: row[name] for name in ROWS.names} for row in rows], schema=ROWS)


def _reasons(row: dict[str, Any], by: str, angles: Sequence[int | float], lower: int | None) -> list[str]:
    """Why a picture may deserve a look, in words; `lower` % of the pictures have a lower score."""
    told = [_WORDS[flag] for flag in ("blank", "constant", "none-kept") if flag in row["flags"]]
    if not told and row["kept"] in (0, 1):
        told.append(_ONE_KEPT if row["kept"] else _WORDS["none-kept"])
    if lower is not None:
        told.append(f"{NAMES[by]} {row[by]:.3g}: more uncertain than {lower} % of the pictures")
    elif not told:
        told.append(f"{NAMES[by]} is undefined here")
    views, agree = row["top1_by_view"] or (), row["agree_by_view"] or ()
    n = len(angles)
    if not {len(views), len(agree)} <= {0, n}:
        raise EquicamError(
            "angles", needs=f"those of {row['id']!r}", got=f"{n} for {len(views)} views", fix="the run's"
        )
    turned = [f"{a:g}°" for a, top1 in zip(angles, views, strict=False) if top1 != row["target"]]
    if len(turned) > 2:
        told.append(
            f"the prediction changes at {', '.join(turned[:2])} and {len(turned) - 2} more of {n} views"
        )
    elif turned:
        told.append(f"the prediction changes at {' and '.join(turned)}, {len(turned)} of {n} views")
    odd = sorted((r, a) for a, r in zip(angles, agree, strict=False) if r is not None and r < 0.5)
    if odd:
        least = ", ".join(f"{a:g}° (r = {r:.2f})" for r, a in odd[:3])
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        told.append(
            f"the view{'s' if len(odd) > 1 else ''} at {least}{more} disagree{'' if len(odd) > 1 else 's'} with the others on the place"
        )
    told += [_WORDS[flag] for flag in ("low-coverage", "odd-size") if flag in row["flags"]]
    if row["prob"] is not None and row["prob"] < 0.5:
        told.append(f"low confidence (p = {row['prob']:.2f})")
    return told


def _guarantee(
    score: Floats, eq: Floats, queue: Indices, *, alpha: float, unstable: int | float, by: str = "peum"
) -> Guarantee:
    found, exact = np.sort(score[eq < unstable]), Fraction(str(alpha))
    n, place = int(np.count_nonzero(~np.isnan(eq))), math.floor(exact * (found.size + 1))
    of = f"{found.size} unstable explanations (Eq < {unstable:g}) among {n} calibrated pictures"
    if not place:
        least = math.ceil(1 / exact) - 1
        told = f"No guarantee: {of}; missing at most {100 * alpha:g} % of them needs {least}, {least - found.size} more."
        return Guarantee(alpha, unstable, n, found.size, None, None, None, told)
    threshold = float(found[place - 1])
    must = score >= threshold
    needed, held = int(must.sum()), int(must[queue].sum())
    which = f"whose {NAMES[by]} says nothing"
    if np.isfinite(threshold):
        which = f"with a {NAMES[by]} of at least {threshold:.4g}, or {which}"
    covered = "so it covers the guarantee" if held == needed else "so it does not cover the guarantee"
    told = (
        f"Reviewing every picture {which} ({needed} of {score.size}, {100 * needed / score.size:.1f} %) misses at most "
        f"{100 * alpha:g} % of the unstable explanations on average, if the calibrated pictures are a random draw; learnt "
        f"from {of}. Budget and guarantee are not promised together: the present queue holds {held} of these {needed}, "
        f"{covered}."
    )
    return Guarantee(alpha, unstable, n, found.size, threshold, needed, needed / score.size, told)
