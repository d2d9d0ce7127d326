"""Freed memory is kept on Linux, so that forward passes on a CPU do not fault every page in again."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch, equicam

net = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 1) for _ in range(4)), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
model, x = equicam.wrap(net.eval(), layer="3"), torch.randn(4, 3, 512, 512)
equicam.explain(model, x, views=4, max_views_per_forward=32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    equicam.explain(model, x, views=4, max_views_per_forward=32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_kept_unless_somebody_has_chosen():
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    kept, chosen = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS], env=env, text=True))
        for env in (usual, usual | {"MALLOC_ARENA_TEST": "8"})
    )
    assert chosen > 20_000  # pages of 4 kB: every layer's output is faulted in again
    assert kept < chosen / 5
