"""ACT: Adaptive Computation Time for Recurrent Neural Networks (Graves, 2016), over the blocks of a transformer.

Equation numbers are A-ViT's, which restates ACT for tokens; here all tokens of an image share one score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.cost import budget_share
from ..core.method import Method, Verdict, goal, halting_verdict, ponder_cost, ramp_factor, wide
from ..core.tokens import Tokens
from ..settings import Above0, AtLeast0, Budget, Inside, Share
from .exits import image_state

if TYPE_CHECKING:
    from ..core.model import Output


class ACT(Method):
    """A halting unit scores each image after each block; when the sum reaches 1 - eps, all its tokens stop.

    The head reads the mean of the states, weighted by the image's halting probabilities (Eq. 9).
    """

    paper = "Adaptive Computation Time for Recurrent Neural Networks, 2016"
    per_image_point = True

    def __init__(
        self,
        eps: Inside = 0.01,
        tau: AtLeast0 = 1e-3,
        bias: float = -5.0,
        threshold: Above0 | None = None,
        budget: Budget = None,
        ramp: Share = 0.3,
    ) -> None:
        """
        eps: an image stops when the sum of its scores reaches 1 - eps (Eq. 4). threshold: a value to use in place of
            1 - eps.
        tau: weight of the ponder cost N + R (Eq. 8).
        bias: initial bias of the halting unit; far below 0, so that training begins with the wrapped model.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'), that training holds by moving the threshold.
            None: only tau decides what images cost. ramp: share of the training over which the budget is brought in.
        """
        super().__init__()
        self.eps, self.tau, self.bias, self.budget, self.ramp = eps, tau, bias, budget, ramp
        limit = 1 - eps if threshold is None else float(threshold)
        self.threshold: float | Tensor
        if budget is None:
            self.threshold = limit
        else:  # training moves it; as it is a tensor, nothing is compiled anew
            self.register_buffer("threshold", torch.tensor(limit))

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.operating_point = ("threshold", 1e-6, float(shape.blocks))
        if self.budget is not None:
            budget_share(self.budget, shape)  # refuses what is no budget
        self.unit = nn.Linear(shape.width, 1)  # shared by all blocks
        nn.init.constant_(self.unit.bias, self.bias)

    def start(self, tokens: Tokens) -> Tokens:
        tokens.notes["cumulative"] = tokens.full(0.0)
        return tokens

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        last = depth + 1 == self.shape.blocks
        before = tokens.notes["cumulative"]
        if last:
            score = torch.ones_like(before)
        else:
            halting = torch.sigmoid(wide(self.unit(image_state(tokens, tokens.x))[:, 0]))  # (B,)
            score = tokens.per_image(halting)
        cumulative = tokens.notes["cumulative"] = before + score
        keep = tokens.decide(depth, cumulative < self.operating_value(tokens, "threshold"))  # Eq. 4
        return halting_verdict(tokens, before, score, keep & (not last))

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        return {"ponder": ponder_cost(out.trace)}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"ponder": self.tau}

    def hold_budget(self, cost: Tensor) -> None:
        """Integral control of the threshold's logarithm: it falls while a batch costs more than the budget."""
        if self.budget is None:
            return
        self.budget_held = True
        assert isinstance(self.threshold, Tensor)
        wanted = goal(self.budget, self.shape, ramp_factor(self.progress, self.ramp))
        with torch.no_grad():  # in place, because a recorded step reads this memory
            self.threshold.mul_(torch.exp(0.5 * (wanted - cost.to(self.threshold)))).clamp_(1e-6, self.shape.blocks)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        width = self.shape.width if depth + 1 < self.shape.blocks else 0
        return (tokens > 0).to(tokens.dtype) * width
