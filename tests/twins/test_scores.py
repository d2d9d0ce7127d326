"""Every metric against SciPy, scikit-image, torchvision or a plain loop."""

import math
from functools import partial
from importlib import import_module
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy import stats as scipy_stats
from skimage.metrics import structural_similarity
from torchvision.transforms.v2.functional import gaussian_blur

import equicam
from equicam.core.chain import Chain, grad_cam, grad_cam_rectified, layer_cam
from equicam.core.uncertainty import correlate_views
from equicam.core.views import Views, disc, rotate, transform_all
from equicam.evaluate import causal, controls, faithfulness, localisation, metrics
from equicam.evaluate.batch import Predictions
from equicam.evaluate.equivariance import (
    ANGLES,
    GROUPS,
    LayerTrace,
    equivariance,
    mean_where,
    stages,
    weighted_mean,
)
from equicam.evaluate.faithfulness import gaussian
from equicam.evaluate.rows import ReasonCode
from equicam.evaluate.similarity import MEASURES, _ranks, compare_planes, ssim
from equicam.protocol import OURS, PAPER
from tests.conftest import Cnn, assert_alive, seeded

SIZE, OTHERS = 28, ("dihedral", "scale", "shift")


def planes(count: int, seed: int = 0, size: int = SIZE) -> torch.Tensor:
    """Rectified smooth planes in [0, 1] with plateaus of zeros, as maps are."""
    made = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 1, 5, 5, generator=made, dtype=torch.float64)
    large = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=True)
    found = large[:, 0].relu()
    found = found / found.amax((-2, -1), keepdim=True)
    assert_alive(found)
    assert (found == 0).flatten(1).double().mean(1).min() > 0.05
    return found


def picked(plane: torch.Tensor | np.ndarray, region: str, radius: float = 1.0) -> np.ndarray:
    inside = np.ones((SIZE, SIZE), bool)
    if region == "disc":
        y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
        inside = np.hypot(y, x) <= radius * SIZE / 2
    return np.asarray(plane)[inside]


def warp(plane: torch.Tensor | np.ndarray, one) -> np.ndarray:
    """A plane flipped, rotated, scaled and shifted by SciPy; outside by reflection about the border pixels."""
    middle = (SIZE - 1) / 2
    y, x = np.mgrid[:SIZE, :SIZE] - middle
    y, x = y - one.shift[1] * SIZE, x - one.shift[0] * SIZE
    cos, sin = np.cos(np.deg2rad(one.degrees)), np.sin(np.deg2rad(one.degrees))
    y, x = (x * sin + y * cos) / one.scale, (x * cos - y * sin) / one.scale
    y = -y if one.mirrored else y
    return ndimage.map_coordinates(np.asarray(plane), (y + middle, x + middle), order=1, mode="mirror")


REFERENCES = {
    "pearson": lambda a, b: scipy_stats.pearsonr(a, b)[0],
    "spearman": lambda a, b: scipy_stats.spearmanr(a, b)[0],
    "cosine": lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
}


