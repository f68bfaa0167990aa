"""The residual stream of a batch, and which of its tokens are still live.

B images, N tokens per image, T live tokens of all images, D width. A method sees *rows*: (B, N, .) in the masked
layout, (T, .) in the packed one. It computes on the last axis and uses methods of `Tokens` for anything that crosses
rows, so the same method code drives both layouts.

A layout knows no method. Its operations return a new object and leave the one they are called on unchanged. A method
may write only to `notes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, overload

import torch
from torch import Tensor, nn

from ..ops.merging import Merge, follow
from ..ops.rows import Rows


class Probe(NamedTuple):
    """What a block records for the method's step after it."""

    neuron: int | None = None  # this neuron of the first linear layer of the MLP
    detach: bool = False  # the neuron's gradient trains its own weights and stops there
    attention: bool = False  # the share of the class token's attention that each row got
    attention_learns: bool = False  # `attention` with its gradient, for a loss that reads it
    keys: bool = False  # the keys of attention, mean over heads
    merging: bool = False  # the same keys, but only for the layout, which may merge rows that stop (`Merge`)


class Probed(NamedTuple):
    """What the last block recorded, on rows; None where the probe did not ask for it."""

    neuron: Tensor | None = None
    attention: Tensor | None = None
    keys: Tensor | None = None  # rows, head size


NOTHING = Probed()


