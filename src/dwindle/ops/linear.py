"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, the library lays the weights out anew in every call. With few rows that is most of the work, and packed
models have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

import time
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A packed form serves any number of rows; this is the number it is made for.
ROWS = 128
_packed: WeakKeyDictionary[nn.Module, tuple[tuple, Tensor]] = WeakKeyDictionary()


class MKL:
    @staticmethod
    def here() -> bool:
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)

    @staticmethod
    def product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


class OneDNN:
    """It writes code for every number of rows it meets, and keeps what it wrote last: rows must come in few numbers."""

    @staticmethod
    def here() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    @staticmethod
    def product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


Library = type[MKL] | type[OneDNN]


def available() -> bool:
    return MKL.here() or OneDNN.here()


@cache
def library() -> Library:
    """The faster of those this torch has, measured once on a layer of DeiT-S. On an AMD CPU oneDNN is far ahead."""
    found: list[Library] = [library for library in (OneDNN, MKL) if library.here()]
    if len(found) == 1:
        return found[0]
    with torch.inference_mode():
        x, weight = torch.ones(ROWS, 384), torch.ones(1536, 384)
        packed = {library: library.pack(weight) for library in found}
        best = dict.fromkeys(found, float("inf"))
        for _ in range(12):  # turn about: a slow moment of the machine hits both
            for library in found:
                begin = time.perf_counter()
                library.product(x, packed[library], weight, None)
                best[library] = min(best[library], time.perf_counter() - begin)
    return min(best, key=lambda library: best[library])


def room(rows: int) -> int:
    """As many rows, or a few more where few numbers of rows are wanted: up to 7, or 3%."""
    if library() is MKL:
        return rows
    step = max(8, 1 << (rows.bit_length() - 6)) if rows >= 64 else 8
    return -(-rows // step) * step


def packs(layer: nn.Linear, x: Tensor) -> bool:
    """Plain layers in float32; what is derived from them runs its own."""
    return type(layer) is nn.Linear and x.dtype == torch.float32 and available()


def roomy(x: Tensor, layer: nn.Linear) -> Tensor:
    """The rows (T, K) with rows of 0 after them, as `room` has it: what is made of them is made by known code."""
    rows = len(x)
    if not packs(layer, x) or (wanted := room(rows)) == rows:
        return x
    padded = x.new_empty(wanted, x.shape[1])
    padded[:rows], padded[rows:] = x, 0
    return padded


def linear_ref(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer without its hooks."""
    if not packs(layer, x):
        return layer.forward(x)
    weight = layer.weight
    # Written to, moved or exchanged since it was packed? A tensor made in inference mode does not count its writes.
    mark = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = _packed.get(layer)
    if known is None or known[0] != mark:
        known = _packed[layer] = (mark, library().pack(weight.detach()))
    if x.dim() != 2:
        return linear(layer, x.flatten(0, -2)).unflatten(0, x.shape[:-1])
    return library().product(roomy(x, layer), known[1], weight, layer.bias)[: len(x)]
