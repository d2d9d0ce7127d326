import io

import pytest
from rich.console import Console

from equicam import progress


def lines(monkeypatch, *, seconds, shown=True):
    monkeypatch.setattr(progress, "LINE_SECONDS", seconds)
    console = Console(file=io.StringIO(), width=100)
    assert not console.is_terminal
    with progress.progress_bar("explaining", 4, shown=shown, console=console) as bar:
        bar.advance(1)
        bar.advance(1)
        bar.update(4, 4, 3)
    assert bar.done == 4
    return console.file.getvalue().splitlines()


def test_without_a_terminal_there_are_lines_now_and_then(monkeypatch):
    found = lines(monkeypatch, seconds=0)
    assert len(found) == 3
    assert found[0].startswith("explaining: 1 of 4 images, ")
    assert found[-1].endswith("/s, 0 s left")


@pytest.mark.parametrize("options", [{"seconds": 60}, {"seconds": 0, "shown": False}])
def test_short_or_quiet_work_has_none(monkeypatch, options):
    assert lines(monkeypatch, **options) == []


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with progress.progress_bar("exporting", unit="files", console=console) as bar:
        bar.advance(1)
    assert "exporting" in console.file.getvalue()
