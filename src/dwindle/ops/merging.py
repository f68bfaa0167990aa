"""Tokens that leave hand what they hold to those who stay. `inherit` is its own definition: plain torch throughout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def merged(x: Tensor, size: Tensor, keys: Tensor, staying: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
    """Every leaving token joins the staying one with the most alike key, which becomes their mean by size.

    x (B, n, D), keys (B, n, E), size (B, n): how many tokens an entry is the mean of; returns the new x and size, of
    which only those of staying entries mean anything. Where nobody stays, nobody inherits.
    """
    keys = F.normalize(keys.to(x.dtype), dim=-1)
    into = (keys @ keys.transpose(1, 2)).masked_fill(~staying[:, None, :], -torch.inf).argmax(-1)
    weight = size * (leaving & staying.any(-1, keepdim=True))
    total = size.scatter_add(1, into, weight)
    sums = (x * size[..., None]).scatter_add(1, into[..., None].expand_as(x), x * weight[..., None])
    return sums / total.clamp_min(1)[..., None], total


def nearest_key(lost_LE: Tensor, keys_GE: Tensor, left: Sequence[int], stay: Sequence[int], prefix: int) -> Tensor:
    """(L,) which of the staying rows inherits from each leaving one, by their keys; -1: its image has none.

    left, stay: how many of the rows belong to image i. The first `prefix` of those who stay inherit nothing.
    """
    # In bf16 many would be as alike, and on a CPU oneDNN would write code for each number of rows.
    fine = torch.promote_types(keys_GE.dtype, torch.float32)
    lost_LE, keys_GE = lost_LE.to(fine), keys_GE.to(fine)
    keys_GE = keys_GE / torch.linalg.vector_norm(keys_GE, dim=-1, keepdim=True).clamp_min_(1e-12)
    if len(stay) == 1 and stay[0] > prefix:
        return (lost_LE @ keys_GE[prefix:].T).argmax(1).add_(prefix)
    found = torch.empty(len(lost_LE), dtype=torch.long, device=lost_LE.device)
    keys_EG, row, first = keys_GE.T, 0, 0
    for lost, kept in zip(left, stay):
        into = found[row : row + lost]
        if kept > prefix:
            alike = lost_LE[row : row + lost] @ keys_EG[:, first + prefix : first + kept]
            torch.argmax(alike, 1, out=into).add_(first + prefix)
        else:
            into.fill_(-1)
        row, first = row + lost, first + kept
    return found


def add_merged(lost_LD: Tensor, given_L: Tensor, into_L: Tensor, x_GD: Tensor, size_G: Tensor) -> tuple[Tensor, Tensor]:
    """The staying rows as means by size of themselves and what they inherit, and their sizes. May write to x."""
    if len(x_GD) == 0:
        return x_GD, size_G
    if (none := into_L < 0).any():
        into_L, given_L = into_L.clamp_min(0), given_L.masked_fill(none, 0)
    total = size_G.index_add(0, into_L, given_L)
    share = given_L / total.index_select(0, into_L)
    wide = x_GD.to(total.dtype).mul_((size_G / total)[:, None])
    return wide.index_add_(0, into_L, lost_LD * share[:, None]).to(x_GD.dtype), total
