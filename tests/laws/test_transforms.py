"""Transforms are a group, and act on pixels as their matrices say."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import ndimage

import equicam
from equicam.core.transforms import Transform, as_transform, inner_radius, presented_index
from equicam.core.views import Views, transform_all
from equicam.errors import EquicamError
from tests.conftest import pictures

transforms = st.builds(
    Transform,
    st.one_of(st.floats(-720, 720), st.integers(-720, 720)),
    st.booleans(),
    st.floats(0.5, 2),
    st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)),
)
SOME = [
    Transform(20),
    Transform(90, mirrored=True),
    Transform(-137.5, mirrored=True),
    Transform(scale=0.8),
    Transform(scale=1.25),
    Transform(shift=(0.1, -0.25)),
    Transform(30, mirrored=True, scale=1.1, shift=(-0.2, 0.05)),
]


def matrix(one: Transform) -> np.ndarray:
    """Shift · scale · rotation · flip of (right, down, 1), written out; counter-clockwise with rows that count down."""
    cos, sin = math.cos(math.radians(one.degrees)), math.sin(math.radians(one.degrees))
    flip = np.diag([1, -1 if one.mirrored else 1, 1])
    rotate = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shift = np.array([[1, 0, one.shift[0]], [0, 1, one.shift[1]], [0, 0, 1]])
    return shift @ np.diag([one.scale, one.scale, 1]) @ rotate @ flip


def assert_same(one: Transform, other: Transform) -> None:
    np.testing.assert_allclose(matrix(one), matrix(other), atol=1e-9)
    assert one.mirrored == other.mirrored


@given(one=transforms)
def test_identity_and_inverse(one):
    assert Transform().is_identity
    assert_same(one.after(Transform()), one)
    assert_same(Transform().after(one), one)
    assert_same(one.after(one.inverse()), Transform())
    assert_same(one.inverse().after(one), Transform())
    assert_same(one.inverse().inverse(), one)


@given(one=transforms, other=transforms, third=transforms)
def test_composition_is_the_product_of_matrices_and_associative(one, other, third):
    np.testing.assert_allclose(matrix(one.after(other)), matrix(one) @ matrix(other), atol=1e-9)
    assert_same(one.after(other).after(third), one.after(other.after(third)))


@given(one=transforms, right=st.floats(-9, 9), down=st.floats(-9, 9), side=st.integers(1, 9))
def test_points_move_as_the_matrix_says(one, right, down, side):
    expected = matrix(one) @ [right / side, down / side, 1]
    np.testing.assert_allclose(one.move(right, down, side=side), side * expected[:2], atol=1e-9)


@given(one=transforms)
@example(one=Transform(0.0, False, 1.0, (0.0, 5.27e-155)))
def test_plain_values_read_back(one):
    back = as_transform(json.loads(json.dumps(one.to_plain())))
    assert back.key == one.key
    # a rotation up to rounding is written as one; everything else reads back to the bit
    assert back == (Transform(one.degrees) if one.is_rotation else one)
    assert isinstance(one.to_plain(), float) == one.is_rotation


def test_keys_are_equal_where_transforms_are():
    assert Transform(360).is_identity
    assert Transform(-90).key == Transform(270).key != Transform(270, mirrored=True).key
    assert Transform(30).after(Transform(60)).key == Transform(90).key
    assert not Transform(mirrored=True).is_identity
    assert presented_index([Transform(20), Transform(720)]) == 1
    assert presented_index([Transform(20)]) is None


@pytest.mark.parametrize(
    ("one", "label"),
    [
        (Transform(), "0°"),
        (Transform(60.0), "60°"),
        (Transform(-22.5), "-22.5°"),
        (Transform(60, mirrored=True), "60° mirrored"),
        (Transform(scale=1.25), "× 1.25"),
        (Transform(shift=(0.05, 0)), "shifted 5 % right"),
        (Transform(shift=(-0.1, -0.025)), "shifted 10 % left, shifted 2.5 % up"),
        (Transform(60, mirrored=True, scale=0.8, shift=(0, 0.1)), "60° mirrored, × 0.8, shifted 10 % down"),
    ],
)
def test_labels(one, label):
    assert one.label == label


@pytest.mark.parametrize(
    "bad", [{"scale": 0}, {"scale": -1}, {"degrees": math.nan}, {"shift": (math.inf, 0)}]
)
def test_what_is_no_transform_is_refused(bad):
    with pytest.raises(EquicamError, match="finite numbers and a scale above 0"):
        equicam.Transform(**bad)


@given(
    size=st.integers(2, 12), fill=st.sampled_from(["reflect", "zeros", "coverage"]), seed=st.integers(0, 99)
)
def test_the_symmetries_of_the_square_are_exact(size, fill, seed):
    x, views = pictures(2, size, size, seed), Views.dihedral(8)
    act = views.act(x)
    assert torch.equal(views.align(act, fill), x.expand(8, *x.shape))
    by_hand = [torch.rot90(y, k, (-2, -1)) for k in range(4) for y in (x, x.flip(-2))]
    assert torch.equal(act, torch.stack(by_hand))
    assert len({one.key for one in (views * views).transforms}) == 8  # closed


@pytest.mark.parametrize("fill", ["reflect", "zeros"])
@pytest.mark.parametrize("size", [(9, 9), (8, 8), (7, 12), (12, 5)])
@pytest.mark.parametrize("one", SOME, ids=lambda one: one.label)
def test_pixels_are_those_of_map_coordinates(one, size, fill):
    plane = pictures(1, *size)[0, 0]
    centre, back = (np.array(size)[::-1] - 1) / 2, np.linalg.inv(matrix(one))
    unit = min(size)
    rows, columns = np.mgrid[: size[0], : size[1]]
    places = np.stack([(columns - centre[0]) / unit, (rows - centre[1]) / unit, np.ones(size)])
    right, down, _ = np.tensordot(back, places, 1) * unit
    mode = {"reflect": "mirror", "zeros": "grid-constant"}[fill]
    at = [down + centre[1], right + centre[0]]
    slow = ndimage.map_coordinates(plane.numpy(), at, order=1, mode=mode, cval=0)
    assert slow.std() > 0.01
    np.testing.assert_allclose(transform_all(plane, [one], fill=fill)[0], slow, atol=1e-9)


def test_products_hold_every_pair_once():
    found = Views.evenly(6) * Views.scales(0.9, 1.1)
    assert len(found) == 12
    assert found.labels[:3] == ("× 0.9", "× 1.1", "60°, × 0.9")
    pairs = [(60 * t, s) for t in range(6) for s in (0.9, 1.1)]
    for one, (angle, scale) in zip(found.transforms, pairs, strict=True):
        assert_same(one, Transform(angle).after(Transform(scale=scale)))
    mirror = Views((Transform(), Transform(mirrored=True)))
    made, known = (Views.evenly(4) * mirror).transforms, Views.dihedral(8).transforms
    assert {one.key for one in made} == {one.key for one in known}
    assert len(Views.evenly(4) * Views.evenly(2)) == 4  # each once


def test_the_disc_that_every_view_covers():
    assert inner_radius(Views.dihedral(18).transforms) == 1
    assert inner_radius(Views.scales(0.8, 1, 1.25).transforms) == pytest.approx(0.8)
    assert inner_radius([Transform(shift=(0.3, 0.4))]) == 0
    assert Views.shifts((0, 0), (0.05, 0)).radius == pytest.approx(0.9)


@given(one=transforms)
def test_a_smooth_image_under_a_transform_returns_inside_that_disc(one):
    small = Transform(one.degrees, one.mirrored, one.scale**0.3, (one.shift[0] / 5, one.shift[1] / 5))
    views = Views((small,))
    y, x = np.mgrid[:48, :48] / 47
    smooth = torch.from_numpy(np.sin(3 * x) * np.cos(2 * y) + x)
    inside = torch.from_numpy(np.hypot(x - 0.5, y - 0.5) * 47 < 24 * views.radius - 1.5)
    returned = views.align(views.act(smooth[None, None]), "reflect")[0, 0, 0]
    assert (returned - smooth)[inside].abs().max() < 0.01


def test_views_that_share_no_part_of_the_image_are_refused():
    with pytest.raises(EquicamError, match="views needs a part of the image that all of them show"):
        equicam.Fusion(Views.shifts((0.6, 0)), "map", "map")
