"""Memory of a process that runs a command. A library never sets this: it holds for everything in the process."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Memory that is freed stays with this process, for the next tensor.

    By default glibc hands tensors of many megabytes back to the system at once, which gives them out again page by
    page, zeroed: a training step on a CPU then spends up to half of its time on that. Where there is no glibc to ask,
    nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
