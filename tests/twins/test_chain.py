"""Min–max, plane by plane."""

import torch

from equicam.core.chain import is_constant, unit
from tests.conftest import assert_alive


def test_min_max_of_every_plane_and_zero_where_it_is_constant():
    planes = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    planes[0, 1] = 0.3  # constant
    planes[1, 2] = 1 + torch.finfo(torch.float32).eps * torch.rand(7, 5)  # up to rounding
    before, found = planes.clone(), unit(planes)
    assert torch.equal(planes, before)
    for i in range(2):
        for j in range(3):
            plane = planes[i, j]
            if (i, j) in ((0, 1), (1, 2)):
                assert is_constant(plane)
                assert torch.equal(found[i, j], torch.zeros(7, 5))
            else:
                assert not is_constant(plane)
                assert_alive(found[i, j][None])
                assert torch.equal(found[i, j], (plane - plane.min()) / (plane.max() - plane.min()))
