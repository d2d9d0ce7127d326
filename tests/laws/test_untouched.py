"""Whatever happens, the model is left as it was found."""

import copy
import gc

import pytest
import torch
from torch import nn

import equicam
from tests.conftest import TRANSFORMERS_ONLY, Cnn, Vit, assert_alive, explained, light, pictures, seeded


def state(module: nn.Module) -> list:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    hooks = [(*(len(getattr(m, kind)) for kind in kinds), m.training) for m in module.modules()]
    grads = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()]
    tensors = [t.clone() for t in [*module.parameters(), *module.buffers()]]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    return [hooks, grads, tensors, torch.get_rng_state(), *modes]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(params=["cnn", "vit"])
def used(request) -> equicam.Model:
    """A network somebody is in the middle of training: mixed modes, some parameters frozen, gradients there."""
    module = seeded(Cnn if request.param == "cnn" else Vit)
    module.train()
    for i, p in enumerate(module.parameters()):
        p.requires_grad_(i % 3 != 0)
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    next(iter(module.children())).eval()
    return equicam.wrap(module, layer="trunk" if request.param == "cnn" else "blocks.1.norm1")


@pytest.mark.parametrize("method", equicam.methods())
def test_after_a_call(used, method):
    before = state(used.module)
    if method in TRANSFORMERS_ONLY and isinstance(used.module, Cnn):
        with pytest.raises(equicam.EquicamError, match="a transformer whose blocks all attend"):
            equicam.explain(used, pictures(), method=method)
    else:
        assert_alive(equicam.explain(used, pictures(2, seed=2), method=light(method), views=4).map)
    assert same(state(used.module), before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": [1]},
        {"target": 99},
        {"target": -1},
        {"max_views_per_forward": 0},
        {"recipe": equicam.Recipe(fill="nonsense")},
        {"method": equicam.Fusion(equicam.Views((0,)), "map", "map", weigh=lambda p, top: 1 / 0)},
    ],
    ids=lambda given: "-".join(given),
)
def test_after_an_exception(used, wrong):
    before = state(used.module)
    with pytest.raises(Exception):  # noqa: B017
        equicam.explain(used, pictures(), **wrong)
    assert same(state(used.module), before)


def test_after_an_exception_inside_the_model():
    module = seeded(Cnn)
    module.head = nn.Linear(4, 2).double()
    model = equicam.wrap(module, layer="trunk")
    before = state(module)
    with pytest.raises(equicam.EquicamError, match=r"RuntimeError: .*conftest\.py"):
        equicam.explain(model, pictures())
    assert same(state(module), before)


def test_the_random_stream_of_a_stochastic_model_is_kept():
    class Noisy(Cnn):
        def forward(self, x):
            return super().forward(x) + torch.rand(1, dtype=x.dtype)

    model = equicam.wrap(seeded(Noisy), layer="trunk")
    before = torch.get_rng_state()
    equicam.explain(model, pictures(), views=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_do_not_change():
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures()
    before = model.module(x)
    equicam.explain(model, x)
    assert torch.equal(model.module(x), before)


def test_nothing_found_holds_a_graph():
    found = explained(seeded(Cnn), pictures().requires_grad_())
    fields = ("map", "raw", "peum", "peum_score", "view_confidence", "view_maps")
    assert not any(getattr(found, field).requires_grad for field in fields)


@pytest.mark.slow
def test_three_hundred_calls_leave_memory_flat():
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(2, 24, 24)

    def call() -> None:
        equicam.explain(model, x, views=3)

    def tensors() -> tuple[int, int]:
        gc.collect()
        alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return len(alive), sum(t.untyped_storage().nbytes() for t in alive)

    for _ in range(20):
        call()
    before = tensors()
    for _ in range(300):
        call()
    assert tensors() == before


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return explained(seeded(Cnn), pictures(), views=4).map


@pytest.mark.parametrize(
    ("keep", "tolerance"),
    [
        (lambda module: module.requires_grad_(False), 0),
        (lambda module: module.to(memory_format=torch.channels_last), 1e-10),
        (nn.DataParallel, 1e-9),  # on a GPU if there is one
    ],
    ids=["frozen", "channels-last", "data-parallel"],
)
def test_a_network_however_it_is_kept(expected, keep, tolerance):
    assert_alive(expected)
    found = explained(keep(seeded(Cnn)), pictures(), views=4).map.cpu()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_no_grad_and_inference_mode(expected, mode):
    model = equicam.wrap(seeded(Cnn), layer="trunk")
    with mode():
        found = equicam.explain(model, pictures() + 0, views=4)
        again = equicam.explain(model, equicam.rotate(pictures(), 0), views=4)
    assert torch.equal(found.map, expected)
    assert torch.equal(again.map, expected)
    after = equicam.explain(model, pictures(), views=4)
    assert torch.equal(after.map, expected)  # nothing cached was spoiled


def test_in_bfloat16():
    module, x = seeded(Cnn).float(), pictures(4).float()
    exact = explained(module, x, views=4)
    half = equicam.wrap(copy.deepcopy(module).bfloat16(), layer="trunk")
    autocast = explained(module, x, views=4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outer = explained(module, x, views=4)
    assert_alive(exact.map)
    halves = [equicam.explain(half, one, views=4) for one in (x, x.bfloat16())]
    for found in (autocast, outer, *halves):
        assert found.map.dtype == found.peum.dtype == torch.float32
        for a, b in zip(found.map.flatten(1), exact.map.flatten(1), strict=True):
            assert torch.corrcoef(torch.stack((a, b)))[0, 1] > 0.99
    assert torch.equal(autocast.map, outer.map)
    assert not torch.equal(autocast.map, exact.map)  # it did run in bfloat16


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("how", ["wrapped", "in place", "a child"])
def test_compiled(expected, how, called_before):
    module = seeded(Cnn)
    if how == "wrapped":
        module = torch.compile(module, backend="eager")
    elif how == "in place":
        module.compile(backend="eager")
    else:
        module.trunk = torch.compile(module.trunk, backend="eager")
    if called_before:
        module(pictures())
    model = equicam.wrap(module, layer="trunk")
    found = equicam.explain(model, pictures(), views=4)
    assert torch.equal(found.map, expected)
    assert module(pictures()).shape == (2, 5)
