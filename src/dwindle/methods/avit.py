"""A-ViT: Adaptive Tokens for Efficient Vision Transformer (Yin et al., 2022). Equation numbers are the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..core.backbone import Shape
from ..core.method import Method, Verdict, halting_kl, halting_verdict, log_gaussian, ponder_cost, require, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import Above0, AtLeast0, Inside, Whole0, Whole1
from .attended import Merging, attention_terms

if TYPE_CHECKING:
    from ..core.model import Output


@dataclass(frozen=True)
class Halting:
    """Variants that the paper compares with, and options of other methods.

    network: hidden width of a two-layer network (GELU, sigmoid) that scores tokens after each block, in place of the
        neuron; section 4.3 has 96 for width 192. None: the neuron. bias: initial bias of its scores.
    merge: tokens that halt are dropped ('none', the paper), or merged with the most similar patch that goes on
        ('nearest', see `AHT`).
    lambda_attention: weight of a term that makes tokens halt later to which a teacher's class token attends more; 0 is
        the paper.
    """

    network: Whole1 | None = None
    bias: float = -3.0
    merge: Merging = "none"
    lambda_attention: AtLeast0 = 0.0


HALTING = Halting()


class AViT(Method):
    """One neuron of each block's output gives a token's halting score; when the sum reaches 1 - eps, the token stops.

    The token that the head reads becomes the mean of its states, weighted by its halting probabilities (Eq. 9).
    """

    paper = "A-ViT: Adaptive Tokens for Efficient Vision Transformer, 2022"
    per_image_point = True

    def __init__(
        self,
        gamma: float = 5.0,
        beta: float = -10.0,
        eps: Inside = 0.01,
        target_depth: float = 8.0,
        sigma: Above0 = 1.0,
        neuron: Whole0 = 0,
        alpha_p: float = 5e-4,
        alpha_d: float = 0.1,
        halt_class: bool = True,
        threshold: Above0 | None = None,
        halting: Halting = HALTING,
    ) -> None:
        """The fields of the last argument are passed by their own names: AViT(merge="nearest").

        gamma, beta: scale and shift of the borrowed neuron, trained and shared by all layers (Eq. 5).
        eps: a token stops when the sum of its scores reaches 1 - eps (Eq. 4). threshold: a value to use in place of
            1 - eps.
        target_depth, sigma: centre and width of the distributional prior (Eq. 12).
        alpha_p, alpha_d: weights of the ponder loss and of the prior (Eq. 14).
        halt_class: the class token halts like the others, as in the paper; False keeps it to the end.
        """
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(float(gamma)))
        self.beta = nn.Parameter(torch.tensor(float(beta)))
        self.eps, self.target_depth, self.sigma, self.neuron = eps, target_depth, sigma, neuron
        self.alpha_p, self.alpha_d, self.halt_class = alpha_p, alpha_d, halt_class
        self.threshold = 1 - eps if threshold is None else threshold
        self.network, self.bias = halting.network, halting.bias
        self.merge, self.lambda_attention = halting.merge, halting.lambda_attention
        self.needs_teacher_attention = bool(halting.lambda_attention)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(
            1 <= self.target_depth <= shape.blocks,
            f"target_depth = {self.target_depth}",
            f"this backbone has blocks 1..{shape.blocks}",
        )
        self.operating_point = ("threshold", 1e-6, float(shape.blocks))
        require(0 <= self.neuron < shape.width, f"neuron = {self.neuron}", f"the blocks' output has {shape.width}")
        if self.network is not None:
            self.networks = nn.ModuleList(
                _network(shape.width, self.network, self.bias) for _ in range(shape.blocks - 1)
            )

    def start(self, tokens: Tokens) -> Tokens:
        tokens.notes["cumulative"] = tokens.full(0.0)
        return tokens

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        last = depth + 1 == self.shape.blocks
        logit = self._logit(depth, tokens)
        score = torch.ones_like(logit) if last else torch.sigmoid(logit)
        before = tokens.notes["cumulative"]
        cumulative = tokens.notes["cumulative"] = before + score
        keep = cumulative < self.operating_value(tokens, "threshold")  # Eq. 4
        if not self.halt_class:
            keep = keep | tokens.is_prefix
        verdict = halting_verdict(tokens, before, score, tokens.decide(depth, keep) & (not last))
        verdict.merge = Merge() if self._merges(depth) else None
        if self.needs_teacher_attention and self.training and not last:
            verdict.record["worth"] = -logit
        return verdict

    def _logit(self, depth: int, tokens: Tokens) -> Tensor:
        """The logit of each token's score. The last block's is not used as a score, because all tokens halt there."""
        if self.network is None or depth + 1 == self.shape.blocks:
            return self.gamma * wide(tokens.x[..., self.neuron]) + self.beta  # Eq. 5
        logit: Tensor = self.networks[depth](tokens.x)
        return wide(logit[..., 0])

    def _merges(self, depth: int) -> bool:
        return self.merge == "nearest" and depth + 1 < self.shape.blocks

    def probe(self, depth: int) -> Probe:
        return Probe(merging=self._merges(depth))

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        trace = out.trace
        # Eq. 11: scores of halted tokens are 0. Both sides are normalised to distributions and then compared (Eq. 12).
        halting = ranks.mean(trace.scores.mean((1, 2)))
        halting = halting / halting.sum()
        target = log_gaussian(torch.full_like(halting[0], self.target_depth), trace.blocks, self.sigma)
        terms = {"ponder": ponder_cost(trace), "prior": halting_kl(halting, target)}
        return terms | attention_terms(out, teacher, lambda values: values.get("worth"))

    @property
    def loss_weights(self) -> dict[str, float]:
        weights = {"ponder": self.alpha_p, "prior": self.alpha_d}  # Eq. 14
        return weights | ({"attention": self.lambda_attention} if self.needs_teacher_attention else {})

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        scores: Tensor = tokens  # gamma * f, once per token
        if self.network is not None:
            scores = tokens * (self.shape.width + 1) * self.network * (depth + 1 < self.shape.blocks)
        return scores + tokens**2 * self.shape.head_size if self._merges(depth) else scores


def _network(width: int, hidden: int, bias: float) -> nn.Module:
    out = nn.Linear(hidden, 1)
    nn.init.constant_(out.bias, bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), out)
