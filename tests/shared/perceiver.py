"""A tiny AdaPerceiver with weights large enough that its settings differ, and images for it."""

from __future__ import annotations

import torch

import dwindle


def tiny(dtype=torch.float64, **changes) -> dwindle.AdaPerceiver:
    torch.manual_seed(0)
    model = dwindle.AdaPerceiver.preset("tiny", classes=5, **changes)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval().requires_grad_(False)


def images(count=4, dtype=torch.float64, size=32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)
