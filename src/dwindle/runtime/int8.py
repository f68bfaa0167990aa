"""A model with the linear layers of its blocks in int8, for CPUs: a quarter of the bytes, and faster products.

Weights have a scale for each output. Inputs have a scale for each row, computed at run time. Embedding, norms,
attention, the method and the head stay in float.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DwindleError
from ..io.checkpoint import WEIGHTS
from ..ops.int8 import is_int8, to_int8

if TYPE_CHECKING:
    from ..core.model import AdaptiveViT


def quantize(model: AdaptiveViT) -> AdaptiveViT:
    """A copy in int8, in eval mode on the CPU. `dwindle.save` and `dwindle.load` support it."""
    if is_int8(model):
        raise DwindleError("This model is in int8 already; quantise the one it was made from.")
    return to_int8(copy.deepcopy(model).float().cpu().eval())


@torch.inference_mode()
def likeness(model: AdaptiveViT, small: AdaptiveViT, images: Tensor) -> dict[str, float]:
    """The shares of equal classes and of equal depths of the model and its int8 copy `small`, and the cost of both."""
    out_int8, out_float = small(images), model(images)
    return {
        "same_answers": round(float((out_int8.logits.argmax(-1) == out_float.logits.argmax(-1)).float().mean()), 4),
        "same_depths": round(float((out_int8.trace.depth == out_float.trace.depth).float().mean()), 4),
        "cost": round(float(small.cost(out_int8.trace)), 4),
        "cost_float": round(float(model.cost(out_float.trace)), 4),
    }


def weight_bytes(folder: str | os.PathLike) -> int:
    """The size of a checkpoint's weights."""
    return (Path(folder) / WEIGHTS).stat().st_size
