from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class EquicamError(ValueError):
    """A mistake the caller can correct: what failed, what it needs, what was given, and what to try."""

    def __init__(self, what: str, needs: str, got: object, fix: str) -> None:
        super().__init__(f"{what} needs {needs}, got {got}; try {fix}")
        self.what, self.needs, self.got, self.fix = what, needs, got, fix

    def to_plain(self) -> dict[str, str]:
        """Its parts as text."""
        return {"what": self.what, "needs": self.needs, "got": str(self.got), "fix": self.fix}

    def __reduce__(self) -> tuple[object, ...]:
        """It travels between processes by its parts, with what was given as text."""
        return type(self), (self.what, self.needs, str(self.got), self.fix)


def not_one_of(what: str, options: Iterable[str], got: object, fix: str) -> EquicamError:
    """A value that is none of the options."""
    return EquicamError(what, f"one of {', '.join(options)}", repr(got), fix)


class NotNamedError(EquicamError):
    """A run names code, a file or an address: only the caller may choose those, because anybody may have written the run."""


class ModelError(EquicamError):
    """An exception out of the caller's model, preprocessing, target or factory, which is its cause (`__cause__`)."""


def error_text(error: BaseException) -> str:
    """What an exception says; nothing where its own `__str__` raises."""
    try:
        return str(error)
    except (Exception, SystemExit):  # noqa: BLE001  # the caller's code, which may raise anything
        return ""


@contextmanager
def refusing(
    what: str, needs: str, fix: str = "a fresh copy of it", *, quoted: bool = True
) -> Iterator[None]:
    """Whatever a library raises on a damaged file becomes an EquicamError; not `quoted` where its text may name a patient."""
    try:
        yield
    except EquicamError:
        raise
    except MemoryError as error:
        raise EquicamError(
            what, "less memory to be read", "a file too large for it", "a smaller or tiled copy"
        ) from error
    except Exception as error:  # noqa: BLE001  # of every kind
        got = error_text(error)[:200] if quoted else ""
        raise EquicamError(what, needs, got or type(error).__name__, fix) from (error if quoted else None)


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Name the extra that installs a library whose import fails."""
    try:
        yield
    except ImportError as error:
        raise EquicamError(
            what, f"{error.name or 'a library'}, which is not installed", "no such library",
            f"pip install 'equicam[{extra}]'",
        ) from error  # fmt: skip
