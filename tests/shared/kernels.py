"""What tests of Triton kernels share: they run on a GPU, or in a process of their own under Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dwindle.ops.launch import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WITH_KERNELS = CUDA or interpreted()
kernels = pytest.mark.skipif(not WITH_KERNELS, reason="needs a GPU or TRITON_INTERPRET=1")


def in_the_interpreter(file: str) -> Callable[[], None]:
    """A test that runs a file's tests anew: Triton decides when it is imported whether to interpret."""

    @pytest.mark.skipif(WITH_KERNELS, reason="they run here")
    def test() -> None:
        pytest.importorskip("triton")
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", file]
        command += ["-k", "not in_the_interpreter"]  # not this one
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
        assert "passed" in done.stdout and "skipped" not in done.stdout

    return test
