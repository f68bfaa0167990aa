"""`merged` of `merging.py` on live rows listed on the device: two launches, which pass over images nobody leaves."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .launch import interpreted, overlapping, power_of_two, precision
from .merging import merged
from .rows import Rows, available


def merge_rows_ref(
    x_BND: Tensor, qkv: Tensor, heads: int, rows: Rows, new: Rows, size_BN: Tensor, bias_BN: Tensor, prefix: int
) -> None:
    """Patches that are live in `rows` and not in `new` join the most alike patch of `new`, in place.

    qkv (R, 3 * H * E): compact, of `rows`; alike are keys, mean over heads. size: how many tokens each is the mean of;
    bias: its logarithm, by which it is attended to as that many.
    """
    images, tokens, width = x_BND.shape
    before, after = (torch.zeros(images * tokens, dtype=torch.bool, device=x_BND.device) for _ in range(2))
    before[rows.live()], after[new.live()] = True, True
    patch = torch.arange(tokens, device=x_BND.device) >= prefix
    staying, leaving = ((who.view(images, tokens) & patch) for who in (after, before & ~after))
    keys = x_BND.new_zeros(images * tokens, width // heads)
    keys[rows.live()] = qkv[: len(rows.live()), width : 2 * width].unflatten(1, (heads, -1)).mean(1)
    exact = torch.promote_types(x_BND.dtype, torch.float32)
    mean, total = merged(x_BND.to(exact), size_BN, keys.view(images, tokens, -1), staying, leaving)
    into = staying & (total > size_BN)
    x_BND.copy_(torch.where(into[..., None], mean.to(x_BND.dtype), x_BND))
    size_BN.copy_(torch.where(into, total, size_BN))
    bias_BN.copy_(torch.where(into, total.log(), bias_BN))


def merge_rows(
    x_BND: Tensor,
    qkv: Tensor,
    heads: int,
    rows: Rows,
    new: Rows,
    live_BN: Tensor,
    size_BN: Tensor,
    bias_BN: Tensor,
    prefix: int,
) -> None:
    """live: who goes on, as a sheet."""
    if not available(x_BND):
        return merge_rows_ref(x_BND, qkv, heads, rows, new, size_BN, bias_BN, prefix)
    images, tokens, width = x_BND.shape
    into = torch.empty(images * tokens, dtype=torch.int32, device=x_BND.device)
    # Few images want many programs; more read what they compare with less often in large tiles.
    tile = 16 if interpreted() or images <= 16 else 32
    other = 16 if interpreted() else 64
    how: dict[str, Any] = {"PRECISION": precision(x_BND), **overlapping(x_BND, len(into))}
    kernels().nearest_key_kernel[(-(-tokens // tile), images)](
        qkv,
        rows.rows_R,
        rows.starts,
        new.starts,
        live_BN.view(torch.uint8),
        into,
        tokens,
        heads,
        width // heads,
        prefix,
        BM=tile,
        BJ=other,
        BE=power_of_two(width // heads, 16),
        **how,
    )
    kernels().merge_kernel[(-(-tokens // tile), images)](
        x_BND,
        rows.rows_R,
        rows.starts,
        new.rows_R,
        new.starts,
        into,
        size_BN,
        bias_BN,
        width,
        BM=tile,
        BJ=other,
        BD=64,
        **how,
    )


@cache
def kernels() -> Any:
    from . import merging_triton  # asked for only where Triton is

    return merging_triton
