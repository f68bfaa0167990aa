"""Linear layers on a CPU with their weights packed once. `linear_ref` is the definition.

Without packing, the library lays the weights out anew in every call. With few rows that is most of the work, and packed
models have few rows. The results are the same to the last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A packed form serves any number of rows; this is the number it is made for.
ROWS = 128
# Multiply-accumulates of a product from which on packing pays: each call of a packed one takes some 20 us more, for
# which two cores of an AMD EPYC do 2M. From 5M to 10M it is even.
WORTH = 8_000_000
KEPT = 8  # of what is made for each number of tokens, for as many numbers


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
FAVOURITES: dict[str, Library] = {"AuthenticAMD": OneDNN, "GenuineIntel": MKL}


class PackedWeight(NamedTuple):
    """A layer's weight, or a corner of it, as a library wants it."""

    library: Library
    weight: Tensor | None  # as it was, where the library asks for it
    packed: Tensor


def library(dtype: torch.dtype = torch.float32) -> Library | None:
    """What runs packed layers in this process; None: nothing here is worth it. By the CPU's maker: on AMD's oneDNN is
    far ahead, on Intel's MKL is. In bf16 it is oneDNN, as it is unpacked: packed, it meets few numbers of rows.
    """
    if dtype == torch.bfloat16:
        return OneDNN if torch.cpu._is_avx512_bf16_supported() and OneDNN.here() else None
    found: Any = FAVOURITES.get(maker())
    return found if found is not None and _works(found) else None


@cache
def maker() -> str:
    """Of this CPU, as Linux tells it; elsewhere nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


@cache
def _works(kind: Library) -> bool:
    """Whether this build of torch has the thing, and not only the name."""
    with torch.inference_mode():
        drawn = torch.Generator("cpu").manual_seed(0)
        x, weight = (torch.randn(n, 64, generator=drawn, dtype=torch.float32, device="cpu") for n in (ROWS, 96))
        try:
            return kind.here() and torch.allclose(
                kind.product(x, kind.pack(weight), weight, None), x @ weight.T, atol=1e-3
            )
        except RuntimeError:
            return False


def available() -> bool:
    return library() is not None


def room(rows: int, dtype: torch.dtype = torch.float32) -> int:
    """As many rows, or a few more where few numbers of rows are wanted: up to 7, or 3%."""
    if library(dtype) is not OneDNN:
        return rows
    step = max(8, 1 << (rows.bit_length() - 6)) if rows >= 64 else 8
    return -(-rows // step) * step


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


def plain(layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> Tensor:
    """The layer called as a module, which hooks see; a corner of it by slices."""
    return layer(x) if corner is None else linear_ref(layer, x, corner)


class Packs:
    """Linear layers whose weights are never written to again, each packed when first asked for: `packs(layer, x)`."""

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Linear, Corner | None], PackedWeight] = {}
        self._once: dict[Any, dict[Any, Any]] = {}

    def __call__(self, layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> Tensor:
        if not self.takes(layer, x, corner):
            return plain(layer, x, corner)
        made = self._made.get((layer, corner)) or self._pack(layer, corner)
        bias = layer.bias if corner is None or layer.bias is None else layer.bias[: corner[0]]
        rows = x.reshape(-1, x.shape[-1])
        out = made.library.product(roomy(rows), made.packed, made.weight, bias)[: len(rows)]
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def takes(layer: nn.Linear, x: Tensor, corner: Corner | None = None) -> bool:
        """Whether a product with as many rows as x is worth packing; of layers that nobody watches, in float32 or
        bf16. What is derived from them runs its own.
        """
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
            return False
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != layer.weight.dtype:
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False  # they want to see plain calls
        if x.dtype == torch.bfloat16:
            return library(x.dtype) is not None
        outputs, inputs = corner or (layer.out_features, layer.in_features)
        return x.numel() // x.shape[-1] * outputs * inputs >= WORTH and available()

    def _pack(self, layer: nn.Linear, corner: Corner | None) -> PackedWeight:
        used, whole = library(layer.weight.dtype), layer.weight.detach()
        assert used is not None
        part = whole if corner is None else whole[: corner[0], : corner[1]].contiguous()
        made = self._made[layer, corner] = PackedWeight(used, part if used.asks_weight else None, used.pack(part))
        return made

    def once(self, owner: Any, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made for this key of this owner only once; kept for the latest few keys."""
        made = self._once.setdefault(owner, {})
        if key not in made:
            if len(made) >= KEPT:
                made.pop(next(iter(made)))
            made[key] = make()
        return made[key]
