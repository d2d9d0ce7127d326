"""Progress of long work on stderr: a bar on a terminal, a line every ten seconds anywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0  # between two lines; work that takes less has none


class Progress:
    """How far the work is; `advance` counts what was just finished, `update` states everything."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done: int | float = 0
        self.computed: int | float = 0  # by this process; what it found done is not in the rate
        self.before: int | float = 0  # computed when this piece of the work was first heard of
        self.start = self.printed = time.monotonic()
        self.show: Callable[[], None] = lambda: None

    def advance(self, count: int | float) -> None:
        """So much more is done."""
        self.done += count
        self.computed += count
        self.show()

    def update(self, done: int, total: int, computed: int, *, title: str = "", unit: str = "") -> None:
        """So much is done, of how much, and by this process; another title begins another piece of the work."""
        if title and title != self.title:
            self.title, self.unit, self.start, self.before = title, unit, time.monotonic(), computed
        self.done, self.total, self.computed = done, total, computed - self.before
        self.show()

    @property
    def rate(self) -> float:
        """Finished a second."""
        return self.computed / max(1e-9, time.monotonic() - self.start)

    def line(self) -> str:
        """Title, counts, rate and time left."""
        of = f" of {self.total:,}" if self.total else ""
        text = f"{self.title}: {self.done:,.0f}{of} {self.unit}"
        if not self.rate:
            return text
        left = f", {(self.total - self.done) / self.rate:,.0f} s left" if self.total else ""
        return f"{text}, {self.rate:.1f}/s{left}"


@contextmanager
def progress_bar(
    title: str,
    total: int | None = None,
    *,
    unit: str = "images",
    shown: bool = True,
    console: "Console | None" = None,
) -> Iterator[Progress]:
    """Progress of one piece of work; `console` is the one that other lines are printed to meanwhile."""
    state = Progress(title, total, unit)
    if not shown:
        yield state
        return
    from rich.console import Console

    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:

        def line() -> None:
            if time.monotonic() - state.printed >= LINE_SECONDS:
                state.printed = time.monotonic()
                console.print(state.line(), soft_wrap=True, highlight=False, markup=False)

        state.show = line
        yield state
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"), progress.TimeRemainingColumn(),
    )  # fmt: skip
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total or None, rate="")

        def redraw() -> None:
            rate, total = f"{state.rate:.1f}/s" if state.rate else "", state.total or None
            bar.update(task, description=state.title, completed=state.done, total=total, rate=rate)

        state.show = redraw
        yield state
