"""Multiply-accumulates of a language model from its shape and a trace, as cost.py counts those of a ViT.

Counted is what the decisions ask for: a fused causal kernel also computes the scores of queries that skip.
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
    """(B,) of each sequence: a row that skips costs its key and value where it offers them, and its gate."""
    live = trace.live.double()  # (L, B, N)
    offered = method.keys == "offered"
    keys = torch.ones_like(live) if offered else live
    seen = (live * keys.cumsum(-1)).sum(-1)  # (L, B): pairs of a query that runs and a key up to it
    total = live.sum(-1) * shape.row_macs + 2 * seen * shape.heads * shape.head_size
    if offered:
        total = total + (1 - live).sum(-1) * shape.key_macs
    decisions = sum(method.macs(depth) for depth in range(shape.blocks)) + shape.read_macs
    return total.sum(0) + trace.shape[1] * decisions


def static_lm_macs(shape: LMShape, trace: Trace) -> float:
    """One sequence of this length with nothing skipped and no router."""
    count = trace.shape[1]
    pairs = count * (count + 1) / 2
    return shape.blocks * (count * shape.row_macs + 2 * pairs * shape.heads * shape.head_size) + count * shape.read_macs
