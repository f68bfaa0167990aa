"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, the library lays the weights out anew in every call. With few rows that is most of the work, and packed
models have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A packed form serves any number of rows; this is the number it is made for.
ROWS = 128
# Multiply-accumulates of a product from which on packing pays: each call of a packed one takes some 20 us more, for
# which two cores of an AMD EPYC do 2M. From 5M to 10M it is even.
WORTH = 8_000_000
_measuring = threading.Lock()


class MKL:
    asks_weight = True

    @staticmethod
    def here() -> bool:
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)

    @staticmethod
    def product(x: Tensor, packed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


class OneDNN:
    """It writes code for every number of rows it meets, and keeps what it wrote last: rows must come in few numbers."""

    asks_weight = False

    @staticmethod
    def here() -> bool:
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    @staticmethod
    def product(x: Tensor, packed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


Library = type[MKL] | type[OneDNN]
Corner = tuple[int, int]  # the first outputs and the first inputs of a layer


@dataclass(frozen=True)
class Pack:
    mark: tuple[int, int]  # what the layer's weight was
    whole: Tensor  # the weight itself, so that no other can come to lie there
    weight: Tensor | None  # it, or a corner of it, where the library asks for it
    library: Library
    packed: Tensor


_packed: WeakKeyDictionary[nn.Module, dict[Corner | None, Pack]] = WeakKeyDictionary()


def library(dtype: torch.dtype = torch.float32) -> Library | None:
    """What runs packed layers in this process; None: nothing here is worth it. In bf16 it is oneDNN, as it is unpacked:
    packed, it meets few numbers of rows.
    """
    if dtype == torch.bfloat16:
        return OneDNN if torch.cpu._is_avx512_bf16_supported() and OneDNN.here() else None
    with _measuring:
        return _fastest()


@cache
def _fastest() -> Library | None:
    """Measured once on a layer of DeiT-S. On an AMD CPU oneDNN is far ahead; elsewhere it may lose to no packing."""
    from ..bench import milliseconds

    with torch.inference_mode():
        drawn = torch.Generator("cpu").manual_seed(0)
        x = torch.randn(ROWS, 384, generator=drawn, dtype=torch.float32, device="cpu")
        weight = torch.randn(1536, 384, generator=drawn, dtype=torch.float32, device="cpu")
        plain = partial(F.linear, x, weight)
        calls: dict[Library | None, partial[Tensor]] = {None: plain}
        for found in (OneDNN, MKL):
            try:
                if found.here():
                    call = partial(found.product, x, found.pack(weight), weight, None)
                    if torch.allclose(call(), plain(), atol=1e-3):
                        calls[found] = call
            except RuntimeError:
                continue  # a build that has the name and not the thing
        best = {one: min(times) for one, times in zip(calls, milliseconds(list(calls.values()), 0.0, x.device))}
    best[None] *= 1.2  # with fewer rows than these packing is worth more
    return min(best, key=lambda one: best[one])


def available() -> bool:
    return library() is not None


def room(rows: int, dtype: torch.dtype = torch.float32) -> int:
    """As many rows, or a few more where few numbers of rows are wanted: up to 7, or 3%."""
    if library(dtype) is not OneDNN:
        return rows
    step = max(8, 1 << (rows.bit_length() - 6)) if rows >= 64 else 8
    return -(-rows // step) * step


def packs(layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> bool:
    """Whether a product with as many rows as x is worth it; of plain layers in float32 or bf16, what is derived from
    them runs its own.
    """
    if type(layer) is not nn.Linear or x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != layer.weight.dtype:
        return False
    if layer.weight.is_inference() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False  # the first do not tell when they are written to; the others want to see plain calls
    if x.dtype == torch.bfloat16:
        return x.device.type == "cpu" and library(x.dtype) is not None
    outputs, inputs = corner or (layer.out_features, layer.in_features)
    return x.numel() // x.shape[-1] * outputs * inputs >= WORTH and available()


def roomy(x: Tensor) -> Tensor:
    """The rows (T, K), for layers that pack, with rows of 0 after them, as `room` has it: what is made of them is made
    by known code."""
    rows = len(x)
    if (wanted := room(rows, x.dtype)) == rows:
        return x
    padded = x.new_empty(wanted, x.shape[1])
    padded[:rows], padded[rows:] = x, 0
    return padded


def linear_ref(layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> Tensor:
    """corner: as if the layer had only its first outputs and inputs, so many of each."""
    if corner is None:
        return F.linear(x, layer.weight, layer.bias)
    outputs, inputs = corner
    return F.linear(x, layer.weight[:outputs, :inputs], None if layer.bias is None else layer.bias[:outputs])


def linear(layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> Tensor:
    """The layer without its hooks."""
    if not packs(layer, x, corner):
        return layer.forward(x) if corner is None else linear_ref(layer, x, corner)
    known = _pack(layer, corner)
    bias = layer.bias if corner is None or layer.bias is None else layer.bias[: corner[0]]
    rows = x.reshape(-1, x.shape[-1])
    out = known.library.product(roomy(rows), known.packed, known.weight, bias)[: len(rows)]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def narrow(layer: nn.Linear, x: Tensor) -> Tensor:
    """A layer too narrow to be packed for its speed; in bf16 it is, as it would meet any number of rows."""
    halves = x.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    return linear(layer, x) if halves else layer(x)


def _pack(layer: nn.Linear, corner: Corner | None) -> Pack:
    """The layer's weight, or a corner of it, packed: anew where it was written to, moved or exchanged."""
    weight = layer.weight
    mark = (weight.data_ptr(), weight._version)
    packs = _packed.get(layer, {})
    known = packs.get(corner)
    if known is None or known.mark != mark:
        used, whole = library(weight.dtype), weight.detach()
        assert used is not None
        part = whole if corner is None else whole[: corner[0], : corner[1]].contiguous()
        known = Pack(mark, whole, part if used.asks_weight else None, used, used.pack(part))
        _packed[layer] = {at: pack for at, pack in packs.items() if pack.mark == mark} | {corner: known}
    return known
