"""What methods that stop whole images share: the state an image is judged by, deep supervision, and its cost."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.tokens import Tokens
from ..core.trace import Trace

Supervision = Literal["linear", "uniform"]


def image_state(tokens: Tokens, rows: Tensor) -> Tensor:
    """(B, D): the first prefix token's row, 0 once it has stopped; without a prefix the mean over live tokens."""
    if not tokens.prefix:
        return tokens.image_mean(rows)
    numbers = torch.arange(tokens.place.numel(), device=rows.device).view_as(tokens.place)
    row = tokens.where.dense_rows(numbers, fill=-1)[:, 0]  # (B,) where each image's first token is, if it is live
    return torch.where(row[:, None] >= 0, rows.flatten(0, -2).index_select(0, row.clamp_min(0)), 0.0)


def depth_weights(trace: Trace, supervision: str) -> Tensor:
    """(L, B): 'linear', in proportion to the depth, or 'uniform'; over the depths an image came to they sum to 1."""
    live = trace.live.any(-1)
    layers = torch.arange(1.0, trace.blocks + 1, device=live.device)[:, None]
    weights = (layers if supervision == "linear" else torch.ones_like(layers)) * live
    return weights / weights.sum(0)


def read_macs(shape: Shape, tokens: Tensor) -> Tensor:
    """Reading an answer of images with that many live tokens once: the head, and attention pooling where there is."""
    return (tokens > 0) * shape.image_macs + (tokens - shape.prefix).clamp_min(0) * shape.pool_macs
