"""What holds on a CPU holds on a GPU: the same maps, the model untouched, memory flat."""

import copy

import pytest
import torch

import equicam
from tests.conftest import Cnn, Vit, assert_alive, light, methods_for, pictures, seeded

pytestmark = pytest.mark.gpu
NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1")}


@pytest.mark.parametrize(
    ("kind", "method"), [(k, m) for k in NETS for m in methods_for(k) if (k, m) != ("vit", "opti-cam")]
)  # see test_method: it starts from rounding there
def test_a_gpu_finds_what_a_cpu_finds(kind, method):
    build, layer = NETS[kind]
    here = equicam.wrap(seeded(build), layer=layer)
    there = equicam.wrap(copy.deepcopy(here.module).cuda(), layer=layer)
    x = pictures(3)
    for fill in ("reflect", "zeros", "coverage"):
        one = equicam.explain(here, x, method=light(method), views=6, fill=fill)
        two = equicam.explain(there, x, method=light(method), views=6, fill=fill)
        assert two.map.is_cuda
        assert two.score.is_cuda
        assert two.flags == one.flags
        for field in ("map", "raw", "peum", "prob", "planes"):
            torch.testing.assert_close(getattr(two, field).cpu(), getattr(one, field), atol=1e-9, rtol=0)
    assert_alive(one.map)


def test_half_precision_agrees():
    net = seeded(Cnn).float().cuda()
    model, x = equicam.wrap(net, layer="trunk"), pictures(4).float()
    exact = equicam.explain(model, x)
    half = equicam.explain(model, x, dtype=torch.bfloat16)
    assert_alive(exact.map)
    for a, b in zip(half.map.flatten(1), exact.map.flatten(1), strict=True):
        assert torch.corrcoef(torch.stack((a, b)))[0, 1] > 0.99


def test_the_gpu_is_left_as_it_was():
    net = seeded(Cnn).cuda()
    model, x = equicam.wrap(net, layer="trunk"), pictures(2)
    equicam.explain(model, x)
    before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    for _ in range(50):
        equicam.explain(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.cuda.memory_allocated() == before[1]


def test_a_full_gpu_halves_the_pass_and_goes_on():
    net = seeded(Cnn).float().cuda()
    model, x = equicam.wrap(net, layer="trunk"), pictures(8, 256, 256).float()
    whole = equicam.explain(model, x, views=18)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(0.35 * 2**30 / total)
        tight = equicam.explain(model, x, views=18, chunk=8 * 18)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(tight.map, whole.map, atol=1e-4, rtol=0)
