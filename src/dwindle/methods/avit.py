"""A-ViT: Adaptive Tokens for Efficient Vision Transformer (Yin et al., 2022). Equation numbers are the paper's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..core.backbone import Shape
from ..core.method import Method, Verdict, halting_kl, halting_verdict, log_gaussian, ponder_cost, require, wide
from ..core.tokens import Tokens
from ..settings import Above0, Inside, Whole0

if TYPE_CHECKING:
    from ..core.model import Output


class AViT(Method):
    """One neuron of every block's output says how much of a token's work is done; at 1 - eps the token stops.

    The token that is read becomes the mean of its states, weighted by its halting probabilities (Eq. 9).
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
    ) -> None:
        """
        gamma, beta: scale and shift of the borrowed neuron, trained and shared by all layers (Eq. 5).
        eps: a token stops when its scores reach 1 - eps (Eq. 4). `threshold` puts another value in place of 1 - eps.
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

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(
            1 <= self.target_depth <= shape.blocks,
            f"target_depth = {self.target_depth}",
            f"this backbone has blocks 1..{shape.blocks}",
        )
        self.operating_point = ("threshold", 1e-6, float(shape.blocks))
        require(0 <= self.neuron < shape.width, f"neuron = {self.neuron}", f"the blocks' output has {shape.width}")

    def start(self, tokens: Tokens) -> Tokens:
        tokens.notes["cumulative"] = tokens.numbers(0.0)
        return tokens

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        last = depth + 1 == self.shape.blocks
        feature = wide(tokens.x[..., self.neuron])
        score = torch.ones_like(feature) if last else torch.sigmoid(self.gamma * feature + self.beta)  # Eq. 5
        before = tokens.notes["cumulative"]
        cumulative = tokens.notes["cumulative"] = before + score
        keep = cumulative < self.operating_value(tokens, "threshold")  # Eq. 4
        if not self.halt_class:
            keep = keep | tokens.is_prefix
        return halting_verdict(tokens, before, score, tokens.decide(depth, keep) & (not last))

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        trace = out.trace
        # Eq. 11: scores of halted tokens are 0. Both sides are made distributions before they are compared (Eq. 12).
        halting = ranks.mean(trace.scores.mean((1, 2)))
        halting = halting / halting.sum()
        target = log_gaussian(torch.full_like(halting[0], self.target_depth), trace.blocks, self.sigma)
        return {"ponder": ponder_cost(trace), "prior": halting_kl(halting, target)}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"ponder": self.alpha_p, "prior": self.alpha_d}  # Eq. 14

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        return tokens  # gamma * f, once per token
