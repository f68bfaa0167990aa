"""The residual stream of a batch, and who is still live in it.

B images, N tokens per image, T live tokens of all images, D width. A method sees *rows*: (B, N, .) in the masked
layout, (T, .) in the packed one. It works on the last axis and asks the tokens for anything that crosses rows, so the
same method code drives both layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.attention import attend_packed, looked_at_packed
from ..ops.merging import merged
from ..ops.rows import Rows


@dataclass(frozen=True)
class Where:
    """Which tokens some rows stand for. Turns values on rows into a (B, N) sheet."""

    shape: tuple[int, int]  # B, N
    live_BN: Tensor | None = None  # masked: rows are (B, N), these count
    flat_index_T: Tensor | None = None  # packed: row t is token home[t] of the B * N

    def dense_rows(self, rows: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """(B, N) with the rows' values, `fill` for everyone else. Without values: True for those who stand here."""
        if self.flat_index_T is None:
            assert self.live_BN is not None
            return self.live_BN if rows is None else torch.where(self.live_BN, rows, torch.full_like(rows, fill))
        if rows is None:
            rows = torch.ones_like(self.flat_index_T, dtype=torch.bool)
        flat = rows.new_full((self.shape[0] * self.shape[1],), fill)
        return flat.index_copy(0, self.flat_index_T, rows).view(self.shape)


