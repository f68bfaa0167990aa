"""Linear layers in int8, each row of the input on a scale of its own. `int8_linear_ref` is the definition.

A scale for the whole batch, as torch's dynamic quantisation has it, would make an image's result depend on its company.
Sums of int8 products are whole numbers: they do not depend on the order they are added in.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256  # at a time: what lies between the steps stays in the cache


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) -> int8 of the same shape, and what 1 stands for in each row, (..., 1)."""
    x = x if x.dtype == torch.float64 else x.float()  # half precision would round the largest to 128
    one = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(127)
    return (x / one).round_().to(torch.int8), one


def int8_linear_ref(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    rows, scale = quantize_rows(x)
    out = (rows.double() @ weight_NK.double().T).to(scale.dtype) * scale_N * scale
    return (out if bias is None else out + bias).to(x.dtype)


def int8_linear(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
        return int8_linear_ref(x, weight_NK, scale_N, bias)
    rows_TK = x.reshape(-1, x.shape[-1])
    out_TN = x.new_empty(len(rows_TK), len(weight_NK))
    parts = [(rows_TK, out_TN)] if len(rows_TK) <= ROWS else zip(rows_TK.split(ROWS), out_TN.split(ROWS))
    for rows, out in parts:
        whole, scale = quantize_rows(rows)
        sums = torch._int_mm(whole, weight_NK.T).float().mul_(scale)
        if bias is None:
            torch.mul(sums, scale_N, out=out)
        else:
            torch.addcmul(bias, sums, scale_N, out=out)
    return out_TN.view(*x.shape[:-1], -1)
