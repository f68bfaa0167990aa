"""The masked layout: every row is computed, and a gate says which rows count.

Shapes: B images, N tokens per image, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention import attend_gated, attend_masked, class_attention
from ..ops.merging import Merge, merge_ref, nearest_ref
from ..ops.rows import Rows
from .tokens import NOTHING, Probe, Tokens, Where


@dataclass
class Masked(Tokens):
    """All rows (B, N, D) are computed; rows that stopped keep their value and are not keys. Differentiable."""

    live: Tensor = None  # type: ignore[assignment]  # (B, N) bool
    gate: Tensor | None = None  # (B, N): 1 for live, 0 for halted, with the gradient of all soft decisions so far
    whole: bool = True  # no row can have stopped yet, so attention needs no mask and is fastest

    @staticmethod
    def start(x_BND: Tensor, prefix: int) -> Masked:
        shape = (x_BND.shape[0], x_BND.shape[1])
        return Masked(x_BND, shape, prefix, live=torch.ones(shape, dtype=torch.bool, device=x_BND.device))

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Masked:
        new = call(self.x)
        if self.whole:
            x = new
        elif self.gate is None:
            x = torch.where(self.live[..., None], new, self.x)
        else:
            x = self.x + self.gate[..., None].to(new.dtype) * (new - self.x)
        return self.changed(x=x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None = None, **options: Any) -> Tensor:
        bias = self.notes.get("key_bias")
        if self.whole and bias is None:
            return F.scaled_dot_product_attention(q, k, v, pair_bias, **options)
        if self.gate is not None:
            gate = self.gate if bias is None else self.gate * bias.exp()
            return attend_gated(q, k, v, gate, pair_bias, **options)
        return attend_masked(q, k, v, self.live, bias, pair_bias, **options)

    def gather_positions(self, places: Tensor) -> Tensor:
        return places

    def mean_keys(self, k: Tensor) -> Tensor:
        return k.mean(1)  # (B, H, N, E) -> (B, N, E)

    def class_attention(self, q: Tensor, k: Tensor, scale: float | None, pair_bias: Tensor | None = None) -> Tensor:
        return class_attention(q, k, self.live, self.prefix, scale, pair_bias)

    def per_image(self, values_B: Tensor) -> Tensor:
        return values_B[:, None].expand(-1, self.shape[1], *values_B.shape[1:])

    def gather(self, dense_BN: Tensor) -> Tensor:
        return dense_BN

    def image_sum(self, rows: Tensor) -> Tensor:
        live = self.live if rows.dim() == 2 else self.live[..., None]
        return (rows * live.to(rows.dtype)).sum(1)

    def add_final(self, weight: Tensor | None) -> None:
        super().add_final(None if weight is None else torch.where(self.live, weight, 0.0))

    def rank(self, score: Tensor) -> Tensor:
        order = score.masked_fill(~self.live, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        return order.argsort(-1)

    def pad(self, rows: Tensor) -> Tensor:
        return _reorder(rows, self._live_first)

    def unpad(self, padded: Tensor) -> Tensor:
        return _reorder(padded, self._live_first.argsort(-1))

    def nearest(self, keep: Tensor) -> Tensor:
        assert self.probed.keys is not None
        patch = self.live & ~self.is_prefix
        into: Tensor = self._compiled(nearest_ref)(self.probed.keys.detach(), patch & keep, patch & ~keep)
        return into

    def rows_of(self, place: Tensor) -> Tensor:
        return place

    def merge_leaders(self, into: Tensor) -> Tensor:
        return torch.where(self.live, into, self.alone if self.leader is None else self.leader)

    def merge_states(self, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        merged: tuple[Tensor, Tensor] = self._compiled(merge_ref)(self.x, weight, into)
        return merged

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled if this forward pass compiles its parts."""
        return _compile(function) if self.compiling else function

    @property
    def _live_first(self) -> Tensor:
        """(B, N): the order of tokens with the live ones first."""
        return (~self.live).to(torch.uint8).argsort(dim=-1, stable=True)

    @property
    def padding(self) -> Tensor:
        return self.pad(self.live)

    @property
    def images_live(self) -> Tensor:
        return self.live.any(-1)

    def read(self) -> Tensor:
        assert self.reader is not None
        logits = self.reader(self.stream())
        return torch.where(self.images_live[:, None], logits, 0.0)

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Masked:
        if keep is None:
            return self.changed(probed=NOTHING)
        after = self if merge is None else self.merged(keep, merge)
        gate = self.gate if gate is None else gate
        return after.changed(live=self.live & keep, gate=gate, whole=False, probed=NOTHING)

    def stream(self) -> Tensor:
        return self.value

    @property
    def live_rows(self) -> Tensor:
        return self.live

    @property
    def where(self) -> Where:
        return Where(self.shape, live_BN=self.live)

    @property
    def place(self) -> Tensor:
        return torch.arange(self.shape[1], device=self.x.device).expand(self.shape)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _reorder(values: Tensor, order_BN: Tensor) -> Tensor:
    """Values (B, N, ...) in this order along the second axis."""
    if values.dim() > 2:
        order_BN = order_BN[..., None].expand(*order_BN.shape, values.shape[-1])
    return values.gather(1, order_BN)
