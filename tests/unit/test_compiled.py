"""The compiled network: the same maps, nothing left behind, and few sizes."""

import gc
import warnings
import weakref
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn

import equicam
from equicam.readers.failures import Check, raise_failed
from equicam.runtime import pending
from equicam.runtime.compiled import _compiled, _CompiledLayer, _padded_size
from equicam.runtime.graphs import MAX_PACKED_VALUES, CompiledCall, _graphs_of, _PackedTensors, pending_call
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded

NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1")}


@pytest.mark.parametrize("kind", ["cnn", pytest.param("vit", marks=pytest.mark.slow)])
def test_a_compiled_network_finds_what_an_eager_one_finds(kind):
    build, layer = NETS[kind]
    net = seeded(build).train()
    model, x = equicam.wrap(net, layer=layer), pictures(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler says of this machine
        fast = equicam.explain(model, x, views=3, compiled=True)
        again = equicam.explain(model, x[:2], views=3, compiled=True, target=[1, 2])
    exact = equicam.explain(model, x, views=3)
    assert_alive(exact.map)
    for field in ("map", "raw", "peum", "view_confidence", "view_maps", "confidence"):
        torch.testing.assert_close(getattr(fast, field), getattr(exact, field), atol=1e-9, rtol=0)
    assert fast.flags == exact.flags
    other = equicam.explain(model, x[:2], views=3, target=[1, 2])
    torch.testing.assert_close(again.map, other.map, atol=1e-9, rtol=0)
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert not any(part._forward_hooks for part in net.modules())


class Twice(nn.Module):
    """A layer that runs twice in a pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)).mean((-2, -1)))


def test_a_layer_that_runs_twice_is_not_compiled():
    model = equicam.wrap(Twice().double(), layer="layer")
    with pytest.raises(equicam.EquicamError, match=r"2 calls of it; try Recipe\(compiled=False\)"):
        equicam.explain(model, pictures(1), views=2, compiled=True)
    assert not model.module.layer._forward_hooks


def test_batches_are_filled_up_to_few_sizes():
    for count in (1, 2, 7, 15, 16, 18, 270, 288, 1152, 2160, 2304):
        assert count <= _padded_size(count) <= count * 1.125
        assert _padded_size(_padded_size(count)) == _padded_size(count)
    for images in (1, 8):  # shards of fifteen and sixteen images
        assert _padded_size(images * 15 * 18) == _padded_size(images * 16 * 18)


def test_checks_are_evaluated_together_and_the_first_that_fails_is_raised():
    def check(passes: bool, name: str) -> Check:
        return Check(lambda: torch.tensor(passes), lambda: ValueError(name))

    checks = [check(True, "first"), check(False, "second"), check(False, "third")]
    with pytest.raises(ValueError, match="second"):
        raise_failed(checks)
    raise_failed(checks[:1])
    raise_failed([])


def test_what_is_refused_eagerly_is_refused_compiled():
    pooled = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = equicam.wrap(nn.Sequential(*pooled, nn.Linear(4, 1), nn.Sigmoid()).double(), layer="0")
    for compiled in (False, True):
        with pytest.raises(equicam.EquicamError, match="probabilities, behind a softmax or sigmoid"):
            equicam.explain(model, pictures(1), views=2, compiled=compiled)


def test_a_compiled_network_is_not_kept_alive():
    net = seeded(Cnn)
    _compiled[net] = {"trunk": _CompiledLayer("trunk")}
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_a_failure_over_values_is_told_by_the_check():
    model = equicam.wrap(seeded(Cnn), layer="trunk")
    with torch.no_grad():
        model.module.trunk[0].weight.fill_(torch.nan)
    with pytest.raises(equicam.EquicamError, match="finite class logits"):
        equicam.explain(model, pictures(1), method="eigen-cam")


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "head", nn.Linear(3, 4)),
        lambda net: net.layer.register_forward_hook(lambda *_: None),
        lambda net: net.layer.register_forward_pre_hook(lambda *_: None),
        lambda net: net.double(),
        lambda net: setattr(net.layer, "bias", None),
    ],
    ids=["part", "hook", "pre-hook", "moved", "gone"],
)
def test_graphs_are_captured_again_when_the_network_changes(change):
    net, captures = Twice(), []
    mine = _graphs_of(net)

    class Fake(CompiledCall):
        def __init__(self):
            captures.append(self)
            self.number, self.refreshed = len(captures) - 1, 0

        def __call__(self, *_given):
            return pending_call({"by": torch.tensor(self.number)}, [], torch.zeros(0), lambda: None)

        def refresh(self):
            self.refreshed += 1

    def by():
        return int(mine.run("key", Fake, (torch.zeros(1), None)).tensors["by"])

    assert ([by() for _ in range(3)], captures[0].refreshed) == ([0, 0, 0], 0)
    with torch.no_grad():
        net.head.weight.neg_()  # where it was: the graph reads what is there, and casts of it are made again
    assert ([by() for _ in range(2)], captures[0].refreshed) == ([0, 0], 1)
    change(net)
    assert [by() for _ in range(2)] == [1, 1]
    for other in range(9):
        mine.run(other, Fake, (torch.zeros(1), None))
    assert len(mine.graphs) == 8
    gone = weakref.ref(net)
    del net, mine
    gc.collect()
    assert gone() is None


def test_packed_tensors_come_out_as_they_are_and_stay():
    given = {"map": torch.rand(2, 200, 200), "score": torch.rand(2), "prob": torch.rand(2, 18)}
    given |= {"target": torch.tensor([3, 4]), "flips": torch.rand(2, 18) > 0.5, "holds": torch.eye(2)[0] > 0}
    packed, kept = _PackedTensors(given), {name: value.clone() for name, value in given.items()}
    found = packed.copy()
    assert given["map"].numel() > MAX_PACKED_VALUES
    for row in (packed.bytes, *packed.large.values()):
        row.zero_()  # as the next run of the graph would
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        torch.testing.assert_close(found[name], value, atol=0, rtol=0)
    assert found["score"].untyped_storage().nbytes() < 4 * MAX_PACKED_VALUES


def test_the_inputs_of_a_side_stream_stay_alive_until_it_is_joined(monkeypatch):
    class Stream:
        waited: ClassVar[list[object]] = []

        def wait_stream(self, other):
            self.waited.append((self, other))

    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _side: nullcontext())
    with pending.side_stream(main):
        pass
    pending.join_side_stream()
    assert Stream.waited == [], "outside `allow_side_stream` nothing branches"
    with pending.allow_side_stream():
        read = torch.ones(3)
        there = weakref.ref(read)
        with pending.side_stream(read):
            pass
        del read
        assert there() is not None
        pending.join_side_stream()
        assert there() is None
    (side, first), (second, back) = Stream.waited
    assert first is main is second
    assert side is back is not main
