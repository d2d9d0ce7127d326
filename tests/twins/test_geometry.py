import numpy as np
import pytest
import torch

import equicam
from equicam.core.views import Views, column_means
from tests.conftest import pictures
from tests.twins import slow


@pytest.mark.parametrize("fill", ["reflect", "zeros"])
@pytest.mark.parametrize("size", [(9, 9), (8, 8), (7, 12), (12, 5)])
@pytest.mark.parametrize("degrees", [0, 17.5, -45, 90, 135, 180, 270, 725])
def test_rotate_is_the_loop(size, degrees, fill):
    plane = pictures(1, *size)[0, 0]
    expected = slow.turn(plane.numpy(), degrees, fill)
    np.testing.assert_allclose(equicam.rotate(plane, degrees, fill=fill), expected, atol=1e-12)


@pytest.mark.parametrize("fill", ["reflect", "zeros"])
def test_column_means_are_the_column_means_of_the_turning_matrix(fill):
    views, h, w = Views((0.0, 25.0, 90.0, 200.0)), 5, 5
    basis = torch.eye(h * w, dtype=torch.float64).view(h * w, h, w)
    matrix = np.stack(
        [[slow.turn(e.numpy(), -a, fill) for e in basis] for a in views.to_plain()]
    )  # M_t[q, p]
    expected = torch.from_numpy(matrix).flatten(2).mean(2).view(4, 1, h, w)
    found = column_means(views, (h, w), fill, torch.float64, torch.device("cpu"))
    assert expected.std() > 0.001
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
