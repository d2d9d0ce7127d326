"""What holds on a CPU holds on a GPU: the same maps, the model untouched, memory flat."""

import copy

import numpy as np
import pytest
import torch
import torchvision

import equicam
from equicam.recipe import Recipe
from equicam.runtime import graphs
from equicam.runtime.compile import traced
from equicam.runtime.executor import Executor
from equicam.runtime.pending import to_device
from tests.conftest import Cnn, Vit, assert_alive, light, methods_for, pictures, seeded

pytestmark = pytest.mark.gpu
NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1")}
EXACTLY = {"atol": 1e-9, "rtol": 0}


def cnn_on_gpu(dtype=torch.float64):
    return equicam.wrap(seeded(Cnn).to(dtype).cuda(), layer="trunk")


def assert_compiled(model, x, expected=None, atol=1e-9, **options):
    """Compiled it finds the expected map, or that of an eager call."""
    expected = equicam.explain(model, x, **options).map if expected is None else expected
    found = equicam.explain(model, x, compiled=True, **options)
    torch.testing.assert_close(found.map, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("kind", "method"), [(k, m) for k in NETS for m in methods_for(k) if (k, m) != ("vit", "opti-cam")]
)  # see test_method: it starts from rounding there
def test_a_gpu_finds_what_a_cpu_finds(kind, method):
    build, layer = NETS[kind]
    here = equicam.wrap(seeded(build), layer=layer)
    there = equicam.wrap(copy.deepcopy(here.module).cuda(), layer=layer)
    x = pictures(3)
    for fill in ("reflect", "zeros", "coverage"):
        one = equicam.explain(here, x, method=light(method), views=6, recipe=equicam.Recipe(fill=fill))
        two = equicam.explain(there, x, method=light(method), views=6, recipe=equicam.Recipe(fill=fill))
        assert two.map.is_cuda
        assert two.peum_score.is_cuda
        assert two.flags == one.flags
        for field in ("map", "raw", "peum", "view_confidence", "view_maps"):
            torch.testing.assert_close(getattr(two, field).cpu(), getattr(one, field), **EXACTLY)
    assert_alive(one.map)


def test_arrays_may_be_overwritten_when_they_are_sent():
    rng, device = np.random.default_rng(0), torch.device("cuda", 0)
    found, expected = [], []
    for count, side in ((8, 64), (8, 64), (3, 64), (9, 96), (2, 32)):
        arrays = [rng.standard_normal((3, side, side), np.float32) for _ in range(count)]
        expected.append(np.stack(arrays))
        found.append(to_device(arrays, device))
        for array in arrays:
            array.fill(np.nan)
    for one, other in zip(found, expected, strict=True):
        assert one.is_cuda
        np.testing.assert_array_equal(one.cpu().numpy(), other)


@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_agrees(compiled):
    model, x = cnn_on_gpu(torch.float32), pictures(4).float()
    exact = equicam.explain(model, x)
    half = equicam.explain(model, x, dtype=torch.bfloat16, compiled=compiled)
    assert_alive(exact.map)
    for a, b in zip(half.map.flatten(1), exact.map.flatten(1), strict=True):
        assert torch.corrcoef(torch.stack((a, b)))[0, 1] > 0.99


def test_the_gpu_is_left_as_it_was():
    model, x = cnn_on_gpu(), pictures(2)
    equicam.explain(model, x)
    before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    for _ in range(50):
        equicam.explain(model, x)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.cuda.memory_allocated() == before[1]


def test_a_full_gpu_halves_the_pass_and_goes_on(monkeypatch):
    # smaller groups may use other kernels, of which not every one takes TF32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = cnn_on_gpu(torch.float32), pictures(8, 256, 256).float()
    whole = equicam.explain(model, x, views=18)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(0.35 * 2**30 / total)
        tight = equicam.explain(model, x, views=18, max_views_per_forward=8 * 18)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(tight.map, whole.map, atol=1e-4, rtol=0)


def test_branches_of_a_graph_wait_for_each_other(monkeypatch):
    """What runs beside the map is read only when it is there: many calls, large enough for a race to show."""
    # not every kernel of a convolution takes TF32, and the compiled first one is another
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = cnn_on_gpu(torch.float32)
    for seed in range(30):
        x = pictures(8, 128, 128, seed=seed).float().cuda()
        fast = equicam.explain(model, x, compiled=True)
        exact = equicam.explain(model, x)
        for field in ("map", "peum", "peum_score", "view_maps"):
            torch.testing.assert_close(getattr(fast, field), getattr(exact, field), atol=1e-4, rtol=0)
    assert_alive(exact.map)


@pytest.fixture(params=["captured", "long"])
def compiled_call(request, monkeypatch):
    """A compiled call that is captured as a graph, and one that is too long to be."""
    if request.param == "long":
        monkeypatch.setattr(graphs, "LONG_VALUES", 0)


