"""Learning rates as functions of the step alone, so that a resumed run needs no other state."""

from __future__ import annotations

import math


def ramp(at: int, steps: int, low: float, high: float) -> float:
    """A straight line: `low` at step 0, `high` after `steps`."""
    return low + at * (high - low) / steps


def cosine(at: int, steps: int, high: float, low: float) -> float:
    """Half a cosine: `high` at step 0, `low` from `steps` on."""
    return low + (high - low) * (1 + math.cos(math.pi * min(at / max(steps, 1), 1.0))) / 2
