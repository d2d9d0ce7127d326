"""The memory that a CPU's forward passes give back and take again."""

import ctypes
import os
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES, LARGEST_BLOCK = 2**31 - 1, 2**30
CHOSEN_BY_USER = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Beginnings of the names of environment variables with which somebody has chosen how memory is allocated."""


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to 1 GiB, 2 GiB in all, in this process; whether it does.

    By default it gives every block above 32 MiB back to the system. A network on a CPU takes and frees such blocks at
    every layer, and page faults then take a third of the time.
    """
    if sys.platform != "linux" or any(name.startswith(CHOSEN_BY_USER) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