@pytest.mark.usefixtures("compiled_call")
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["equigrad-cam", "equigrad-cam+pcf", "equigrad-cam-out", "grad-cam"])
def test_a_captured_call_finds_what_an_eager_one_finds(kind, method):
    build, layer = NETS[kind]
    model = equicam.wrap(seeded(build).cuda(), layer=layer)
    earlier = equicam.explain(model, pictures(3), method=method, compiled=True)
    kept = earlier.map.clone()
    for seed in (1, 2, 3):  # the graph of the first serves the others
        x = pictures(3, seed=seed).to(memory_format=torch.channels_last)
        fast = equicam.explain(model, x, method=method, compiled=True)
        exact = equicam.explain(model, x, method=method)
        assert_alive(exact.map)
        fields = "map raw peum view_confidence view_maps confidence target view_kept view_flips"
        for field in fields.split():
            torch.testing.assert_close(getattr(fast, field), getattr(exact, field), **EXACTLY)
        assert fast.flags == exact.flags
    assert torch.equal(earlier.map, kept), "later calls leave earlier results alone"
    assert_compiled(model, x, method=method, target=[0, 1, 2])


@pytest.mark.usefixtures("compiled_call")
def test_a_captured_call_sees_new_weights_and_refuses_what_an_eager_one_does():
    model, x = cnn_on_gpu(), pictures(2)
    before = equicam.explain(model, x, compiled=True)
    with torch.no_grad():
        model.module.head.weight.neg_()
    assert_compiled(model, x)
    model.module.head = copy.deepcopy(model.module.head)
    with torch.no_grad():
        model.module.head.weight.neg_()
    assert_compiled(model, x, before.map)
    with pytest.raises(equicam.EquicamError, match="finite pixels"):
        equicam.explain(model, x / 0, compiled=True)
    with pytest.raises(equicam.EquicamError, match="classes from 0"):
        equicam.explain(model, x, compiled=True, target=99)
    with torch.no_grad():
        model.module.head.bias.fill_(torch.nan)
    with pytest.raises(equicam.EquicamError, match="finite class logits"):
        equicam.explain(model, x, compiled=True)


@pytest.mark.usefixtures("compiled_call")
def test_a_captured_call_sees_another_type_and_memory_format(monkeypatch):
    # in TF32 the kernels of another format round otherwise
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = cnn_on_gpu(torch.float32), pictures(2).float()
    exact = equicam.explain(model, x, compiled=True)
    assert_alive(exact.map)
    model.module.to(memory_format=torch.channels_last)
    assert_compiled(model, x, exact.map, 1e-4)
    model.module.half()
    assert_compiled(model, x, exact.map, 2e-2)


def test_a_captured_call_outlives_the_caches():
    model, x = cnn_on_gpu(), pictures(2)
    equicam.explain(model, x, compiled=True)
    graphs._kept.clear()
    junk = [torch.rand(17, 32, 32, 2, device="cuda") for _ in range(50)]
    assert_compiled(model, x)
    del junk


def test_all_angles_at_once_on_a_gpu_are_what_they_are_one_by_one():
    model, x = cnn_on_gpu(), pictures(3)
    asked = {"methods": ["grad-cam", "equigrad-cam"], "scores": ["eq", "peum"], "views": 4}
    there = equicam.evaluate(model, x, **asked).to_pylist()
    here = equicam.evaluate(equicam.wrap(seeded(Cnn), layer="trunk"), x, **asked).to_pylist()
    assert [r["value"] for r in there] == pytest.approx([r["value"] for r in here], abs=1e-8, nan_ok=True)


def test_the_widest_layer_is_measured_only_where_it_decides():
    model, sizes = cnn_on_gpu(), []
    model.module.register_forward_pre_hook(lambda _module, given: sizes.append(len(given[0])))
    equicam.explain(model, pictures(1, 224, 224))
    assert sizes == [18]
    equicam.explain(model, pictures(4, 224, 224))
    assert sizes == [18, 1, 72]


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_that_a_gpu_gets_ahead_are_those_that_it_gets_one_by_one_and_those_of_a_cpu(
    compiled, monkeypatch
):
    x = pictures(37)
    asked = {"methods": ["grad-cam", "equigrad-cam"], "scores": ["eq", "insertion", "stability"], "views": 4}
    model = cnn_on_gpu()
    # eager calls wait for the device anyway
    assert Executor(model, Recipe(compiled=compiled)).ahead == compiled
    ahead = equicam.evaluate(model, x, compiled=compiled, **asked).to_pylist()
    here = equicam.evaluate(equicam.wrap(seeded(Cnn), layer="trunk"), x, **asked).to_pylist()
    monkeypatch.setattr(Executor, "ahead", 0)
    one_by_one = equicam.evaluate(model, x, compiled=compiled, **asked).to_pylist()
    assert len({r["id"] for r in here}) == 37
    for name in ("id", "method", "score", "angle", "region", "reason"):
        assert [r[name] for r in ahead] == [r[name] for r in one_by_one] == [r[name] for r in here]
    for name in ("value", "floor"):
        rows_of = (ahead, one_by_one, here)
        a, b, c = ([float("nan") if r[name] is None else r[name] for r in rows] for rows in rows_of)
        # insertion ranks pixels, and rounding ranks equal ones
        ranked = [i for i, r in enumerate(here) if r["score"] == "insertion"]
        continuous = [i for i in range(len(here)) if i not in set(ranked)]
        assert ranked
        for some, same_device, another_device in ((continuous, 1e-12, 1e-8), (ranked, 1e-3, 1e-3)):
            found, expected, on_cpu = ([rows[i] for i in some] for rows in (a, b, c))
            assert found == pytest.approx(expected, abs=same_device, rel=0, nan_ok=True)
            assert found == pytest.approx(on_cpu, abs=another_device, nan_ok=True)


