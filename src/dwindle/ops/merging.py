"""Merging: a token that leaves is averaged into one that goes on. Every method that merges uses this one operation.

`merge_ref` is the definition: an index says into which token each is merged. `nearest_ref` is the most common way to
choose that index: the most similar key, as in ToMe. For live rows listed on the device `merge_rows` does both with two
kernels.
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

DOUBLINGS = 6  # turns of `follow`: enough for chains of 64 merges


@dataclass(frozen=True)
class Merge:
    """How a method merges tokens that leave. Values are on rows."""

    # (0..N-1) the token of its image into which each row is merged; its own place: it is not merged. None: each patch
    # that leaves is merged into the patch that goes on with the most similar key, if any patch goes on.
    into: Tensor | None = None
    # The weight of a row in the mean, which is one token for attention. None: the row's size, which is the number of
    # tokens it is the mean of; then sizes are added, and attention counts the row as that many tokens.
    weight: Tensor | None = None
    proportion: float = 1.0  # attention counts a row of size s as s to this power


def merge_ref(x: Tensor, weight: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """x_j = sum of w_i x_i / total_j over all i with into_i = j, and total_j, the sum of those w_i.

    x (B, n, D), weight (B, n), into (B, n): the entry into which each is merged; its own index: it is not merged. An
    entry into which none is merged keeps its x, and an entry that leaves keeps its weight.
    """
    images, count = weight.shape
    own = torch.arange(count, device=into.device)
    first = count * torch.arange(images, device=into.device)[:, None]
    flat = (into + first).flatten()
    moved = torch.where(into == own, 0.0, weight)  # the weight that leaves its own entry
    total = weight.flatten().index_add(0, flat, moved.flatten()).view_as(weight)
    exact = x.to(torch.promote_types(x.dtype, weight.dtype))
    moved_x = (exact * moved[..., None]).flatten(0, 1)
    sums = (exact * weight[..., None]).flatten(0, 1).index_add(0, flat, moved_x).view_as(x)
    mean = sums / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return torch.where((total > weight)[..., None], mean.to(x.dtype), x), total


def follow(values_BND: Tensor, leader_BN: Tensor) -> Tensor:
    """(B, N, D): the value of the last token in each token's chain of leaders, which was not merged into another.

    leader: the place of the token into which each was merged, or its own place. Each turn doubles the number of merges
    that are followed, and no chain has more merges than there are blocks.
    """
    for _ in range(DOUBLINGS):
        leader_BN = leader_BN.gather(1, leader_BN)
    images, count, width = values_BND.shape
    flat = leader_BN + count * torch.arange(images, device=leader_BN.device)[:, None]
    return values_BND.flatten(0, 1).index_select(0, flat.flatten()).view(images, -1, width)


def nearest_ref(keys: Tensor, staying: Tensor, leaving: Tensor) -> Tensor:
    """(B, n): for each leaving entry the staying one of its image with the most similar key; for others their own.

    keys (B, n, E), compared by cosine. In an image where none stays, every entry has its own.
    """
    keys = F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
    similarity = (keys @ keys.transpose(1, 2)).masked_fill(~staying[:, None, :], -torch.inf)
    own = torch.arange(keys.shape[1], device=keys.device)
    return torch.where(leaving & staying.any(-1, keepdim=True), similarity.argmax(-1), own)


def merge_rows_ref(
    x_BND: Tensor, qkv: Tensor, heads: int, rows: Rows, new: Rows, size_BN: Tensor, bias_BN: Tensor, prefix: int
) -> Tensor:
    """Merge patches that are live in `rows` and not in `new` into the nearest patch of `new`. x, size and bias are
    changed in place.

    qkv (R, 3 * H * E): compact, for `rows`; the mean over heads of the keys is compared. size: how many tokens each row
    is the mean of. bias: the logarithm of the size, which attention adds to the row's scores as a key.

    Returns (B, N): the place of the token into which each was merged; -1: it was not merged.
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
    """`merge_rows_ref` by two kernels, which skip images without leaving rows. live: the rows of `new`, as (B, N)."""
    if not available(x_BND):
        return merge_rows_ref(x_BND, qkv, heads, rows, new, size_BN, bias_BN, prefix)
    images, tokens, width = x_BND.shape
    into = torch.full((images * tokens,), -1, dtype=torch.int32, device=x_BND.device)
    # Few images need many small programs. For many images larger tiles read the other rows less often.
    tile = 16 if interpreted() or images <= 16 else 32
    other = 16 if interpreted() else 64
    options: dict[str, Any] = {"PRECISION": precision(x_BND), **overlapping(x_BND, len(into))}
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
        **options,
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
        **options,
    )
    return torch.where(into < 0, into, into % tokens).view(images, tokens).long()
