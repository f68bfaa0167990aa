"""Tokens that leave join tokens that go on, which become their mean: one operation, for every method that merges.

`merge_ref` is the definition: an index says which token each joins. `nearest_ref` is the most common way to choose: by
the most alike key, as ToMe does. On live rows listed on the device both are two kernels, `merge_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import merging_triton
from .launch import available, interpreted, overlapping, power_of_two, precision
from .rows import Rows

DOUBLINGS = 6  # enough for chains of 64 merges


@dataclass(frozen=True)
class Merge:
    """What a method wants to become of tokens that leave. Values are on rows."""

    into: Tensor | None = None  # which token of its image (0..N-1) each row joins; its own: it joins none. None: each
    # patch that leaves joins the patch with the most alike key that goes on; where none goes on it is gone
    weight: Tensor | None = None  # how much a row counts in the mean, as one token. None: by its size, the number of
    # tokens it is the mean of; sizes then add up, and attention counts the row as that many
    proportion: float = 1.0  # attention counts a row of size s as s to this power


def merge_ref(x: Tensor, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """x_j = sum of w_i x_i / total_j over all i with into_i = j, and total_j, the sum of those w_i.

    x (B, n, D), weight (B, n), into (B, n): the entry that each joins, its own for one that stays as it is. An entry
    that none joins keeps its x, and an entry that leaves keeps its weight.
    """
    images, count = weight.shape
    own = torch.arange(count, device=into.device)
    first = count * torch.arange(images, device=into.device)[:, None]
    flat = (into + first).flatten()
    given = torch.where(into == own, 0.0, weight)
    total = weight.flatten().index_add(0, flat, given.flatten()).view_as(weight)
    exact = x.to(torch.promote_types(x.dtype, weight.dtype))
    brought = (exact * given[..., None]).flatten(0, 1)
    sums = (exact * weight[..., None]).flatten(0, 1).index_add(0, flat, brought).view_as(x)
    mean = sums / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return torch.where((total > weight)[..., None], mean.to(x.dtype), x), total


def follow(values_BND: Tensor, leader_BN: Tensor) -> Tensor:
    """What each token's leader has, or that one's leader, and so on to the one that has joined no other.

    leader: a token of the image for each; its own place for one without. Each turn doubles how far is looked, and no
    chain is longer than there are merges, one after each block.
    """
    for _ in range(DOUBLINGS):
        leader_BN = leader_BN.gather(1, leader_BN)
    images, count, width = values_BND.shape
    flat = leader_BN + count * torch.arange(images, device=leader_BN.device)[:, None]
    return values_BND.flatten(0, 1).index_select(0, flat.flatten()).view(images, -1, width)


def nearest_ref(keys: Tensor, staying: Tensor, leaving: Tensor) -> Tensor:
    """(B, n): for each leaving entry the staying one of its image with the most alike key; for all others their own.

    keys (B, n, E), alike by their cosine. In an image where none stays, none joins another.
    """
    keys = F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
    alike = (keys @ keys.transpose(1, 2)).masked_fill(~staying[:, None, :], -torch.inf)
    own = torch.arange(keys.shape[1], device=keys.device)
    return torch.where(leaving & staying.any(-1, keepdim=True), alike.argmax(-1), own)


def merge_rows_ref(
    x_BND: Tensor, qkv: Tensor, heads: int, rows: Rows, new: Rows, size_BN: Tensor, bias_BN: Tensor, prefix: int
) -> Tensor:
    """Patches that are live in `rows` and not in `new` join the nearest patch of `new`, in place.

    qkv (R, 3 * H * E): of `rows`, compact; keys are compared as their mean over heads. size: how many tokens each row
    is the mean of. bias: its logarithm, which attention adds to the row's scores as a key.

    Returns (B, N): which token of its image each has joined now; -1: none.
    """
    images, tokens, width = x_BND.shape
    before, after = (torch.zeros(images * tokens, dtype=torch.bool, device=x_BND.device) for _ in range(2))
    before[rows.live()], after[new.live()] = True, True
    patch = torch.arange(tokens, device=x_BND.device) >= prefix
    staying, leaving = ((dense.view(images, tokens) & patch) for dense in (after, before & ~after))
    keys = x_BND.new_zeros(images * tokens, width // heads)
    keys[rows.live()] = qkv[: len(rows.live()), width : 2 * width].unflatten(1, (heads, -1)).mean(1)
    into = nearest_ref(keys.view(images, tokens, -1), staying, leaving)
    mean, total = merge_ref(x_BND, size_BN, into)
    joined = total > size_BN
    x_BND.copy_(mean)
    size_BN.copy_(total)
    bias_BN.copy_(torch.where(joined, total.log(), bias_BN))
    return torch.where(leaving & staying.any(-1, keepdim=True), into, -1)


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
) -> Tensor:
    """`merge_rows_ref` in two launches, which skip images that no row leaves. live: the rows of `new`, as (B, N)."""
    if not available(x_BND):
        return merge_rows_ref(x_BND, qkv, heads, rows, new, size_BN, bias_BN, prefix)
    images, tokens, width = x_BND.shape
    into = torch.full((images * tokens,), -1, dtype=torch.int32, device=x_BND.device)
    # For few images many small programs; for many images larger tiles, which read the other rows less often.
    tile = 16 if interpreted() or images <= 16 else 32
    other = 16 if interpreted() else 64
    how: dict[str, Any] = {"PRECISION": precision(x_BND), **overlapping(x_BND, len(into))}
    merging_triton.nearest_key_kernel[(-(-tokens // tile), images)](
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
    merging_triton.merge_kernel[(-(-tokens // tile), images)](
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
    return torch.where(into < 0, into, into % tokens).view(images, tokens).long()
