"""The packed layout: only live rows exist.

Shapes: B images, N tokens per image, T live tokens of all images, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.attention import Pairs, attend_packed, class_attention_packed
from ..ops.merging import Merge, merge_ref, nearest_ref
from ..ops.rows import Rows
from .tokens import NOTHING, Probe, Tokens, Where


@dataclass
class Packed(Tokens):
    """Live rows (T, D), image after image. A row that stops is moved out once, to `stopped`."""

    flat_index: Tensor = None  # type: ignore[assignment]  # (T,) position b * N + n of each row, ascending
    lengths: list[int] = field(default_factory=list)  # live rows of each image
    stopped: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (flat_index, value) of rows that stopped

    @staticmethod
    def start(x_BND: Tensor, prefix: int) -> Packed:
        images, count, _ = x_BND.shape
        flat_index = torch.arange(images * count, device=x_BND.device)
        return Packed(x_BND.flatten(0, 1), (images, count), prefix, flat_index=flat_index, lengths=[count] * images)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Packed:
        return self.changed(x=call(self.x[None])[0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None = None, **options: Any) -> Tensor:
        pairs = None if pair_bias is None else Pairs(pair_bias, self.place)
        return attend_packed(q, k, v, self.lengths, self.notes.get("key_bias"), pairs, **options)

    def gather_positions(self, places: Tensor) -> Tensor:
        return places.index_select(-2, self.place)

    def mean_keys(self, k: Tensor) -> Tensor:
        return k[0].mean(0)  # (1, H, T, E) -> (T, E)

    def class_attention(self, q: Tensor, k: Tensor, scale: float | None, pair_bias: Tensor | None = None) -> Tensor:
        pairs = None if pair_bias is None else Pairs(pair_bias, self.place)
        return class_attention_packed(q, k, self.lengths, self.prefix, scale, pairs)

    @property
    def empty(self) -> bool:
        return not len(self.x)

    @property
    def image(self) -> Tensor:
        """Index of each row's image."""
        return self.flat_index // self.shape[1]

    def per_image(self, values_B: Tensor) -> Tensor:
        if self.shape[0] == 1:
            return values_B.expand(len(self.flat_index), *values_B.shape[1:])
        return values_B.index_select(0, self.image)

    def gather(self, dense_BN: Tensor) -> Tensor:
        return dense_BN.flatten()[self.flat_index]

    def image_sum(self, rows: Tensor) -> Tensor:
        if not rows.is_cuda:
            return torch.stack([part.sum(0) for part in rows.split(self.lengths)])
        # On a GPU one sum over all rows is faster than one for each image.
        return rows.new_zeros(self.shape[0], *rows.shape[1:]).index_add(0, self.image, rows)

    def image_mean(self, rows: Tensor) -> Tensor:
        if not rows.is_cuda:  # one mean for each image, so that it is rounded as if the image were alone
            parts = rows.split(self.lengths)
            return torch.stack([part.mean(0) if len(part) else part.new_zeros(part.shape[1:]) for part in parts])
        count = torch.tensor([max(length, 1) for length in self.lengths], device=rows.device)
        total = self.image_sum(rows)
        return total / count.view(-1, *[1] * (total.dim() - 1))

    def rank(self, score: Tensor) -> Tensor:
        order = score.argsort(dim=-1, descending=True, stable=True)
        order = order[self.image[order].argsort(dim=-1, stable=True)]  # image after image, best first
        return torch.empty_like(order).index_copy(0, order, self._within)

    @property
    def _first(self) -> Tensor:
        """(B,) the first row of each image."""
        sizes = torch.tensor(self.lengths, device=self.x.device)
        return sizes.cumsum(0) - sizes

    @property
    def _within(self) -> Tensor:
        """(T,) how many rows of the same image come before each row."""
        return torch.arange(len(self.flat_index), device=self.flat_index.device) - self._first[self.image]

    @property
    def _slot(self) -> Tensor:
        """(T,) the index of each row in a padded list (B * n)."""
        return self.image * max(self.lengths) + self._within

    def nearest(self, keep: Tensor) -> Tensor:
        assert self.probed.keys is not None
        patch = ~self.is_prefix
        padded = (self.pad(rows) for rows in (self.probed.keys.detach(), patch & keep, patch & ~keep))
        return self.unpad(nearest_ref(*padded)) + self._first[self.image]

    def rows_of(self, place: Tensor) -> Tensor:
        row = torch.arange(len(self.flat_index), device=self.flat_index.device)
        dense = row.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.flat_index, row)
        return dense[self.image * self.shape[1] + place]

    def merge_leaders(self, into: Tensor) -> Tensor:
        leader = self.alone if self.leader is None else self.leader
        place = self.place.index_select(0, into)
        return leader.flatten().index_copy(0, self.flat_index, place).view(self.shape)

    def merge_states(self, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        x, total = merge_ref(self.x[None], weight[None], into[None])
        return x[0], total[0]

    def pad(self, rows: Tensor) -> Tensor:
        images, longest = self.shape[0], max(self.lengths)
        flat = rows.new_zeros(images * longest, *rows.shape[1:]).index_copy(0, self._slot, rows)
        return flat.view(images, longest, *rows.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1).index_select(0, self._slot)

    @property
    def padding(self) -> Tensor:
        return self.pad(torch.ones_like(self.flat_index, dtype=torch.bool))

    @property
    def images_live(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.x.device) > 0

    def read(self) -> Tensor:
        assert self.reader is not None
        going = self.images_live.nonzero()[:, 0]
        logits = self.reader(self.stream().index_select(0, going))
        return logits.new_zeros(self.shape[0], logits.shape[-1]).index_copy(0, going, logits)

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Packed:
        if gate is not None and torch.is_grad_enabled():
            raise DwindleError(
                "This method learns through gates on its decisions, which a pack of live rows cannot carry; train it "
                "with layout='masked'."
            )
        if keep is None or (count := int(keep.count_nonzero())) == len(keep):
            return self.changed(probed=NOTHING)
        joined = self if merge is None else self.merged(keep, merge)
        return joined.move(keep.argsort(descending=True, stable=True), count)

    def move(self, order: Tensor, count: int) -> Packed:
        """The tokens with only the first `count` rows of this order. The other rows move to `stopped`."""
        going = order[:count]
        x, flat_index = self.x.index_select(0, order), self.flat_index.index_select(0, order)
        value = x if self.value is self.x else self.value.index_select(0, order)
        images, tokens = self.shape
        one = images == 1
        lengths = [count] if one else torch.bincount(flat_index[:count] // tokens, minlength=images).tolist()
        return self.changed(
            x=x[:count],
            notes={name: note.index_select(0, going) for name, note in self.notes.items()},
            flat_index=flat_index[:count],
            lengths=lengths,
            stopped=[*self.stopped, (flat_index[count:], value[count:])],
            probed=NOTHING,
        )

    def stream(self) -> Tensor:
        places, values = zip(*self.stopped, (self.flat_index, self.value))
        images, count = self.shape
        flat = self.x.new_zeros(images * count, self.x.shape[-1]).index_copy(0, torch.cat(places), torch.cat(values))
        return flat.view(images, count, -1)

    @property
    def where(self) -> Where:
        return Where(self.shape, flat_index_T=self.flat_index)

    @property
    def place(self) -> Tensor:
        return self.flat_index % self.shape[1]