@pytest.mark.parametrize("region", ["disc", "full"])
@pytest.mark.parametrize("name", REFERENCES)
def test_similarity_is_scipys(name, region):
    a, b = planes(3), planes(2, seed=1)
    expected = [[REFERENCES[name](picked(p, region), picked(q, region)) for q in b] for p in a]
    assert compare_planes(a, b, name, region)[0].numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_ssim_is_scikit_images_and_in_the_disc_uses_windows_inside_it_only():
    a, b = planes(2), planes(2, seed=1)
    disc_, full = ssim(a, b, "disc"), ssim(a, b, "full")
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    windows = np.lib.stride_tricks.sliding_window_view(np.hypot(y, x) <= SIZE / 2, (7, 7)).all((2, 3))
    assert windows.sum() > 50
    for i, j in product(range(2), repeat=2):
        expected, each = structural_similarity(a[i].numpy(), b[j].numpy(), data_range=1.0, full=True)
        assert full[i, j].item() == pytest.approx(expected, abs=1e-12)
        assert disc_[i, j].item() == pytest.approx(each[3:-3, 3:-3][windows].mean(), abs=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_constant_maps_count_zero(measure):
    a = planes(2)
    a[1] = 0.37
    found, *constant = compare_planes(a, a, measure, "full")
    assert [one.tolist() for one in constant] == [[False, True]] * 2
    assert found[0, 0].item() == pytest.approx(1)
    assert found[0, 1] == found[1, 0] == found[1, 1] == 0


def test_ranks_share_ties():
    values = torch.tensor([[3.0, 1.0, 3.0, 0.0, 3.0, 1.0]], dtype=torch.float64)
    assert _ranks(values)[0].tolist() == scipy_stats.rankdata(values[0].numpy()).tolist()


def assert_is_the_loop(found, moved, references, region, radius=1.0, close=1e-12):
    """Eq and floor of every presentation and image, one correlation after the other."""
    for a, reference in enumerate(references):
        for i, plane in enumerate(moved[a]):
            own = picked(plane, region, radius)
            others = [picked(one, region, radius) for one in reference]
            each = [scipy_stats.pearsonr(own, other)[0] if own.std() else 0.0 for other in others]
            assert found.value[a, i].item() == pytest.approx(each[i], abs=close)
            assert found.floor[a, i].item() == pytest.approx(np.mean(np.delete(each, i)), abs=close)


@pytest.mark.parametrize("fill", ["reflect", "zeros"])
@pytest.mark.parametrize("region", ["disc", "full"])
def test_equivariance_is_the_loop(region, fill):
    presented, rotated = planes(3), torch.stack([planes(3, seed=s) for s in (1, 2)])
    rotated[1, 2] = 0
    found = equivariance(rotated, presented, (30, 90), region=region, fill=fill)
    references = [[rotate(plane, angle, fill=fill) for plane in presented] for angle in (30, 90)]
    assert_is_the_loop(found, rotated, references, region)
    assert found.constant.tolist() == [[False] * 3, [False, False, True]]


def test_regions_are_lent_by_the_nearest_unrelated_image():
    groups = ["a", "a", "b", None, "b", "a", None]
    n, x = len(groups), torch.zeros(len(groups), 1)
    unrelated = [
        [i != j and (a is None or a != b) for j, b in enumerate(groups)] for i, a in enumerate(groups)
    ]
    wanted = [next(j % n for j in range(i - 1, i - n, -1) if unrelated[i][j % n]) for i in range(n)]
    assert causal._lenders(torch.tensor(unrelated), x).tolist() == wanted
    assert causal._lenders(None, x).tolist() == [6, 0, 1, 2, 3, 4, 5]
    assert causal._lenders(torch.zeros(2, 2, dtype=torch.bool), x[:2]).tolist() == [0, 1]  # nobody lends


@pytest.mark.parametrize("region", ["disc", "full"])
@pytest.mark.parametrize(("group", "radius"), [("dihedral", 1.0), ("scale", 0.8), ("shift", 0.8)])
def test_equivariance_under_other_groups_is_the_loop(group, radius, region):
    presented, group = planes(3), GROUPS[group]
    moved = torch.stack([planes(3, seed=10 + s) for s in range(len(group))])
    found = equivariance(moved, presented, group, region=region)
    pixels = len(picked(presented[0], region, radius))
    assert 300 < pixels < SIZE**2 or region == "full"
    references = [[warp(plane, one) for plane in presented] for one in group]
    assert min(np.abs(one[0] - presented[0].numpy()).max() for one in references) > 0.05
    assert_is_the_loop(found, moved, references, region, radius, close=1e-9)
    assert not found.constant.any()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("group", ["scale", "shift"])
def test_pixels_that_a_presentation_does_not_show_do_not_count(group, measure):
    presented, group = planes(2), GROUPS[group]
    moved = transform_all(presented, group) ** 2
    inside = disc((SIZE, SIZE), moved.device, 0.8)
    elsewhere, outside = torch.where(inside, moved, 1 - moved), torch.where(inside, 0.3, moved)
    assert_alive(moved.flatten(0, 1), elsewhere.flatten(0, 1))
    assert outside.flatten(2).std(2).min() > 0.01
    eq = partial(equivariance, presented=presented, presentations=group, measure=measure)
    found, same = eq(moved), eq(elsewhere)
    assert torch.equal(found.value, same.value)
    assert torch.equal(found.floor, same.floor)
    assert (eq(moved, region="full").value - eq(elsewhere, region="full").value).abs().min() > 1e-3
    assert eq(outside).constant.all()


def test_a_perfectly_equivariant_map_scores_one_and_a_lone_image_has_no_floor():
    presented = planes(1)
    rotated = torch.stack([rotate(presented, a) for a in ANGLES])
    found = equivariance(rotated, presented, ANGLES)
    assert found.value.min() > 1 - 1e-12
    assert found.floor.isnan().all()
    # under the authors' zero filling even a perfect map does not reach 1 over the full square
    assert equivariance(rotated, presented, ANGLES, region="full", fill="zeros").value.mean() < 0.97


def test_zero_filling_rewards_noise_and_the_disc_does_not():
    """Independent noise in every view: nothing is shared, and yet the zero-filled average scores above .7."""
    made = torch.Generator().manual_seed(0)
    views, count = Views.evenly(18), 24
    chain = Chain(grad_cam, (224, 224))

    def averaged(fill):
        noise = torch.rand(18, count, 7, 7, generator=made, dtype=torch.float64)
        return chain.trace("combined", [views.align(noise, fill).mean(0)])["map"]

    def score(fill, region):
        rotated, presented = averaged(fill)[None], averaged(fill)
        return equivariance(rotated, presented, (45,), region=region, fill="zeros").value.mean()

    assert score("zeros", "full") > 0.7
    assert abs(score("reflect", "disc")) < 0.25


def test_the_coverage_map_scores_090_under_the_published_protocol():
    ones = torch.ones(1, 224, 224, dtype=torch.float64)
    cover = controls.coverage_map(Views.evenly(18), (7, 7), (224, 224), like=ones)
    maps = controls.times_coverage(ones, cover)
    published = equivariance(maps.expand(7, 1, -1, -1), maps, ANGLES, region="full", fill="zeros")
    assert published.value.mean().item() == pytest.approx(0.904, abs=0.002)
    clean = equivariance(maps.expand(7, 1, -1, -1), maps, ANGLES)
    assert clean.value.mean().item() == pytest.approx(0.515, abs=0.003)


FIRST, SECOND = (
    [[0.7, 0.2, 0.1], [0.35, 0.45, 0.2], [0.9, 0.1, 0]],
    [[0.3, 0.4, 0.3], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]],
)
PROBS = torch.tensor([FIRST, SECOND]).swapaxes(0, 1)  # of two images
TARGET = torch.tensor([0, 1])


