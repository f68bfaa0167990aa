"""The layout that torch.export and ONNX record: live rows, padded to the longest image, of sizes known at run time.

Shapes: B images, N tokens per image, n rows of each image: as many as the longest image had live when rows were last
moved together. A runtime has a cost for every node of a graph, however small its tensors. Therefore this code prefers
few operations to few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.masked import Masked
from ..core.tokens import NOTHING, Probe, Where, wide
from ..core.trace import Trace
from ..ops.merging import Merge
from ..ops.rows import Rows

NEVER = -1e9  # the softmax makes it exactly 0; unlike -inf, an image without live rows stays finite


@dataclass(frozen=True)
class _PaddedWhere(Where):
    """Rows (B, n) that are the tokens `token_index_Bn` of their images."""

    token_index_Bn: Tensor | None = None
    live_Bn: Tensor | None = None

    def dense_rows(self, rows: Tensor | None = None, fill: float = 0.0) -> Tensor:
        assert self.token_index_Bn is not None and self.live_Bn is not None
        rows = self.live_Bn if rows is None else torch.where(self.live_Bn, rows, fill)
        # The rows of an image are different tokens, live or not, so no two of them are written to one position.
        return rows.new_full(self.shape, fill).scatter(1, self.token_index_Bn, rows)


def depth_of(trace: Trace) -> Tensor:
    """`Trace.depth` (B, N) of the padded layout. It scatters once for each move of rows, not for each block."""
    depths = []
    places = cast(list[_PaddedWhere], trace.lives)
    for _, group in groupby(places, key=lambda place: id(place.token_index_Bn)):
        flat_index, lives = zip(*((place.token_index_Bn, place.live_Bn) for place in group))
        blocks_lived = sum(live.long() for live in lives)
        depths.append(blocks_lived.new_zeros(trace.shape).scatter(1, flat_index[0], blocks_lived))
    return torch.stack(depths).sum(0)


@dataclass
class Padded(Masked):
    """The masked layout with fewer rows. Rows that are not live are padding: they are computed and never read.

    Rows keep their order, so the first `front` tokens are among the first `front` rows as long as they are live.
    """

    flat_index: Tensor = None  # type: ignore[assignment]  # (B, n) the token of its image that a row is
    front: int | None = None  # only the first so many tokens are read in the end; None: all
    moves: Collection[int] | None = None  # blocks after which live rows are moved together; None: each that decides
    depth: int = 0  # blocks done
    compact: bool = True  # the live rows of each image are its first rows
    moved: bool = False  # rows have been moved together, so row i need not be token i
    prefix_stays: bool = False  # the method keeps all prefix tokens to the end
    # Of rows that have stopped, at each decision: which of the rows they are, the rows' tokens, and their values.
    stopped: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def start(
        x_BND: Tensor,
        prefix: int,
        front: int | None = None,
        moves: Collection[int] | None = None,
        prefix_stays: bool = False,
    ) -> Padded:
        shape = (x_BND.shape[0], x_BND.shape[1])
        live = torch.ones(shape, dtype=torch.bool, device=x_BND.device)
        flat_index = torch.arange(shape[1], device=x_BND.device).expand(shape)
        return Padded(
            *(x_BND, shape, prefix),
            live=live,
            flat_index=flat_index,
            front=front,
            moves=moves,
            prefix_stays=prefix_stays,
        )

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Padded:
        return self.changed(x=call(self.x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None = None, **options: Any) -> Tensor:
        bias = self.notes.get("key_bias")
        if bias is None:
            bias = None if self.whole else q.new_zeros(())
        mask = None if bias is None else torch.where(self.live, bias.to(q.dtype), NEVER)[:, None, None, :]
        if pair_bias is not None:
            pairs = self._pairs(pair_bias)
            mask = pairs if mask is None else pairs + mask
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    def gather_positions(self, places: Tensor) -> Tensor:
        """The values of each row's position: (B, 1 or H, n, C) of (N, C) or (H, N, C)."""
        if not self.moved:
            return places
        by_place = places[None] if places.dim() == 2 else places  # (1 or H, N, C)
        rows = by_place.index_select(1, self.flat_index.flatten())
        return rows.unflatten(1, (self.shape[0], self.flat_index.shape[1])).transpose(0, 1)

    def _pairs(self, pair_bias: Tensor) -> Tensor:
        """The bias (B, 1 or H, n, n) of pairs of rows, from that of all pairs of tokens (1 or B, 1 or H, N, N)."""
        if not self.moved:
            return pair_bias
        index = self.flat_index[:, None]
        images, heads = self.shape[0], pair_bias.shape[1]
        rows, count = self.flat_index.shape[1], self.shape[1]
        if pair_bias.shape[0] == 1:
            of_rows = pair_bias[0].index_select(1, self.flat_index.flatten())  # (H, B * n, N)
            of_rows = of_rows.unflatten(1, (images, rows)).transpose(0, 1)
        else:
            of_rows = pair_bias.gather(2, index[..., None].expand(images, heads, rows, count))
        return of_rows.gather(3, index[..., None, :].expand(images, heads, rows, rows))

    def class_attention(self, q: Tensor, k: Tensor, scale: float | None, pair_bias: Tensor | None = None) -> Tensor:
        return super().class_attention(q, k, scale, None if pair_bias is None else self._pairs(pair_bias))

    def image_mean(self, rows: Tensor) -> Tensor:
        share = self.live.to(rows.dtype)
        share = share / share.sum(1, keepdim=True).clamp_min(1)
        return (share[:, None] @ rows).squeeze(1)

    def per_image(self, values_B: Tensor) -> Tensor:
        return values_B[:, None].expand(-1, self.x.shape[1], *values_B.shape[1:])

    def gather(self, dense_BN: Tensor) -> Tensor:
        return dense_BN.gather(1, self.flat_index)

    @property
    def place(self) -> Tensor:
        return self.flat_index

    @property
    def where(self) -> Where:
        return _PaddedWhere(self.shape, token_index_Bn=self.flat_index, live_Bn=self.live)

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Padded:
        after = self.changed(depth=self.depth + 1, probed=NOTHING)
        if keep is None:
            return after
        stopped = self.stopped if self._front_stays else [*self.stopped, self._stopping(self.live & ~keep)]
        after = after.changed(live=self.live & keep, whole=False, compact=False, stopped=stopped)
        order = after._order() if self.moves is None or after.depth in self.moves else None
        if merge is None:
            return after if order is None else after._selected(order)
        into = self.nearest(keep) if merge.into is None else merge.into
        x, weight = self._merged(into, merge, order)
        if self.front is None:
            after = after.changed(
                leader=self.merge_leaders(into if merge.into is not None else self.flat_index.gather(1, into))
            )
        if merge.weight is not None:
            return after.changed(x=x) if order is None else after._selected(order, x)
        after = after if order is None else after._selected(order, x, but=("size", "key_bias"))
        return after.changed(x=x, notes=after.notes | {"size": weight, "key_bias": merge.proportion * weight.log()})

    def pad(self, rows: Tensor) -> Tensor:
        return rows if self.compact else super().pad(rows)

    def unpad(self, padded: Tensor) -> Tensor:
        return padded if self.compact else super().unpad(padded)

    def _order(self) -> Tensor:
        """(B, longest) the rows to keep: the live ones first, in their order, as many as the longest image has."""
        rows = self.x.shape[1]
        least = max(self.front or 0, 2)  # AOTInductor specialises on size 1, so that this must not be possible
        longest: Any = self.live.long().sum(1).max().clamp_min(least).item()
        torch._check(longest >= least)
        torch._check(longest <= rows)
        return self._queue.topk(longest, dim=1, largest=False)[1]

    @property
    def _queue(self) -> Tensor:
        """(B, n) different sort keys: sorted by them, live rows come first in their order, then the others."""
        rows = self.x.shape[1]
        index = torch.arange(rows, device=self.x.device)
        return torch.where(self.live, index, index + rows)

    @property
    def _live_first(self) -> Tensor:
        return self._queue.argsort(-1)

    def _select(self, values: Tensor, order: Tensor) -> Tensor:
        """Values of the rows `order` (B, m), from those of all rows (B, n, ...)."""
        if values.dim() == 2:
            return values.gather(1, order)
        images, rows = self.shape[0], self.x.shape[1]
        flat = (order + rows * torch.arange(images, device=order.device)[:, None]).flatten()
        return values.flatten(0, 1).index_select(0, flat).unflatten(0, (images, order.shape[1]))

    def _selected(self, order: Tensor, x: Tensor | None = None, but: Collection[str] = ()) -> Padded:
        """The layout with the rows `order`. x: their states, if they changed. but: notes that the caller replaces."""
        return self.changed(
            x=self._select(self.x, order) if x is None else x,
            notes={name: self._select(note, order) for name, note in self.notes.items() if name not in but},
            live=self._select(self.live, order),
            flat_index=self._select(self.flat_index, order),
            compact=True,
            moved=True,
        )

    def merge_leaders(self, into: Tensor) -> Tensor:
        """The leaders after merging. into: the token that each row is merged into.

        No two rows of an image are the same token, so no row overwrites another's entry. Rows that are not live keep
        their entries.
        """
        leader = self.alone if self.leader is None else self.leader
        into = torch.where(self.live, into, leader.gather(1, self.flat_index))
        return leader.scatter(1, self.flat_index, into)

    def _merged(self, into: Tensor, how: Merge, order: Tensor | None) -> tuple[Tensor, Tensor]:
        """`merged` of the rows `order` (None: all), and their weights. It is one matrix product, as scattering is slow.

        into: for each row, the row that it is merged into; the token, if the method gave `how.into`.
        """
        if how.into is None:
            to = torch.arange(into.shape[1], device=into.device) if order is None else order[:, None]
        else:
            to = (self.flat_index if order is None else self.flat_index.gather(1, order))[:, None]
        weight = self.size if how.weight is None else how.weight
        # Rows that are not live have weight 0.
        share = torch.where(into[..., None] == to, torch.where(self.live, weight, 0.0)[..., None], 0.0)  # (B, from, to)
        total = share.sum(1)
        if how.weight is None:
            mean = (share.transpose(1, 2) @ wide(self.x)) / total.clamp_min(1)[..., None]
            return mean.to(self.x.dtype), total
        mean = (share.transpose(1, 2) @ wide(self.x)) / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
        x, weight = (self.x, weight) if order is None else (self._select(self.x, order), weight.gather(1, order))
        return torch.where((total > weight)[..., None], mean.to(x.dtype), x), total

    def nearest(self, keep: Tensor) -> Tensor:
        """The row that each row is merged into, as in the masked layout, in fewer operations.

        If no patch stays and none is read in the end, rows are merged into an arbitrary one.
        """
        if not self.prefix_stays:
            return super().nearest(keep)
        assert self.probed.keys is not None
        keys = wide(self.probed.keys)
        length = keys.norm(dim=-1, keepdim=True).clamp_min(
            1e-12
        )  # the leaving row's own length does not change its argmax
        similarity = keys @ (keys / length)[:, self.prefix :].transpose(1, 2)
        stays = self.live & keep
        best = torch.where(stays[:, None, self.prefix :], similarity, NEVER).argmax(-1) + self.prefix
        alone = stays if self._front_stays else stays | ~stays[:, self.prefix :].any(-1, keepdim=True)
        return torch.where(alone, torch.arange(keys.shape[1], device=keys.device), best)

    @property
    def _front_stays(self) -> bool:
        """Whether every token that is read in the end stays to the end. These tokens are then the first rows."""
        return self.prefix_stays and self.front is not None and self.front <= self.prefix

    def _stopping(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows stop now, and all rows' tokens and values, limited to the rows that may be read in the end."""
        return tuple(rows[:, : self.front] for rows in (chosen, self.flat_index, self.value))  # type: ignore[return-value]

    def stream(self) -> Tensor:
        """The final states (B, N, D), or (B, front, D) if only the first tokens are read."""
        if self._front_stays:
            return self.value[:, : self.front]
        images, count = self.shape
        parts = [*self.stopped, self._stopping(self.live)]
        if self.front is not None:
            chosen, flat_index, value = (torch.cat(part, 1) for part in zip(*parts))
            first = torch.arange(self.front, device=flat_index.device)
            return ((chosen[..., None] & (flat_index[..., None] == first)).to(value.dtype).transpose(1, 2)) @ value
        places, values = [], []
        for stopped, flat_index, value in parts:
            chosen = stopped.flatten().nonzero()[:, 0]
            place = flat_index + count * torch.arange(images, device=flat_index.device)[:, None]
            places.append(place.flatten().index_select(0, chosen))
            values.append(value.flatten(0, 1).index_select(0, chosen))
        flat = self.x.new_zeros(images * count, self.x.shape[-1]).index_copy(0, torch.cat(places), torch.cat(values))
        return flat.view(images, count, -1)
