"""Attention among the live tokens of each image, in every layout. `attend_ref` is the definition.

Shapes: B images, N tokens, T live rows of all images one after the other, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import gated, half


class Pairs(NamedTuple):
    """A bias for each pair of an image's tokens, added to the scores, and the token of each packed row."""

    bias: Tensor  # (1 or B, 1 or H, N, N)
    place_T: Tensor  # (T,) the place of each row's token in its image

    def of(self, images: list[int], place: Tensor) -> Tensor:
        """(1 or b, H, n, n): the bias between the tokens `place` (b, n) of these images. place: in ascending order."""
        if place.shape[1] == self.bias.shape[-1]:
            return self.bias if self.bias.shape[0] == 1 else self.bias[images]
        return self.gathered(images, place)

    def gathered(self, images: list[int], place: Tensor) -> Tensor:
        """(1 or b, H, n, n): as `of`, for tokens in any order."""
        bias = self.bias if self.bias.shape[0] == 1 else self.bias[images]
        if len(images) == 1:
            return bias.index_select(-2, place[0]).index_select(-1, place[0])
        rows, keys = place[:, :, None], place[:, None, :]
        if bias.shape[0] == 1:
            return bias[0][:, rows, keys].transpose(0, 1)
        return torch.stack([one[:, r, k] for one, r, k in zip(bias, rows, keys)])

    def each(self, lengths: Sequence[int]) -> list[Tensor]:
        """The bias (1, H, n, n) of each image that has rows. lengths: the number of rows of each image."""
        places = self.place_T.split(list(lengths))
        return [self.of([image], place[None]) for image, place in enumerate(places) if len(place)]


def attend_ref(
    q: Tensor, k: Tensor, v: Tensor, gate_BN: Tensor, scale: float | None = None, pair_bias: Tensor | None = None
) -> Tensor:
    """softmax over the keys that count: out_i = sum_j g_j e_ij v_j / sum_j g_j e_ij, with e_ij = exp(q_i . k_j + b_ij).

    A gate of 0 removes a key, 1 keeps it. An image with no key at all gives 0. pair_bias: b, (1 or B, 1 or H, N, N).
    """
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if pair_bias is None else scores + pair_bias
    gate = gate_BN[:, None, None, :].to(scores.dtype)
    scores = scores - scores.masked_fill(gate == 0, -torch.inf).amax(-1, keepdim=True).clamp_min(-1e30)
    weights = torch.where(gate == 0, 0.0, scores.exp()) * gate
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny) @ v


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    live_BN: Tensor,
    bias_BN: Tensor | None = None,
    pair_bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """`attend_ref` by one fused call: every row (B, H, N, E) attends to the live rows of its image.

    bias: added to the scores of a key, which is a gate of e^bias. pair_bias: (1 or B, 1 or H, N, N).
    """
    # In an image without live rows the softmax would be NaN, in the backward pass too. Nobody reads such rows, so they
    # attend to everything.
    mask = live_BN | ~live_BN.any(-1, keepdim=True)
    if bias_BN is not None:
        mask = bias_BN.to(q.dtype).masked_fill(~mask, -torch.inf)
    mask = mask[:, None, None, :]
    if pair_bias is not None:
        mask = pair_bias.masked_fill(~mask, -torch.inf) if bias_BN is None else pair_bias + mask
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_p, scale=scale)


