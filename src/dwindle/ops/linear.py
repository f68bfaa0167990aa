"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, the library lays the weights out anew in every call. With few rows that is most of the work, and packed
models have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

import threading
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A packed form serves any number of rows; this is the number it is made for.
ROWS = 128
_measuring = threading.Lock()


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
# Of each layer: what its weight was, the weight itself (so that no other can come to lie there), and its packed form.
_packed: WeakKeyDictionary[nn.Module, tuple[tuple, Tensor, Library, Tensor]] = WeakKeyDictionary()


def library() -> Library | None:
    """What runs packed layers in this process; None: nothing here is worth it."""
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


def room(rows: int) -> int:
    """As many rows, or a few more where few numbers of rows are wanted: up to 7, or 3%."""
    if library() is not OneDNN:
        return rows
    step = max(8, 1 << (rows.bit_length() - 6)) if rows >= 64 else 8
    return -(-rows // step) * step


def packs(layer: nn.Linear, x: Tensor) -> bool:
    """Plain layers in float32; what is derived from them runs its own."""
    return type(layer) is nn.Linear and x.dtype == torch.float32 and available()


def roomy(x: Tensor) -> Tensor:
    """The rows (T, K), for layers that pack, with rows of 0 after them, as `room` has it: what is made of them is made
    by known code."""
    rows = len(x)
    if (wanted := room(rows)) == rows:
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
        used = library()
        assert used is not None
        known = _packed[layer] = (mark, weight.detach(), used, used.pack(weight.detach()))
    rows = x.reshape(-1, x.shape[-1])
    out = known[2].product(roomy(rows), known[3], weight, layer.bias)[: len(rows)]
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
