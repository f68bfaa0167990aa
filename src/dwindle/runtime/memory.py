"""How a process keeps its memory. Only commands set this, never the library: it holds for the whole process."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = -1  # as a trim threshold: nothing is given back


def keep_freed_memory(most: int = NEVER) -> None:
    """Make glibc keep freed memory for the next tensor: `most` bytes of it, or all.

    By default glibc returns tensors of many megabytes to the system at once, and the system hands them out again page
    by page, zeroed. A training step on a CPU then spends up to half of its time on that, and a server 2 ms of a core on
    each image. Without glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, most)
