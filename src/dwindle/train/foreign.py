"""Any timm model as a teacher, such as a CNN. Only its logits can be learnt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..io.checkpoint import load_vit_weights
from ..io.download import offline_if_unreachable
from ..io.images import Preprocess


class Foreign(nn.Module):
    """A timm model that takes images normalised for another model, and normalises them for itself."""

    def __init__(self, model: Any, images: Preprocess) -> None:
        super().__init__()
        own = model.pretrained_cfg
        self.model, self.classes = model, int(model.num_classes)
        mean, std = (torch.tensor(values)[:, None, None] for values in (images.mean, images.std))
        own_mean, own_std = (torch.tensor(own.get(n, getattr(images, n)))[:, None, None] for n in ("mean", "std"))
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", std / own_std)
        self.register_buffer("shift", (mean - own_mean) / own_std)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(x * self.scale.to(x.dtype) + self.shift.to(x.dtype)))


def is_foreign(name: str) -> bool:
    import timm

    found: bool = timm.is_model(name)
    return found


def foreign(name: str, weights: str | None, images: Preprocess, classes: int) -> Foreign:
    """The timm model of this name as a teacher. weights: a file; None: its pretrained ones. images: the student's."""
    import timm

    if weights is not None and not Path(weights).is_file():
        raise DwindleError(f"teacher_weights = {weights}: there is no such file; give the teacher's weights.")
    try:
        with offline_if_unreachable():
            options = {"pretrained": True} if weights is None else {"num_classes": classes}
            model: Any = timm.create_model(name, **options)
    except (OSError, RuntimeError) as error:
        raise DwindleError(
            f"teacher = {name}: its weights could not be fetched ({type(error).__name__}); give a file with --set "
            "teacher_weights=PATH."
        ) from error
    if weights is not None:
        load_vit_weights(model, weights)
    if model.num_classes != classes:
        raise DwindleError(
            f"teacher = {name}: it answers with {model.num_classes} classes, the data has {classes}; take a teacher of "
            "the data's classes."
        )
    return Foreign(model, images)
