"""Context: views cut from the surround of the input, and what must hold of them."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

import equicam
from equicam.core.transforms import Transform, canvas_size, margin_needed
from equicam.core.uncertainty import pearson
from equicam.core.views import Views, Window, crop_centre, rotate, transform_all
from equicam.demo import synthetic_patches
from equicam.errors import EquicamError
from equicam.explain import explain_batch
from equicam.models.images import preprocess_image, standard_preprocessing
from equicam.models.surround import preprocess_surround
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor

SIZE = (96, 96)


def scenes(count: int, side: int, seed: int = 3) -> torch.Tensor:
    """Random smooth scenes as large as the surround."""
    rng = np.random.default_rng(seed)
    planes = ndimage.gaussian_filter(rng.standard_normal((count, 3, side, side)), (0, 0, 3, 3))
    return torch.from_numpy(planes / planes.std()).float()


def preprocessed_by(preprocess):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    return equicam.wrap(net, layer="0", preprocess=preprocess)


@pytest.fixture(scope="module")
def model():
    return equicam.load("embedded")


def test_a_view_is_the_crop_of_the_transformed_scene():
    scene = scenes(2, 140).double()
    views = Views([0, 30, 90, Transform(20, mirrored=True), Transform(10, scale=0.9, shift=(0.05, -0.02))])
    assert views.act(scene, Window((82, 60))).shape == (5, 2, 3, 82, 60)
    square = views.act(scene, Window((80, 80)))
    for one, view in zip(views.transforms, square, strict=True):
        shift = (one.shift[0] * 80 / 140, one.shift[1] * 80 / 140)
        whole = transform_all(scene, [Transform(one.degrees, one.mirrored, one.scale, shift)])[0]
        torch.testing.assert_close(view, crop_centre(whole, (80, 80)), rtol=0, atol=1e-9)


def test_without_margin_context_changes_nothing_of_the_views():
    x = scenes(2, 96)
    torch.testing.assert_close(Views.evenly(6).act(x, Window(SIZE)), Views.evenly(6).act(x), rtol=0, atol=0)


@pytest.mark.parametrize("count", [3, 5, 6, 18])
@pytest.mark.parametrize("method", ["equigrad-cam-fine", "equigrad-cam-out"])
def test_the_theorem_for_every_number_of_views(model, count, method):
    """With full context and angles of the grid, the map of the rotated scene is the same function of the scene.

    Its pixels lie elsewhere, so the twin evaluates the aligned planes of the presented explanation at the rotated pixels.
    """
    scene = scenes(1, canvas_size(SIZE)[0])
    executor = Executor(model, Recipe(method=method, views=count, context="auto"))
    margin = [((scene.shape[-2] - 96) // 2,) * 2]
    presented = explain_batch(executor, scene, None, Window(SIZE), margin)
    assert presented.map.std() > 0.05
    angle = 360 / count
    rotated = explain_batch(executor, scene, presented.target, Window(SIZE, Transform(angle)), margin)
    # the same views in another order
    torch.testing.assert_close(rotated.view_maps.roll(1, 1), presented.view_maps, rtol=1e-4, atol=1e-5)
    planes = torch.nn.functional.interpolate(presented.view_maps[0][:, None], SIZE, mode="bilinear")[:, 0]
    if method.endswith("out"):
        low, high = planes.amin((-2, -1), keepdim=True), planes.amax((-2, -1), keepdim=True)
        planes = (planes - low) / (high - low)
    total, cover = np.zeros(SIZE), np.zeros(SIZE)
    y, x = np.mgrid[:96, :96] - 47.5
    for t, plane in enumerate(planes.double().numpy()):
        # pixel (x, y) of the rotated frame is at the place the view of t − 1 steps shows there
        theta = np.deg2rad(angle * (t - 1))
        cos, sin = np.cos(theta), np.sin(theta)
        places = np.stack([-x * sin + y * cos, x * cos + y * sin]) + 47.5
        for into, values in ((total, plane), (cover, np.ones(SIZE))):
            into += ndimage.map_coordinates(np.pad(values, 1), places + 1, order=1, mode="constant") / count
    expected = torch.from_numpy(np.divide(total, cover, out=np.zeros(SIZE), where=cover > 0))
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    inside = cover > 1e-6
    difference = (rotated.map[0].double() - expected).abs()[torch.from_numpy(inside)]
    assert difference.max() < 2e-4, difference.max()


def test_context_is_more_equivariant_than_reflection(model):
    scene = scenes(6, canvas_size(SIZE)[0], seed=5)
    x, margins = crop_centre(scene, SIZE).contiguous(), [(20, 20)] * 6
    found = {}
    for name, recipe in (("reflect", Recipe(views=12)), ("context", Recipe(views=12, context="auto"))):
        executor, eq = Executor(model, recipe), []
        window = None if name == "reflect" else Window(SIZE)
        base = explain_batch(
            executor, x if window is None else scene, None, window, margins if window else ()
        )
        for angle in (15, 45, 135):
            if window is None:
                other = explain_batch(executor, rotate(x, angle), base.target)
            else:
                other = explain_batch(executor, scene, base.target, Window(SIZE, Transform(angle)), margins)
            eq.append(pearson(other.map[:, None], rotate(base.map, angle)[:, None], "disc").mean())
        found[name] = float(torch.stack(eq).mean())
    assert 1 - found["context"] < 0.75 * (1 - found["reflect"])
    assert found["context"] > 0.98


@pytest.mark.parametrize("size", [(640, 480), (480, 641), (300, 300), (257, 256), (224, 400)])
def test_the_middle_of_the_surround_is_the_input(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor
    from torchvision.transforms._presets import ImageClassification

    steps = [Resize(256), CenterCrop(224), ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)]
    made = (
        standard_preprocessing(256, 224, (0.5,) * 3, (0.5,) * 3),
        Compose(steps),
        ImageClassification(crop_size=224, resize_size=232),
        lambda given: ToTensor()(given.resize((224, 224))),
    )
    for preprocess in made:
        model = preprocessed_by(preprocess)
        found = preprocess_surround(model, image)
        assert found.whole.shape == (3, 318, 318)
        assert found.size == (224, 224)
        assert torch.equal(crop_centre(found.whole, found.size), preprocess_image(model, image))
        if preprocess is made[-1]:
            assert found.margin == (0, 0)
        else:
            assert max(found.margin) >= 4


def test_the_margin_that_views_need():
    assert margin_needed(Views.evenly(4).transforms, (224, 224)) == (0, 0)
    assert margin_needed(Views.evenly(8).transforms, (224, 224)) == (47, 47)
    assert canvas_size((224, 224)) == (318, 318)
    assert canvas_size((7, 7)) == (11, 11)
    assert margin_needed(Views.shifts((0.1, 0)).transforms, (100, 100)) == (0, 10)


def test_edges_are_flagged(model):
    found = equicam.explain(model, synthetic_patches(2), views=6, context="auto")
    assert all("edge" in flags for flags in found.flags)  # its preprocessing crops nothing
    scene = scenes(2, canvas_size(SIZE)[0])
    inner = scene[..., 6:-6, 6:-6]
    for given, views, edge in ((scene, 6, False), (inner, 6, True), (inner, 4, False)):
        found = equicam.explain(model, given, views=views, window=96)
        assert ["edge" in flags for flags in found.flags] == [edge] * 2


def test_what_is_refused(model):
    scene = scenes(1, 138)
    with pytest.raises(EquicamError, match="window needs at least 2 and at most 138×138"):
        equicam.explain(model, scene, window=200)
    with pytest.raises(EquicamError, match="window needs a tensor"):
        equicam.explain(model, Image.new("RGB", (200, 200)), window=96)
    with pytest.raises(EquicamError, match="context needs one of none, auto"):
        equicam.explain(model, scene, context="some")
    with pytest.raises(EquicamError, match="context needs none: the authors'"):
        equicam.explain(model, scene, window=96, recipe=equicam.Recipe(protocol="paper"))


@pytest.mark.parametrize("later", ["resize", "pad", "standardise"])
def test_a_step_after_the_crop_that_depends_on_it_leaves_no_margin(later):
    from torchvision.transforms import CenterCrop, Compose, Lambda, Pad, Resize, ToTensor

    after = {"resize": Resize(96), "pad": Pad(4), "standardise": Lambda(lambda given: given)}[later]
    last = [ToTensor()] + [Lambda(lambda x: (x - x.mean()) / x.std())] * (later == "standardise")
    model = preprocessed_by(Compose([Resize(256), CenterCrop(160), after, *last]))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    found = preprocess_surround(model, image)
    assert found.margin == (0, 0)
    assert torch.equal(crop_centre(found.whole, found.size), preprocess_image(model, image))


def test_a_crop_of_a_tensor_has_a_margin_too():
    from torchvision.transforms import v2

    steps = [v2.PILToTensor(), v2.CenterCrop(96), v2.ToDtype(torch.float32, scale=True)]
    model = preprocessed_by(v2.Compose(steps))
    assert preprocess_surround(model, Image.new("RGB", (200, 150))).margin == (20, 20)


def test_narrow_inputs_are_reflected_again_and_again():
    from torchvision.transforms import Compose, Resize, ToTensor

    model = preprocessed_by(Compose([Resize((8, 128)), ToTensor()]))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    found = preprocess_surround(model, image)
    expected = np.pad(preprocess_image(model, image).numpy(), ((0, 0), (61, 61), (1, 1)), mode="reflect")
    assert found.whole.shape == expected.shape
    np.testing.assert_array_equal(found.whole.numpy(), expected)


def test_full_context_has_no_flag_of_coverage(model):
    found = equicam.explain(model, scenes(2, canvas_size(SIZE)[0]), views=18, window=96)
    assert not any({"low-coverage", "edge"} & flags for flags in found.flags)


def test_lists_and_tensors_without_a_window_are_refused(model):
    image = Image.new("RGB", (120, 120))
    with pytest.raises(
        EquicamError, match="images needs a tensor, arrays of 8-bit pixels, PIL images or paths"
    ):
        equicam.explain(model, [preprocess_surround(model, image), image], context="auto")
    with pytest.raises(EquicamError, match=r"context needs images, .* or a window"):
        equicam.explain(model, scenes(1, 96), context="auto")
