"""Libraries that only some exports need."""

from collections.abc import Iterator
from contextlib import contextmanager

from equicam.errors import EquicamError


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Name the extra that installs a library whose import fails."""
    try:
        yield
    except ImportError as error:
        raise EquicamError(
            what, needs=f"{error.name or 'a library'}, which is not installed", got="no such library",
            fix=f"pip install 'equicam[{extra}]'",
        ) from error  # fmt: skip
