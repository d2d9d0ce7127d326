"""What is compiled: never on a CPU unless asked for, and on a GPU where it is repaid."""

import pytest
import torch

import equicam
from equicam.audit.audit import _is_repaid
from equicam.cli.shared import parse_speed


def test_only_a_gpu_with_images_enough_compiles_by_itself():
    assert _is_repaid("cuda", 20_000, 18)
    assert not _is_repaid("cuda", 1_000, 18)
    assert not _is_repaid("cpu", 10_000_000, 18)


def test_fast_is_bfloat16_and_compiled():
    assert parse_speed(True, None, None, "cuda:1") == (torch.bfloat16, True)
    assert parse_speed(True, "float16", True, "cuda") == (torch.float16, True)
    assert parse_speed(False, None, None, "cuda") == (None, None)
    assert parse_speed(False, "bfloat16", False, "cpu") == (torch.bfloat16, False)


@pytest.mark.parametrize(
    ("compiled", "device", "got"), [(None, "cpu", "--device cpu"), (False, "cuda", "--no-compile")]
)
def test_fast_is_refused_where_it_is_not(compiled, device, got):
    with pytest.raises(equicam.EquicamError, match="--fast needs a GPU") as error:
        parse_speed(True, None, compiled, device)
    assert error.value.got == got
