"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, MKL lays the weights out anew in every call. With few rows that is most of the work, and packed models
have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# MKL's packed form serves any number of rows; this is the number it is made for.
ROWS = 128
_packed: WeakKeyDictionary[nn.Module, tuple[tuple, Tensor]] = WeakKeyDictionary()


@cache
def available() -> bool:
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


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
        known = _packed[layer] = (mark, torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), ROWS))
    return torch.ops.mkl._mkl_linear(x, known[1], weight, layer.bias, x.numel() // x.shape[-1])
