"""Linear layers in int8, each row of the input on a scale of its own. `int8_linear_ref` is the definition.

A scale for the whole batch, as torch's dynamic quantisation has it, would make an image's result depend on its company.
Sums of int8 products are whole numbers: they do not depend on the order they are added in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError

ROWS = 256  # at a time: what lies between the steps stays in the cache


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) -> int8 of the same shape, and the scale of each row (the value of a 1), (..., 1)."""
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


class Int8Linear(nn.Linear):
    """`weight` is int8, and `scale` the value of a 1 in each of its rows."""

    scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        del self.weight
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))

    @staticmethod
    @torch.no_grad()
    def of(layer: nn.Linear) -> Int8Linear:
        made = Int8Linear(layer.in_features, layer.out_features, layer.bias is not None)
        made.weight, scale = quantize_rows(layer.weight.float())
        made.scale = scale[:, 0]
        if layer.bias is not None:
            made.bias = nn.Parameter(layer.bias.float(), requires_grad=False)
        return made.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise DwindleError(
                "An int8 model cannot be trained; train the one it was made from and quantise that again."
            )
        with torch.no_grad():
            return int8_linear(x, self.weight, self.scale, self.bias)


def is_int8(model: nn.Module) -> bool:
    return any(isinstance(module, Int8Linear) for module in model.modules())


def to_int8(model: Any) -> Any:
    """The model itself, with its blocks' linear layers replaced."""
    backbone = model.backbone
    backbone.described = backbone.describe()  # while it still looks like what it is
    backbone.remove()
    for block in backbone.blocks:
        for owner in list(block.modules()):
            for name, layer in owner.named_children():
                if type(layer) is nn.Linear and not backbone.reads(owner, name):
                    setattr(owner, name, Int8Linear.of(layer))
    backbone.install()
    return model
