"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, the library lays the weights out anew in every call. With few rows that is most of the work, and packed
models have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A packed form serves any number of rows; this is the number it is made for.
ROWS = 128
Product = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]  # rows, packed weight, weight, bias
_packed: WeakKeyDictionary[nn.Module, tuple[tuple, Product, Tensor]] = WeakKeyDictionary()


def _mkl(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


def _onednn(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def packers() -> dict[Product, Callable[[Tensor, int], Tensor]]:
    """The libraries of this torch that take packed weights, and how each packs them."""
    found: dict[Product, Callable[[Tensor, int], Tensor]] = {}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[_onednn] = torch.ops.mkldnn._reorder_linear_weight
    if torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        found[_mkl] = torch.ops.mkl._mkl_reorder_linear_weight
    return found


def available() -> bool:
    return bool(packers())


@cache
def fastest(wide: int, out: int, threads: int) -> Product:
    """Of the libraries, for a layer of this size, measured once: on an AMD CPU oneDNN is far ahead of MKL."""
    if len(packers()) == 1:
        return next(iter(packers()))
    with torch.inference_mode():
        x, weight = torch.ones(ROWS, wide), torch.ones(out, wide)
        tried = {product: pack(weight, ROWS) for product, pack in packers().items()}
        best = dict.fromkeys(tried, float("inf"))
        for _ in range(6):  # turn about: a slow moment of the machine hits both
            for product, packed in tried.items():
                begin = time.perf_counter()
                product(x, packed, weight, None)
                best[product] = min(best[product], time.perf_counter() - begin)
    return min(best, key=lambda product: best[product])


def linear_ref(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer without its hooks. Packed are plain layers in float32; what is derived from them runs its own."""
    if type(layer) is not nn.Linear or x.dtype != torch.float32 or not available():
        return layer.forward(x)
    weight = layer.weight
    # Written to, moved or exchanged since it was packed? A tensor made in inference mode does not count its writes.
    mark = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = _packed.get(layer)
    if known is None or known[0] != mark:
        product = fastest(layer.in_features, layer.out_features, torch.get_num_threads())
        known = _packed[layer] = (mark, product, packers()[product](weight.detach(), ROWS))
    return known[1](x, known[2], weight, layer.bias)
