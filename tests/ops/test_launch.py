"""Whether Triton is here is known in one place."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # an import of it raises
import torch
import dwindle
from dwindle.ops import gated, launch, merging, planner, rows
assert not launch.TRITON and not launch.available(torch.zeros(1))
x = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
assert not gated.covers(x, x, x)
"""


def test_without_triton_everything_is_imported_and_no_kernel_launched():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
