"""How work runs: groups that fit memory, captured calls that do not, and constants kept between calls."""

import pytest
import torch

import equicam
from equicam.core.constants import constant
from equicam.core.views import Views
from equicam.explain import explain_batch
from equicam.recipe import Recipe
from equicam.runtime import constants
from equicam.runtime.executor import Executor
from tests.conftest import assert_alive, pictures


def test_groups_are_halved_when_memory_runs_out(cnn):
    x, sizes = pictures(6), []
    executor = Executor(cnn, Recipe(), max_views_per_forward=24)

    def run(rows: slice, fit: int) -> dict[str, torch.Tensor]:
        sizes.append(rows.stop - rows.start)
        if rows.stop - rows.start > 2:
            raise torch.OutOfMemoryError
        return {"index": torch.arange(rows.start, rows.stop)}

    found = torch.cat([part["index"] for part in executor.groups(x, 4, run)])
    assert found.tolist() == list(range(6))
    assert sizes[0] == 6
    assert all(size <= 2 for size in sizes[2:])


def test_one_view_that_does_not_fit_is_an_error(cnn):
    def run(rows: slice, fit: int) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        list(Executor(cnn, Recipe()).groups(pictures(1), 4, run))


@pytest.mark.parametrize("behind_another", [False, True])
def test_a_capture_that_runs_out_of_memory_is_run_eagerly(cnn, monkeypatch, behind_another):
    x, tried = pictures(2), []

    def replay(*_args: object) -> None:
        tried.append(1)
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            if behind_another:  # ending the broken capture fails too
                raise RuntimeError  # noqa: B904
            raise

    monkeypatch.setattr(Executor, "_captures", lambda *_: True)
    monkeypatch.setattr(Executor, "_replay", replay)
    found = explain_batch(Executor(cnn, Recipe(views=3)), x)
    assert tried == [1]
    expected = equicam.explain(cnn, x, views=3)
    assert_alive(expected.map)
    assert torch.equal(found.map, expected.map)


def test_another_failure_of_a_capture_is_not_hidden(cnn, monkeypatch):
    def replay(*_args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Executor, "_captures", lambda *_: True)
    monkeypatch.setattr(Executor, "_replay", replay)
    with pytest.raises(RuntimeError, match="broken"):
        explain_batch(Executor(cnn, Recipe(views=3)), pictures(2))


def test_constants_are_kept_within_calls_and_bounded(monkeypatch):
    made = []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size)

    assert constant(make, 3) is not constant(make, 3)
    made.clear()
    monkeypatch.setattr(constants, "_kept", type(constants._kept)())
    monkeypatch.setattr(constants, "MAX_KEPT_BYTES", 4 * 250)
    graph: list[torch.Tensor] = []
    with constants.keep_constants():
        first = constant(make, 100)
        assert constant(make, 100) is first
        assert made == [100]
        with constants.keep_constants(also_in=graph):
            assert constant(make, 100) is first
        constant(make, 101)
        constant(make, 102)  # the least recently used goes
        assert constant(make, 102).numel() == 102
        assert made == [100, 101, 102]
        assert constant(make, 100) is not first
    assert graph[0] is first


def test_a_recipe_survives_json_and_names_equal_recipes_equally():
    recipe = Recipe("equigrad-cam+pcf", views=Views((0, 90)), tau=0.2, dtype=torch.bfloat16, seed=3)
    assert recipe.views == (0.0, 90.0)
    assert recipe.dtype == "bfloat16"
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()
    others = [Recipe(), Recipe(views=6), Recipe(seed=1), Recipe(compiled=True), Recipe(fill="zeros"), recipe]
    assert len({r.fingerprint() for r in others}) == len(others)
    with pytest.raises(equicam.EquicamError, match=r"only as_published.*got colour"):
        Recipe.from_json({"colour": "red"})
