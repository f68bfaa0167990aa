"""Heads that answer for each patch, in the place of the wrapped model's own head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..settings import Classes, checked


class PatchHead(nn.Module):
    """A linear layer on the state of each patch, whose outputs form a map."""

    @checked
    def __init__(self, width: Classes, outputs: Classes) -> None:
        super().__init__()
        self.width, self.outputs = width, outputs
        self.linear = nn.Linear(width, outputs)

    def forward(self, patches_BPD: Tensor) -> Tensor:
        """(B, P, D) -> (B, P, outputs)."""
        logits: Tensor = self.linear(patches_BPD)
        return logits

    @property
    def macs(self) -> int:
        """Multiply-accumulates per patch."""
        return self.width * self.outputs

    @property
    def config(self) -> dict[str, Any]:
        return {"outputs": self.outputs}
