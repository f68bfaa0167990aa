"""Token-Selective Attention: a gate on every token's residual update between consecutive blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.method import require, wide
from ...settings import AtLeast0, Share, Size
from .model import LMShape
from .routing import Gate, Keys, Router, RouterInput

if TYPE_CHECKING:
    from .execute import LMOutput


class TSA(Router):
    """A gate p = sigmoid(MLP(x)) for every token before every block but the first; x + p f(x), skipped where p < tau.

    Training is soft: every update is computed and scaled. Hard execution skips the updates with p < tau and scales the
    others as in training, so that tau = 0 is exactly the soft model.
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
        """penalty: lambda, the weight of the mean p in the loss. tau: the default raised the loss by less than 0.5%
        wherever it was measured; `evaluate.affordable` finds one for a model. keys: 'offered': a token that skips is
        still a key to others; 'withheld': it is not. hidden: neurons of the MLP; None: a quarter of the width, which
        with L = 6 blocks gives the paper's 1.7% of parameters. open: the gates' bias at the start, p = sigmoid(open).
        """
        super().__init__()
        self.penalty, self.tau, self.keys, self.hidden, self.open = penalty, tau, keys, hidden, open
        self.compiled: dict[bool, Callable[[nn.Module, Tensor], Tensor]] = {}  # `_probability`, by training mode

    def bind(self, shape: LMShape) -> None:
        super().bind(shape)
        require(shape.blocks >= 2, f"blocks = {shape.blocks}", "all tokens run the first, so TSA needs at least 2")
        self.gates = nn.ModuleList(_gate(shape.width, self._hidden, self.open) for _ in range(shape.blocks - 1))

    def gate(self, inputs: RouterInput) -> Gate | None:
        if inputs.depth == 0:  # an embedding holds nothing of its context to decide by
            return None
        p = self.compiled.get(self.training, _probability)(self.gates[inputs.depth - 1], inputs.x)
        keep = torch.ones_like(p, dtype=torch.bool) if self.training else p >= self.tau
        return Gate(p, keep, self.keys, {"p": p})

    def compile_parts(self, training: bool) -> None:
        self.compiled[training] = torch.compile(_probability)

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
    """(B, N) gates. The norm of the stream grows with depth, so the gate is given the stream normalised."""
    return wide(gate(F.layer_norm(x, x.shape[-1:]))[..., 0]).sigmoid()


def _gate(width: int, hidden: int, open: float) -> nn.Module:
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, 1)
    for layer, bias in ((first, 0.0), (last, open)):
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.constant_(layer.bias, bias)
    return nn.Sequential(first, nn.GELU(), last)
