"""Causal attention with a weight for each key. `attend_causal_ref` is the definition.

Shapes: B sequences, n new rows of each, m rows so far (the new ones last), H heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_causal_ref(q: Tensor, k: Tensor, v: Tensor, weight_Bm: Tensor | None = None) -> Tensor:
    """out_i = sum_{j <= i} w_j e_ij v_j / sum_{j <= i} w_j e_ij, with e_ij = exp(q_i . k_j / sqrt(E)).

    q (B, n, H, E), k and v (B, m, H, E). A weight of 0 removes a key; without weights all are 1.
    """
    (_, n, heads, size), m = q.shape, k.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bnhe,bmhe->bhnm", q, k) * size**-0.5
    seen = torch.arange(m, device=q.device) <= torch.arange(m - n, m, device=q.device)[:, None]
    scores = (scores - scores.amax(-1, keepdim=True)).exp() * seen
    if weight_Bm is not None:
        scores = scores * weight_Bm[:, None, None, :].to(scores.dtype)
    shares = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return torch.einsum("bhnm,bmhe->bnhe", shares, v)


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, weight_Bm: Tensor | None = None, *, dropout_p: float = 0.0
) -> Tensor:
    """`attend_causal_ref` in one fused call. Keys and values may have fewer heads than queries.

    A weight multiplies e_ij, so its logarithm is added to the score. It is one more coordinate of the keys, through
    which the weight gets its gradient: a mask per sequence would need n m numbers.
    """
    (_, n, heads, size), m = q.shape, k.shape[1]
    if weight_Bm is not None:
        # Fused kernels need a head size that is a multiple of 8, the same for q, k and v.
        q, k, v = (F.pad(t, (0, 8)) for t in (q, k, v))
        tiny = torch.finfo(weight_Bm.dtype).tiny
        bias = weight_Bm.clamp_min(tiny).log().to(k.dtype)[:, :, None] * size**0.5
        k = torch.cat([k[..., :size], bias[..., None].expand(*k.shape[:-1], 1), k[..., size + 1 :]], -1)
        q = torch.cat([q[..., :size], torch.ones_like(q[..., :1]), q[..., size + 1 :]], -1)
    mask, causal = None, False
    if 1 < n < m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    elif n > 1:  # a branch and not an expression: with symbolic sizes that would be a symbol, which `is_causal` refuses
        causal = True
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask,
        dropout_p,
        is_causal=causal,
        scale=size**-0.5,
        enable_gqa=k.shape[2] != heads,
    ).transpose(1, 2)
    return out if weight_Bm is None else out[..., :size]


@dataclass(frozen=True)
class Queries:
    """The positions of the T tokens that have a query. Queries in the early half of a sequence attend to no late key,
    so the two halves are computed separately.

    Each half is padded to the sequence with the most queries; padding repeats a query of another sequence.
    """

    halves: tuple[Tensor, Tensor]  # (B, n) indices of queries among the T; each half has its own n
    flat_index: Tensor  # (T,) the index of each query in both padded halves one after the other

    @staticmethod
    def of(keep_BN: Tensor) -> Queries:
        """The queries of the tokens (B, N) with `keep`. N >= 2, and at least one token has a query."""
        (batch, length), device = keep_BN.shape, keep_BN.device
        rank = keep_BN.flatten().cumsum(0).view(batch, length) - 1  # the index among the T of a token with a query
        halves, places, before = [], [], 0
        for keep, ranks in zip(*(t.tensor_split([length // 2], 1) for t in (keep_BN, rank))):
            count = keep.sum(1, keepdim=True)
            most = max(int(count.amax()), 2)  # torch.compile would make other code for sizes 0 and 1
            first = ranks[:, -1:] - count + 1  # (B, 1)
            halves.append((first + torch.arange(most, device=device)).clamp(max=rank[-1, -1]))
            places.append(before + most * torch.arange(batch, device=device)[:, None] + ranks - first)
            before += batch * most
        return Queries((halves[0], halves[1]), torch.cat(places, 1)[keep_BN])


def attend_queries(q_T: Tensor, place_T: Tensor, k: Tensor, v: Tensor, queries: Queries) -> Tensor:
    """(T, H, E): `attend_causal` for the queries (T, H, E) at positions (T,) only.

    It is for CPUs: there a causal fused call computes all scores of a short sequence anyway, and a mask costs nothing.
    """
    parts = []
    for rows, end in zip(queries.halves, (k.shape[1] // 2, k.shape[1])):
        q, place = (t.index_select(0, rows.flatten()).unflatten(0, rows.shape) for t in (q_T, place_T))
        seen = torch.arange(end, device=k.device) <= place[:, None, :, None]  # (B, 1, n, m)
        q, keys, values = (t.transpose(1, 2) for t in (q, k[:, :end], v[:, :end]))
        grouped = q.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, queries.flat_index)
