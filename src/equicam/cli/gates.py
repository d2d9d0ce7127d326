"""Gates of an audit: limits that a run must keep, as shares or counts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equicam.errors import EquicamError


@dataclass(frozen=True)
class Gate:
    """A limit as it was typed: a count, or a share of all images or of all explained ones."""

    option: str  # --max-bad or --min-steady
    text: str
    limit: float
    is_share: bool


def parse_gates(max_bad: str | None, min_steady: str | None) -> list[Gate]:
    """The gates that were given."""
    given = {"--max-bad": max_bad, "--min-steady": min_steady}
    return [_parse(option, text) for option, text in given.items() if text is not None]


def _parse(option: str, text: str) -> Gate:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip(), re.ASCII)
    if found is None or (found[2] and float(found[1]) > 100) or (not found[2] and "." in found[1]):
        raise EquicamError(
            option,
            "a share from 0% to 100%, or a number of images",
            repr(text),
            f"{option} {'5%' if option == '--max-bad' else '80%'}",
        )
    return Gate(option, text.strip(), float(found[1]), bool(found[2]))


def refuse_unreachable(gates: Sequence[Gate], images: int) -> None:
    """Refuse a count above the number of images: --min-steady could never hold, and --max-bad never fail."""
    for gate in gates:
        if not gate.is_share and gate.limit > images:
            share = f"{gate.text}%" if gate.limit <= 100 else "80%" if gate.option == "--min-steady" else "5%"
            raise EquicamError(
                gate.option,
                f"a number of images up to {images:,}, as many as there are, or a share",
                gate.text,
                f"{gate.option} {share}",
            )


def check_gates(gates: Sequence[Gate], counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Each gate with its count, the number it is of, and whether it holds."""
    return [_check(gate, counts) for gate in gates]


def _check(gate: Gate, counts: Mapping[str, int]) -> dict[str, Any]:
    at_most = gate.option == "--max-bad"
    count, of = (counts["bad"], counts["images"]) if at_most else (counts["steady"], counts["explained"])
    # compared as whole numbers times 100: 5 of 100 keep 5%
    value, limit = (100 * count, gate.limit * of) if gate.is_share else (count, gate.limit)
    holds = value <= limit if at_most else value >= limit
    return {"option": gate.option, "limit": gate.text, "count": count, "of": of, "holds": holds}


def failed_gate(checked: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence on the gates that do not hold; None where all do."""
    failed = [one for one in checked if not one["holds"]]
    return "; ".join(map(_sentence, failed)) or None


def _sentence(one: Mapping[str, Any]) -> str:
    what = "images could not be explained" if one["option"] == "--max-bad" else "maps are steady"
    share = f" ({100 * one['count'] / one['of']:.1f} %)" if one["of"] else ""
    return f"the gate {one['option']} {one['limit']} failed: {one['count']:,} of {one['of']:,} {what}{share}"