@dataclass
class Tokens:
    """What the layouts share. `notes` are a method's values per row; they travel, and stop, with their rows."""

    x: Tensor  # rows, D
    shape: tuple[int, int]  # B, N
    prefix: int  # class, distillation and register tokens come first in every image
    notes: dict[str, Tensor] = field(default_factory=dict)
    probed: int | None = None  # a method asked for this neuron after the first linear layer of the MLP
    probe_detached: bool = False  # its gradient shall train the neuron's own weights and stop there
    probe: Tensor | None = None  # that neuron in the block just run, on rows
    watching: bool = False  # a method asked for `attention`
    attention: Tensor | None = None  # share of the class token's attention each row got in the block just run
    keeping_keys: bool = False  # a method asked for `keys`
    keys_to_merge: bool = False  # and only for `merge_nearest`
    keys: Tensor | None = None  # rows, head size: mean over heads of the keys of the block just run
    reader: Callable[[Tensor], Tensor] | None = None  # (B, N, D) -> logits; the loop lends the backbone's
    rows: Rows | None = None  # the live rows as a list on the device, where kernels can go by it
    listed: tuple[Tensor, Rows] | None = None  # who goes on and the list of them, where a kernel has made both
    prefix_stays: bool = False  # a method said that it lets all prefix tokens go on to the end
    compiling: bool = False  # this forward pass is one of many alike: compiling its parts pays

    def changed(self, **values: Any) -> Self:
        """A copy with other values: `dataclasses.replace`, which takes longer than a small block's arithmetic."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **values)
        return other

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Tokens:
        """Run a block on the live rows; `call` is its forward on a plain tensor."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of the live rows among those of the same image."""
        raise NotImplementedError

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """A narrow layer of a method's own, on rows or on images."""
        return layer(x)

    def catch_neuron(self, layer: Any, x: Tensor, out: Tensor) -> Tensor:
        """The neuron a method asked for, of a linear layer that made `out` from `x`."""
        index = self.probed
        assert index is not None
        if not (self.probe_detached and torch.is_grad_enabled()):
            return out[..., index].clone()  # a view would keep the whole hidden layer in memory
        bias = None if layer.bias is None else layer.bias[index : index + 1]
        return F.linear(x.detach(), layer.weight[index : index + 1], bias)[..., 0]

    def per_image(self, values_B: Tensor) -> Tensor:
        """Values of the images, handed to their rows."""
        raise NotImplementedError

    def gather(self, dense_BN: Tensor) -> Tensor:
        """Values of the tokens (B, N), for the rows."""
        raise NotImplementedError

    def image_sum(self, rows: Tensor) -> Tensor:
        """(B, ...): sum over the live tokens of each image."""
        raise NotImplementedError

    def image_mean(self, rows: Tensor) -> Tensor:
        """(B, D): mean over the live tokens of each image; 0 for an image with none."""
        count = self.image_sum(torch.ones_like(rows[..., 0]))
        return self.image_sum(rows) / count.clamp_min(1)[:, None]

    def rank(self, score: Tensor) -> Tensor:
        """0, 1, 2... in its image for the live row of the highest score, the next... Of equals the first is first."""
        raise NotImplementedError

    def pad(self, rows: Tensor) -> Tensor:
        """(B, n, ...): the live rows of each image one after the other, for what compares them; then what `padding`
        says is none."""
        raise NotImplementedError

    def unpad(self, padded: Tensor) -> Tensor:
        """Back to rows."""
        raise NotImplementedError

    def merged(self, size: Tensor, staying: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """States and sizes of the rows after every leaving one has joined the staying one with the most alike key."""
        raise NotImplementedError

    def merge_nearest(self, keep: Tensor) -> None:
        """Patches that stop now join the one with the most alike key that goes on; where none does they are gone."""
        patch = self.counted & ~self.is_prefix
        staying = patch & keep
        self.set_merged(staying, *self.merged(self.notes["size"], staying, patch & ~keep))

    def set_merged(self, who: Tensor, mean: Tensor, size: Tensor) -> None:
        """These rows become the mean of so many, and are attended to as the many they stand for."""
        self.x = torch.where(who[..., None], mean.to(self.x.dtype), self.x)
        size = self.notes["size"] = torch.where(who, size, self.notes["size"])
        self.notes["key_bias"] = size.clamp_min(1).log()

    @property
    def padding(self) -> Tensor:
        """(B, n) bool: which entries of a padded tensor are live rows."""
        raise NotImplementedError

    @property
    def images_live(self) -> Tensor:
        """(B,) bool: which images have a live token."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """(B, classes): what the backbone would answer if everyone stopped now; 0 for images that are done."""
        raise NotImplementedError

    def advance(self, keep: Tensor | None, gate: Tensor | None = None) -> Tokens:
        """Only rows with `keep` go on; None: all."""
        raise NotImplementedError

    def stream(self) -> Tensor:
        """(B, N, D): for every token the value it stopped with."""
        raise NotImplementedError

    @property
    def where(self) -> Where:
        raise NotImplementedError

    @property
    def place(self) -> Tensor:
        """Index of each row's token in its image."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        """Nobody in the whole batch is live. The masked layout computes every row anyway and never asks."""
        return False

    @property
    def counted(self) -> Tensor:
        """Which rows are live: all of a pack."""
        return torch.ones_like(self.place, dtype=torch.bool)

    @property
    def is_prefix(self) -> Tensor:
        return self.place < self.prefix

    @overload
    def decide(self, depth: int, keep: Tensor) -> Tensor: ...
    @overload
    def decide(self, depth: int, keep: None) -> Tensor | None: ...
    def decide(self, depth: int, keep: Tensor | None) -> Tensor | None:
        """The outcome of a decision: the method's own, or the depth forced on the token (bench, tests)."""
        forced = self.notes.get("forced")
        return keep if forced is None else forced > depth + 1

    def forget(self) -> dict[str, Any]:
        """What belonged to the block just run."""
        return {"probe": None, "attention": None, "keys": None, "listed": None}

    @property
    def value(self) -> Tensor:
        """What is read of a row if it stops now: its state, or the mean over states a method asked for."""
        return self.notes.get("final", self.x)

    def add_final(self, weight: Tensor | None) -> None:
        """final += weight * x, for methods whose result is a mean over depths."""
        if weight is not None:
            step = weight[..., None] * self.x
            self.notes["final"] = self.notes["final"] + step if "final" in self.notes else step


@dataclass
class Packed(Tokens):
    """Only live rows exist: (T, D), image after image. A row is moved once, when it stops."""

    flat_index: Tensor = None  # type: ignore[assignment]  # (T,) position b * N + n of each row, ascending
    lengths: list[int] = field(default_factory=list)  # live rows of each image
    stopped: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (home, value) of those who left
    first: Tensor | None = None  # `is_prefix`, once somebody has asked for it

    @staticmethod
    def start(x_BND: Tensor, prefix: int) -> Packed:
        images, count, _ = x_BND.shape
        flat_index = torch.arange(images * count, device=x_BND.device)
        return Packed(x_BND.flatten(0, 1), (images, count), prefix, flat_index=flat_index, lengths=[count] * images)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Packed:
        return self.changed(x=call(self.x[None])[0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.keeping_keys:
            self.keys = self.mean_over_heads(k[0])
        if self.watching:
            self.attention = looked_at_packed(q.detach(), k.detach(), self.lengths, self.prefix, options.get("scale"))
        return attend_packed(q, k, v, self.lengths, self.notes.get("key_bias"), **options)

    def mean_over_heads(self, rows_HTE: Tensor) -> Tensor:
        return rows_HTE.mean(0)

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
        if not rows.is_cuda:  # there one sum over all is faster than one for each image
            return torch.stack([part.sum(0) for part in rows.split(self.lengths)])
        return rows.new_zeros(self.shape[0], *rows.shape[1:]).index_add(0, self.image, rows)

    def image_mean(self, rows: Tensor) -> Tensor:
        if not rows.is_cuda:  # one mean for each image: rounded as if it were alone
            parts = rows.split(self.lengths)
            return torch.stack([part.mean(0) if len(part) else part.new_zeros(part.shape[1:]) for part in parts])
        count = torch.tensor([max(length, 1) for length in self.lengths], device=rows.device)
        return self.image_sum(rows) / count[:, None]

    def rank(self, score: Tensor) -> Tensor:
        order = score.argsort(dim=-1, descending=True, stable=True)
        order = order[self.image[order].argsort(dim=-1, stable=True)]  # image after image, best first
        return torch.empty_like(order).index_copy(0, order, self._within)

    @property
    def _within(self) -> Tensor:
        """(T,) how many rows of its image come before each."""
        sizes = torch.tensor(self.lengths, device=self.x.device)
        begin = sizes.cumsum(0) - sizes
        return torch.arange(len(self.flat_index), device=self.flat_index.device) - begin[self.image]

    @property
    def _slot(self) -> Tensor:
        """(T,) where each row sits in a padded (B * n) list."""
        return self.image * max(self.lengths) + self._within

    def merged(self, size: Tensor, staying: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        rows = (wide(self.x), size, self.keys.detach(), staying, leaving)
        mean, total = merged(*(self.pad(row) for row in rows))
        return self.unpad(mean), self.unpad(total)

    def pad(self, rows: Tensor) -> Tensor:
        images, longest = self.shape[0], max(self.lengths)
        flat = rows.new_zeros(images * longest, *rows.shape[1:]).index_copy(0, self._slot, rows)
        return flat.unflatten(0, (images, longest))

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

    def advance(self, keep: Tensor | None, gate: Tensor | None = None) -> Packed:
        if gate is not None and torch.is_grad_enabled():
            raise DwindleError(
                "This method learns through gates on its decisions, which a pack of live rows cannot carry; train it "
                "with layout='masked'."
            )
        if keep is None or (count := int(keep.count_nonzero())) == len(keep):
            return self.changed(**self.forget())
        return self.move(keep.argsort(descending=True, stable=True), count)

    def move(self, order: Tensor, count: int) -> Packed:
        """Only the first `count` rows of this order; the others are put aside."""
        going = order[:count]
        x, flat_index = self.x.index_select(0, order), self.flat_index.index_select(0, order)
        value = x if self.value is self.x else self.value.index_select(0, order)
        one = self.shape[0] == 1
        lengths = (
            [count] if one else torch.bincount(flat_index[:count] // self.shape[1], minlength=self.shape[0]).tolist()
        )
        return self.changed(
            x=x[:count],
            notes={name: note.index_select(0, going) for name, note in self.notes.items()},
            flat_index=flat_index[:count],
            lengths=lengths,
            stopped=[*self.stopped, (flat_index[count:], value[count:])],
            first=None if self.first is None else self.first.index_select(0, going),
            **self.forget(),
        )

    def stream(self) -> Tensor:
        homes, values = zip(*self.stopped, (self.flat_index, self.value))
        images, count = self.shape
        flat = self.x.new_zeros(images * count, self.x.shape[-1]).index_copy(0, torch.cat(homes), torch.cat(values))
        return flat.view(images, count, -1)

    @property
    def where(self) -> Where:
        return Where(self.shape, flat_index_T=self.flat_index)

    @property
    def place(self) -> Tensor:
        return self.flat_index % self.shape[1]

    @property
    def is_prefix(self) -> Tensor:
        if self.first is None:
            self.first = super().is_prefix
        return self.first


def wide(x: Tensor) -> Tensor:
    """At least float32: scores are added up and compared, which half precision is too coarse for."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))
