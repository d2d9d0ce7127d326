from collections.abc import Iterator
from contextlib import contextmanager


class EquicamError(ValueError):
    """A mistake the caller can correct: what failed, what it needs, what was given, and what to try."""

    def __init__(self, what: str, *, needs: str, got: object, fix: str) -> None:
        super().__init__(f"{what} needs {needs}, got {got}; try {fix}")
        self.what, self.needs, self.got, self.fix = what, needs, got, fix

    def to_plain(self) -> dict[str, str]:
        """Its parts as text."""
        return {"what": self.what, "needs": self.needs, "got": str(self.got), "fix": self.fix}

    def __reduce__(self) -> tuple[object, ...]:
        """Exceptions with keyword-only arguments need this to travel between processes."""
        return _rebuild, (type(self), self.what, self.needs, str(self.got), self.fix)


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
            what, needs="less memory to be read", got="a file too large for it", fix="a smaller or tiled copy"
        ) from error
    except Exception as error:  # noqa: BLE001  # of every kind
        got = error_text(error)[:200] if quoted else ""
        raise EquicamError(what, needs=needs, got=got or type(error).__name__, fix=fix) from (
            error if quoted else None
        )


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


def _rebuild(kind: type[EquicamError], what: str, needs: str, got: str, fix: str) -> EquicamError:
    return kind(what, needs=needs, got=got, fix=fix)
