"""What must hold of turns, for every picture."""

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

import equicam
from equicam.core.views import Views, rotate_each
from tests.conftest import pictures

angles = st.floats(-720, 720, allow_nan=False)
sizes = st.integers(2, 12)


@given(size=sizes, first=st.integers(-8, 8), second=st.integers(-8, 8), seed=st.integers(0, 99))
def test_right_angles_are_an_exact_group_action(size, first, second, seed):
    x = pictures(1, size, size, seed)
    once = equicam.rotate(equicam.rotate(x, 90 * first), 90 * second)
    assert torch.equal(once, equicam.rotate(x, 90 * (first + second)))
    assert torch.equal(equicam.rotate(x, 90 * first), torch.rot90(x, first, (-2, -1)))


@given(size=sizes, quarter=st.integers(0, 3), seed=st.integers(0, 99))
def test_exact_and_sampled_right_angles_agree(size, quarter, seed):
    x = pictures(1, size, size, seed)
    sampled = equicam.rotate(x, 90 * quarter + 1e-9)
    torch.testing.assert_close(sampled, equicam.rotate(x, 90 * quarter), atol=1e-6, rtol=0)


@given(height=sizes, width=sizes, turns=st.lists(st.sampled_from([0, 180, 360]), min_size=1, max_size=3))
def test_half_turns_are_exact_on_any_rectangle(height, width, turns):
    x = pictures(2, height, width)
    views = Views(tuple(turns))
    assert torch.equal(views.align(views.act(x), "reflect"), x.expand(len(turns), *x.shape))


@given(count=st.sampled_from([1, 2, 4]), fill=st.sampled_from(["reflect", "zeros", "coverage"]))
def test_undo_after_act_is_the_identity_on_the_lattice(count, fill):
    x, views = pictures(2, 9, 9), Views.evenly(count)
    assert torch.equal(views.align(views.act(x), fill), x.expand(count, *x.shape))


@given(degrees=angles, seed=st.integers(0, 9))
@settings(max_examples=20)
def test_a_turn_and_its_undoing_return_a_smooth_picture_inside_the_disc(degrees, seed):
    made = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 1, 4, 4, generator=made, dtype=torch.float64)
    x = torch.nn.functional.interpolate(coarse, (64, 64), mode="bicubic", align_corners=True)[0, 0]
    y, xs = torch.meshgrid(torch.arange(64) - 31.5, torch.arange(64) - 31.5, indexing="ij")
    inside = y**2 + xs**2 < 30**2
    back = equicam.rotate(equicam.rotate(x, degrees), -degrees)
    assert x[inside].std() > 0.1
    assert (back - x)[inside].abs().max() < 0.05 * x.std()


@pytest.mark.parametrize("degrees", [15, 45, 100.5, -30])
@pytest.mark.parametrize("pad", [47, 64, 100])
def test_one_sample_equals_pad_rotate_crop(degrees, pad):
    """The paper pads by 64 px, rotates and crops; any pad that reaches the corners gives the same picture."""
    x = pictures(1, 224, 224)
    padded = torch.nn.functional.pad(x, (pad,) * 4, mode="reflect")
    cropped = equicam.rotate(padded, degrees, fill="zeros")[..., pad:-pad, pad:-pad]
    torch.testing.assert_close(equicam.rotate(x, degrees), cropped, atol=1e-9, rtol=0)


def test_positive_is_counter_clockwise_as_torchvision_and_pillow_have_it():
    x = pictures(1, 33, 33)
    theirs = torchvision.transforms.functional.rotate(
        x, 30, interpolation=torchvision.transforms.InterpolationMode.BILINEAR
    )
    torch.testing.assert_close(equicam.rotate(x, 30, fill="zeros"), theirs, atol=1e-4, rtol=0)
    dot = torch.zeros(5, 5)
    dot[2, 4] = 1  # right of the centre
    assert equicam.rotate(dot, 90)[0, 2] == 1  # goes to the top


@given(count=st.integers(1, 40), start=st.sampled_from([0.0, -180.0]))
def test_presented_first_keeps_every_view_and_its_place(count, start):
    views = Views.evenly(count, start=start)
    ordered, place = views.presented_first()
    assert ordered.to_plain()[0] == 0
    assert [ordered.to_plain()[p] % 360 for p in place] == [a % 360 for a in views.to_plain()]
    assert len(ordered) == count + (views.presented is None)
    assert (views.presented is None) == (start == -180 and count % 2 == 1)


def test_coverage_is_what_zeros_leave():
    views = Views((0, 30, 45, 90))
    cover = views.coverage((7, 7), like=torch.zeros(1, dtype=torch.float64))
    assert cover[0].min() == cover[3].min() == 1
    assert cover[1].min() < 0.7
    assert cover[2, 0, 0] == 0
    assert cover.max() <= 1 + 1e-12


def test_each_image_is_rotated_exactly_as_alone():
    """Also at multiples of 90°, where rotation permutes pixels."""
    x = pictures(5)
    degrees = torch.tensor([0.0, 90.0, 37.5, 180.0, -90.0], dtype=torch.float64)
    found = rotate_each(x, degrees)
    for one, image, angle in zip(found, x, degrees.tolist(), strict=True):
        assert torch.equal(one, equicam.rotate(image, angle))
    assert torch.equal(found[1], torch.rot90(x[1], 1, (-2, -1)))