def test_conditions_by_hand():
    found = Predictions(PROBS, TARGET)
    assert found.consistent.tolist() == [[False, True], [True, False]]
    assert torch.allclose(found.confidence_kept, torch.tensor([[0.5, 1.0], [1.0, 0.5]]))
    of_any = Predictions(PROBS, TARGET, kept_is_of_any_class=True).confidence_kept
    assert torch.allclose(of_any, torch.tensor([[0.45, 0.8], [0.9, 0.6]]))
    value = torch.tensor([[0.2, 0.4], [0.8, 0.6]])
    assert torch.allclose(mean_where(value, found.consistent), torch.tensor([0.8, 0.4]))
    assert mean_where(value, torch.zeros(2, 2, dtype=torch.bool)).isnan().all()
    weighted = torch.tensor([(0.1 + 0.8) / 1.5, (0.4 + 0.3) / 1.5])
    assert torch.allclose(weighted_mean(value, found.confidence_kept), weighted)
    assert found.flip_rate.tolist() == [0.5, 0.5]
    expected = torch.tensor([(0.5 + 1 - 9 / 7) / 2, (1 - 2 + 0.5) / 2], dtype=torch.float64)
    assert torch.allclose(Predictions(PROBS.double(), TARGET).confidence_drop, expected)


def test_the_blur_is_torchvisions():
    x = torch.randn(2, 3, 64, 80, dtype=torch.float64)
    assert torch.allclose(gaussian(x, 10.0, reach=25), gaussian_blur(x, [51, 51], [10.0, 10.0]), atol=1e-12)
    small = torch.randn(1, 3, 8, 8, dtype=torch.float64)  # the kernel is wider than the image
    assert gaussian(small, 10.0, reach=25).std() < small.std()


def bright(x: torch.Tensor) -> torch.Tensor:
    """A model whose class-0 probability is a smooth function of the pixels."""
    z = (x * torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).view(x.shape[1:])).sum((1, 2, 3)) / 40
    return torch.stack((z.sigmoid(), 1 - z.sigmoid()), 1)


