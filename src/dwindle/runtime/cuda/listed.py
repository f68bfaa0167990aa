"""The masked layout over a list: the stream stays in place, and kernels run over a list of its live rows, made on the
device.

Methods see rows (B, N) as in the masked layout, so every method runs here as it is. A block for which there are no
kernels runs as in the masked layout: with the same result, only not faster. Operations return new objects, as in every
layout, but kernels write to the memory of the old one: it is used up, and the loop holds none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...core.masked import Masked
from ...core.tokens import NOTHING, Probe, Probed
from ...ops.merging import Merge, merge_rows
from ...ops.rows import Rows, compact
from .block import Ready


@dataclass
class Listed(Masked):
    ready: dict[nn.Module, Ready] = field(default_factory=dict)
    entries: tuple[Tensor, int] | None = None  # queries, keys and values of the block just run, compact; and heads

    @staticmethod
    def begin(x_BND: Tensor, prefix: int, ready: dict[nn.Module, Ready], live: Tensor, rows: Rows) -> Listed:
        """live, rows: the live rows, as (B, N) and as a list. No kernel writes to these."""
        images, count, _ = x_BND.shape
        return Listed(x_BND.contiguous(), (images, count), prefix, live=live, ready=ready, rows=rows)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Listed:
        ready = self.ready.get(block)
        if ready is None:
            return super().update(call, block, probe)  # type: ignore[return-value]
        assert self.rows is not None
        kept = any(note is self.x for note in self.notes.values())  # a method kept the stream as it is now
        stream = self.x.clone() if kept else self.x.contiguous()
        x = stream.flatten(0, 1)  # (B * N, D), the same memory
        bias = self.notes.get("key_bias")
        qkv = ready.attend(x, self.rows, self.shape[1], None if bias is None else bias.flatten())
        entries, attended = None, NOTHING
        if probe.merging and not (probe.keys or probe.attention) and ready.norm is None:
            entries = qkv, ready.heads
        elif probe.merging or probe.keys or probe.attention:
            attended = self._look(probe, qkv, ready)
        neuron = None if probe.neuron is None else torch.empty(self.shape, device=x.device)
        ready.mlp(x, self.rows, None if neuron is None else neuron.view(-1), probe.neuron or 0)
        return self.changed(x=stream, entries=entries, probed=Probed(neuron, attended.attention, attended.keys))

    def _look(self, probe: Probe, qkv: Tensor, ready: Ready) -> Probed:
        """What a probe asks of attention, from compact entries."""
        q, k, _ = self._dense(qkv).unflatten(-1, (3, ready.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, E)
        if ready.norm is not None:
            q, k = ready.norm(q, k)
        return self.probe_attention(probe, q, k, ready.scale)

    def _dense(self, compact_TC: Tensor) -> Tensor:
        """(B, N, C) of compact entries: those beyond the live count land on a row that is cut off."""
        assert self.rows is not None
        total = self.shape[0] * self.shape[1]
        entry = torch.arange(total, device=compact_TC.device)
        flat_index = torch.where(entry < self.rows.count, self.rows.rows_R, total).long()
        dense_rows = compact_TC.new_zeros(total + 1, compact_TC.shape[1])
        # Many entries may land on the last row: which wins does not matter.
        return dense_rows.index_copy(0, flat_index, compact_TC)[:-1].view(*self.shape, -1)

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Listed:
        if keep is None:
            return self.changed(probed=NOTHING, entries=None)
        new, live = (rows, keep) if rows is not None else compact(self.live, keep)
        if merge is None:
            after = self
        elif self.entries is not None and merge == Merge():
            after = self._merged_in_place(new, live)
        else:
            after = self.merged(keep, merge)
        return after.changed(live=live, rows=new, whole=False, probed=NOTHING, entries=None)

    def _merged_in_place(self, new: Rows, live: Tensor) -> Listed:
        """`merged` with the nearest, by kernels. new, live: the rows that go on, as a list and as (B, N)."""
        assert self.entries is not None and self.rows is not None
        (qkv, heads), size = self.entries, self.size
        bias = self.notes.get("key_bias")
        bias = torch.zeros_like(size) if bias is None else bias
        joined = merge_rows(self.x, qkv, heads, self.rows, new, live, size, bias, self.prefix)
        leader = torch.where(joined < 0, self.alone if self.leader is None else self.leader, joined)
        return self.changed(notes=self.notes | {"size": size, "key_bias": bias}, leader=leader)
