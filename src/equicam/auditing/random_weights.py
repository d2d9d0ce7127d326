"""What a run's log says about the same network with random weights: whether steady maps tell the two apart."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from equicam.auditing.log import Event

EVENT = "sanity"


@dataclass(frozen=True)
class RandomWeights:
    """Maps of a few images with the run's weights, and with random ones drawn several times; a blank map has stability 0."""

    images: int
    stability: float
    steady: int
    random_networks: int
    random_stability: float
    random_steady: int

    @property
    def random_maps(self) -> int:
        """Maps by all networks with random weights."""
        return self.images * self.random_networks

    @property
    def as_steady(self) -> bool:
        """Whether at least as large a share of the maps is steady without the trained weights."""
        return self.random_steady > 0 and self.random_steady >= self.steady * self.random_networks


def logged_random_weights(events: Sequence[Event]) -> RandomWeights | None:
    """What `equicam evidence` measured; None before, or where the event is not as it writes it."""
    payload = next((event.payload for event in reversed(events) if event.kind == EVENT), {})
    found = {field.name: payload.get(field.name) for field in fields(RandomWeights)}
    numbers = {name: one for name, one in found.items() if isinstance(one, int | float)}
    return RandomWeights(**numbers) if len(numbers) == len(found) else None  # type: ignore[arg-type]
