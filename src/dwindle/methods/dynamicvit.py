"""DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification (Rao et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.cost import keep_for
from ..core.method import Method, Verdict, check_stages, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import AtLeast0, Budget, Share, Stages
from .attended import Merging, attention_terms

if TYPE_CHECKING:
    from ..core.model import Output


class Predictor(nn.Module):
    """A token's own features beside the mean over its image's live patches: the logit of keeping it."""

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
        local, wider = F.gelu(self.embed(self.norm(tokens.x))).chunk(2, -1)
        patch = (~tokens.is_prefix)[..., None].to(wider.dtype)
        count = tokens.image_sum(patch).clamp_min(1)
        features = torch.cat([local, tokens.per_image(tokens.image_sum(wider * patch) / count)], -1)
        drop, keep = wide(self.out(features)).unbind(-1)
        return keep - drop


class DynamicViT(Method):
    """Predictors at three stages decide which patches go on; trained with hard Gumbel decisions and a ratio loss."""

    paper = "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification, 2021"
    asks_features = True
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
        stages: patches leave after these blocks. keep: rho, the share that goes on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        count: at inference the best of each image go on, the same number in all ('fixed', the paper), or as many as
            have a probability of at least `threshold` ('image').
        lambda_ratio, lambda_features: weights of the ratio loss and, with a teacher, of the distance of the kept
            patches' features to its own. (The paper's third loss, KL to the teacher's answer, is any method's.)
        gumbel: decide by the Gumbel-softmax in training, with a gradient; False: as at inference, without one.
        merge: what leaves is gone ('none', the paper), or joins the most alike patch that goes on ('nearest', as in
            `AHT`).
        lambda_attention: weight of a term that has the predictors rank patches as a teacher's class token attends to
            them over all its blocks; 0 is the paper.
        """
        super().__init__()
        self.stages = tuple(sorted(set(stages)))
        self.budget, self.count, self.threshold = budget, count, threshold
        self.keep: Tensor
        self.register_buffer("keep", torch.tensor(float(keep)))  # a tensor: turned without compiling anew
        self.lambda_ratio, self.lambda_features, self.gumbel = lambda_ratio, lambda_features, gumbel
        self.merge, self.lambda_attention = merge, lambda_attention
        self.asks_attention = bool(lambda_attention)
        self.operating_point = ("keep", 0.0, 1.0) if count == "fixed" else ("threshold", 1.0, 0.0)
        self.predictors = nn.ModuleDict()

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        check_stages(self.stages, shape)
        if self.budget is not None:
            self.keep.fill_(keep_for(self.budget, shape, self.stages, self.macs))
        for stage in self.stages:
            self.predictors[str(stage)] = Predictor(shape.width)

    def probe(self, depth: int) -> Probe:
        return Probe(merging=self.merge == "nearest" and depth + 1 in self.stages)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        layer = depth + 1
        if layer not in self.stages:
            return Verdict(tokens.decide(depth, None))
        logit, patch = self.predictors[str(layer)](tokens), ~tokens.is_prefix
        record = {"score": torch.sigmoid(-logit)}  # of halting
        record |= {"worth": logit} if self.asks_attention and self.training else {}
        merge = Merge() if self.merge == "nearest" else None
        if self.training and self.gumbel:
            soft, keep = self._drawn(tokens, logit)
            keep = tokens.decide(depth, keep | ~patch)
            gate = torch.where(patch, keep + (soft - soft.detach()), 1.0)
            so_far = tokens.notes["decision"] = gate * tokens.notes.get("decision", torch.ones_like(gate))
            return Verdict(keep, gate=so_far, record=record | {"kept": gate * patch}, merge=merge)
        if self.count == "fixed":
            # int(rho^s N) of the patches the image began with.
            share = self.keep.expand(self.stages.index(layer) + 1).prod()  # AOTInductor knows no power of a constant
            begun = (tokens.shape[1] - tokens.prefix) * share
            keep = tokens.rank(logit.masked_fill(~patch, -torch.inf)) < (begun + 1e-4).floor()
        else:
            keep = torch.sigmoid(logit) >= self.threshold
        keep = tokens.decide(depth, keep | ~patch)
        return Verdict(keep, record=record | {"kept": (keep & patch).to(logit.dtype)}, merge=merge)

    def _drawn(self, tokens: Tokens, logit: Tensor) -> tuple[Tensor, Tensor]:
        """Gumbel-softmax of (drop, keep): the difference of two Gumbel variables is logistic."""
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
            # Features as they leave the network, normed; without its scale and shift, which both share.
            mine, other = (F.layer_norm(o.features.float(), o.features.shape[-1:]) for o in (out, teacher))
            to_end = (trace.depth == trace.blocks)[:, trace.prefix :].to(mine.dtype)
            distance = ((mine - other)[:, trace.prefix :] ** 2).mean(-1)
            terms["features"] = ((distance * to_end).sum(-1) / to_end.sum(-1).clamp_min(1)).mean()
        return terms | attention_terms(out, teacher, lambda values: values.get("worth"))

    @property
    def loss_weights(self) -> dict[str, float]:
        weights = {"ratio": self.lambda_ratio, "features": self.lambda_features}
        return weights | ({"attention": self.lambda_attention} if self.asks_attention else {})

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if depth + 1 not in self.stages:
            return torch.zeros_like(tokens)
        width = self.shape.width
        half, quarter = width // 2, width // 4
        compared = tokens**2 * self.shape.head_size if self.merge == "nearest" else 0
        return tokens * (width * width + width * half + half * quarter + quarter * 2) + compared
