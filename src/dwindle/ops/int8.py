"""Linear layers in int8, each row of the input on a scale of its own. `int8_linear_ref` is the definition.

A scale for the whole batch, as torch's dynamic quantisation has it, would make an image's result depend on its company.
Sums of int8 products are whole numbers: they do not depend on the order they are added in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) -> int8 of the same shape, and what 1 stands for in each row, (..., 1)."""
    top = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp_min_(1e-30)
    return (x * (127 / top)).round_().to(torch.int8), top / 127


def int8_linear_ref(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    rows, scale = quantize_rows(x)
    sums = (rows.double() @ weight_NK.double().T).to(x.dtype)
    out = sums * scale_N.to(x.dtype) * scale
    return out if bias is None else out + bias


def int8_linear(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    if x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
        return int8_linear_ref(x, weight_NK, scale_N, bias)
    rows, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    out = torch._int_mm(rows, weight_NK.T).float().mul_(scale_N).mul_(scale)
    out = out if bias is None else out.add_(bias)
    return out.view(*x.shape[:-1], -1)
