"""The parts of a transformer block on the live rows of a batch, whose count only the device knows.

The stream x (R, D) holds every token of every image, R = B * N, and stays in place. `Rows` lists the live rows. Tensors
in between are compact: entry t belongs to row rows[t], and entries from the live count on are arbitrary. Each function
has its definition, `_ref`, beside it in plain PyTorch, which runs on a CPU and without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import rows_triton
from .launch import (
    Tile,
    attention_tile,
    available,
    interpreted,
    linear_tile,
    multiprocessors,
    norm_tile,
    overlapping,
    power_of_two,
    split_precision,
)

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu")


@dataclass(frozen=True)
class Rows:
    """The list of live rows of the stream, on the device."""

    rows_R: Tensor  # int32: the live rows, image after image; the rest is arbitrary
    starts: Tensor  # (B + 1) int32: where each image's entries begin; the last is the live count

    @property
    def count(self) -> Tensor:
        """(1) the number of live rows."""
        return self.starts[-1:]

    def live(self) -> Tensor:
        """The live rows alone. This waits for the device, so only definitions and tests call it."""
        return self.rows_R[: int(self.starts[-1])].long()


@dataclass
class Affine:
    """A linear layer in the form for the kernels, with the LayerNorm before it folded in if there is one."""

    weight: Tensor  # (out, in), times the norm's scale
    bias: Tensor  # (out) float32, the layer's bias plus W times the norm's shift
    column: Tensor | None  # (out) float32: row sums of the weight; None: there is no norm
    eps: float

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None = None) -> Affine:
        wide = weight.detach().float()
        shift = torch.zeros(len(wide), device=wide.device) if bias is None else bias.detach().float()
        if norm is None:
            return Affine(weight.detach().contiguous(), shift, None, 0.0)
        if norm.bias is not None:
            shift = shift + wide @ norm.bias.detach().float()
        scaled = wide if norm.weight is None else wide * norm.weight.detach().float()
        folded = scaled.to(weight.dtype).contiguous()
        return Affine(folded, shift, folded.float().sum(1), norm.eps)


def activate(x: Tensor, name: str) -> Tensor:
    """The activation of this name. 'gelu_rough' is the kernels' approximation of GELU for 16 bits."""
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if name == "gelu_rough":
        return _gelu_rough(x)
    functions: dict[str, Any] = {
        "none": lambda x: x,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }
    return functions[name](x)


def _gelu_rough(x: Tensor) -> Tensor:
    """GELU by Abramowitz and Stegun's 7.1.28, 1 - erf z = 1 / (1 + a1 z + ... + a6 z^6)^16 to 3e-7."""
    z, p = x.abs() * 0.5**0.5, torch.zeros_like(x)
    for a in (0.0000430638, 0.0002765672, 0.0001520143, 0.0092705272, 0.0422820123, 0.0705230784):
        p = (p + a) * z
    tail = 0.5 / (1 + p) ** 16
    return x * torch.where(x > 0, 1 - tail, tail)


def normed_linear_ref(
    x_RD: Tensor, rows: Rows, layer: Affine, act: str, probe_R: Tensor | None = None, neuron: int = 0
) -> Tensor:
    """(R, out) compact: act(W norm(x) + b). The value of `neuron` before `act` is written to `probe`, row by row."""
    live = rows.live()
    x = x_RD[live].float()
    y = x @ layer.weight.float().T
    if layer.column is not None:
        mean = x.mean(-1, keepdim=True)
        y = (y - mean * layer.column) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + layer.eps)
    y = y + layer.bias
    if probe_R is not None:
        probe_R[live] = y[:, neuron].to(probe_R.dtype)
    out = x_RD.new_zeros(len(x_RD), len(layer.bias))
    out[: len(live)] = activate(y, act).to(out.dtype)
    return out


def normed_linear(
    x_RD: Tensor, rows: Rows, layer: Affine, act: str, probe_R: Tensor | None = None, neuron: int = 0
) -> Tensor:
    """`normed_linear_ref` by a kernel."""
    if not available(x_RD):
        return normed_linear_ref(x_RD, rows, layer, act, probe_R, neuron)
    (capacity, width), out = x_RD.shape, len(layer.bias)
    tile = linear_tile(capacity, out, width, x_RD.dtype)
    y = x_RD.new_empty(capacity, out)
    act = "gelu_rough" if act == "gelu" and x_RD.dtype != torch.float32 else act
    if tile.persistent and layer.column is not None:
        _persistent(_normed(x_RD, rows, layer, probe_R, neuron), y, x_RD, rows, layer, layer.bias, act, tile)
    else:
        _tiled(x_RD, y, x_RD, rows, layer, layer.bias, act, tile, probe_R, neuron)
    return y


