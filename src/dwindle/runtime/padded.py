"""Live rows padded to the longest image, at sizes only known when a graph runs: what torch.export and ONNX record.

Shapes: B images, N tokens per image, n rows of each image now: as many as the longest had live when rows were last
moved. A runtime pays for every node of a graph, however small what it works on: here few nodes come before few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.masked import Masked
from ..core.tokens import Where, wide
from ..core.trace import Trace
from ..ops.attention import looked_at

NEVER = -1e9  # what the softmax makes exactly 0; unlike -inf it leaves an image without live rows finite


@dataclass(frozen=True)
class _Placed(Where):
    """Rows (B, n) that stand for the tokens `home_Bn` of their images."""

    token_index_Bn: Tensor | None = None
    live_Bn: Tensor | None = None

    def dense_rows(self, rows: Tensor | None = None, fill: float = 0.0) -> Tensor:
        assert self.token_index_Bn is not None and self.live_Bn is not None
        rows = self.live_Bn if rows is None else torch.where(self.live_Bn, rows, fill)
        # The rows of an image are different tokens, live or not: none writes where another has.
        return rows.new_full(self.shape, fill).scatter(1, self.token_index_Bn, rows)


def depth_of(trace: Trace) -> Tensor:
    """`Trace.depth` of rows that move now and then: a sheet for each move, not for each block."""
    sheets = []
    places = cast(list[_Placed], trace.lives)
    for _, group in groupby(places, key=lambda place: id(place.token_index_Bn)):
        flat_index, lives = zip(*((place.token_index_Bn, place.live_Bn) for place in group))
        lived = sum(live.long() for live in lives)
        sheets.append(lived.new_zeros(trace.shape).scatter(1, flat_index[0], lived))
    return torch.stack(sheets).sum(0)


@dataclass
class Padded(Masked):
    """Rows that are not live are padding: computed, and read by nobody.

    Rows keep their order, so the first `front` tokens are among the first `front` rows for as long as they are live.
    """

    flat_index: Tensor = None  # type: ignore[assignment]  # (B, n) which token of its image a row is
    front: int | None = None  # only so many tokens, the first, are read in the end; None: all
    moves: Collection[int] | None = None  # blocks after which live rows are moved together; None: each that decides
    depth: int = 0
    compact: bool = True  # the live rows of each image are its first
    merging: bool = False  # those who stop now have heirs
    stopped: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # (who of the rows, home, value)

    @staticmethod
    def start(x_BND: Tensor, prefix: int, front: int | None = None, moves: Collection[int] | None = None) -> Padded:
        shape = (x_BND.shape[0], x_BND.shape[1])
        live = torch.ones(shape, dtype=torch.bool, device=x_BND.device)
        flat_index = torch.arange(shape[1], device=x_BND.device).expand(shape)
        return Padded(x_BND, shape, prefix, live=live, flat_index=flat_index, front=front, moves=moves)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Padded:
        return replace(self, x=call(self.x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.keeping_keys:
            self.keys = k.mean(1)
        if self.watching:
            self.attention = looked_at(q, k, self.live, self.prefix, options.get("scale"))
        bias = self.notes.get("key_bias")
        if bias is None:
            bias = None if self.whole else q.new_zeros(())
        mask = None if bias is None else torch.where(self.live, bias.to(q.dtype), NEVER)[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    def merge_nearest(self, keep: Tensor) -> None:
        if not self.prefix_stays:
            return super().merge_nearest(keep)
        self.merging = True  # done in `advance`, together with the move

    def image_mean(self, rows: Tensor) -> Tensor:
        share = self.live.to(rows.dtype)
        share = share / share.sum(1, keepdim=True).clamp_min(1)
        return (share[:, None] @ rows).squeeze(1)

    def forget(self) -> dict[str, Any]:
        return super().forget() | {"merging": False}

    def per_image(self, values_B: Tensor) -> Tensor:
        return values_B[:, None].expand(-1, self.x.shape[1], *values_B.shape[1:])

    def gather(self, dense_BN: Tensor) -> Tensor:
        return dense_BN.gather(1, self.flat_index)

    @property
    def place(self) -> Tensor:
        return self.flat_index

    @property
    def where(self) -> Where:
        return _Placed(self.shape, token_index_Bn=self.flat_index, live_Bn=self.live)

    def advance(self, keep: Tensor | None, gate: Tensor | None = None) -> Padded:
        after = replace(self, depth=self.depth + 1, **self.forget())
        if keep is None:
            return after
        after.live, after.whole, after.compact = self.live & keep, False, False
        if not self._front_stays:
            after.stopped = [*self.stopped, self._picked(self.live & ~keep)]
        order = after._order() if self.moves is None or after.depth in self.moves else None
        if not self.merging:
            if "size" in self.notes:  # what they knew is gone
                after.notes = self.notes | {"size": self.notes["size"] * after.live}
            return after if order is None else after._moved(order)
        assert self.keys is not None
        x, size = after._merged(wide(self.keys), order)
        if order is not None:
            after = after._moved(order, but=("size", "key_bias"))
        after.x = x.to(self.x.dtype)
        after.notes = after.notes | {"size": size, "key_bias": size.log()}
        return after

    def pad(self, rows: Tensor) -> Tensor:
        return rows if self.compact else super().pad(rows)

    def unpad(self, padded: Tensor) -> Tensor:
        return padded if self.compact else super().unpad(padded)

    def _order(self) -> Tensor:
        """(B, longest) which rows to keep: live ones first, in their order; as many as the longest image has."""
        rows = self.x.shape[1]
        least = max(self.front or 0, 2)  # at 1 the compiler (AOTInductor) would have to know which of two paths to take
        longest: Any = self.live.long().sum(1).max().clamp_min(least).item()
        torch._check(longest >= least)
        torch._check(longest <= rows)
        return self._queue.topk(longest, dim=1, largest=False)[1]

    @property
    def _queue(self) -> Tensor:
        """(B, n) a place for each row, all different: live rows in their order, then the others."""
        rows = self.x.shape[1]
        index = torch.arange(rows, device=self.x.device)
        return torch.where(self.live, index, index + rows)

    @property
    def _live_first(self) -> Tensor:
        return self._queue.argsort(-1)

    def _moved(self, order: Tensor, but: Collection[str] = ()) -> Padded:
        """Only these rows. `but`: notes that will be others."""
        rows, longest = self.x.shape[1], order.shape[1]

        def taken(values: Tensor) -> Tensor:
            if values.dim() == 2:
                return values.gather(1, order)
            flat = (order + rows * torch.arange(self.shape[0], device=order.device)[:, None]).flatten()
            return values.flatten(0, 1).index_select(0, flat).unflatten(0, (self.shape[0], longest))

        notes = {name: taken(note) for name, note in self.notes.items() if name not in but}
        x = self.x if but else taken(self.x)
        return replace(self, x=x, notes=notes, live=taken(self.live), flat_index=taken(self.flat_index), compact=True)

    def _merged(self, keys: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
        """States and sizes of the rows `order` (None: all): as one matrix product, as runtimes are slow to scatter.

        Who is live is its own heir. A row that has left stands for none, so that it gives nothing a second time. Where
        no patch stays, a row that nobody reads is everyone's.
        """
        rows = torch.arange(self.x.shape[1], device=self.x.device)
        length = keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # whoever looks for an heir: its own plays no part
        alike = keys @ (keys / length)[:, self.prefix :].transpose(1, 2)
        best = torch.where(self.live[:, None, self.prefix :], alike, NEVER).argmax(-1) + self.prefix
        into = torch.where(self.live, rows, best)[..., None]
        to = rows if order is None else order[:, None]
        given = torch.where(into == to, self.notes["size"][..., None], 0.0)  # (B, from, to)
        total = given.sum(1)
        return (given.transpose(1, 2) @ wide(self.x)) / total.clamp_min(1)[..., None], total

    @property
    def _front_stays(self) -> bool:
        """Nobody who is read in the end stops: these are the first rows."""
        return self.prefix_stays and self.front is not None and self.front <= self.prefix

    def _picked(self, who: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(rows[:, : self.front] for rows in (who, self.flat_index, self.value))  # type: ignore[return-value]

    def stream(self) -> Tensor:
        """(B, N, D), or only the tokens that are read."""
        if self._front_stays:
            return self.value[:, : self.front]
        images, count = self.shape
        picked = [*self.stopped, self._picked(self.live)]
        if self.front is not None:
            who, flat_index, value = (torch.cat(parts, 1) for parts in zip(*picked))
            first = torch.arange(self.front, device=flat_index.device)
            return ((who[..., None] & (flat_index[..., None] == first)).to(value.dtype).transpose(1, 2)) @ value
        places, values = [], []
        for who, flat_index, value in picked:
            chosen = who.flatten().nonzero()[:, 0]
            place = flat_index + count * torch.arange(images, device=flat_index.device)[:, None]
            places.append(place.flatten().index_select(0, chosen))
            values.append(value.flatten(0, 1).index_select(0, chosen))
        flat = self.x.new_zeros(images * count, self.x.shape[-1]).index_copy(0, torch.cat(places), torch.cat(values))
        return flat.view(images, count, -1)
