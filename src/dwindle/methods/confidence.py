"""Confidence threshold: an image stops when its class is predicted with enough confidence (A-ViT, Table 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.method import Method, Verdict, require, wide
from ..core.tokens import Tokens
from ..settings import Share
from .exits import EarlyExit, Supervision, read_macs


class Confidence(EarlyExit, Method):
    """The model's own norm and head predict after every block; an image stops when the probability of its likeliest
    class is above `threshold`."""

    paper = "confidence threshold, as compared with in A-ViT, 2022"
    per_image_point = True
    exits_by_confidence = True

    def __init__(self, threshold: Share = 0.9, min_depth: int = 1, supervision: Supervision = "linear") -> None:
        """
        threshold: an image stops when max softmax exceeds it; at 1 none stops.
        min_depth: no image stops before this block.
        supervision: weights of the depths in the task loss, 'linear' (proportional to the depth) or 'uniform'.
        """
        super().__init__()
        self.threshold, self.min_depth, self.supervision = threshold, min_depth, supervision
        self.operating_point = ("threshold", 0.0, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(
            1 <= self.min_depth <= shape.blocks,
            f"min_depth = {self.min_depth}",
            f"this backbone has blocks 1..{shape.blocks}",
        )

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if self.training:  # the head is trained at every depth
            return Verdict(tokens.decide(depth, None), exit=tokens.read())
        if not self.decides(depth):
            return Verdict(tokens.decide(depth, None))
        logits = tokens.read()
        confidence = tokens.per_image(wide(logits).softmax(-1).amax(-1))
        keep = confidence <= self.operating_value(tokens, "threshold")
        return Verdict(tokens.decide(depth, keep), record={"score": confidence}, exit=logits)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        return read_macs(self.shape, tokens) if self.decides(depth) else torch.zeros_like(tokens)
