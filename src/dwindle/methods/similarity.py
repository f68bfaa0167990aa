"""Similarity gauging: an image stops when its prediction hardly changes from block to block (A-ViT, Table 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.backbone import Shape
from ..core.method import Method, Verdict, require, wide
from ..core.tokens import Tokens
from ..settings import AtLeast0
from .exits import EarlyExit, Supervision, read_macs

# Distances that few pairs of predictions reach, or none: the cheapest value of the operating point.
FARTHEST = {"mse": 16.0, "cosine": 2.0, "lpips": 4.0}


class Similarity(EarlyExit, Method):
    """The model's own norm and head predict after every block; an image stops when two predictions in a row are closer
    than `threshold`."""

    paper = "similarity gauging, as compared with in A-ViT, 2022"
    per_image_point = True
    exits_by_confidence = True

    def __init__(
        self,
        threshold: AtLeast0 = 0.1,
        kind: Literal["mse", "cosine", "lpips"] = "mse",
        min_depth: int = 2,
        supervision: Supervision = "linear",
    ) -> None:
        """
        threshold: an image stops when the distance of its last two predictions is below it; at 0 none stops.
        kind: distance of the logits, 'mse' (mean squared difference) or 'cosine' (1 - cosine); or of the states,
            'lpips': the squared difference of each token's two states, both normalised to length 1, mean over the
            image, as LPIPS compares features (without weights learnt from people's judgement).
        min_depth: no image stops before this block; there are two predictions to compare from block 2 on.
        supervision: weights of the depths in the task loss, 'linear' (proportional to the depth) or 'uniform'.
        """
        super().__init__()
        self.threshold, self.kind, self.min_depth, self.supervision = threshold, kind, min_depth, supervision
        self.operating_point = ("threshold", FARTHEST[kind], 0.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(
            2 <= self.min_depth <= shape.blocks,
            f"min_depth = {self.min_depth}",
            f"this backbone has blocks 1..{shape.blocks}, and answers to compare from block 2 on",
        )

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if self.training:  # the head is trained at every depth
            return Verdict(tokens.decide(depth, None), exit=tokens.read())
        before, tokens.notes["before"] = tokens.notes.get("before"), tokens.x
        if before is None or not self.decides(depth):
            return Verdict(tokens.decide(depth, None))
        if self.kind == "lpips":
            square = (F.normalize(wide(tokens.x), dim=-1) - F.normalize(wide(before), dim=-1)).square().sum(-1)
            distance = tokens.per_image(tokens.image_mean(square[..., None])[:, 0])
            keep = distance >= self.operating_value(tokens, "threshold")
            return Verdict(tokens.decide(depth, keep), record={"score": distance})
        # Notes hold one entry per row, and logits are per image, so the state is kept and read a second time.
        logits, earlier = tokens.read(), replace(tokens, x=before).read()
        distance = tokens.per_image(self.distance(wide(logits), wide(earlier)))
        keep = distance >= self.operating_value(tokens, "threshold")
        return Verdict(tokens.decide(depth, keep), record={"score": distance}, exit=logits)

    def distance(self, logits: Tensor, earlier: Tensor) -> Tensor:
        """(B,) distances of two predictions, each (B, classes)."""
        if self.kind == "mse":
            return (logits - earlier).square().mean(-1)
        return 1 - F.cosine_similarity(logits, earlier, dim=-1)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        reads = self.kind != "lpips" and self.decides(depth)
        return 2 * read_macs(self.shape, tokens) if reads else torch.zeros_like(tokens)
