"""The residual stream of a batch, and which of its tokens are still live.

B images, N tokens per image, T live tokens of all images, D width. A method sees *rows*: (B, N, .) in the masked
layout, (T, .) in the packed one. It works on the last axis and asks the tokens for anything that crosses rows, so the
same method code drives both layouts.

A layout knows no method. Its operations return a new object and leave the one they are called on as it is; only `notes`
are the method's to write to.
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
    """What a block is asked to leave behind for the method's step after it."""

    neuron: int | None = None  # this neuron after the first linear layer of the MLP
    detach: bool = False  # the neuron's gradient trains its own weights and stops there
    attention: bool = False  # the share of the class token's attention that each row got
    attention_learns: bool = False  # with its gradient, for a loss that compares it with something
    keys: bool = False  # the keys of attention, mean over heads
    merging: bool = False  # the same, but for the layout alone: rows that stop now may join the nearest (`Merge`)


class Probed(NamedTuple):
    """What the block just run left behind, on rows; None where it was not asked to."""

    neuron: Tensor | None = None
    attention: Tensor | None = None
    keys: Tensor | None = None  # rows, head size


NOTHING = Probed()


@dataclass(frozen=True)
class Where:
    """Which tokens some rows are. Turns values on rows into dense ones, (B, N)."""

    shape: tuple[int, int]  # B, N
    live_BN: Tensor | None = None  # masked: rows are (B, N), these count
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

    `notes` are values per row, which travel, and stop, with their rows. They are the method's, but for these, which the
    loop and the layouts read: `forced` (depths), `operating_point` (of each image), `final` (the mean of states that is
    read in place of x), `size` (how many tokens a merged row is the mean of) and `key_bias` (added to the scores of a
    row as a key).
    """

    x: Tensor  # rows, D
    shape: tuple[int, int]  # B, N
    prefix: int  # class, distillation and register tokens come first in every image
    notes: dict[str, Tensor] = field(default_factory=dict)
    probed: Probed = NOTHING
    reader: Callable[[Tensor], Tensor] | None = None  # (B, N, D) -> logits; the loop lends the backbone's
    positions: Tensor | None = None  # (..., N, C): what the backbone tells its blocks of each place
    norm: Callable[[Tensor], Tensor] | None = None  # (..., D): the backbone's last norm, likewise
    leader: Tensor | None = None  # (B, N): which token of its image each has joined; its own place: none. None: nobody
    images: Tensor | None = None  # what the model was given, for a method that looks at them in `start`
    rows: Rows | None = None  # the live rows as a list on the device, in the layout whose kernels go by it
    compiling: bool = False  # this forward pass is one of many alike, so that compiling its parts pays

    def changed(self, **values: Any) -> Self:
        """A copy with other values: `dataclasses.replace`, which takes longer than a small block's arithmetic."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **values)
        return other

    def numbers(self, value: float) -> Tensor:
        """This number for each row, in at least float32."""
        return torch.full(self.x.shape[:-1], value, dtype=exact(self.x.dtype), device=self.x.device)

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Tokens:
        """The rows after a block. call: its forward on a plain tensor, during which `probe` is caught; a layout that
        runs the block by its parts catches it itself."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of the live rows among those of the same image. pair_bias: (1 or B, 1 or H, N, N) added to the
        scores of all tokens, live or not."""
        raise NotImplementedError

    def placed(self, places: Tensor) -> Tensor:
        """Of values of the places (..., N, C) those of the rows, to go with queries (b, H, rows, E)."""
        raise NotImplementedError

    def look(
        self, probe: Probe, q: Tensor, k: Tensor, scale: float | None = None, pair_bias: Tensor | None = None
    ) -> Probed:
        """What a probe asks of attention."""
        bias = None if pair_bias is None else pair_bias.detach()
        asked = (q, k) if probe.attention_learns else (q.detach(), k.detach())
        attention = self.class_attention(*asked, scale, bias) if probe.attention else None
        return Probed(attention=attention, keys=self.mean_keys(k) if probe.keys or probe.merging else None)

    def mean_keys(self, k: Tensor) -> Tensor:
        """The keys on rows, mean over heads."""
        raise NotImplementedError

    def class_attention(self, q: Tensor, k: Tensor, scale: float | None, pair_bias: Tensor | None = None) -> Tensor:
        """The share of the class token's attention that each row gets."""
        raise NotImplementedError

    def per_image(self, values_B: Tensor) -> Tensor:
        """Values of the images (B, ...), for the rows."""
        raise NotImplementedError

    def gather(self, dense_BN: Tensor) -> Tensor:
        """Values of the tokens (B, N), for the rows."""
        raise NotImplementedError

    def image_sum(self, rows: Tensor) -> Tensor:
        """(B, ...): sum over the live tokens of each image."""
        raise NotImplementedError

    def image_mean(self, rows: Tensor) -> Tensor:
        """(B, ...): mean over the live tokens of each image; 0 for an image with none."""
        total = self.image_sum(rows)
        count = self.image_sum(self.numbers(1.0).to(rows.dtype)).clamp_min(1)
        return total / count.view(-1, *[1] * (total.dim() - 1))

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

    @property
    def size(self) -> Tensor:
        """How many tokens each row is the mean of: 1 until it has been merged with others."""
        size = self.notes.get("size")
        return self.numbers(1.0) if size is None else size

    def merged(self, keep: Tensor, how: Merge) -> Self:
        """The rows after those that leave have joined others. They still are live: `advance` takes them out."""
        into = self.nearest(keep) if how.into is None else self.rows_of(how.into)
        by_size = how.weight is None
        x, total = self.joined(self.size if how.weight is None else how.weight, into)
        notes = self.notes | {"size": total, "key_bias": how.proportion * total.log()} if by_size else self.notes
        return self.changed(x=x, notes=notes, leader=self.led(into))

    def led(self, into: Tensor) -> Tensor:
        """(B, N): `leader` after live rows have joined the rows `into`."""
        raise NotImplementedError

    @property
    def alone(self) -> Tensor:
        """(B, N): `leader` while nobody has joined another."""
        return torch.arange(self.shape[1], device=self.x.device).expand(self.shape)

    def nearest(self, keep: Tensor) -> Tensor:
        """For each patch that leaves the row with the most alike key, of the patches that go on; else its own row."""
        raise NotImplementedError

    def rows_of(self, place: Tensor) -> Tensor:
        """The rows of live tokens that are given by their place in their image."""
        raise NotImplementedError

    def joined(self, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
        """States and weights after each row has joined the row `into`: `merge_ref` on rows."""
        raise NotImplementedError

    @property
    def padding(self) -> Tensor:
        """(B, n) bool: which entries of a padded tensor are live rows."""
        raise NotImplementedError

    @property
    def images_live(self) -> Tensor:
        """(B,) bool: which images have a live token."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """(B, classes): what the backbone would answer if all tokens stopped now; 0 for images without live tokens."""
        raise NotImplementedError

    def advance(
        self, keep: Tensor | None, gate: Tensor | None = None, merge: Merge | None = None, rows: Rows | None = None
    ) -> Tokens:
        """Only rows with `keep` go on; None: all. The arguments are the fields of `Verdict`."""
        raise NotImplementedError

    def stream(self) -> Tensor:
        """(B, N, D): for every token the value it stopped with."""
        raise NotImplementedError

    def normed(self) -> Tensor:
        """The rows after the backbone's last norm."""
        assert self.norm is not None
        return self.norm(self.x.detach())

    def given_back(self, stream_BND: Tensor) -> Tensor:
        """The stream, where a token that has joined another has that one's value."""
        return stream_BND if self.leader is None else follow(stream_BND, self.leader)

    @property
    def where(self) -> Where:
        raise NotImplementedError

    @property
    def place(self) -> Tensor:
        """Index of each row's token in its image."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        """Whether no token of the batch is live. The masked layout computes every row anyway and does not look."""
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

    @property
    def value(self) -> Tensor:
        """What is read of a row if it stops now: its state, or the mean over states a method asked for."""
        return self.notes.get("final", self.x)

    def add_final(self, weight: Tensor | None) -> None:
        """final += weight * x, for methods whose result is a mean over depths."""
        if weight is not None:
            step = weight[..., None] * self.x
            self.notes["final"] = self.notes["final"] + step if "final" in self.notes else step


def exact(dtype: torch.dtype) -> torch.dtype:
    """At least float32: scores are added up and compared, which half precision is too coarse for."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(exact(x.dtype))
