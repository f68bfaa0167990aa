"""Trace: what happened at each block. Losses, cost, figures and the demo read only this."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tokens import Tokens, Where


@dataclass(repr=False)
class Trace:
    """Which tokens were live in each block, and the values that the method recorded there. The loop fills it."""

    shape: tuple[int, int]  # B, N
    prefix: int
    grid: tuple[int, int]  # rows and columns of patches
    blocks: int
    lives: list[Where] = field(default_factory=list)
    values: list[dict[str, Tensor]] = field(default_factory=list)
    exits: list[Tensor] = field(default_factory=list)  # (B, classes) logits at each depth, for methods with exits
    image_grid: tuple[int, int] | None = None  # the grid of the images themselves, if smaller ones were computed
    _live: Tensor | None = None  # a cache; functools.cached_property takes a lock, which cannot be compiled

    def record(self, tokens: Tokens, values: dict[str, Tensor], exit: Tensor | None = None) -> None:
        """Add a block: its live tokens, the method's values on rows, and the logits of an exit."""
        self.lives.append(tokens.where)
        self.values.append(values)
        if exit is not None:
            self.exits.append(exit)

    @property
    def live(self) -> Tensor:
        """(L, B, N) bool: which tokens block l computed."""
        if self._live is None:
            self._live = self._stack([where.dense_rows() for where in self.lives], False)
        return self._live

    @property
    def live_at_end(self) -> Tensor:
        """(B, N) bool: which tokens the last block computed."""
        last = self.lives[-1].dense_rows()
        return last if len(self.lives) == self.blocks else torch.zeros_like(last)

    @property
    def depth(self) -> Tensor:
        """(B, N) int, 1..L: the block after which each token stopped."""
        return self.live.sum(0)

    @property
    def counts(self) -> Tensor:
        """(L, B): tokens of each image that block l computed."""
        return self.live.sum(-1)

    def stack(self, name: str, fill: float = 0.0) -> Tensor:
        """(L, B, N): the values that the method recorded as `name` at each block; `fill` where a token was not live."""
        if not any(name in values for values in self.values):
            raise KeyError(f"this trace holds no '{name}'; it holds {sorted({k for v in self.values for k in v})}")
        empty = torch.full(self.shape, fill, device=self.live.device)
        pairs = zip(self.lives, self.values)
        return self._stack([w.dense_rows(v[name], fill) if name in v else empty for w, v in pairs], fill)

    def _stack(self, dense: list[Tensor], fill: float) -> Tensor:
        """(L, B, N): one of `dense` (B, N) per block, and `fill` for blocks that did not run as no token was live."""
        return torch.stack([*dense, *[torch.full_like(dense[0], fill)] * (self.blocks - len(dense))])

    @property
    def scores(self) -> Tensor:
        """(L, B, N) halting scores h, 0 where a token was not live."""
        return self.stack("score")

    @property
    def plans(self) -> dict[int, Tensor]:
        """{stage: (B, N) planned depth}, NaN for tokens that had halted before that stage."""
        return {
            block: where.dense_rows(values["plan"], torch.nan)
            for block, (where, values) in enumerate(zip(self.lives, self.values), 1)
            if "plan" in values
        }

    @property
    def patches(self) -> Tensor:
        """(B, rows, columns): the depth of each patch, for maps."""
        return self.depth[:, self.prefix :].view(-1, *self.grid)

    @property
    def mean_depth(self) -> Tensor:
        """(B,) mean depth over the tokens that each image began with; other images of the batch may have more."""
        depth = self.depth
        return depth.sum(-1) / (depth > 0).sum(-1).clamp_min(1)

    def __repr__(self) -> str:
        depths = ", ".join(f"{depth:.2f}" for depth in self.mean_depth.tolist()[:8])
        more = ", ..." if self.shape[0] > 8 else ""
        return (
            f"Trace(images={self.shape[0]}, tokens={self.shape[1]}, blocks={self.blocks}, mean_depth=[{depths}{more}])"
        )
