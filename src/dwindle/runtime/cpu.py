"""The packed layout on a CPU with no more calls than a block needs, over weights packed once: what `prepare` runs.

`Packed` is the definition. A block that is not exactly what is known runs as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from ..core.backbone import BlockParts
from ..core.packed import Packed
from ..core.tokens import Probe, Probed
from ..ops.linear import Packs, roomy


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

    def update(self, call: Callable[[Tensor], Tensor], block: nn.Module, probe: Probe) -> Packed:
        parts = self.block_parts.get(block)
        if parts is None:
            return super().update(call, block, probe)
        x, looked = self._attend(parts, self.x, probe)
        x, neuron = self._think(parts, x, probe)
        return self.changed(x=x, probed=Probed(neuron, looked.attention, looked.keys))

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Too narrow to be packed for its speed; in bf16 it is, as it would meet any number of rows."""
        return self.packs(layer, x) if x.dtype == torch.bfloat16 else layer(x)

    def _attend(self, parts: BlockParts, x_TD: Tensor, probe: Probe) -> tuple[Tensor, Probed]:
        """x plus its attention update, and what the probe asks of attention."""
        normed = _norm(parts.norm1, x_TD)
        made = [self.packs(layer, normed) for layer in parts.qkv]  # one layer, or three
        qkv = made[0] if len(made) == 1 else torch.cat(made, -1)
        q, k, v = qkv.view(1, len(x_TD), 3, parts.heads, -1).permute(2, 0, 3, 1, 4)  # (1, H, T, E)
        if parts.q_norm is not None and parts.k_norm is not None:
            q, k = parts.q_norm(q), parts.k_norm(k)
        mixed = self.attend(q, k, v, scale=parts.scale)
        update = self.packs(parts.proj, mixed[0].transpose(0, 1).flatten(1))
        return _added(x_TD, update, parts.scale1), self.look(probe, q, k, parts.scale)

    def _think(self, parts: BlockParts, x_TD: Tensor, probe: Probe) -> tuple[Tensor, Tensor | None]:
        """x plus its MLP's update, and the neuron that was asked for."""
        normed = _norm(parts.norm2, x_TD)
        if self.packs.takes(parts.fc1, normed) and self.packs.takes(parts.fc2, normed):
            normed = roomy(normed)  # the rows that fill up stay until the sum
        hidden = self.packs(parts.fc1, normed)
        neuron = None if probe.neuron is None else hidden[: len(x_TD)].select(1, probe.neuron).clone()
        update = self.packs(parts.fc2, ACTIVATIONS[parts.act](hidden))[: len(x_TD)]
        return _added(x_TD, update, parts.scale2), neuron

    def mean_keys(self, k: Tensor) -> Tensor:
        """Head by head: torch is slow to sum over so few."""
        exact = k.dtype == torch.float32  # in half precision each sum would be rounded
        return reduce(torch.add, k[0]).div_(k.shape[1]) if exact else super().mean_keys(k)


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _added(x: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """Into the update's memory: x may be in somebody's notes."""
    return update.add_(x) if scale is None else update.mul_(scale).add_(x)
