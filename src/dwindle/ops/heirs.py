"""Tokens that leave hand what they hold to those who stay. `inherit` is its own definition: plain torch throughout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def inherit(x: Tensor, size: Tensor, keys: Tensor, staying: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
    """Every leaving token joins the staying one with the most alike key, which becomes their mean by size.

    x (B, n, D), keys (B, n, E), size (B, n): how many tokens an entry is the mean of; returns the new x and size, of
    which only those of staying entries mean anything. Where nobody stays, nobody inherits.
    """
    keys = F.normalize(keys.to(x.dtype), dim=-1)
    heir = (keys @ keys.transpose(1, 2)).masked_fill(~staying[:, None, :], -torch.inf).argmax(-1)
    weight = size * (leaving & staying.any(-1, keepdim=True))
    total = size.scatter_add(1, heir, weight)
    sums = (x * size[..., None]).scatter_add(1, heir[..., None].expand_as(x), x * weight[..., None])
    return sums / total.clamp_min(1)[..., None], total


def inherit_rows(
    x: Tensor, size: Tensor, keys: Tensor, staying: Tensor, leaving: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`inherit` on rows (T, .), `lengths[i]` of them for image i; only those who leave are looked at."""
    keys = F.normalize(keys.to(x.dtype), dim=-1)
    who, heir, begin = [], [], 0
    for length in lengths:
        here = slice(begin, begin + length)
        stay, leave = staying[here].nonzero()[:, 0], leaving[here].nonzero()[:, 0]
        if len(stay) and len(leave):
            mine = keys[here]
            alike = mine.index_select(0, leave) @ mine.index_select(0, stay).T
            who.append(begin + leave)
            heir.append(begin + stay[alike.argmax(1)])
        begin += length
    if not who:
        return x, size
    from_, to = torch.cat(who), torch.cat(heir)
    weight = size[from_]
    total = size.index_add(0, to, weight)
    sums = (x * size[:, None]).index_add(0, to, x.index_select(0, from_) * weight[:, None])
    return sums / total[:, None], total
