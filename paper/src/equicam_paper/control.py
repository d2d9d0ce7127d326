"""The negative control of verdicts: another network's measurements, judged in the place of ResNet-50's.

A rule that cannot tell two networks apart says nothing with a match.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from equicam_paper.claims import NETWORKS, TITLES
from equicam_paper.kept import Kept, KeptRows
from equicam_paper.margins import quantity
from equicam_paper.rows import Row, judge_again

CONTROLLED = "resnet50"  # whose claims the other network's measurements are judged by
WORDS = {"matches": "match", "differs": "differ", "artefact": "artefact", "undecided": "undecided"}


@dataclass(frozen=True)
class Judged:
    """A claim's row with the network that it is about, and with another one."""

    own: Row
    other: Row


def controls(kept: Kept) -> Iterator[str]:
    """A paragraph for every network on ImageNet that the paper does not have; of two sections that of most images counts."""
    judged: dict[str, dict[str, Judged]] = {}
    known: dict[str, set[str]] = {}
    for folder, experiments in kept.items():
        for network, domain in {(one.backbone, one.domain) for one in experiments.values()}:
            if network in NETWORKS or domain:
                continue
            of = folder.replace(network, CONTROLLED) if network and network in folder else CONTROLLED
            own = kept.get(of, {})
            known.setdefault(network, set()).update(row.claim for row in _decidable(own.values()))
            claims = judged.setdefault(network, {})
            for one in judge_in_place(own, experiments):
                before = claims.get(one.own.claim)
                if before is None or one.own.images > before.own.images:
                    claims[one.own.claim] = one
    for network, claims in judged.items():
        if claims:
            left = len(known[network] - claims.keys())
            yield _describe(TITLES.get(network, network), list(claims.values()), left)


def _decidable(kept: Iterable[KeptRows]) -> Iterator[Row]:
    """Rows of claims that an interval decides."""
    return (row for one in kept for row in one.ran if row.within is not None)


def judge_in_place(own: Mapping[str, KeptRows], other: Mapping[str, KeptRows]) -> Iterator[Judged]:
    """The claims that an interval decides, each with the other network's row of the same experiment and label."""
    for name in own.keys() & other.keys():
        rows = {row.label: row for row in other[name].ran}
        for row in _decidable([own[name]]):
            found = rows.get(row.label)
            if found is None:
                continue
            swapped = replace(row, clean=found.clean, as_published=found.as_published, verdict="measured")
            yield Judged(row, judge_again(swapped))


def _describe(network: str, judged: list[Judged], left: int = 0) -> str:
    """How often the other network would match, differ or be undecided, next to ResNet-50 itself."""
    matched = {one.own.claim for one in judged if one.own.verdict == "matches"}
    both = {one.own.claim for one in judged if one.own.claim in matched and one.other.verdict == "matches"}
    text = (
        f"**Can the rule say no?** With {network}'s measurements in the place of ResNet-50's, of {len(judged)} claims "
        f"{_tally(one.other for one in judged)}; with ResNet-50's own, {_tally(one.own for one in judged)}."
    )
    if both:
        shares = f"{len(both)} of the {len(matched)} matches ({distinct(both)} of {distinct(matched)} distinct ones)"
        listed = ", ".join(f"`{claim}`" for claim in sorted(both))
        text += f" So {shares} do not tell the two networks apart, and say little about ResNet-50: {listed}."
    if left:
        text += f" {left} more claims that an interval decides have no counterpart."
    return f"{text}\n\n"


def _tally(rows: Iterator[Row]) -> str:
    found = Counter(row.verdict for row in rows)
    return ", ".join(f"{found[verdict]} {words}" for verdict, words in WORDS.items() if found[verdict])


def distinct(claims: Iterable[str]) -> int:
    """How many measurements these claims are: several tables print the same number."""
    return len({quantity(claim) for claim in claims})
