"""Why an image was refused, ranked or flagged, as data: code and values here, sentences where a person reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reason:
    """A code that programs compare, and the values its sentence is written from."""

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)
