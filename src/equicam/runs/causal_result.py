"""What the signal-or-noise test of a run found: its numbers, its answer, and the file that keeps them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equicam.errors import EquicamError
from equicam.evaluate.statistics import Estimate
from equicam.images.files import file_digest
from equicam.images.items import valid_utf8
from equicam.reasons import Reason, describe
from equicam.runs.log import CAUSAL, Log, logged_files
from equicam.runs.store import RunStore
from equicam.shards import from_plain, json_ready, read_json, write_atomic

MIN_EFFECT = 0.02
"""Of the probability: a smaller change counts as none."""


@dataclass(frozen=True)
class Costs:
    """Probability lost where a tenth of the image is blurred, in the mean over the images; a blank map counts 0."""

    drift: Estimate  # where the map moves
    elsewhere: Estimate  # the same shape, rotated to another place
    agreement: Estimate  # where the map stays
    effect: Estimate  # drift minus elsewhere, paired by image
    blank: int  # images whose map is constant

    @property
    def shows_effect(self) -> bool:
        """Whether drift surely costs more than as much elsewhere, and enough to speak of."""
        return self.effect.low > 0 and self.effect.value >= MIN_EFFECT


@dataclass(frozen=True)
class CausalTest:
    """The test on random images of a run, with the run's weights and with random ones."""

    images: tuple[str, ...]  # the ids of those tested
    left_out: int  # chosen, but changed since the audit or unreadable
    explained: int  # images of the run to choose from
    requested: int
    recipe: Mapping[str, Any]  # of the maps; its seed chose images, regions and random weights
    weights: str  # SHA-256
    trained: Costs
    random: Costs

    @property
    def reason(self) -> Reason:
        """The answer as a code, and the numbers of its sentence."""
        trained, random = self.trained, self.random
        effect, count = trained.effect, len(self.images)
        costs = trained.drift, trained.elsewhere, trained.agreement
        if trained.blank == count:
            code = "all-blank"
        elif all(abs(cost.value) < MIN_EFFECT for cost in costs):
            code = "no-effect"
        elif trained.shows_effect:
            code = "as-random" if random.shows_effect else "signal"
        else:
            code = "noise" if effect.high < MIN_EFFECT else "undecided"
        values = {
            "effect": effect.value,
            "low": effect.low,
            "high": effect.high,
            "random": random.effect.value,
        }
        counts = {"images": count, "of": self.explained, "requested": self.requested, "least": MIN_EFFECT}
        return Reason(code, values | counts)

    @property
    def sentence(self) -> str:
        """The answer for a person."""
        return describe(self.reason)

    def is_of(self, explained: int, requested: int, seed: int) -> bool:
        """Whether it tested what these ask for, and left nothing out."""
        mine = (self.explained, self.requested, self.recipe.get("seed"))
        return mine == (explained, requested, seed) and not self.left_out

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined, and the answer's code."""
        return json_ready({"answer": self.reason.code} | asdict(self))  # type: ignore[no-any-return]


def write_causal(store: RunStore, test: CausalTest) -> None:
    """Write causal.json, and log its digest and the answer."""
    path = store.folder / CAUSAL
    write_atomic(path, json.dumps(test.to_json(), indent=1, allow_nan=False).encode())
    payload = {"answer": test.reason.code, "images": len(test.images), "files": {CAUSAL: file_digest(path)}}
    Log(store.folder).add("causal", payload)


def read_causal(store: RunStore, *, as_logged: bool = False) -> CausalTest | None:
    """The test that was written; None before the first, or if its file must be and is not as the log has it."""
    path = store.folder / CAUSAL
    if not path.is_file() or (as_logged and logged_files(Log(store.folder)).get(CAUSAL) != file_digest(path)):
        return None
    plain = read_json(path)
    try:
        return from_plain(CausalTest, plain)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # anybody may have written the file
        raise EquicamError(
            valid_utf8(str(path)), "the result of a causal test", error, "removing it, then equicam causal"
        ) from error
