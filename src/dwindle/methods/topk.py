"""EViT: Expediting Vision Transformers via Token Reorganizations (Liang et al., 2022), its rule for picking tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import keep_for
from ..core.method import Method, Verdict, check_stages, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import Budget, Share, Stages


class TopK(Method):
    """After some blocks only the patches that the class token attends to most go on, as many in every image."""

    needs_training = False
    keeps_prefix = True
    paper = "EViT: Expediting Vision Transformers via Token Reorganizations, 2022"

    def __init__(
        self,
        stages: Stages = (4, 7, 10),
        keep: Share = 0.7,
        budget: Budget = None,
        fuse: bool = False,
    ) -> None:
        """
        stages: patches leave after these blocks. keep: share of the patches that go on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        fuse: one more token goes on, the mean of those left behind, weighted by the attention they got.
        """
        super().__init__()
        self.stages = tuple(sorted(set(stages)))
        self.budget, self.fuse = budget, fuse
        self.keep: Tensor
        self.register_buffer("keep", torch.tensor(float(keep)))  # a tensor: turned without compiling anew
        self.operating_point = ("keep", 0.0, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        check_stages(self.stages, shape)
        if self.budget is not None:
            self.keep.fill_(keep_for(self.budget, shape, self.stages, self.macs, int(self.fuse)))

    def probe(self, depth: int) -> Probe:
        return Probe(attention=depth + 1 in self.stages)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if depth + 1 not in self.stages:
            return Verdict(tokens.decide(depth, None))
        score = tokens.probed.attention
        assert score is not None
        patch = ~tokens.is_prefix
        rank = tokens.rank(score.masked_fill(~patch, -torch.inf))
        # Rounded against noise in the product: 0.7 * 10 is 7, not 8.
        wanted = tokens.per_image((self.keep * tokens.image_sum(wide(patch.to(score.dtype))) - 1e-4).ceil())
        keep, merge = (rank < wanted) | ~patch, None
        if self.fuse and "forced" not in tokens.notes:
            leaving = tokens.counted & ~keep
            best = leaving & (rank == wanted)  # the best of those that would leave goes on, as the mean of all of them
            place = tokens.per_image(tokens.image_sum(tokens.place * best))
            keep, merge = keep | best, Merge(torch.where(leaving, place, tokens.place), weight=score)
        return Verdict(tokens.decide(depth, keep), record={"score": score}, merge=merge)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if depth + 1 not in self.stages:
            return torch.zeros_like(tokens)
        queries = 1 if self.shape.prefix else tokens
        fused = tokens * self.shape.width if self.fuse else 0
        return queries * tokens * self.shape.heads * self.shape.head_size + fused