@pytest.mark.parametrize("whole_pixels", [False, True])
@pytest.mark.parametrize("kind", ["insertion", "deletion"])
def test_insertion_and_deletion_are_the_loop(kind, whole_pixels):
    x, maps = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), planes(2)
    target = torch.tensor([0, 1])
    found = faithfulness.curve(bright, x, maps, target, kind, whole_pixels=whole_pixels)
    blur = gaussian_blur(x, [51, 51], [10.0, 10.0]) if SIZE > 25 else None
    for i in range(2):
        order = np.argsort(-maps[i].numpy().ravel(), kind="stable")
        expected = []
        for s in range(21):
            many = s * (SIZE * SIZE // 20) if whole_pixels else round(s * SIZE * SIZE / 20)
            image = (blur if kind == "insertion" else x)[i].clone().reshape(3, -1)
            image[:, order[:many]] = (x if kind == "insertion" else blur)[i].reshape(3, -1)[:, order[:many]]
            expected.append(bright(image.view(1, 3, SIZE, SIZE))[0, target[i]].item())
        assert np.ptp(expected) > 0.05
        assert found[i].tolist() == pytest.approx(expected, abs=1e-12)
        for steps in (20, 21):
            area = faithfulness.area(found, steps)[i].item()
            assert area == pytest.approx(np.trapezoid(expected, dx=1 / steps), abs=1e-12)


def test_a_curve_that_stays_at_one_scores_one_or_the_published_0952_and_equal_pixels_keep_reading_order():
    ones = torch.ones(1, 21)
    assert faithfulness.area(ones).item() == pytest.approx(1)
    assert faithfulness.area(ones, PAPER.curve_divisor).item() == pytest.approx(20 / 21)
    assert faithfulness._pixel_ranks(torch.zeros(1, 2, 3))[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_drift_and_agreement_regions_by_sorting():
    h, back = planes(2), planes(2, seed=5)
    streams = [torch.Generator().manual_seed(s) for s in (1, 2)]
    found = causal._regions(h, back, "disc", streams)
    valid = disc((SIZE, SIZE), h.device)
    count = round(0.1 * int(valid.sum()))
    for i in range(2):
        for name, value in (("drift", (h - back).abs()), ("agreement", torch.minimum(h, back))):
            flat = np.where(valid.numpy(), value[i].numpy(), -1).ravel()
            largest = sorted(np.argsort(-flat, kind="stable")[:count])
            assert largest == np.flatnonzero(found[name][i]).tolist()
        for name, mask in found.items():
            assert not (mask[i] & ~valid).any(), name
            assert abs(int(mask[i].sum()) - count) <= 0.12 * count, name
        drift, same = found["drift"][i], found["same-saliency"][i]
        assert not (drift & same).any()
        others = [h[i][m].mean() for m in (found["scattered"][i], found["agreement"][i])]
        gap = (h[i][same].mean() - h[i][drift].mean()).abs()
        assert gap < 0.02
        assert gap < min((o - h[i][drift].mean()).abs() for o in others)
    assert torch.equal(found["drift-of-another"], found["drift"].roll(1, 0))
    assert not torch.equal(found["drift-elsewhere"], found["drift"])


@pytest.mark.parametrize(
    ("protocol", "group"),
    [(PAPER, (30, 180)), *((OURS, g) for g in ((30, 180), *(GROUPS[name][-2:] for name in OTHERS)))],
)
def test_occlusion_is_the_loop(protocol, group):
    x, target = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), torch.tensor([0, 1])
    maps = torch.stack([planes(2, seed=s) for s in range(3)])
    found = causal.occlusion(bright, x, maps, group, target, seeds=[4, 5], protocol=protocol)
    assert set(found.presented) == set(causal.CONTROLS if protocol.causal_controls else causal.UNCONTROLLED)
    streams = [torch.Generator().manual_seed(s) for s in (4, 5)]
    carry, views = partial(transform_all, fill=protocol.causal_fill), Views(group)
    outside = ~disc((SIZE, SIZE), x.device, views.radius)
    for a, (one, inverse) in enumerate(zip(views.transforms, views.inverses, strict=True)):
        moved, aligned = transform_all(x, [one])[0], carry(maps[a + 1], [inverse])[0]
        where = (protocol.region, streams, views.radius)
        masks = causal._regions(maps[0], aligned, *where, controls=protocol.causal_controls)
        for name, mask in masks.items():
            assert mask.any()
            assert protocol.region == "full" or not (mask & outside).any()
            for i in range(2):
                carried = carry(mask[i].double(), [one])[0]
                carried = carried if protocol.soft_masks else (carried >= 0.5).double()
                own = mask[i].double()
                for drops, image, hide in ((found.presented, x[i], own), (found.rotated, moved[i], carried)):
                    blurred = gaussian_blur(image[None], [51, 51], [10.0, 10.0])[0]
                    hidden = image * (1 - hide) + blurred * hide
                    before, after = (bright(v[None])[0, target[i]].item() for v in (image, hidden))
                    assert drops[name][a, i].item() == pytest.approx(before - after, abs=1e-12)
    assert max(v.abs().max() for v in found.presented.values()) > 1e-3


def test_occlusion_skips_constant_maps_and_a_lone_image_has_no_other():
    x, target = torch.randn(1, 3, SIZE, SIZE, dtype=torch.float64), torch.tensor([0])
    maps = torch.stack([planes(1), planes(1, seed=1), torch.zeros(1, SIZE, SIZE, dtype=torch.float64)])
    found = causal.occlusion(bright, x, maps, (30, 90), target, seeds=[1])
    assert found.presented["drift"][:, 0].isnan().tolist() == [False, True]
    assert found.presented["drift-of-another"].isnan().all()


def test_the_label_disc_of_patchcamelyon():
    """A box of 85.33 pixels in 224: the disc of equal area has radius 48.14 and holds .1451 of the image."""
    side = 256 / 3
    edge = torch.arange(224, dtype=torch.float64) - (224 - side) / 2
    profile = edge.clamp(-1, 0) + 1 - (edge - side + 1).clamp(0, 1)
    soft = profile.clamp(0, 1)[:, None] * profile.clamp(0, 1)[None]
    assert soft.sum().sqrt().item() == pytest.approx(side, abs=0.01)
    round_ = localisation.disc_of_equal_area(soft)
    assert math.sqrt(round_.sum().item() / math.pi) == pytest.approx(48.14, abs=0.1)
    assert round_.double().mean().item() == pytest.approx(0.1452, abs=0.0003)
    cover = controls.coverage_map(Views.evenly(18), (7, 7), (224, 224), like=soft)
    null = controls.times_coverage(torch.ones_like(soft), cover)
    assert localisation.energy(cover, round_).item() == pytest.approx(0.164, abs=0.001)
    assert localisation.energy(null, round_).item() == pytest.approx(0.172, abs=0.001)
    assert localisation.energy(torch.zeros_like(soft), round_).isnan()


def test_boxes_by_hand():
    plane = torch.zeros(10, 12)
    plane[2:5, 3:9] = 0.5  # the larger part
    plane[5, 9] = 0.9  # touches it only at a corner
    plane[8, 1] = 1.0  # the maximum, a part of one pixel
    assert localisation._saliency_box(plane) == (3.0, 2.0, 9.0, 5.0)
    assert localisation._saliency_box(torch.zeros(4, 4)) is None
    assert localisation._overlap((0.0, 0.0, 4.0, 4.0), (2.0, 2.0, 6.0, 6.0)) == pytest.approx(4 / 28)
    assert localisation._overlap((0.0, 0.0, 1.0, 1.0), (5.0, 5.0, 6.0, 6.0)) == 0
    mask = torch.zeros(10, 12, dtype=torch.bool)
    mask[2:5, 3:9] = True
    assert localisation._boxes(mask.int().numpy()) == [(3.0, 2.0, 9.0, 5.0)]
    assert localisation._boxes(torch.zeros_like(mask).int().numpy()) == []
    there = torch.zeros_like(mask)
    there[8, 1] = True
    assert localisation._pointing(plane, torch.stack((mask, there)))
    assert not localisation._pointing(plane, mask[None])


def test_disagreement_is_the_mean_over_pairs():
    maps = torch.stack([planes(2, seed=s) for s in range(4)])
    found = correlate_views(maps, "disc").disagreement
    for i in range(2):
        pairs = combinations([picked(one, "disc") for one in maps[:, i]], 2)
        expected = np.mean([1 - scipy_stats.pearsonr(*pair)[0] for pair in pairs])
        assert found[i].item() == pytest.approx(expected, abs=1e-12)


def test_calibration_compares_in_the_presented_frame():
    """Drift at one place of the presented frame, and PEUM at the same place: near 1 at any angle."""
    still = planes(2)
    spot = torch.zeros_like(still)
    spot[:, 8:14, 15:20] = torch.linspace(0.1, 1, 30, dtype=torch.float64).view(6, 5)
    rotated = torch.stack([rotate(still + spot.sqrt(), a) for a in (90, 180)])
    maps = torch.cat((still[None], rotated))
    assert metrics.calibration(spot, maps, (90, 180), "disc").min() > 0.999
    elsewhere = rotate(spot, 90)
    assert metrics.calibration(elsewhere, maps, (90, 180), "disc").max() < 0.5
    assert metrics.calibration(torch.zeros_like(spot), maps, (90, 180), "disc").isnan().all()


@pytest.mark.parametrize("group", OTHERS)
def test_calibration_under_other_groups_is_the_loop(group):
    maps, peum = torch.stack([planes(2, seed=s) for s in range(3)]), planes(2, seed=9)
    views = Views(GROUPS[group][-2:])
    found = metrics.calibration(peum, maps, views.transforms, "disc")
    aligned = [transform_all(m, [one])[0] for m, one in zip(maps[1:], views.inverses, strict=True)]
    for i in range(2):
        drift = np.mean([(m[i] - maps[0, i]).numpy() ** 2 for m in aligned], axis=0)
        pair = (picked(of, "disc", views.radius) for of in (peum[i], drift))
        assert np.std(drift) > 0.01
        assert found[i].item() == pytest.approx(scipy_stats.spearmanr(*pair)[0], abs=1e-9)


OPTIONS = {"target": torch.tensor([0, 1, 0]), "size": (24, 24)}


def trace(seed: int, *, same: bool = False) -> LayerTrace:
    made = torch.Generator().manual_seed(seed)
    acts, grads = (torch.randn(3, 4, 6, 6, generator=made, dtype=torch.float64) for _ in range(2))
    acts[:, 3] = 0  # a dead channel
    grads = grads.mean((-2, -1), keepdim=True).expand_as(grads) if same else grads
    return LayerTrace(acts, grads, torch.randn(3, 5, generator=made, dtype=torch.float64))


@pytest.mark.parametrize("combine", [grad_cam, grad_cam_rectified, layer_cam])
def test_stages_are_the_loop(combine):
    before, after = trace(1), trace(2)
    found = stages(before, [after], (30,), combine, **OPTIONS)
    y, x = np.mgrid[:6, :6] - 2.5
    inside = np.hypot(y, x) <= 3

    def r(a, b):
        return scipy_stats.pearsonr(a.numpy()[inside], b.numpy()[inside])[0]

    def cos(a, b):
        return (a @ b / a.norm() / b.norm()).item()

    def at(stage, i, j):
        if stage in ("activations", "gradients"):
            a, b = (getattr(t, stage) for t in (after, before))
            live = range(3) if stage == "activations" else range(4)
            return np.mean([r(a[i, k], rotate(b[j, k], 30)) for k in live])
        if stage == "pooled-cosine":
            return cos(after.activations[i].mean((1, 2)), before.activations[j].mean((1, 2)))
        if stage == "logits-cosine":
            return cos(after.logits[i], before.logits[j])
        if stage.startswith("weights"):
            a, b = (g.mean((1, 2)) for g in (after.gradients[i], before.gradients[j]))
            a, b = (a.relu(), b.relu()) if combine is grad_cam_rectified else (a, b)
            return cos(a, b) if stage == "weights-cosine" else np.corrcoef(a, b)[0, 1]
        planes_ = [combine(t.activations, t.gradients) for t in (after, before)]
        planes_ = [p.relu() for p in planes_] if stage != "combined" else planes_
        if stage in ("upsampled", "map"):
            enlarge = partial(torch.nn.functional.interpolate, size=(24, 24), mode="bilinear")
            a, b = (enlarge(p[:, None])[:, 0] for p in planes_)
            round_ = disc((24, 24), a.device).numpy()
            return scipy_stats.pearsonr(a[i].numpy()[round_], rotate(b[j], 30).numpy()[round_])[0]
        return r(planes_[0][i], rotate(planes_[1][j], 30))

    assert ("weights" in found) == (combine is not layer_cam)
    for stage, eq in found.items():
        for i in range(3):
            assert eq.value[0, i].item() == pytest.approx(at(stage, i, i), abs=1e-10), stage
            # a class has the same weights in any image: only another class is unrelated
            same = OPTIONS["target"] if stage.startswith("weights") else torch.arange(3)
            others = np.mean([at(stage, i, j) for j in range(3) if same[j] != same[i]])
            assert eq.floor[0, i].item() == pytest.approx(others, abs=1e-10), stage


def test_a_constant_gradient_has_no_eq_and_a_reason():
    found = stages(trace(1, same=True), [trace(2, same=True)], (30,), grad_cam, **OPTIONS)
    assert found["gradients"].value.isnan().all()
    assert found["gradients"].reason == ReasonCode.CONSTANT_GRADIENT
    assert found["activations"].reason is None


def test_the_published_reference_is_rectified_after_rotation():
    before, after = trace(1), trace(2)
    find = partial(stages, before, [after], (30,), grad_cam, region="full", fill="zeros", **OPTIONS)
    clean, theirs = find(), find(rectify_last=True)
    assert torch.equal(clean["combined"].value, theirs["combined"].value)
    assert not torch.equal(clean["rectified"].value, theirs["rectified"].value)
    reference = rotate(grad_cam(before.activations, before.gradients)[0], 30, fill="zeros").relu()
    own = grad_cam(after.activations, after.gradients)[0].relu()
    expected = np.corrcoef(own.flatten(), reference.flatten())[0, 1]
    assert theirs["rectified"].value[0, 0].item() == pytest.approx(expected, abs=1e-12)


def test_one_undefined_map_leaves_the_others_their_floors():
    presented, rotated = planes(3), planes(3, seed=1)[None].clone()
    rotated[0, 1] = torch.nan
    found = equivariance(rotated, presented, (90,))
    assert found.value[0].isnan().tolist() == [False, True, False]
    assert found.floor[0].isnan().tolist() == [False, True, False]
    presented[2] = torch.nan
    assert equivariance(rotated, presented, (90,)).floor[0].isnan().tolist() == [False, True, False]


def test_a_flat_map_lends_no_region():
    x, target = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64), torch.tensor([0, 1, 0])
    maps = torch.stack([planes(3), planes(3, seed=1)])
    maps[0, 0] = 0
    found = causal.occlusion(bright, x, maps, (30,), target, seeds=[1, 2, 3])
    assert found.presented["drift"][0].isnan().tolist() == [True, False, False]
    assert found.presented["drift-of-another"][0].isnan().tolist() == [True, True, False]


