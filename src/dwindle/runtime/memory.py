"""Memory on a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
_within = 0  # how many times it was entered and not left
LARGEST = 32 * 2**20  # what glibc's own threshold for mmap rises to in a process that frees large blocks


@contextmanager
def kept_pages(on_cpu: bool = True) -> Iterator[None]:
    """Within, memory that is freed stays with this process, for the next tensor. By default glibc hands tensors of many
    megabytes back to the system at once, which gives them out again page by page, zeroed: a step that makes and frees
    hundreds of them then spends up to half of its time on that. It holds for the whole process, which may need more
    memory meanwhile, and gives it back on leaving the outermost. Where there is no glibc to ask, nothing happens.
    """
    global _within
    libc = _glibc() if on_cpu else None
    if libc is None:
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    _within += 1
    try:
        yield
    finally:
        _within -= 1
        if not _within:
            _give_back(libc)


def _give_back(libc: Any) -> None:
    # Where it would have come to by itself: once told a number, glibc does not adapt its thresholds any more.
    libc.mallopt(M_MMAP_MAX, 65536)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)
    libc.malloc_trim(0)


def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
