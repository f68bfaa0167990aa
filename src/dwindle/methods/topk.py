"""EViT's rule for picking tokens: Expediting Vision Transformers via Token Reorganizations (Liang et al., 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.method import Method, Verdict, require
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import AtLeast0, Budget, Share, Stages
from .attended import Merging, attention_terms
from .keeping import KeepsShare

if TYPE_CHECKING:
    from ..core.model import Output


class TopK(KeepsShare, Method):
    """After some blocks only the patches that the class token attends to most go on, the same number in every image."""

    needs_training = False
    keeps_prefix = True
    paper = "EViT: Expediting Vision Transformers via Token Reorganizations, 2022"

    def __init__(
        self,
        stages: Stages = (4, 7, 10),
        keep: Share = 0.7,
        budget: Budget = None,
        fuse: bool = False,
        merge: Merging = "none",
        lambda_attention: AtLeast0 = 0.0,
    ) -> None:
        """
        stages: patches leave after these blocks. keep: share of the patches that go on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        fuse: one more token goes on, the mean of the patches that leave, weighted by the attention they got.
        merge: patches that leave are dropped ('none'), or merged with the most similar patch that goes on ('nearest',
            see `AHT`).
        lambda_attention: weight of a term that trains the class token to attend at each stage as a teacher's does over
            all its blocks; 0 is the paper.
        """
        super().__init__()
        require(
            not fuse or merge == "none", "fuse = True, merge = nearest", "each is a place for what leaves; take one"
        )
        self.set_share(stages, keep, budget, merge)
        self.fuse, self.lambda_attention = fuse, lambda_attention
        self.needs_teacher_attention = bool(lambda_attention)
        self.operating_point = ("keep", 0.0, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.bind_share(shape, self.macs, fused=int(self.fuse))

    def probe(self, depth: int) -> Probe:
        decides = depth + 1 in self.stages
        learns = decides and self.needs_teacher_attention and self.training
        return Probe(attention=decides, attention_learns=learns, merging=self.merges(depth))

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if depth + 1 not in self.stages:
            return Verdict(tokens.decide(depth, None))
        score = tokens.probed.attention
        assert score is not None
        patch = ~tokens.is_prefix
        rank = tokens.rank(score.detach().masked_fill(~patch, -torch.inf))
        count = self.kept_patches(tokens, patch.to(score.dtype))
        keep, merge = (rank < count) | ~patch, Merge() if self.merges(depth) else None
        if self.fuse and "forced" not in tokens.notes:
            leaving = tokens.live_rows & ~keep
            best = leaving & (rank == count)  # the best of those that would leave goes on, as the mean of all of them
            place = tokens.per_image(tokens.image_sum(tokens.place * best))
            keep, merge = keep | best, Merge(torch.where(leaving, place, tokens.place), weight=score)
        return Verdict(tokens.decide(depth, keep), record={"score": score}, merge=merge)

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        if not self.needs_teacher_attention:
            return {}
        return attention_terms(out, teacher, lambda values: _log(values.get("score")))

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"attention": self.lambda_attention} if self.needs_teacher_attention else {}

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if depth + 1 not in self.stages:
            return torch.zeros_like(tokens)
        queries = 1 if self.shape.prefix else tokens
        fused = tokens * self.shape.width if self.fuse else 0
        compared = tokens**2 * self.shape.head_size if self.merges(depth) else 0
        return queries * tokens * self.shape.heads * self.shape.head_size + fused + compared


def _log(score: Tensor | None) -> Tensor | None:
    return None if score is None else score.clamp_min(1e-6).log()
