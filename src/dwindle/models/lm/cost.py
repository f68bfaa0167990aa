"""Multiply-accumulates of a language model from its shape and a trace, by the rules of core/cost.py for a ViT.

Only the scores of queries that run are counted, though a fused causal kernel also computes those of queries that skip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.trace import Trace
from .model import LMShape

if TYPE_CHECKING:
    from .routing import Router


def lm_macs(shape: LMShape, trace: Trace, method: Router) -> Tensor:
    """(B,) multiply-accumulates of each sequence. A row that skips costs its gate, and its key and value if offered."""
    live = trace.live.double()  # (L, B, N)
    offered = method.keys == "offered"
    keys = torch.ones_like(live) if offered else live
    seen = (live * keys.cumsum(-1)).sum(-1)  # (L, B): pairs of a query that runs and a key at or before it
    total = live.sum(-1) * shape.row_macs + 2 * seen * shape.heads * shape.head_size
    if offered:
        total = total + (1 - live).sum(-1) * shape.key_macs
    decisions = sum(method.macs(depth) for depth in range(shape.blocks)) + shape.read_macs
    return total.sum(0) + trace.shape[1] * decisions


def static_lm_macs(shape: LMShape, trace: Trace) -> float:
    """Multiply-accumulates of one sequence of the trace's length with nothing skipped and no router."""
    count = trace.shape[1]
    pairs = count * (count + 1) / 2
    return shape.blocks * (count * shape.row_macs + 2 * pairs * shape.heads * shape.head_size) + count * shape.read_macs