def attend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_BN: Tensor,
    pair_bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """`attend_ref` with a gradient for the gates, and no (N, N) matrix in memory.

    Attention is linear in the values: with values (g v, g) one fused call returns the numerator and the denominator
    of the definition, both divided by the same softmax sum. A gate of 0 still receives its gradient, so a token that
    halted can learn to go on.
    """
    if not dropout_p and pair_bias is None and gated.covers(q, k, v):
        return gated.attend(q, k, v, gate_BN, scale)
    gate = gate_BN[:, None, :, None].to(v.dtype)
    # Fused kernels need a head size that is a multiple of 8, so the gate is eight equal columns.
    columns = gate.expand(*v.shape[:-1], 8)
    both = torch.cat([v * gate, columns], -1)
    out = F.scaled_dot_product_attention(q, k, both, pair_bias, dropout_p=dropout_p, scale=scale)
    return out[..., :-8] / out[..., -1:].clamp_min(torch.finfo(out.dtype).tiny)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    bias_T: Tensor | None = None,
    pairs: Pairs | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Rows (1, H, T, E), `lengths[i]` of them for image i: each image attends within itself.

    Images of equal length are computed in one call. Otherwise each image has its own call on a CPU, and on a GPU all
    images have one padded call, because there a call costs more than the padding.
    """
    sizes = [n for n in lengths if n]
    if not sizes:
        return v
    if len(set(sizes)) == 1:
        if len(sizes) > 1:
            q, k, v = (x[0].unflatten(1, (len(sizes), sizes[0])).transpose(0, 1) for x in (q, k, v))  # (B, H, n, E)
        mask = None if bias_T is None else bias_T.to(q.dtype).view(len(sizes), 1, 1, sizes[0])
        if pairs is not None:
            going = [image for image, n in enumerate(lengths) if n]
            mask = _sum(pairs.of(going, pairs.place_T.view(len(sizes), sizes[0])), mask)
        out = half.attend(q, k, v, mask, dropout_p, scale)
        return out if len(sizes) == 1 else out.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    if q.is_cuda:
        return _attend_padded(q, k, v, lengths, bias_T, pairs, dropout_p=dropout_p, scale=scale)
    masks = [None] * len(sizes) if bias_T is None else bias_T.to(q.dtype).view(1, 1, 1, -1).split(sizes, 3)
    if pairs is not None:
        masks = [_sum(pair, mask) for pair, mask in zip(pairs.each(lengths), masks)]
    images = zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), masks)
    outs = [half.attend(*image, dropout_p, scale).transpose(1, 2) for image in images]
    return torch.cat(outs, 1).transpose(1, 2)


def _sum(bias: Tensor, other: Tensor | None) -> Tensor:
    return bias if other is None else bias + other


def class_attention(
    q: Tensor,
    k: Tensor,
    gate_BN: Tensor,
    prefix: int,
    scale: float | None = None,
    pair_bias: Tensor | None = None,
) -> Tensor:
    """(B, N): each token's share of the class token's attention, mean over heads. Without a prefix (prefix = 0): its
    share of the attention of all tokens."""
    queries = q[:, :, :1] if prefix else q
    scores = queries @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if pair_bias is not None:
        scores = scores + pair_bias[..., : scores.shape[-2], :]
    weights = scores.masked_fill(~gate_BN[:, None, None, :], -torch.inf).softmax(-1).nan_to_num(0.0)
    if not prefix:
        weights = weights.where(gate_BN[:, None, :, None], 0.0) / gate_BN.sum(-1)[:, None, None, None].clamp_min(1)
    return weights.sum(2).mean(1)


def class_attention_packed(
    q: Tensor,
    k: Tensor,
    lengths: Sequence[int],
    prefix: int,
    scale: float | None = None,
    pairs: Pairs | None = None,
) -> Tensor:
    """(T,): `class_attention` of packed rows, computed image by image."""
    sizes = [n for n in lengths if n]
    biases = [None] * len(sizes) if pairs is None else pairs.each(lengths)
    return torch.cat(
        [
            class_attention(q_i, k_i, q_i.new_ones(1, q_i.shape[2], dtype=torch.bool), prefix, scale, bias)[0]
            for q_i, k_i, bias in zip(q.split(sizes, 2), k.split(sizes, 2), biases)
        ]
    )


def _attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    bias_T: Tensor | None = None,
    pairs: Pairs | None = None,
    *,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """`attend_packed` by one call, in which every image has as many rows as the longest."""
    going = [image for image, n in enumerate(lengths) if n]
    sizes = torch.tensor([lengths[image] for image in going], device=q.device)
    real = torch.arange(max(lengths), device=q.device) < sizes[:, None]  # (B, longest)
    slot = real.flatten().nonzero()[:, 0]  # where each row of the pack sits in the padded batch

    def pad(rows: Tensor) -> Tensor:
        padded = rows.new_zeros(real.numel(), rows.shape[1], rows.shape[-1])
        return padded.index_copy(0, slot, rows[0].transpose(0, 1)).unflatten(0, real.shape).transpose(1, 2)

    mask = real
    if bias_T is not None:
        filled = q.new_full((real.numel(),), -torch.inf).index_copy(0, slot, bias_T.to(q.dtype))
        mask = filled.view(real.shape)
    mask = mask[:, None, None, :]
    if pairs is not None:
        place = pairs.place_T.new_zeros(real.numel()).index_copy(0, slot, pairs.place_T).view(real.shape)
        bias = pairs.gathered(going, place)
        mask = bias.masked_fill(~mask, -torch.inf) if bias_T is None else bias + mask
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), mask, dropout_p=dropout_p, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[slot].transpose(0, 1)[None]
