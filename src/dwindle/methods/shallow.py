"""A shallower static model: what any adaptive depth has to beat (A-ViT, Table 2's baseline at reduced depth)."""

from __future__ import annotations

from typing import Annotated

import torch

from ..core.backbone import Shape
from ..core.method import Method, Verdict, require
from ..core.tokens import Tokens
from ..settings import Within


class Shallow(Method):
    """All tokens of all images stop after block `depth`."""

    paper = "the wrapped model, cut short"

    def __init__(self, depth: Annotated[float, Within(1)] = 8) -> None:
        """depth: the last block that is run. A fraction, as calibration may leave it, counts as the block above."""
        super().__init__()
        self.depth = depth

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(self.depth <= shape.blocks, f"depth = {self.depth}", f"this backbone has blocks 1..{shape.blocks}")
        self.operating_point = ("depth", 1.0, float(shape.blocks))

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        done = depth + 1 >= self.depth
        return Verdict(tokens.decide(depth, torch.zeros_like(tokens.counted) if done else None))
