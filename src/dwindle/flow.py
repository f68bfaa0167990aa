"""Live rows padded to the longest image, at sizes only known when a graph runs: what torch.export and ONNX record.

Shapes: B images, N tokens per image, n rows of each image now: as many as the longest has live, a new symbol after
each block at which tokens may leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .ops.heirs import inherit_by_product
from .tokens import Masked, Where, wide


@dataclass(frozen=True)
class _Placed(Where):
    """Rows (B, n) that stand for the tokens `home_Bn` of their images."""

    home_Bn: Tensor | None = None
    live_Bn: Tensor | None = None

    def sheet(self, rows: Tensor | None = None, fill: float = 0.0) -> Tensor:
        assert self.home_Bn is not None and self.live_Bn is not None
        rows = self.live_Bn if rows is None else torch.where(self.live_Bn, rows, fill)
        # The rows of an image are different tokens, live or not: none writes where another has.
        return rows.new_full(self.shape, fill).scatter(1, self.home_Bn, rows)


@dataclass
class Flow(Masked):
    """Rows that are not live are padding: computed, and read by nobody. An image alone has none."""

    home: Tensor = None  # type: ignore[assignment]  # (B, n) which token of its image a row is
    stopped: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (position b * N + n, value) of those who left

    @staticmethod
    def start(x_BND: Tensor, prefix: int) -> Flow:
        shape = (x_BND.shape[0], x_BND.shape[1])
        live = torch.ones(shape, dtype=torch.bool, device=x_BND.device)
        return Flow(x_BND, shape, prefix, live=live, home=torch.arange(shape[1], device=x_BND.device).expand(shape))

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Flow:
        return replace(self, x=call(self.x))

    def inherit(self, size: Tensor, staying: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        return inherit_by_product(wide(self.x), size, self.keys.detach(), staying, leaving)

    def per_image(self, values_B: Tensor) -> Tensor:
        return values_B[:, None].expand(-1, self.x.shape[1], *values_B.shape[1:])

    def take(self, sheet_BN: Tensor) -> Tensor:
        return sheet_BN.gather(1, self.home)

    @property
    def place(self) -> Tensor:
        return self.home

    @property
    def where(self) -> Where:
        return _Placed(self.shape, home_Bn=self.home, live_Bn=self.live)

    def advance(self, keep: Tensor | None, gate: Tensor | None = None) -> Flow:
        if keep is None:
            return replace(self, **self.forget())
        live, rows = self.live & keep, self.x.shape[1]
        counted = live.long()
        longest: Any = counted.sum(1).max().clamp_min(1).item()  # a row must be, were it padding
        torch._check(longest >= 1)
        torch._check(longest <= rows)
        # Live rows to the front, in their order, by counting: a sort costs more and its ties are the runtime's.
        ahead, behind = counted.cumsum(1), (1 - counted).cumsum(1)
        slot = torch.where(live, ahead - 1, ahead[:, -1:] + behind - 1)
        order = torch.zeros_like(slot).scatter(1, slot, torch.arange(rows, device=slot.device).expand(slot.shape))
        order = order[:, :longest]
        flat = (order + rows * torch.arange(self.shape[0], device=slot.device)[:, None]).flatten()

        def taken(values: Tensor) -> Tensor:
            return values.flatten(0, 1).index_select(0, flat).unflatten(0, (self.shape[0], longest))

        return replace(
            self,
            x=taken(self.x),
            notes={name: taken(note) for name, note in self.notes.items()},
            live=taken(live),
            home=taken(self.home),
            whole=False,
            stopped=[*self.stopped, self._picked(self.live & ~keep)],
            **self.forget(),
        )

    def _picked(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = rows.flatten().nonzero()[:, 0]
        position = self.home + self.shape[1] * torch.arange(self.shape[0], device=rows.device)[:, None]
        return position.flatten().index_select(0, chosen), self.value.flatten(0, 1).index_select(0, chosen)

    def stream(self) -> Tensor:
        homes, values = zip(*self.stopped, self._picked(self.live))
        images, count = self.shape
        flat = self.x.new_zeros(images * count, self.x.shape[-1]).index_copy(0, torch.cat(homes), torch.cat(values))
        return flat.view(images, count, -1)
