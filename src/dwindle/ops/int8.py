"""Linear layers in int8, with a scale for each row of the input. `int8_linear_ref` is the definition.

One scale for the whole batch, as in torch's dynamic quantisation, would make an image's result depend on the others in
its batch. Sums of int8 products are integers, so they do not depend on the order of addition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError

ROWS = 256  # computed at a time, so that intermediate values stay in the cache


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) -> int8 of the same shape, and the scale of each row (..., 1), which is the value of an int8 of 1."""
    x = x if x.dtype == torch.float64 else x.float()  # half precision would round the largest to 128
    scale = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(127)
    return (x / scale).round_().to(torch.int8), scale


def int8_linear_ref(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, where row n of W is scale_n times the int8 row, and x is rounded to int8 row by row."""
    rows, scale = quantize_rows(x)
    out = (rows.double() @ weight_NK.double().T).to(scale.dtype) * scale_N * scale
    return (out if bias is None else out + bias).to(x.dtype)


def int8_linear(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    """`int8_linear_ref`, by int8 products on a CPU."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
        return int8_linear_ref(x, weight_NK, scale_N, bias)
    rows_TK = x.reshape(-1, x.shape[-1])
    out_TN = x.new_empty(len(rows_TK), len(weight_NK))
    parts = [(rows_TK, out_TN)] if len(rows_TK) <= ROWS else zip(rows_TK.split(ROWS), out_TN.split(ROWS))
    for rows, out in parts:
        quantized, scale = quantize_rows(rows)
        sums = torch._int_mm(quantized, weight_NK.T).float().mul_(scale)
        if bias is None:
            torch.mul(sums, scale_N, out=out)
        else:
            torch.addcmul(bias, sums, scale_N, out=out)
    return out_TN.view(*x.shape[:-1], -1)


class Int8Linear(nn.Linear):
    """A linear layer whose `weight` is int8. `scale` is the value of an int8 of 1 in each row of the weight."""

    scale: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        del self.weight
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))

    @staticmethod
    @torch.no_grad()
    def of(layer: nn.Linear) -> Int8Linear:
        """The int8 form of a linear layer."""
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
    """Whether a model has linear layers in int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def to_int8(model: Any) -> Any:
    """Replace the linear layers of an adaptive model's blocks. Returns the model itself."""
    backbone = model.backbone
    backbone.described = backbone.describe()  # before layers are replaced, which `describe` would not know
    backbone.remove()
    for block in backbone.blocks:
        for owner in list(block.modules()):
            for name, layer in owner.named_children():
                if type(layer) is nn.Linear and not backbone.reads_weight(owner, name):
                    setattr(owner, name, Int8Linear.of(layer))
    backbone.install()
    return model
