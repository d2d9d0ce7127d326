"""Work that is started ahead is finished in order, and never lost."""

import gc
import weakref

import pytest

from equicam.runtime.pending import finish_in_order


def pieces(events, count, fail_at=None, error=RuntimeError):
    for i in range(count):
        if i == fail_at:
            raise error
        events.append(f"start {i}")
        yield i, lambda i=i: events.append(f"finish {i}") or i * i


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_results_come_in_order_after_so_many_were_started(ahead):
    events = []
    assert list(finish_in_order(pieces(events, 5), ahead)) == [(i, i * i) for i in range(5)]
    assert events.index("finish 0") == min(ahead + 1, 5)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_was_started_is_finished_before_the_error(ahead, error):
    found = []
    with pytest.raises(error):
        found.extend(finish_in_order(pieces([], 5, 3, error), ahead))
    assert found == [(0, 0), (1, 1), (2, 4)]


def test_finished_work_is_let_go():
    class Held:
        pass

    alive = []

    def work():
        for i in range(4):
            alive.append(sum(one() is not None for one in refs))
            held = Held()
            refs.append(weakref.ref(held))
            yield i, lambda held=held: None
            del held

    refs = []
    for _ in finish_in_order(work(), 1):
        gc.collect()
    assert max(alive) <= 1
