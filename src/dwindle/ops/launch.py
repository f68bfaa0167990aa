"""Whether Triton is installed, and how kernels over rows are divided into tiles and launched."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    TRITON = True
except ImportError:  # files with kernels are still imported, but their kernels are never launched
    TRITON = False
    triton = SimpleNamespace(jit=lambda function: function)  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=lambda value: value)  # type: ignore[assignment]
    gdc_launch_dependents = gdc_wait = None

SPLIT = 64  # the largest head size for which `split_precision` was tried


class Tile(NamedTuple):
    """The sides of a kernel's tile: m rows, n columns, steps of k over the inner axis; and how it is launched."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    persistent: int = 0  # programs per multiprocessor, each of which computes many tiles; 0: a program for each tile


def linear_tile(rows: int, out: int, inner: int, dtype: torch.dtype) -> Tile:
    """The tile of a linear layer, chosen by measurements on an H200 (benchmarks/tiles.py): many small programs are
    fastest for little work, and large tiles for much work. rows: of the input; out, inner: the layer's sizes."""
    if interpreted():
        return _dividing(Tile(32, 32, 32, 4, 1, persistent=int(rows > 100 and out % 8 == inner % 8 == 0)), inner)
    width = min(out, inner)
    work = rows * max(width, 384) // 384  # the number of rows of width 384 that are as much work
    if dtype == torch.float32:
        if work > 2048 and can_describe(out, inner):
            return Tile(128, 64, 32, 4, 3, persistent=2)
        return _dividing(Tile(64, 64, 32, 4, 2) if work <= 2048 else Tile(64, 128, 32, 4, 3), inner)
    if work <= 512:
        return _dividing(Tile(64, 64, 64, 4, 4) if out > inner else Tile(32, 32, 128, 4, 4), inner)
    if not can_describe(out, inner):
        return _dividing(Tile(64, 64, 64, 4, 4) if work <= 2048 else Tile(128, 128, 64, 8, 3), inner)
    qkv = out == 3 * inner
    if work <= 2048:
        if out <= inner:
            return _dividing(Tile(64, 64, 128, 4, 3), inner)
        if width < 384:
            return _dividing(Tile(64, 64, 64, 4, 4), inner)
        return Tile(64, 64, 64, 4, 4, persistent=1000) if qkv else Tile(128, 64, 64, 4, 3, persistent=3)
    if work <= 8192:
        return Tile(64, 128, 64, 4, 4, persistent=2) if out < inner else Tile(128, 64, 64, 4, 4, persistent=2)
    if qkv:
        return Tile(256, 128, 64, 8, 3, persistent=1)
    return Tile(128, 128, 64, 8, 4, persistent=1) if out < inner else Tile(128, 64, 64, 4, 4, persistent=2)


def _dividing(tile: Tile, inner: int) -> Tile:
    """The tile with a k that divides the inner size, if there is one; then no load needs a mask."""
    return next((tile._replace(k=k) for k in (128, 64, 32, 16) if k <= tile.k and inner % k == 0), tile)


def norm_tile(rows: int) -> Tile:
    """The tile of a LayerNorm over so many rows."""
    return Tile(2, 0, 0, 2, 1) if rows <= 2048 else Tile(4, 0, 0, 4, 1)


def can_describe(out: int, inner: int) -> bool:
    """Whether tensor descriptors (Hopper's copy engine) support rows of these sizes."""
    return torch.cuda.get_device_capability() >= (9, 0) and out % 8 == inner % 8 == 0


def attention_tile(longest: int, size: int, images: int, dtype: torch.dtype) -> Tile:
    """The tile of attention: m queries and n keys. size: of a head."""
    if interpreted():
        return Tile(16, 16, 0, 4, 1)
    if dtype == torch.float32:
        return Tile(64, 32, 0, 4, 2) if size <= SPLIT else Tile(32, 32, 0, 4, 1)
    if size > 64:
        return Tile(64, 64, 0, 4, 2)
    if images <= 2:
        return Tile(16, 128, 0, 4, 2)
    return Tile(64 if images <= 16 else 128, 32, 0, 4, 3)


def interpreted() -> bool:
    """Whether Triton runs kernels as Python on the CPU, which tests use."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(x: Tensor) -> bool:
    """Whether kernels run on this tensor. If not, callers use the definitions in plain PyTorch."""
    return TRITON and (x.is_cuda or interpreted())


def power_of_two(least: int, floor: int = 2) -> int:
    """The smallest power of two that is at least both; `floor` is one. Triton's tiles need such sides."""
    return max(floor, 1 << (least - 1).bit_length())


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; a few for the CPU in tests."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def overlapping(x: Tensor, rows: int) -> dict[str, bool]:
    """Launch options of kernels over this many rows. From Hopper on a kernel is set up while the one before still runs
    (programmatic dependent launch, PDL). Long kernels gain nothing by it, and the programs set up early take space."""
    supported = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if supported and rows <= 16384 else {"PDL": False}


def precision(x: Tensor) -> str:
    """The precision of products on which decisions depend, or that tensor cores cannot compute: float32 stays exact."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def split_precision(x: Tensor, head: int = 0) -> str:
    """The precision of a block's products, or of attention with heads of this size: float32 becomes three products of
    tensor cores on its upper and lower bits. On an H200 this is three times as fast, and DeiT-S's logits are no further
    from those of float64 (docs/engine.md)."""
    supported = x.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return "tf32x3" if x.dtype == torch.float32 and supported and head <= SPLIT else precision(x)