def test_a_captured_call_that_does_not_fit_is_run_in_groups_instead():
    """A capture needs its memory twice; when it runs out the same call runs eagerly, halved until it fits."""
    model, x = cnn_on_gpu(), pictures(64, 96, 96)
    expected = equicam.explain(model, x)
    assert_alive(expected.map)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + 600 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        assert_compiled(model, x, expected.map)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert_compiled(model, x[:2], expected.map[:2])


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_fused_convolutions_find_what_separate_ones_find(name, dtype, monkeypatch):
    """Also after a change of the weights; TF32, float16 and bf16 round each product, wherever it is computed."""
    fused, fuse = [], traced.fuse_convolutions

    def counted(graph):
        found = fuse(graph)
        kind = torch.ops.equicam.convolution_relu.default
        fused.append(sum(node.target is kind for node in graph.graph.nodes))
        return found

    monkeypatch.setattr(traced, "fuse_convolutions", counted)
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)().eval().cuda().to(memory_format=torch.channels_last)
    model = equicam.wrap(net, layer={"resnet18": "layer4", "vgg11": "features.19"}[name])
    x = torch.rand(2, 3, 96, 96)
    for change in (lambda: None, lambda: change_weights(net)):
        change()
        exact = equicam.explain(model, x, views=4, dtype=dtype)
        fast = equicam.explain(model, x, views=4, dtype=dtype, compiled=True)
        assert_alive(exact.map)
        for a, b in zip(fast.map.flatten(1), exact.map.flatten(1), strict=True):
            least = {None: 0.9999, torch.float16: 0.999, torch.bfloat16: 0.995}[dtype]
            assert torch.corrcoef(torch.stack((a, b)))[0, 1] > least
    (compiled,) = graphs._graphs_of(net).graphs.values()
    assert compiled.traced is not None
    # of 20 convolutions three are shortcuts; in bf16 the eight that end a residual block stay apart
    assert fused == [{"resnet18": 9 if dtype is torch.bfloat16 else 17, "vgg11": 8}[name]]


def change_weights(net):
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fused_convolution_reads_no_memory_that_nobody_wrote(dtype):
    """cuDNN's kernel also takes a residual; without one it is given the result's own memory, times zero."""
    torch.manual_seed(0)
    shape = (64, 128, 28, 28)
    sizes = (shape, (128, 128, 3, 3), (128,))
    x, weight, bias = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    weight = (weight / 30).contiguous(memory_format=torch.channels_last)
    torch.cuda.empty_cache()
    poison = [torch.full(shape, torch.nan, device="cuda", dtype=dtype) for _ in range(4)]
    torch.cuda.synchronize()
    del poison
    found = torch.ops.equicam.convolution_relu(x, weight, bias, None, [1, 1], [1, 1], [1, 1])
    exact = torch.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
    assert exact.std() > 0.01
    assert found.isfinite().all()
    assert (found - exact).norm() / exact.norm() < (1e-3 if dtype is torch.float32 else 1e-2)


@pytest.mark.usefixtures("compiled_call")
@pytest.mark.parametrize("method", ["score-cam", "rise-400"])
def test_compiled_predictions_of_masked_images_are_those_of_eager_ones(method):
    model, x = cnn_on_gpu(), pictures(3)
    expected = equicam.explain(model, x, method=method)
    assert_alive(expected.map)
    for _ in range(2):
        assert_compiled(model, x, expected.map, method=method)
    assert any(key[0] == "predict" for key in graphs._graphs_of(model.module).graphs)
    with torch.no_grad():
        model.module.head.weight.neg_()
    after = equicam.explain(model, x, method=method)
    assert not torch.allclose(after.map, expected.map, atol=1e-3)
    assert_compiled(model, x, after.map, method=method)
