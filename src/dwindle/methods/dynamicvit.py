"""DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification (Rao et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.method import Method, Verdict, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import AtLeast0, Budget, Share, Stages
from .attended import Merging, attention_terms
from .keeping import KeepsShare

if TYPE_CHECKING:
    from ..core.model import Output


class Predictor(nn.Module):
    """An MLP on a token's own features and the mean over its image's live patches; gives the logit of keeping it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.embed = nn.Linear(width, width)
        self.out = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.GELU(),
            nn.Linear(width // 2, width // 4),
            nn.GELU(),
            nn.Linear(width // 4, 2),
        )

    def forward(self, tokens: Tokens) -> Tensor:
        local, shared = F.gelu(self.embed(self.norm(tokens.x))).chunk(2, -1)
        patch = (~tokens.is_prefix)[..., None].to(shared.dtype)
        count = tokens.image_sum(patch).clamp_min(1)
        features = torch.cat([local, tokens.per_image(tokens.image_sum(shared * patch) / count)], -1)
        drop, keep = wide(self.out(features)).unbind(-1)
        return keep - drop


class DynamicViT(KeepsShare, Method):
    """Predictors after some blocks decide which patches go on; trained with hard Gumbel decisions and a ratio loss."""

    paper = "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification, 2021"
    needs_teacher_features = True
    keeps_prefix = True

    def __init__(
        self,
        stages: Stages = (3, 6, 9),
        keep: Share = 0.7,
        budget: Budget = None,
        count: Literal["fixed", "image"] = "fixed",
        threshold: Share = 0.5,
        lambda_ratio: float = 2.0,
        lambda_features: float = 0.5,
        gumbel: bool = True,
        merge: Merging = "none",
        lambda_attention: AtLeast0 = 0.0,
    ) -> None:
        """
        stages: patches leave after these blocks. keep: rho, the share of the patches that goes on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        count: at inference the best patches of each image go on, the same number in every image ('fixed', the paper),
            or all whose probability is at least `threshold` ('image').
        lambda_ratio, lambda_features: weights of the ratio loss and, with a teacher, of the distance of the kept
            patches' features to the teacher's. (The recipe sets the paper's third loss, KL to the teacher's answer.)
        gumbel: training decides by Gumbel-softmax, with a gradient; False: as at inference, without a gradient.
        merge: patches that leave are dropped ('none', the paper), or merged with the most similar patch that goes on
            ('nearest', see `AHT`).
        lambda_attention: weight of a term that trains the predictors to rank patches as a teacher's class token attends
            to them over all its blocks; 0 is the paper.
        """
        super().__init__()
        self.set_share(stages, keep, budget, merge)
        self.count, self.threshold = count, threshold
        self.lambda_ratio, self.lambda_features, self.gumbel = lambda_ratio, lambda_features, gumbel
        self.lambda_attention = lambda_attention
        self.needs_teacher_attention = bool(lambda_attention)
        self.operating_point = ("keep", 0.0, 1.0) if count == "fixed" else ("threshold", 1.0, 0.0)
        self.predictors = nn.ModuleDict()

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.bind_share(shape, self.macs)
        for stage in self.stages:
            self.predictors[str(stage)] = Predictor(shape.width)

    def probe(self, depth: int) -> Probe:
        return Probe(merging=self.merges(depth))

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        layer = depth + 1
        if layer not in self.stages:
            return Verdict(tokens.decide(depth, None))
        logit, patch = self.predictors[str(layer)](tokens), ~tokens.is_prefix
        record = {"score": torch.sigmoid(-logit)}  # probability of halting
        record |= {"worth": logit} if self.needs_teacher_attention and self.training else {}
        merge = Merge() if self.merges(depth) else None
        if self.training and self.gumbel:
            soft, keep = self._gumbel_softmax(tokens, logit)
            keep = tokens.decide(depth, keep | ~patch)
            gate = torch.where(patch, keep + (soft - soft.detach()), 1.0)
            product = tokens.notes["decision"] = gate * tokens.notes.get("decision", torch.ones_like(gate))
            return Verdict(keep, gate=product, record=record | {"kept": gate * patch}, merge=merge)
        if self.count == "fixed":
            # int(rho^s N), N the number of patches that the image had at the start.
            share = self.keep.expand(self.stages.index(layer) + 1).prod()  # AOTInductor knows no power of a constant
            count = (tokens.shape[1] - tokens.prefix) * share
            keep = tokens.rank(logit.masked_fill(~patch, -torch.inf)) < (count + 1e-4).floor()
        else:
            keep = torch.sigmoid(logit) >= self.threshold
        keep = tokens.decide(depth, keep | ~patch)
        return Verdict(keep, record=record | {"kept": (keep & patch).to(logit.dtype)}, merge=merge)

    def _gumbel_softmax(self, tokens: Tokens, logit: Tensor) -> tuple[Tensor, Tensor]:
        """The soft and the hard decision to keep. The difference of two Gumbel variables is logistic."""
        u = tokens.gather(torch.rand(tokens.shape, device=logit.device, dtype=logit.dtype)).clamp(1e-6, 1 - 1e-6)
        soft = torch.sigmoid(logit + u.log() - (1 - u).log())
        return soft, soft > 0.5

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        trace = out.trace
        kept = trace.stack("kept")[..., trace.prefix :]  # (L, B, patches)
        gaps = [
            (kept[stage - 1].mean(-1) - self.keep**s) ** 2
            for s, stage in enumerate(self.stages, 1)
            if stage <= len(trace.lives)
        ]
        terms = {"ratio": torch.stack(gaps).mean()}
        if teacher is not None:
            # Layer norm without the network's scale and shift, which student and teacher share.
            student_BND, teacher_BND = (F.layer_norm(o.features.float(), o.features.shape[-1:]) for o in (out, teacher))
            kept_to_end = (trace.depth == trace.blocks)[:, trace.prefix :].to(student_BND.dtype)
            distance = ((student_BND - teacher_BND)[:, trace.prefix :] ** 2).mean(-1)
            terms["features"] = ((distance * kept_to_end).sum(-1) / kept_to_end.sum(-1).clamp_min(1)).mean()
        return terms | attention_terms(out, teacher, lambda values: values.get("worth"))

    @property
    def loss_weights(self) -> dict[str, float]:
        weights = {"ratio": self.lambda_ratio, "features": self.lambda_features}
        return weights | ({"attention": self.lambda_attention} if self.needs_teacher_attention else {})

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if depth + 1 not in self.stages:
            return torch.zeros_like(tokens)
        width = self.shape.width
        half, quarter = width // 2, width // 4
        compared = tokens**2 * self.shape.head_size if self.merges(depth) else 0
        return tokens * (width * width + width * half + half * quarter + quarter * 2) + compared
