"""Work that a device is given before the results of the work before it are taken."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def finish_in_order(
    started: Iterable[tuple[Name, Callable[[], Result]]], ahead: int
) -> Iterator[tuple[Name, Result]]:
    """Names and results of work that is started as this iterates; `ahead` pieces are started before one is finished.

    What was started is finished also if the next piece fails or is interrupted; the error comes after it.
    """
    waiting: deque[tuple[Name, Callable[[], Result]]] = deque()
    failed: BaseException | None = None
    pieces = iter(started)
    while True:
        try:
            waiting.append(next(pieces))
        except StopIteration:
            break
        except BaseException as error:  # noqa: BLE001  # raised below
            failed = error
            break
        while len(waiting) > ahead:
            yield _finish_first(waiting)
    while waiting:
        yield _finish_first(waiting)
    if failed is not None:
        raise failed


def _finish_first(waiting: deque[tuple[Name, Callable[[], Result]]]) -> tuple[Name, Result]:
    name, finish = waiting.popleft()
    return name, finish()
