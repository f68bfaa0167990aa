"""The state that a token which stopped early gets at the end, so that features and dense tasks have the whole grid.

A token that was merged into another always gets the other's state. Shapes: B images, N tokens, D width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..settings import Size, checked
from .backbone import Shape
from .trace import Trace


class GiveBack(nn.Module):
    """How stopped tokens get a state at the end: `adapt(vit, method, give_back=GiveBack("nearest"))`."""

    @checked
    def __init__(self, halted: Literal["own", "nearest"] = "own", hidden: Size | Literal[0] = 0) -> None:
        """
        halted: the state of a token that stopped without being merged. 'own': the state it stopped with; 'nearest': the
            state of the token whose key was most similar when it stopped.
        hidden: neurons of a small MLP that updates every stopped token; 0: none. Before training the update is 0.
        """
        super().__init__()
        self.halted, self.hidden = halted, hidden

    def bind(self, shape: Shape) -> None:
        self.shape = shape
        if self.hidden:
            self.fc1 = nn.Linear(2 * shape.width, self.hidden)
            self.fc2 = nn.Linear(self.hidden, shape.width)
            nn.init.zeros_(self.fc2.weight)
            nn.init.zeros_(self.fc2.bias)

    def forward(self, own_BND: Tensor, given_BND: Tensor, stopped_BN: Tensor) -> Tensor:
        """(B, N, D) final states. own: the states tokens stopped with; given: their states without a learned update."""
        if not self.hidden:
            return given_BND
        width = (own_BND.shape[-1],)
        both = torch.cat([F.layer_norm(own_BND, width), F.layer_norm(given_BND, width)], -1)
        update: Tensor = self.fc2(F.gelu(self.fc1(both)))
        return torch.where(stopped_BN[..., None], given_BND + update.to(given_BND.dtype), given_BND)

    def macs(self, trace: Trace) -> Tensor:
        """(B,) multiply-accumulates: the update of every token, and the comparison of keys for 'nearest'."""
        counts = trace.counts.to(torch.float64)  # (L, B)
        update = 3 * self.hidden * self.shape.width * trace.shape[1]
        if self.halted == "own":
            return torch.full_like(counts[0], update)
        left = counts[:-1] - counts[1:]
        return update + (left * counts[1:] * self.shape.head_size).sum(0)

    @property
    def config(self) -> dict[str, Any]:
        return {"halted": self.halted, "hidden": self.hidden}