@dataclass(frozen=True)
class Where:
    """Which token each row is. It turns values on rows into dense values (B, N)."""

    shape: tuple[int, int]  # B, N
    live_BN: Tensor | None = None  # masked: rows are (B, N), and those that are True here count
    flat_index_T: Tensor | None = None  # packed: row t is token flat_index[t] of the B * N

    def dense_rows(self, rows: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """(B, N): values of the rows at their tokens, `fill` elsewhere. Without values: True at the rows' tokens."""
        if self.flat_index_T is None:
            assert self.live_BN is not None
            return self.live_BN if rows is None else torch.where(self.live_BN, rows, torch.full_like(rows, fill))
        if rows is None:
            rows = torch.ones_like(self.flat_index_T, dtype=torch.bool)
        flat = rows.new_full((self.shape[0] * self.shape[1],), fill)
        return flat.index_copy(0, self.flat_index_T, rows).view(self.shape)


@dataclass
class Tokens:
    """What the layouts share.

    `notes` are values per row, which move with their rows and are dropped when these stop. They belong to the method,
    except for those that the loop and the layouts read: `forced` (depths), `operating_point` (of each image), `final`
    (the weighted sum of states that is read out in place of x), `size` (how many tokens a merged row is the mean of)
    and `key_bias` (added to the scores of a row as a key).
    """

    x: Tensor  # rows, D
    shape: tuple[int, int]  # B, N
    prefix: int  # class, distillation and register tokens come first in every image
    notes: dict[str, Tensor] = field(default_factory=dict)
    probed: Probed = NOTHING
    reader: Callable[[Tensor], Tensor] | None = None  # (B, N, D) -> logits: `Backbone.logits`
    positions: Tensor | None = None  # (..., N, C): `Backbone.positions`
    norm: Callable[[Tensor], Tensor] | None = None  # (..., D): `Backbone.normed`
    # (B, N): the place of the token that each token was merged into, or its own place. None: no token was merged.
    leader: Tensor | None = None
    images: Tensor | None = None  # the model's input, for a method that reads it in `start`
    rows: Rows | None = None  # the live rows as a list on the device, in the layout with kernels over rows
    compiling: bool = False  # functions that are slow without compiling are compiled

    def changed(self, **values: Any) -> Self:
        """A copy with other values, as from `dataclasses.replace`, which takes longer than a small block computes."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **values)
        return other

    def full(self, value: float) -> Tensor:
        """The number `value` for each row, in at least float32."""
        return torch.full(self.x.shape[:-1], value, dtype=exact(self.x.dtype), device=self.x.device)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Tokens:
        """The rows after a block. call: the block's forward on a plain tensor, during which `probe` is recorded. A
        layout that computes the block from its parts does not use it and records the probe itself."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of each row to the live rows of its image. pair_bias: (1 or B, 1 or H, N, N) for all tokens, live
        or not, added to the scores."""
        raise NotImplementedError

    def gather_positions(self, places: Tensor) -> Tensor:
        """The part of `places` (..., N, C) that belongs to the rows, shaped to go with queries (b, H, rows, E)."""
        raise NotImplementedError

    def probe_attention(
        self, probe: Probe, q: Tensor, k: Tensor, scale: float | None = None, pair_bias: Tensor | None = None
    ) -> Probed:
        """The part of a probe that is computed from queries and keys. The arguments are those of `attend`."""
        bias = None if pair_bias is None else pair_bias.detach()
        q_and_k = (q, k) if probe.attention_learns else (q.detach(), k.detach())
        attention = self.class_attention(*q_and_k, scale, bias) if probe.attention else None
        return Probed(attention=attention, keys=self.mean_keys(k) if probe.keys or probe.merging else None)

    def mean_keys(self, k: Tensor) -> Tensor:
        """The keys of the rows, averaged over heads."""
        raise NotImplementedError

    def class_attention(self, q: Tensor, k: Tensor, scale: float | None, pair_bias: Tensor | None = None) -> Tensor:
        """The share of the class token's attention that each row gets."""
        raise NotImplementedError

    def per_image(self, values_B: Tensor) -> Tensor:
        """The value of each row's image. values: (B, ...)."""
        raise NotImplementedError

    def gather(self, dense_BN: Tensor) -> Tensor:
        """The value of each row's token. dense: (B, N)."""
        raise NotImplementedError

    def image_sum(self, rows: Tensor) -> Tensor:
        """(B, ...): sum over the live tokens of each image."""
        raise NotImplementedError

    def image_mean(self, rows: Tensor) -> Tensor:
        """(B, ...): mean over the live tokens of each image; 0 for an image with none."""
        total = self.image_sum(rows)
        count = self.image_sum(self.full(1.0).to(rows.dtype)).clamp_min(1)
        return total / count.view(-1, *[1] * (total.dim() - 1))

    def rank(self, score: Tensor) -> Tensor:
        """The rank of each live row in its image: 0 for the highest score, then 1, 2... Equal rows keep their order."""
        raise NotImplementedError

    def pad(self, rows: Tensor) -> Tensor:
        """(B, n, ...): the live rows of each image first, for code that compares rows. `padding` marks which entries
        are live rows."""
        raise NotImplementedError

    def unpad(self, padded: Tensor) -> Tensor:
        """The rows of a tensor that `pad` made."""
        raise NotImplementedError

    @property
    def size(self) -> Tensor:
        """How many tokens each row is the mean of: 1 until it has been merged with others."""
        size = self.notes.get("size")
        return self.full(1.0) if size is None else size

    def merged(self, keep: Tensor, how: Merge) -> Self:
        """The rows after those without `keep` were merged into others. They are still live: `advance` removes them."""
        into = self.nearest(keep) if how.into is None else self.rows_of(how.into)
        by_size = how.weight is None
        x, total = self.merge_states(self.size if how.weight is None else how.weight, into)
        notes = self.notes | {"size": total, "key_bias": how.proportion * total.log()} if by_size else self.notes
        return self.changed(x=x, notes=notes, leader=self.merge_leaders(into))

    def merge_leaders(self, into: Tensor) -> Tensor:
        """(B, N): `leader` after live rows were merged into the rows `into`."""
        raise NotImplementedError

    @property
    def alone(self) -> Tensor:
        """(B, N): `leader` before any merge, where each token has its own place."""
        return torch.arange(self.shape[1], device=self.x.device).expand(self.shape)

    def nearest(self, keep: Tensor) -> Tensor:
        """For each patch that leaves, the row of the patch that goes on with the most similar key; for other rows
        their own. keep: which rows go on."""
        raise NotImplementedError

    def rows_of(self, place: Tensor) -> Tensor:
        """The index of the row of the token at each `place`. place: on rows, a place in the row's image."""
        raise NotImplementedError

    def merge_states(self, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        """States and weights after each row was merged into the row `into`: `merge_ref` on rows."""
        raise NotImplementedError

    @property
    def padding(self) -> Tensor:
        """(B, n) bool: which entries of a tensor that `pad` made are live rows."""
        raise NotImplementedError

    @property
    def images_live(self) -> Tensor:
        """(B,) bool: which images have a live token."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """(B, classes): the backbone's logits if all tokens stopped now; 0 for images without live tokens."""
        raise NotImplementedError

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Tokens:
        """The tokens after a verdict: only rows with `keep` go on; None: all. The arguments are fields of `Verdict`."""
        raise NotImplementedError

    def stream(self) -> Tensor:
        """(B, N, D): the value of every token, live or stopped."""
        raise NotImplementedError

    def normed(self) -> Tensor:
        """The rows after the backbone's last norm."""
        assert self.norm is not None
        return self.norm(self.x.detach())

    def follow_leaders(self, stream_BND: Tensor) -> Tensor:
        """The stream, in which a token that was merged into another has the other's value."""
        return stream_BND if self.leader is None else follow(stream_BND, self.leader)

    @property
    def where(self) -> Where:
        """Which token each row is."""
        raise NotImplementedError

    @property
    def place(self) -> Tensor:
        """Index of each row's token in its image."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        """Whether no token of the batch is live. The masked layout says False, as it computes every row anyway."""
        return False

    @property
    def live_rows(self) -> Tensor:
        """Which rows are live. In the packed layout all of them are."""
        return torch.ones_like(self.place, dtype=torch.bool)

    @property
    def is_prefix(self) -> Tensor:
        """Which rows are class, distillation or register tokens."""
        return self.place < self.prefix

    @overload
    def decide(self, depth: int, keep: Tensor) -> Tensor: ...
    @overload
    def decide(self, depth: int, keep: None) -> Tensor | None: ...
    def decide(self, depth: int, keep: Tensor | None) -> Tensor | None:
        """Which rows go on: the method's `keep`, or what the depths forced on the tokens say (bench, tests)."""
        forced = self.notes.get("forced")
        return keep if forced is None else forced > depth + 1

    @property
    def value(self) -> Tensor:
        """The result of each row if it stops now: its state, or the weighted sum of states that `add_final` makes."""
        return self.notes.get("final", self.x)

    def add_final(self, weight: Tensor | None) -> None:
        """Add weight * x to the note `final`, for methods whose result is a mean over depths."""
        if weight is not None:
            step = weight[..., None] * self.x
            self.notes["final"] = self.notes["final"] + step if "final" in self.notes else step


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type, or float32 if it is smaller: half precision is too coarse to add up and compare scores."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return x.to(exact(x.dtype))
