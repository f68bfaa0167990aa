"""What tests of Triton kernels share: they run on a GPU, or as Python under Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
kernels = pytest.mark.usefixtures("interpreter")  # a fixture of conftest.py, which does nothing on a GPU


def import_interpreted() -> None:
    """Triton decides while a module is imported whether its functions are to be interpreted, so this comes first."""
    if CUDA or find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from dwindle.ops import gated_triton, merging_triton, planner_triton, rows_triton  # noqa: F401
