"""What ships answers as it did: decisions equal, logits to rounding."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"
made = runpy.run_path(str(GOLDEN / "make.py"))


@pytest.mark.parametrize("name", made["NAMES"])
def test_shipped_checkpoints_answer_as_they_did(name):
    held = np.load(GOLDEN / f"{name}.npz")
    answers = made["answers"](name)
    assert set(answers) == set(held.files)
    for what, value in answers.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(value, held[what], atol=2e-3, rtol=1e-4, err_msg=what)
        else:
            np.testing.assert_array_equal(value, held[what], err_msg=what)