def test_almost_constant_maps_have_no_ranks():
    a = planes(2)
    a[1] = 0.5 + 1e-10 * torch.randn(SIZE, SIZE, dtype=torch.float64)
    assert compare_planes(a, a, "spearman", "full")[0][1].tolist() == [0, 0]


def test_pixels_of_the_same_saliency_are_found_as_by_trying_every_window():
    h, valid = planes(3), disc((SIZE, SIZE), torch.device("cpu"))
    count = round(0.1 * int(valid.sum()))
    region = causal._largest(planes(3, seed=9), valid, count)
    found = causal._same_saliency(h, region, valid)
    for i in range(3):
        free = sorted(h[i][valid & ~region[i]].tolist())
        goal = h[i][region[i]].mean().item()
        means = [np.mean(free[s : s + count]) for s in range(len(free) - count + 1)]
        best = min(means, key=lambda mean: abs(mean - goal))
        assert h[i][found[i]].mean().item() == pytest.approx(best, abs=1e-9)
        assert int(found[i].sum()) == count
        assert not (found[i] & (region[i] | ~valid)).any()


def test_all_angles_in_one_call_are_the_same_as_one_by_one(monkeypatch):
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model = equicam.wrap(seeded(Cnn), layer="trunk")
    methods = ["grad-cam", "equigrad-cam+pcf", "eigen-cam", "equigrad-cam-out"]
    scores = ["eq", "stages", "peum", "disagreement"]
    evaluate = partial(equicam.evaluate, model, x, methods=methods, scores=scores, angles=(45, 90), views=4)
    one_by_one = evaluate().to_pylist()
    monkeypatch.setattr(import_module("equicam.evaluate.maps"), "_fits_one_call", lambda *_: True)
    at_once = evaluate().to_pylist()
    assert len(at_once) == len(one_by_one) > 100
    values = [row["value"] for row in one_by_one if row["score"] == "eq"]
    assert np.std(values) > 0.05
    for a, b in zip(one_by_one, at_once, strict=True):
        for column in ("value", "floor"):
            assert b.pop(column) == pytest.approx(a.pop(column), abs=1e-9, nan_ok=True)
        assert a == b
