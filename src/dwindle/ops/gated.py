"""Attention with gated keys as one operator with its own backward pass, for training on a GPU.

The definition is `attention.py: attend_ref`. PyTorch's fused kernels have no gate with a gradient: `attend_gated` gets
it from them by wider values, which takes three times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import gated_triton
from .launch import Tile, available, interpreted, power_of_two, precision


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these tensors: bf16, whose range holds any ratio e_ij / Z_i, and heads up to 128, as
    larger ones do not fit the tiles."""
    half = q.dtype == k.dtype == v.dtype == torch.bfloat16
    return half and q.shape[-1] <= 128 and available(q)


# The fastest tile of each kernel for heads up to 64.
FORWARD, QUERIES, KEYS = Tile(128, 32, 0, 4, 3), Tile(64, 64, 0, 4, 3), Tile(32, 128, 0, 4, 2)


def _tile(size: int, dtype: torch.dtype, best: Tile) -> Tile:
    """The tile for heads of this size: `best`, or a smaller one that fits."""
    if interpreted():
        return Tile(16, 16, 0, 4, 1)
    if dtype == torch.float32 or size > 64:
        return Tile(32, 32, 0, 4, 1)
    return best


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], scale: float, *strided: Tensor, tile: Tile
) -> None:
    """Launch a kernel with `tensors`, then the scale, then the strides of `strided`, of which the first is q."""
    q = strided[0]
    _, heads, tokens, size = q.shape
    strides = [step for x in strided for step in x.stride()[:3]]
    kernel[grid](
        *tensors,
        scale,
        *strides,
        heads,
        tokens,
        size,
        PRECISION=precision(q),
        BQ=tile.m,
        BJ=tile.n,
        BE=power_of_two(size, 16),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _like_rows(q: Tensor) -> Tensor:
    """An empty tensor (B, H, N, E) that is (B, N, H, E) in memory, as the layer after attention reads it."""
    images, heads, tokens, size = q.shape
    return q.new_empty(images, tokens, heads, size).transpose(1, 2)


@torch.library.custom_op("dwindle::attend_gated", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    images, heads, tokens, size = q.shape
    out, norm = _like_rows(q), torch.empty(q.shape[:3], device=q.device)
    tile = _tile(size, q.dtype, FORWARD)
    grid = (-(-tokens // tile.m), heads, images)
    _launch(gated_triton.forward_kernel, grid, (q, k, v, gate_BN, out, norm), scale, q, k, v, tile=tile)
    return out, norm


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dwindle::attend_gated_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, out: Tensor, norm: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, heads, tokens, size = q.shape
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv = (_like_rows(q) for _ in range(3))
    dot, dgate = torch.empty_like(norm), torch.empty_like(norm)
    tile = _tile(size, q.dtype, QUERIES)
    grid = (-(-tokens // tile.m), heads, images)
    by_query = (q, k, v, gate_BN, out, norm, dout, dq, dot)
    _launch(gated_triton.queries_kernel, grid, by_query, scale, q, k, v, out, dout, tile=tile)
    tile = _tile(size, q.dtype, KEYS)
    grid = (-(-tokens // tile.n), heads, images)
    by_key = (q, k, v, gate_BN, norm, dot, dout, dk, dv, dgate)
    _launch(gated_triton.keys_kernel, grid, by_key, scale, q, k, v, dout, tile=tile)
    return dq, dk, dv, dgate.sum(1)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, out: Tensor, norm: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like_rows(q), _like_rows(q), _like_rows(q), torch.empty_like(gate_BN)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, gate_BN, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, gate_BN, *output)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, dout, ctx.scale), None


_forward.register_autograd(_differentiate, setup_context=_save)


def attend(q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, scale: float | None = None) -> Tensor:
    """`attend_ref` by the kernels, with gradients for q, k, v and the gates."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _forward(q, k, v, gate_BN.float().contiguous(), scale)[0]
