"""The third layout: the stream stays in place, and kernels run over a list of its live rows that is made on the device.

Methods see the sheets (B, N) of the masked layout, so that every method runs here as it is. What no kernel covers (a
block of an unknown make) runs as in the masked layout: right, only not faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.masked import Masked
from ...ops.attention import looked_at
from ...ops.merging_rows import merge_rows
from ...ops.rows import Rows, compact
from .block import Ready


@dataclass
class Listed(Masked):
    ready: dict[nn.Module, Ready] = field(default_factory=dict)
    entries: tuple[Tensor, int] | None = None  # queries, keys and values of the block just run, compact; and heads

    @staticmethod
    def begin(x_BND: Tensor, prefix: int, ready: dict[nn.Module, Ready], live: Tensor, rows: Rows) -> Listed:
        """live, rows: who is there, as a sheet and as a list. Nobody writes to these."""
        images, count, _ = x_BND.shape
        return Listed(x_BND.contiguous(), (images, count), prefix, live=live, ready=ready, rows=rows)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Listed:
        ready = self.ready.get(block)
        if ready is None:
            return super().update(call, block)  # type: ignore[return-value]
        assert self.rows is not None
        if any(note is self.x for note in self.notes.values()):  # a method kept the stream as it is now
            self.x = self.x.clone()
        self.x = self.x.contiguous()
        x = self.x.flatten(0, 1)
        bias = self.notes.get("key_bias")
        qkv = ready.attend(x, self.rows, self.shape[1], None if bias is None else bias.flatten())
        if self.keeping_keys and self.keys_to_merge and ready.norm is None:
            self.entries = qkv, ready.heads
        elif self.keeping_keys or self.watching:
            self._look(qkv, ready)
        probe = None
        if self.probed is not None:
            probe = torch.empty(self.shape, device=x.device)
        ready.think(x, self.rows, None if probe is None else probe.view(-1), self.probed or 0)
        self.probe = probe
        return self

    def _look(self, qkv: Tensor, ready: Ready) -> None:
        """Keys, and the class token's attention, for methods that asked."""
        q, k, _ = self._sheet(qkv).unflatten(-1, (3, ready.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, E)
        if ready.norm is not None:
            q, k = ready.norm(q, k)
        if self.keeping_keys:
            self.keys = k.mean(1)
        if self.watching:
            self.attention = looked_at(q, k, self.live, self.prefix, ready.scale)

    def _sheet(self, compact_TC: Tensor) -> Tensor:
        """(B, N, C) of compact entries: those beyond the live count land on a row that is cut off."""
        assert self.rows is not None
        total = self.shape[0] * self.shape[1]
        entry = torch.arange(total, device=compact_TC.device)
        flat_index = torch.where(entry < self.rows.count, self.rows.rows_R, total).long()
        dense_rows = compact_TC.new_zeros(total + 1, compact_TC.shape[1])
        # Many entries may land on the last row: which wins does not matter.
        return dense_rows.index_copy(0, flat_index, compact_TC)[:-1].view(*self.shape, -1)

    def merge_nearest(self, keep: Tensor) -> None:
        if self.entries is None:
            return super().merge_nearest(keep)
        assert self.rows is not None
        size, (new, live) = self.notes["size"], self._going(keep)
        bias = self.notes.setdefault("key_bias", torch.zeros_like(size))
        qkv, heads = self.entries
        merge_rows(self.x, qkv, heads, self.rows, new, live, size, bias, self.prefix)

    def advance(self, keep: Tensor | None, gate: Tensor | None = None) -> Listed:
        if keep is None:
            return replace(self, **self.forget())
        rows, live = self._going(keep)
        return replace(self, live=live, rows=rows, whole=False, **self.forget())

    def _going(self, keep: Tensor) -> tuple[Rows, Tensor]:
        """Who goes on, as a list and as a sheet."""
        if self.listed is not None and self.listed[0] is keep:
            return self.listed[1], keep
        return compact(self.live, keep)

    def forget(self) -> dict[str, Any]:
        return {**super().forget(), "entries": None}
