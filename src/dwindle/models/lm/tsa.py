"""Token-Selective Attention: a gate on every token's residual update between consecutive blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.method import require, wide
from ...settings import AtLeast0, Share, Size
from .model import LMShape
from .routing import Gate, Keys, Moment, Router

if TYPE_CHECKING:
    from .execute import LMOutput


class TSA(Router):
    """p = sigmoid(MLP(x)) for every token before every block but the first; x + p f(x); skipped where p < tau.

    Training is soft: every update is computed and scaled. Hard execution leaves out those with p < tau and scales the
    others as in training, so that tau = 0 is exactly the soft model and the only change is what is left out.
    """

    paper = "Adaptive Computation Depth via Learned Token Routing in Transformers, 2026"
    operating_point = ("tau", 1.0, 0.0)

    def __init__(
        self,
        penalty: AtLeast0 = 0.0,
        tau: Share = 0.1,
        keys: Keys = "offered",
        hidden: Size | None = None,
        open: float = 2.0,
    ) -> None:
        """penalty: lambda, of the mean p; 0: the task loss alone. tau: the default costs less than 0.5% of the loss
        wherever it was measured; `evaluate.affordable` finds a model's own. keys: whether a token that skips is still a
        key to others. hidden: of the MLP; None: a quarter of the width, which with gates between L = 6 blocks is the
        paper's 1.7% of parameters. open: the gates' bias at the start, p = sigmoid(open)."""
        super().__init__()
        self.penalty, self.tau, self.keys, self.hidden, self.open = penalty, tau, keys, hidden, open
        self.asked: dict[bool, Callable[[nn.Module, Tensor], Tensor]] = {}  # compiled, by whether it is for training

    def bind(self, shape: LMShape) -> None:
        super().bind(shape)
        require(shape.blocks >= 2, f"blocks = {shape.blocks}", "all tokens run the first, so TSA needs at least 2")
        self.gates = nn.ModuleList(_gate(shape.width, self._hidden, self.open) for _ in range(shape.blocks - 1))

    def gate(self, now: Moment) -> Gate | None:
        if now.depth == 0:  # an embedding knows nothing of its context: there is nothing to decide by
            return None
        p = self.asked.get(self.training, _probability)(self.gates[now.depth - 1], now.x)
        keep = torch.ones_like(p, dtype=torch.bool) if self.training else p >= self.tau
        return Gate(p, keep, self.keys, {"p": p})

    def compile_parts(self, training: bool) -> None:
        self.asked[training] = torch.compile(_probability)

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        p = torch.stack([values["p"] for values in out.trace.values[1:]])  # (L - 1, B, N)
        if out.real is not None:
            return {"depth": (p * out.real).sum() / (len(p) * out.real.sum())}
        return {"depth": p.mean((1, 2)).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"depth": self.penalty}

    def macs(self, depth: int) -> int:
        return (self.shape.width + 1) * self._hidden if depth else 0

    @property
    def _hidden(self) -> int:
        return self.hidden or max(self.shape.width // 4, 1)


def _probability(gate: nn.Module, x: Tensor) -> Tensor:
    """(B, N). The stream grows with depth; the gate reads its direction."""
    return wide(gate(F.layer_norm(x, x.shape[-1:]))[..., 0]).sigmoid()


def _gate(width: int, hidden: int, open: float) -> nn.Module:
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, 1)
    for layer, bias in ((first, 0.0), (last, open)):
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(first, nn.GELU(), last)


@contextmanager
def softly(router: TSA) -> Iterator[None]:
    """tau = 0 for a while: nothing is skipped, everything is scaled."""
    tau, router.tau = router.tau, 0.0
    try:
        yield
    finally:
        router.tau = tau
