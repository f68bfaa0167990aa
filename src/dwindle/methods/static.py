"""The wrapped model itself, in which nothing halts: for baselines trained and measured by the same loop."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.method import Method, Verdict
from ..core.tokens import Probe, Tokens


class Static(Method):
    """Every token runs through every block. As a teacher it can record which tokens the class token attends to."""

    needs_training = False
    keeps_prefix = True
    paper = "the wrapped model itself"

    def __init__(self, attention: bool = False) -> None:
        """attention: record, for every block, the share of the class token's attention that each token got."""
        super().__init__()
        self.attention = attention

    def probe(self, depth: int) -> Probe:
        return Probe(attention=self.attention)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        attention = tokens.probed.attention
        return Verdict(tokens.decide(depth, None), record={} if attention is None else {"attention": attention})

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if not self.attention:
            return torch.zeros_like(tokens)
        queries = 1 if self.shape.prefix else tokens
        return queries * tokens * self.shape.heads * self.shape.head_size  # q k^T, once more