def add_linear_ref(x_RD: Tensor, rows: Rows, h: Tensor, layer: Affine, scale: Tensor) -> None:
    """x += scale * (W h + b) on the live rows, in place. h (R, in) is compact."""
    live = rows.live()
    update = (h[: len(live)].float() @ layer.weight.float().T + layer.bias) * scale
    x_RD[live] = (x_RD[live].float() + update).to(x_RD.dtype)


def add_linear(x_RD: Tensor, rows: Rows, h: Tensor, layer: Affine, scale: Tensor) -> None:
    """`add_linear_ref` by a kernel."""
    if not available(x_RD):
        return add_linear_ref(x_RD, rows, h, layer, scale)
    tile = linear_tile(len(h), x_RD.shape[1], h.shape[1], h.dtype)
    (_persistent if tile.persistent else _tiled)(h, None, x_RD, rows, layer, scale, "none", tile)


def _normed(x_RD: Tensor, rows: Rows, layer: Affine, probe_R: Tensor | None, neuron: int) -> Tensor:
    """(R, D) compact: the live rows with mean 0 and deviation 1. The neuron of `layer` is written to `probe`."""
    (capacity, width), tile = x_RD.shape, norm_tile(len(x_RD))
    y = torch.empty_like(x_RD)
    rows_triton.norm_rows_kernel[(-(-capacity // tile.m),)](
        x_RD,
        rows.rows_R,
        rows.count,
        y,
        layer.weight,
        layer.bias,
        y if probe_R is None else probe_R,
        neuron,
        layer.eps,
        width,
        PROBE=probe_R is not None,
        BM=tile.m,
        BK=power_of_two(width),
        num_warps=tile.warps,
        **overlapping(x_RD, len(x_RD)),
    )
    return y


def _tiled(
    a: Tensor,
    y: Tensor | None,
    x_RD: Tensor,
    rows: Rows,
    layer: Affine,
    scale: Tensor,
    act: str,
    tile: Tile,
    probe_R: Tensor | None = None,
    neuron: int = 0,
) -> None:
    """Launch a program for each tile, which also computes the LayerNorm. y = None: the output is added to x."""
    out, inner = layer.weight.shape
    rows_triton.linear_kernel[(-(-len(a) // tile.m) * -(-out // tile.n),)](
        a,
        x_RD,
        rows.rows_R,
        rows.count,
        layer.weight,
        layer.bias,
        layer.bias if layer.column is None else layer.column,
        scale,
        x_RD if y is None else y,
        x_RD if probe_R is None else probe_R,
        neuron,
        layer.eps,
        out,
        inner,
        ADD=y is None,
        NORM=layer.column is not None,
        PROBE=probe_R is not None,
        ACT=act,
        PRECISION=split_precision(a),
        EVEN=inner % tile.k == 0,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapping(a, len(a)),
    )


def _persistent(
    a: Tensor, y: Tensor | None, x_RD: Tensor, rows: Rows, layer: Affine, scale: Tensor, act: str, tile: Tile
) -> None:
    """Launch programs that compute many tiles each, for many rows. y = None: the output is added to x."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    out, inner = layer.weight.shape
    programs = min(tile.persistent * multiprocessors(a.device), -(-len(a) // tile.m) * -(-out // tile.n))
    rows_of_a = TensorDescriptor.from_tensor(a, [tile.m, tile.k])
    rows_triton.persistent_kernel[(programs,)](
        rows_of_a,
        TensorDescriptor.from_tensor(layer.weight, [tile.n, tile.k]),
        rows_of_a if y is None else TensorDescriptor.from_tensor(y, [tile.m, tile.n]),
        x_RD,
        rows.rows_R,
        rows.count,
        layer.bias,
        scale,
        out,
        inner,
        ADD=y is None,
        ACT=act,
        PRECISION=split_precision(a),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapping(a, len(a)),
    )


class HeadNorm(NamedTuple):
    """LayerNorms of queries and keys over the head size."""

    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        size, dtype = (q.shape[-1],), q.dtype
        return (
            F.layer_norm(q, size, self.q_weight.to(dtype), self.q_bias.to(dtype), self.eps),
            F.layer_norm(k, size, self.k_weight.to(dtype), self.k_bias.to(dtype), self.eps),
        )


def attend_rows_ref(
    qkv: Tensor, rows: Rows, heads: int, longest: int, scale: float, bias_R: Tensor | None, norm: HeadNorm | None = None
) -> Tensor:
    """(R, H * E) compact: attention within each image. qkv (R, 3 * H * E) compact; bias: of each row as a key.
    longest: the most tokens that an image can have, which only the kernel needs."""
    out = qkv.new_zeros(len(qkv), qkv.shape[1] // 3)
    bounds = rows.starts.tolist()
    for start, end in pairwise(bounds):
        if start == end:
            continue
        q, k, v = qkv[start:end].float().unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
        if norm is not None:
            q, k = norm(q, k)
        scores = q @ k.transpose(1, 2) * scale
        if bias_R is not None:
            scores = scores + bias_R[rows.rows_R[start:end].long()].float()
        out[start:end] = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).to(out.dtype)
    return out


def attend_rows(
    qkv: Tensor, rows: Rows, heads: int, longest: int, scale: float, bias_R: Tensor | None, norm: HeadNorm | None = None
) -> Tensor:
    """`attend_rows_ref` by a kernel."""
    if not available(qkv):
        return attend_rows_ref(qkv, rows, heads, longest, scale, bias_R, norm)
    size = qkv.shape[1] // 3 // heads
    out = qkv.new_empty(len(qkv), heads * size)
    tile = attention_tile(longest, size, len(rows.starts) - 1, qkv.dtype)
    at = norm or HeadNorm(qkv, qkv, qkv, qkv, 0.0)
    rows_triton.attend_kernel[(-(-longest // tile.m), heads, len(rows.starts) - 1)](
        qkv,
        rows.starts,
        rows.rows_R,
        qkv if bias_R is None else bias_R,
        out,
        at.q_weight,
        at.q_bias,
        at.k_weight,
        at.k_bias,
        scale,
        at.eps,
        heads,
        size,
        BIAS=bias_R is not None,
        QK_NORM=norm is not None,
        PRECISION=split_precision(qkv, size),
        BQ=tile.m,
        BJ=tile.n,
        BE=power_of_two(size, 16),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapping(qkv, len(qkv)),
    )
    return out


def compact_ref(live_BN: Tensor, keep_BN: Tensor) -> tuple[Rows, Tensor]:
    """The live rows that are kept, as a list and as (B, N), without waiting for the device."""
    live_BN = live_BN & keep_BN
    flat = live_BN.flatten()
    rows = torch.zeros(len(flat) + 1, dtype=torch.int32, device=flat.device)
    # Rows that are not live write to one entry behind the list.
    target = torch.where(flat, flat.cumsum(0) - 1, len(flat))
    rows[target] = torch.arange(len(flat), device=flat.device, dtype=torch.int32)
    counts = live_BN.sum(1)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    return Rows(rows[:-1], starts), live_BN


def compact(live_BN: Tensor, keep_BN: Tensor) -> tuple[Rows, Tensor]:
    """`compact_ref` by one kernel, or two for many images."""
    if not available(live_BN):
        return compact_ref(live_BN, keep_BN)
    images, tokens = live_BN.shape
    live, keep = live_BN.view(torch.uint8), keep_BN.contiguous().view(torch.uint8)
    if few(images):
        return listed(live, keep, None)
    counts = torch.empty(images, dtype=torch.int32, device=live.device)
    rows_triton.count_kernel[(images,)](
        live, keep, counts, tokens, BN=power_of_two(tokens), **overlapping(live, live.numel())
    )
    return listed(live, keep, counts)


def few(images: int) -> bool:
    """Whether there are so few images that each program counts the rows of all images before its own: this saves the
    launch that counts them."""
    return images <= (2 if interpreted() else 32)


def listed(live: Tensor, keep: Tensor, counts: Tensor | None) -> tuple[Rows, Tensor]:
    """`compact` by one kernel. counts: how many rows each image keeps; None: the kernel counts them."""
    images, tokens = live.shape
    rows, starts = (torch.empty(n, dtype=torch.int32, device=live.device) for n in (live.numel(), images + 1))
    new = torch.empty_like(live)
    rows_triton.compact_kernel[(images,)](
        live,
        keep,
        live if counts is None else counts,
        rows,
        starts,
        new,
        images,
        tokens,
        COUNTED=counts is not None,
        BN=power_of_two(tokens),
        BB=1024,
        **overlapping(live, live.numel()),
    )
    return Rows(rows, starts), new.view(torch.bool)
