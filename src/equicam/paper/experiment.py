"""A table, figure or claim of the paper: the published numbers it answers, what it needs, and how it is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from equicam.paper.claims import NETWORKS, Claim, claims
from equicam.paper.context import Context
from equicam.paper.rows import Remark, Row, not_run, note


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

    def run(self, context: Context) -> Iterator[Row]:
        """Every claim once: measured, or not run with the reason."""
        answered = set()
        for row in self.measure(context):
            answered.add(row.claim)
            yield row
        for name, claim in claims().items():
            if name.startswith(self.answers) and name not in answered:
                yield not_run(name, self.missing(context, claim))

    def rows(self, context: Context) -> Iterator[Row]:
        """`run`, except that a number published for one network is not a claim about another."""
        for row in self.run(context):
            network = claims()[row.claim].network if row.claim else ""
            elsewhere = not context.domain and context.backbone not in NETWORKS
            if row.verdict in ("not run", "by definition") or not row.claim or network == context.backbone:
                yield row
            elif network or elsewhere:
                about = network or ", ".join(NETWORKS)
                yield replace(
                    row, claim="", published=f"{row.published}, of {about}", verdict="measured", why=None, margin=None, within=None,
                )  # fmt: skip
                yield not_run(row.claim, Remark("network", {"network": network or NETWORKS[0]}))
            else:
                yield row
