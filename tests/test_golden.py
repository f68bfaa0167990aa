"""What ships answers as it did: decisions equal, logits to rounding."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from dwindle.io.checkpoint import shipped

GOLDEN = Path(__file__).parent / "golden"
made = runpy.run_path(str(GOLDEN / "make.py"))
CASES = [(name, "packed") for name in made["NAMES"]]
CASES += [(name, "masked") for name in made["NAMES"] if not name.startswith("ada")]  # which has one way to compute


def test_every_shipped_checkpoint_is_held():
    assert set(made["NAMES"]) == set(shipped())


@pytest.mark.parametrize("name, layout", CASES)
def test_shipped_checkpoints_answer_as_they_did(name, layout):
    held = np.load(GOLDEN / f"{name}.npz")
    answers = made["answers"](name, layout)
    assert set(answers) == set(held.files)
    for what, value in answers.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(value, held[what], atol=2e-3, rtol=1e-4, err_msg=what)
        else:
            np.testing.assert_array_equal(value, held[what], err_msg=what)
