"""How work runs: groups that fit memory, captured calls that do not, and constants kept between calls."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import equicam
from equicam import Fusion
from equicam.core import views as views_module
from equicam.core.fusion import FLAGS
from equicam.core.views import Views, constant
from equicam.explain import explain_batch
from equicam.methods import METHODS, Method
from equicam.readers.forward import Forward, Network, capture_layer
from equicam.readers.reading import Reader, Reading, Targets
from equicam.recipe import Recipe
from equicam.runtime import graphs
from equicam.runtime.executor import Executor
from equicam.runtime.graphs import GraphCache, _graphs_of, _identity, pending_call
from equicam.runtime.pending import Pending
from tests.conftest import Cnn, assert_alive, pictures, seeded


def test_groups_are_halved_when_memory_runs_out(cnn):
    x, sizes = pictures(6), []
    executor = Executor(cnn, Recipe(), max_views_per_forward=24)

    def run(rows: slice, fit: int) -> dict[str, torch.Tensor]:
        sizes.append(rows.stop - rows.start)
        if rows.stop - rows.start > 2:
            raise torch.OutOfMemoryError
        return {"index": torch.arange(rows.start, rows.stop)}

    found = torch.cat([part["index"] for part in executor.groups(x, 4, run)])
    assert (found.tolist(), sizes[0]) == (list(range(6)), 6)
    assert all(size <= 2 for size in sizes[2:])


def compile_calls(monkeypatch, run=GraphCache.run):
    """As if there were a GPU and memory enough; `run` stands in for that of a graph cache."""
    monkeypatch.setattr(Executor, "_compiles", lambda *_: True)
    monkeypatch.setattr(graphs, "_fits_memory", lambda *_: True)
    monkeypatch.setattr(GraphCache, "run", run)


@pytest.mark.parametrize("behind_another", [False, True])
def test_a_capture_without_memory_is_run_eagerly_and_not_tried_again(cnn, monkeypatch, behind_another):
    x, tried = pictures(2), []

    def run(*_args: object) -> None:
        tried.append(1)
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError:
            if behind_another:  # ending the broken capture fails too
                raise RuntimeError  # noqa: B904
            raise

    compile_calls(monkeypatch, run)
    executor = Executor(cnn, Recipe(views=3), refuse_unscaled=True)  # as `explain` has it
    found = explain_batch(executor, x)
    again = explain_batch(executor, x)
    assert tried == [1]
    expected = equicam.explain(cnn, x, views=3)
    assert_alive(expected.map)
    assert torch.equal(found.map, expected.map)
    assert torch.equal(again.map, expected.map)
    explain_batch(executor, x[:1])
    assert len(tried) == 2, "another shape may fit"


def test_a_captured_call_is_replayed_when_memory_is_short_later(cnn, monkeypatch):
    """Its own graph may be what fills the memory."""
    x, captured = pictures(2), []
    expected = equicam.explain(cnn, x, views=3)

    class Graph:
        def __init__(self, *_args: object, **_options: object) -> None:
            captured.append(self)

        def __call__(self, *_inputs: object) -> Pending:
            flags = torch.zeros(2, len(FLAGS), dtype=torch.bool)
            tensors = {name: torch.from_numpy(value) for name, value in expected.to_numpy().items()}
            return pending_call(tensors | {"flags": flags}, [], flags.flatten(), lambda: None)

    memory = iter([True, False, False])
    compile_calls(monkeypatch)
    monkeypatch.setattr(graphs, "_fits_memory", lambda *_: next(memory))
    monkeypatch.setattr(graphs, "CompiledCall", Graph)
    executor = Executor(cnn, Recipe(views=3))
    for _ in range(3):
        explain_batch(executor, x)
    assert len(captured) == 1
    explain_batch(executor, x[:1])  # what does not fit now runs eagerly, and is asked again
    explain_batch(executor, x[:1])
    assert len(captured) == 1


def test_one_call_without_memory_drops_no_graph(cnn, monkeypatch):
    x, runs = pictures(2), []
    expected = equicam.explain(cnn, x, views=3)
    assert_alive(expected.map)

    def run(cache: GraphCache, key: object, *_args: object) -> None:
        cache.graphs[key] = None
        runs.append(key)
        raise torch.OutOfMemoryError

    compile_calls(monkeypatch, run)
    executor = Executor(cnn, Recipe(views=3))
    for _ in range(2):
        assert torch.equal(explain_batch(executor, x).map, expected.map)
    assert len(runs) == 2, "it is tried again"
    assert _graphs_of(cnn.module).graphs.keys() == {runs[0]}


def test_the_identity_of_a_network_sees_what_moves():
    def hook(*_args: object) -> None:
        pass

    net = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(), nn.Linear(2, 2), nn.ReLU())
    parts = [weakref.ref(part) for part in net.modules()]
    seen = [_identity(parts)]

    def changed() -> bool:
        seen.append(_identity(parts))
        return seen[-1] != seen[-2]

    assert not changed()
    handle = net[0][0].register_forward_hook(hook)
    assert changed()
    handle.remove()
    net[3].register_forward_hook(hook)
    assert changed(), "the same hook on another layer"
    part = net[0][0]
    del net[0][0]
    net[1].append(part)
    assert changed(), "a layer in another block"
    net[2].half()
    assert changed()
    with torch.no_grad():
        net[2].weight.zero_()
    assert changed()


@pytest.mark.parametrize(
    ("views", "room", "expected"),
    [
        (64, 1, True),
        (100, 200, True),
        (100, 199, False),
        (256, 512, True),
        (257, 257, True),
        (257, 256, False),
    ],
)
def test_a_captured_call_needs_its_memory_twice_and_a_long_one_once(monkeypatch, views, room, expected):
    monkeypatch.setattr(graphs, "views_that_fit", lambda _x, *, with_kept: room)
    assert graphs._fits_memory(torch.empty(1, 3, 224, 224), views) == expected


def test_another_failure_of_a_capture_is_not_hidden(cnn, monkeypatch):
    def run(*_args: object) -> None:
        raise RuntimeError("broken")

    compile_calls(monkeypatch, run)
    with pytest.raises(RuntimeError, match="broken"):
        explain_batch(Executor(cnn, Recipe(views=3)), pictures(2))


def test_one_pass_is_freed_before_the_next(cnn):
    alive: list[weakref.ref[torch.Tensor]] = []
    before: list[int] = []

    def forward(network: Network, x: torch.Tensor) -> Forward:
        before.append(sum(ref() is not None for ref in alive))
        found = capture_layer(network, x)
        found = replace(found, captured=(found.features.clone(),))
        alive.append(weakref.ref(found.captured[0]))
        return found

    def read(forward: Forward, _targets: Targets) -> Reading:
        return Reading("rectified", (forward.features.mean(1).relu(),))

    method = Method("", Fusion(Views.evenly(6), "map", "map"), reader=Reader(read, forward=forward))
    equicam.explain(cnn, pictures(1), method=method, max_views_per_forward=2)
    assert before == [0, 0, 0]


def test_checks_keep_neither_gradients_nor_the_network_alive(vit):
    network = Network(vit)
    forward = capture_layer(network, pictures(2))
    (grads,), checks = forward.gradient(torch.ones_like(forward.logits))
    storage = grads.untyped_storage().data_ptr()
    assert len(checks) == 2
    for check in checks:
        for function in (check.passes, check.error):
            for cell in function.__closure__ or ():
                held = cell.cell_contents
                assert not isinstance(held, equicam.Model)
                assert not isinstance(held, torch.Tensor) or held.untyped_storage().data_ptr() != storage


def test_a_method_defined_again_is_the_one_that_runs(cnn, monkeypatch):
    x = pictures(1)
    monkeypatch.setitem(METHODS, "mine", METHODS["grad-cam"])
    first = equicam.explain(cnn, x, method="mine").map
    monkeypatch.setitem(METHODS, "mine", METHODS["layer-cam"])
    second = equicam.explain(cnn, x, method="mine").map
    assert_alive(first, second)
    assert not torch.allclose(first, second, atol=1e-3)
    assert torch.equal(second, equicam.explain(cnn, x, method="layer-cam").map)


def test_nothing_keeps_an_explained_network_alive():
    net = seeded(Cnn)
    gone = weakref.ref(net)
    model = equicam.wrap(net, layer="trunk")
    equicam.explain(model, pictures(1), views=2)

    def explainer(x: torch.Tensor, target: torch.Tensor, net: torch.nn.Module = net) -> torch.Tensor:
        return net(x)[:, :1, None].expand(-1, 4, 4)

    equicam.equivariant(explainer, views=2)(pictures(1), 0)
    del net, model, explainer
    gc.collect()
    assert gone() is None


@pytest.fixture
def keep_at_most(monkeypatch):
    """An empty cache of constants, of so many bytes."""
    monkeypatch.setattr(graphs, "_kept", type(graphs._kept)())
    return lambda size: monkeypatch.setattr(graphs, "MAX_KEPT_BYTES", size)


def test_grids_larger_than_the_cache_are_made_once_a_call(cnn, monkeypatch, keep_at_most):
    made = []
    make = views_module._sampling_grid.__wrapped__
    counted = constant(lambda *args: made.append(args) or make(*args))
    monkeypatch.setattr(views_module, "_sampling_grid", counted)
    keep_at_most(1)
    equicam.explain(cnn, pictures(4), views=5, max_views_per_forward=5)  # four groups
    assert len(made) == len(set(made))


def test_constants_are_kept_by_threads_at_once(keep_at_most):
    keep_at_most(4000)
    zeros = constant(torch.zeros)

    def work(seed: int) -> None:
        for i in range(300):
            with graphs.keep_constants():
                assert zeros((i * seed) % 50 + 1).numel() == (i * seed) % 50 + 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, (1, 3, 7, 11)))
    finally:
        sys.setswitchinterval(interval)


def test_constants_are_kept_within_calls_and_bounded(keep_at_most):
    made, graph = [], []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size)

    kept = constant(make)
    assert kept(3) is not kept(3)
    made.clear()
    keep_at_most(4 * 250)
    with graphs.keep_constants():
        first = kept(100)
        assert kept(100) is first
        assert made == [100]
        with graphs.keep_constants(also_in=graph):
            assert kept(100) is first
        kept(101)
        kept(102)
        assert kept(100) is first, "a call keeps what it uses"
    assert graph[0] is first
    with graphs.keep_constants():
        assert (kept(102).numel(), made) == (102, [100, 101, 102])
        assert kept(101) is not None
        assert made == [100, 101, 102, 101], "between calls the least recently used goes"


def test_a_recipe_survives_json_and_names_equal_recipes_equally():
    recipe = Recipe("equigrad-cam+pcf", views=Views((0, 90)), tau=0.2, dtype=torch.bfloat16, seed=3)
    assert (recipe.views, recipe.dtype) == ((0.0, 90.0), "bfloat16")
    again = Recipe.from_json(recipe.to_json())
    assert (again, again.fingerprint()) == (recipe, recipe.fingerprint())
    others = [Recipe(), Recipe(views=6), Recipe(seed=1), Recipe(compiled=True), Recipe(fill="zeros"), recipe]
    assert len({r.fingerprint() for r in others}) == len(others)
    with pytest.raises(equicam.EquicamError, match="got colour"):
        Recipe.from_json({"colour": "red"})
