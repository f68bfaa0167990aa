"""A model with the linear layers of its blocks in int8, for CPUs: a quarter of the bytes, and faster products.

Weights have a scale for each output, inputs one for each row, found as they come. Embedding, norms, attention, the
method and the head stay as they are.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.int8 import int8_linear, quantize_rows

if TYPE_CHECKING:
    from ..core.model import AdaptiveViT


class Int8Linear(nn.Linear):
    """`weight` is int8, `scale` what 1 stands for in each of its rows."""

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


def quantize(model: AdaptiveViT) -> AdaptiveViT:
    """A copy in int8, in eval mode on the CPU. `dwindle.save` and `dwindle.load` take it."""
    if is_int8(model):
        raise DwindleError("This model is in int8 already; quantise the one it was made from.")
    return to_int8(copy.deepcopy(model).float().cpu().eval())


def to_int8(model: AdaptiveViT) -> AdaptiveViT:
    """The model itself, its blocks' linear layers exchanged."""
    backbone = model.backbone
    backbone.described = backbone.describe()  # while it still looks like what it is
    backbone.remove()
    for block in backbone.blocks:
        for owner in list(block.modules()):
            for name, layer in owner.named_children():
                if type(layer) is nn.Linear:
                    setattr(owner, name, Int8Linear.of(layer))
    backbone.install()
    return model


@torch.inference_mode()
def likeness(model: AdaptiveViT, small: AdaptiveViT, images: Tensor) -> dict[str, float]:
    """How much of what the model says and decides of these images its int8 copy says and decides too."""
    ours, theirs = small(images), model(images)
    return {
        "same_answers": round(float((ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean()), 4),
        "same_depths": round(float((ours.trace.depth == theirs.trace.depth).float().mean()), 4),
        "cost": round(float(small.cost(ours.trace)), 4),
        "cost_float": round(float(model.cost(theirs.trace)), 4),
    }


@torch.inference_mode()
def race(model: AdaptiveViT, small: AdaptiveViT, photos: Tensor, seconds: float) -> list[dict[str, Any]]:
    """Static and adaptive, in float and in int8, turn about in one process; images as the model decides by itself."""
    from ..evaluate.bench import milliseconds, static_calls

    rows = []
    for batch in (1, 8):
        images = photos[torch.arange(batch) % len(photos)]
        calls: dict[str, Callable[[], Any]] = {
            "static_float": static_calls(model, images, ["eager"])["eager"],
            "static_int8": static_calls(small, images, ["eager"])["eager"],
            "adaptive_float": partial(model.prepare(), images),
            "adaptive_int8": partial(small.prepare(), images),
        }
        times = dict(zip(calls, milliseconds(list(calls.values()), seconds, images.device)))
        ratios = {
            "speedup": [s / a for s, a in zip(times["static_int8"], times["adaptive_int8"])],
            "over_float": [f / i for f, i in zip(times["adaptive_float"], times["adaptive_int8"])],
        }
        rows.append(
            {"batch": batch, "threads": torch.get_num_threads()}
            | {f"{name}_ms": round(statistics.median(spent), 3) for name, spent in times.items()}
            | {name: round(statistics.median(values), 3) for name, values in ratios.items()}
        )
    return rows


def weight_bytes(folder: str | os.PathLike) -> int:
    from ..io.checkpoint import WEIGHTS

    return (Path(folder) / WEIGHTS).stat().st_size
