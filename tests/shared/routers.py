"""A tiny language model, and each router set so that tokens differ in what they skip."""

from __future__ import annotations

import torch

from dwindle.models.lm import TSA, AdaptiveLM, CharLM, EarlyExit, LMSize, MoD, Random, Router, Static, adapt_lm

SIZE = LMSize(vocabulary=20, blocks=4, width=32, heads=2, context=24)
ROUTERS = {
    "TSA": lambda: TSA(tau=0.5, open=0.0),
    "TSA_withheld": lambda: TSA(tau=0.5, open=0.0, keys="withheld"),
    "EarlyExit": lambda: EarlyExit(threshold=0.3),
    "MoD": lambda: MoD(capacity=0.5),
    "Random": lambda: Random((0.4,)),
    "Random_withheld": lambda: Random((0.0, 0.3, 0.2, 0.6), keys="withheld"),
    "Static": Static,
}


def build(router: Router, dtype: torch.dtype = torch.float32, size: LMSize = SIZE) -> AdaptiveLM:
    """Weights large enough that tokens differ in what they skip, in eval mode."""
    torch.manual_seed(0)
    model = adapt_lm(CharLM(size), router).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def ids_for(count: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(0, SIZE.vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
