"""The masked layout with a list of its live rows: the states stay in place, and kernels compute the listed rows only.
The list is made on the device.

Methods see rows (B, N) as in the masked layout, so every method runs here without changes. A block without kernels runs
as in the masked layout: with the same result, but not faster. As in every layout, operations return new objects. But
kernels write to the memory of the old object, which must not be used afterwards; the loop keeps no old object.
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
from .block import FoldedBlock


@dataclass
class Listed(Masked):
    folded: dict[nn.Module, FoldedBlock] = field(default_factory=dict)
    entries: tuple[Tensor, int] | None = None  # queries, keys and values of the block just run, compact; and heads

    @staticmethod
    def begin(x_BND: Tensor, prefix: int, folded: dict[nn.Module, FoldedBlock], live: Tensor, rows: Rows) -> Listed:
        """The layout at the start. live, rows: the live rows, as (B, N) and as a list, to which no kernel writes."""
        images, count, _ = x_BND.shape
        return Listed(x_BND.contiguous(), (images, count), prefix, live=live, folded=folded, rows=rows)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Listed:
        folded = self.folded.get(block)
        if folded is None:
            return super().update(call, block, probe)  # type: ignore[return-value]
        assert self.rows is not None
        kept = any(note is self.x for note in self.notes.values())  # a method kept the stream as it is now
        stream = self.x.clone() if kept else self.x.contiguous()
        x = stream.flatten(0, 1)  # (B * N, D), the same memory
        bias = self.notes.get("key_bias")
        qkv = folded.attend(x, self.rows, self.shape[1], None if bias is None else bias.flatten())
        entries, attended = None, NOTHING
        if probe.merging and not (probe.keys or probe.attention) and folded.norm is None:
            entries = qkv, folded.heads
        elif probe.merging or probe.keys or probe.attention:
            attended = self._probed_attention(probe, qkv, folded)
        neuron = None if probe.neuron is None else torch.empty(self.shape, device=x.device)
        folded.mlp(x, self.rows, None if neuron is None else neuron.view(-1), probe.neuron or 0)
        return self.changed(x=stream, entries=entries, probed=Probed(neuron, attended.attention, attended.keys))

    def _probed_attention(self, probe: Probe, qkv: Tensor, folded: FoldedBlock) -> Probed:
        """What the probe reads of attention, from the compact queries, keys and values."""
        q, k, _ = self._dense(qkv).unflatten(-1, (3, folded.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, E)
        if folded.norm is not None:
            q, k = folded.norm(q, k)
        return self.probe_attention(probe, q, k, folded.scale)

    def _dense(self, compact_TC: Tensor) -> Tensor:
        """(B, N, C) of compact entries. Those beyond the number of live rows are written to a last row that is cut."""
        assert self.rows is not None
        total = self.shape[0] * self.shape[1]
        entry = torch.arange(total, device=compact_TC.device)
        flat_index = torch.where(entry < self.rows.count, self.rows.rows_R, total).long()
        dense_rows = compact_TC.new_zeros(total + 1, compact_TC.shape[1])
        # Many entries may be written to the last row; which of them remains does not matter.
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
        """`merged` with the nearest row, by kernels. new, live: the rows that stay, as a list and as (B, N)."""
        assert self.entries is not None and self.rows is not None
        (qkv, heads), size = self.entries, self.size
        bias = self.notes.get("key_bias")
        bias = torch.zeros_like(size) if bias is None else bias
        joined = merge_rows(self.x, qkv, heads, self.rows, new, live, size, bias, self.prefix)
        leader = torch.where(joined < 0, self.alone if self.leader is None else self.leader, joined)
        return self.changed(notes=self.notes | {"size": size, "key_bias": bias}, leader=leader)
