"""PonderNet: Learning to Ponder (Banino et al., 2021), over the blocks of a transformer and without new layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.method import Method, Verdict, halting_distribution, halting_kl, require, wide
from ..core.tokens import Tokens
from ..core.trace import Trace
from ..settings import AtLeast0, Inside, Whole0, Within
from .exits import image_state
from .random import drawn

if TYPE_CHECKING:
    from ..core.model import Output


class PonderNet(Method):
    """After each block an image halts with probability lambda; training weights each depth's loss by the probability of
    halting there.

    lambda is read from one neuron of the class token, as A-ViT reads its scores.
    """

    paper = "PonderNet: Learning to Ponder, 2021"
    per_image_point = True
    exits_by_confidence = True

    def __init__(
        self,
        gamma: float = 1.0,
        beta: float = -2.0,
        neuron: Whole0 = 0,
        prior: Inside = 0.1,
        beta_kl: AtLeast0 = 0.01,
        threshold: Annotated[float, Within(0, 1, over=True)] = 0.5,
        per: Literal["image", "token"] = "image",
        sample: bool = False,
    ) -> None:
        """
        gamma, beta: lambda = sigmoid(gamma * f + beta), f neuron number `neuron` of the block's output; both are
            trained and shared by all blocks.
        prior: parameter of the geometric distribution that the KL term pulls halting towards. beta_kl: its weight.
        threshold: an image stops when it has halted with at least this probability. 0.5 is the median.
        per: 'image': lambda is the class token's, and all tokens stop; 'token': each token has its own, and patches
            stop (A-ViT's appendix).
        sample: patches stop at a depth drawn from their halting distribution, in training too; needs per='token'. The
            draw is computed from the image's pixels. At a threshold of 0.5 it is unbiased; below, depths are earlier.
        """
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(float(gamma)))
        self.beta = nn.Parameter(torch.tensor(float(beta)))
        require(per == "token" or not sample, "sample = True, per = image", "tokens are drawn; say per='token' as well")
        self.neuron, self.prior, self.beta_kl, self.threshold = neuron, prior, beta_kl, threshold
        self.per, self.sample = per, sample
        self.operating_point = ("threshold", 1e-6, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        require(
            0 <= self.neuron < shape.width, f"neuron = {self.neuron}", f"the blocks' output has 0..{shape.width - 1}"
        )

    def start(self, tokens: Tokens) -> Tokens:
        tokens.notes["surviving"] = tokens.full(1.0)  # prod_j (1 - lambda_j)
        if self.sample:
            assert tokens.images is not None
            draws = drawn(tokens.images, tokens.shape[1], 0)
            tokens.notes["draws"] = tokens.gather(draws).to(tokens.notes["surviving"].dtype)
        return tokens

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if depth + 1 == self.shape.blocks:  # all that is left stops here
            score, keep = torch.ones_like(tokens.notes["surviving"]), None
        else:
            score = self._score(tokens)
            surviving = tokens.notes["surviving"] = tokens.notes["surviving"] * (1 - score)
            keep = None if self.training and not self.sample else self._goes_on(tokens, surviving)
        logits = tokens.read() if self.training else None
        return Verdict(tokens.decide(depth, keep), record={"score": score}, exit=logits)

    def _score(self, tokens: Tokens) -> Tensor:
        if self.per == "token":
            return torch.sigmoid(self.gamma * wide(tokens.x[..., self.neuron]) + self.beta)
        feature = wide(image_state(tokens, tokens.x[..., self.neuron, None])[:, 0])
        return tokens.per_image(torch.sigmoid(self.gamma * feature + self.beta))

    def _goes_on(self, tokens: Tokens, surviving: Tensor) -> Tensor:
        limit = self.operating_value(tokens, "threshold")
        if self.sample:  # a uniform number under the distribution function is a draw from the distribution
            limit = 2 * limit * tokens.notes["draws"]
        keep: Tensor = 1 - surviving < limit
        return keep if self.per == "image" else keep | tokens.is_prefix

    def distribution(self, trace: Trace) -> Tensor:
        """(L, B): p_n = lambda_n prod_{j<n} (1 - lambda_j), and the remainder at the last block an image reached. Where
        each token has its own lambda, this is the class token's, because the head reads it."""
        if self.per == "token" and trace.prefix:
            return halting_distribution(trace.scores[..., 0], trace.live[..., 0], "hazard")
        counts = trace.counts
        score = trace.scores.sum(-1) / counts.clamp_min(1)  # all live tokens of an image share it
        return halting_distribution(score, counts > 0, "hazard")

    def exit_weights(self, trace: Trace) -> Tensor | None:
        return self.distribution(trace) if self.training else None

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        if self.per == "token":
            actual = halting_distribution(out.trace.scores, out.trace.live, "hazard").flatten(1)  # L, B * N
        else:
            actual = self.distribution(out.trace)
        steps = torch.arange(out.trace.blocks, device=actual.device, dtype=actual.dtype)[:, None]
        log_prior = torch.log_softmax(steps * math.log1p(-self.prior), 0)  # geometric, truncated to L blocks
        return {"prior": halting_kl(actual, log_prior).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"prior": self.beta_kl}

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if self.per == "token":
            return tokens * (depth + 1 < self.shape.blocks)
        scored = (tokens > 0) & (depth + 1 < self.shape.blocks)
        return scored.to(tokens.dtype)  # gamma * f, once per image
