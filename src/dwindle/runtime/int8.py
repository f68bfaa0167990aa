"""A model with the linear layers of its blocks in int8, for CPUs: a quarter of the bytes, and faster products.

Weights have a scale for each output, inputs one for each row, found as they come. Embedding, norms, attention, the
method and the head stay as they are.
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
    """A copy in int8, in eval mode on the CPU. `dwindle.save` and `dwindle.load` take it."""
    if is_int8(model):
        raise DwindleError("This model is in int8 already; quantise the one it was made from.")
    return to_int8(copy.deepcopy(model).float().cpu().eval())


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


def weight_bytes(folder: str | os.PathLike) -> int:
    return (Path(folder) / WEIGHTS).stat().st_size
