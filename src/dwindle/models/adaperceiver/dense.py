"""Dense prediction (C.6): maps at the image's resolution, from any number of latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DwindleError, unknown
from ...io.scenes import PLACES
from ...tasks.base import Task, answers_of, task_of
from ...tasks.dense import depths, maps
from .model import AdaPerceiver


def map_task(model: AdaPerceiver, source: str) -> type[Task]:
    """The task that a dense network was trained for. source: its checkpoint, for errors."""
    if answers_of(model)[1] != "maps":
        raise DwindleError(
            f"{source} gives features of patches, no maps; train it for a task first (dwindle train ada_segment)."
        )
    return task_of(model, source)


@torch.no_grad()
def predict(
    model: AdaPerceiver,
    images: Tensor,
    task: str = "segmentation",
    size: tuple[int, ...] | None = None,
    **setting: Any,
) -> Tensor:
    """(B, H, W) maps of classes or metres, at the images' resolution or at `size` (height, width). setting: as for the
    network."""
    if task not in PLACES:
        raise unknown("task", task, PLACES)
    if model.outputs != "dense":
        raise DwindleError("This network answers once for an image; maps need a dense network (outputs='dense').")
    (height, width), resolution = images.shape[-2:], size or images.shape[-2:]
    answers = model(images, **setting).logits, model.grid((height, width)), (resolution[0], resolution[1])
    return maps(*answers).argmax(1) if task == "segmentation" else depths(*answers)
