"""Memory for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = 2**31 - 1


def keep_pages() -> bool:
    """Memory that is freed stays with this process, for the next tensor. By default glibc hands tensors of many
    megabytes back to the system at once, which gives them out again page by page, zeroed: a step that makes and frees
    hundreds of them then spends up to half of its time on that. False where there is no glibc to ask.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))
