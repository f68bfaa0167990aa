"""What methods that stop whole images share: an image's state, exits with deep supervision, and the cost of reading."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.tokens import Tokens
from ..core.trace import Trace

Supervision = Literal["linear", "uniform"]


def image_state(tokens: Tokens, rows: Tensor) -> Tensor:
    """(B, D): the row of the first prefix token, 0 once it has stopped; without a prefix the mean over live tokens."""
    if not tokens.prefix:
        return tokens.image_mean(rows)
    numbers = torch.arange(tokens.place.numel(), device=rows.device).view_as(tokens.place)
    row = tokens.where.dense_rows(numbers, fill=-1)[:, 0]  # (B,) where each image's first token is, if it is live
    return torch.where(row[:, None] >= 0, rows.flatten(0, -2).index_select(0, row.clamp_min(0)), 0.0)


class EarlyExit(nn.Module):
    """What `Confidence` and `Similarity` share: every depth's prediction is trained, and an image may stop by it from
    block `min_depth` on. It is not a `Method` itself, because each of those registers under its name."""

    min_depth: int
    supervision: Supervision
    shape: Shape

    def decides(self, depth: int) -> bool:
        """Whether images may stop after block `depth` (from 0)."""
        return self.min_depth <= depth + 1 < self.shape.blocks

    def exit_weights(self, trace: Trace) -> Tensor | None:
        """(L, B) weights of the depths in the task loss; None in evaluation."""
        return _depth_weights(trace, self.supervision) if self.training else None


def _depth_weights(trace: Trace, supervision: Supervision) -> Tensor:
    """(L, B): 'linear', proportional to the depth, or 'uniform'; the sum over the depths that an image reached is 1."""
    live = trace.live.any(-1)
    layers = torch.arange(1.0, trace.blocks + 1, device=live.device)[:, None]
    weights = (layers if supervision == "linear" else torch.ones_like(layers)) * live
    return weights / weights.sum(0)


def read_macs(shape: Shape, tokens: Tensor) -> Tensor:
    """MACs of one prediction for images with that many live tokens: the head, and attention pooling if there is one."""
    return (tokens > 0) * shape.image_macs + (tokens - shape.prefix).clamp_min(0) * shape.pool_macs
