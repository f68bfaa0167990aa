"""The packed layout on a CPU with no more calls than a block needs, over weights packed once: what `prepare` runs.

`Packed` is the definition. A block that is not exactly what is known runs as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from ..core.backbone import BlockParts
from ..core.tokens import Packed
from ..ops.linear import Packs, roomy
from ..ops.merging import add_merged, nearest_key


def _quick_gelu_(x: Tensor) -> Tensor:
    return x.mul_(torch.sigmoid(1.702 * x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # in place: the hidden layer is the largest tensor there is
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "quick_gelu": _quick_gelu_,
    "silu": torch.ops.aten.silu_,
    "relu": torch.relu_,
}


def takes(images: Tensor) -> bool:
    """Whether this is for the lean path: autocast, torch.compile and hooks of every module want to see each call."""
    plain = not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or watched_everywhere())
    return plain and images.device.type == "cpu"


def watched_everywhere() -> bool:
    """Whether torch calls somebody's hooks at every module there is."""
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


@dataclass
class CpuPacked(Packed):
    block_parts: dict[nn.Module, BlockParts | None] = field(default_factory=dict)
    packs: Packs = field(default_factory=Packs)
    merging: bool = False  # those who stop now have heirs

    @staticmethod
    def begin(x_BND: Tensor, prefix: int, block_parts: dict[nn.Module, BlockParts | None], packs: Packs) -> CpuPacked:
        plain = Packed.start(x_BND, prefix)
        return CpuPacked(
            plain.x,
            plain.shape,
            prefix,
            flat_index=plain.flat_index,
            lengths=plain.lengths,
            block_parts=block_parts,
            packs=packs,
        )

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module) -> Packed:
        parts = self.block_parts.get(block)
        if parts is None:
            return super().update(call, block)
        self.x, self.probe = self._think(parts, self._attend(parts, self.x))
        return self

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Too narrow to be packed for its speed; in bf16 it is, as it would meet any number of rows."""
        return self.packs(layer, x) if x.dtype == torch.bfloat16 else layer(x)

    def _attend(self, parts: BlockParts, x_TD: Tensor) -> Tensor:
        """x plus its attention update."""
        normed = _norm(parts.norm1, x_TD)
        made = [self.packs(layer, normed) for layer in parts.qkv]  # one layer, or three
        qkv = made[0] if len(made) == 1 else torch.cat(made, -1)
        q, k, v = qkv.view(1, len(x_TD), 3, parts.heads, -1).permute(2, 0, 3, 1, 4)  # (1, H, T, E)
        if parts.q_norm is not None and parts.k_norm is not None:
            q, k = parts.q_norm(q), parts.k_norm(k)
        mixed = self.attend(q, k, v, scale=parts.scale)
        update = self.packs(parts.proj, mixed[0].transpose(0, 1).flatten(1))
        return _added(x_TD, update, parts.scale1)

    def _think(self, parts: BlockParts, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """x plus its MLP's update, and the neuron that was asked for."""
        normed = _norm(parts.norm2, x_TD)
        if self.packs.takes(parts.fc1, normed) and self.packs.takes(parts.fc2, normed):
            normed = roomy(normed)  # the rows that fill up stay until the sum
        hidden = self.packs(parts.fc1, normed)
        probe = None if self.probed is None else hidden[: len(x_TD)].select(1, self.probed).clone()
        update = self.packs(parts.fc2, ACTIVATIONS[parts.act](hidden))[: len(x_TD)]
        return _added(x_TD, update, parts.scale2), probe

    def mean_over_heads(self, rows_HTE: Tensor) -> Tensor:
        """Head by head: torch is slow to sum over so few."""
        exact = rows_HTE.dtype == torch.float32  # in half precision each sum would be rounded
        return reduce(torch.add, rows_HTE).div_(len(rows_HTE)) if exact else super().mean_over_heads(rows_HTE)

    def merge_nearest(self, keep: Tensor) -> None:
        if not self.prefix_stays:
            return super().merge_nearest(keep)
        self.merging = True  # done in `move`, when it is known who stays and who not

    def move(self, order: Tensor, count: int) -> Packed:
        if self.merging:
            self.notes.pop("key_bias", None)  # it will be another
        after = super().move(order, count)
        if self.merging:
            assert self.keys is not None and "final" not in self.notes
            keys, (_, lost) = self.keys.index_select(0, order), after.stopped[-1]
            left = [before - now for before, now in zip(self.lengths, after.lengths)]
            into = nearest_key(keys[count:], keys[:count], left, after.lengths, self.prefix)
            size, given = after.notes["size"], self.notes["size"].index_select(0, order[count:])
            after.x, size = add_merged(lost, given, into, after.x, size)
            after.notes |= {"size": size, "key_bias": size.log()}
        return after

    def forget(self) -> dict[str, Any]:
        return super().forget() | {"merging": False}


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _added(x: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """Into the update's memory: x may be in somebody's notes."""
    return update.add_(x) if scale is None else update.mul_(scale).add_(x)
