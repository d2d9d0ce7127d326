"""A table, figure or claim of the paper: the published numbers it answers, what it needs, and how it is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from equicam_paper.claims import NETWORKS, Claim, claims
from equicam_paper.context import Context
from equicam_paper.rows import Remark, Row, not_run, note, only_of_the_papers


def another_network(context: Context, claim: Claim) -> Remark:
    """Why a claim about another network or domain is not answered, with the option that names it."""
    about = next((network for network in NETWORKS if network in claim.id), claim.of)
    if about and about not in (context.backbone, context.domain, "all"):
        return Remark("network", {"network": about})
    return note("not answered by this run")


@dataclass(frozen=True)
class Experiment:
    """`measure` yields the rows that a context allows; every other claim it answers is listed as not run."""

    title: str
    answers: tuple[str, ...]  # prefixes of its claims' ids
    measure: Callable[[Context], Iterator[Row]] = field(repr=False)
    needs: str = "an ImageNet classifier and validation images"
    missing: Callable[[Context, Claim], Remark] = field(default=another_network, repr=False)
    prepare: Callable[[Context], Context] = field(default=lambda context: context, repr=False)
    """The context that it is run in, and whose provenance its rows carry."""

    @property
    def claims(self) -> dict[str, Claim]:
        """The claims it answers, by id."""
        return {name: claim for name, claim in claims().items() if name.startswith(self.answers)}

    def run(self, context: Context) -> Iterator[Row]:
        """Every claim once: measured, or not run with the reason."""
        answered = set()
        for row in self.measure(context):
            answered.add(row.claim)
            yield row
        for name, claim in self.claims.items():
            if name not in answered:
                yield not_run(name, self.missing(context, claim))

    def rows(self, context: Context) -> Iterator[Row]:
        """`run`, except that a number published for one network and its images is not a claim about others."""
        for row in self.run(context):
            yield from only_of_the_papers(row, context.backbone, context.domain, cub=context.of_cub)
