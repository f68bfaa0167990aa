"""Learning rates as functions of the step alone, so that a resumed run needs no other state."""

from __future__ import annotations

import math


def ramp(at: int, steps: int, low: float, high: float) -> float:
    """A straight line: `low` at step 0, `high` after `steps`."""
    return low + at * (high - low) / steps


def poly(at: int, steps: int, high: float, low: float, power: float = 1.0) -> float:
    """A power of the share of the steps that is left: `high` at step 0, `low` from `steps` on; 1: a straight line."""
    return low + (high - low) * (1 - min(at / max(steps, 1), 1.0)) ** power


def cosine(at: int, steps: int, high: float, low: float) -> float:
    """Half a cosine: `high` at step 0, `low` from `steps` on."""
    return low + (high - low) * (1 + math.cos(math.pi * min(at / max(steps, 1), 1.0))) / 2
