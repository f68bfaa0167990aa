"""A shallower static model, as a baseline for adaptive depth (the baseline at reduced depth of A-ViT's Table 2)."""

from __future__ import annotations

from typing import Annotated, Any

import torch

from ..core.backbone import Shape
from ..core.cost import block_macs, budget_share, fixed_macs, static_macs
from ..core.method import Method, Verdict, require
from ..core.tokens import Tokens
from ..settings import Budget, Within


class Shallow(Method):
    """All tokens of all images stop after block `depth`."""

    paper = "the wrapped model, cut short"

    def __init__(self, depth: Annotated[float, Within(1)] = 8, budget: Budget = None) -> None:
        """
        depth: the last block that is run. A fraction, which calibration may set, is rounded up.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `depth` to the one of the nearest cost.
        """
        super().__init__()
        self.depth, self.budget = depth, budget

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        if self.budget is not None:
            goal = budget_share(self.budget, shape) * static_macs(shape) - fixed_macs(shape)
            block = block_macs(shape, float(shape.tokens()))
            self.depth = min(range(1, shape.blocks + 1), key=lambda depth: abs(depth * block - goal))
        require(self.depth <= shape.blocks, f"depth = {self.depth}", f"this backbone has blocks 1..{shape.blocks}")
        self.operating_point = ("depth", 1.0, float(shape.blocks))

    @property
    def config(self) -> dict[str, Any]:
        """The settings, with the depth in use (chosen by the budget, or set later) in place of the budget."""
        return super().config | ({"budget": None} if hasattr(self, "shape") else {})

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        done = depth + 1 >= self.depth
        return Verdict(tokens.decide(depth, torch.zeros_like(tokens.live_rows) if done else None))
