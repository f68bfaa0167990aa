"""A third family of models, as somebody would add it: this folder in `dwindle/models/`, and nothing else to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.registry import Family
from ...io.card import vision_card
from ...io.checkpoint import check_fit, filled, planned, read_both


class Mean(nn.Module):
    """Classifies an image by the mean of each of its channels."""

    def __init__(self, classes: int = 3, size: int = 32) -> None:
        super().__init__()
        self.config = {"classes": classes, "size": size}
        self.classes, self.size = classes, size
        self.head = nn.Linear(3, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean((2, 3)))


class Means(Family):
    one, many, model = "a mean", "means", Mean
    cli = f"{__name__}.cli"
    commands = {"eval": "Of a mean its accuracy, and nothing else.", "average": "What a mean makes of grey."}
    backbones = ("mean",)

    def describe(self, model: Mean) -> dict[str, Any]:
        backbone = {"family": "mean", "model": Mean.__name__, "options": model.config}
        return {"backbone": backbone, "method": {"name": None, "options": {}}}

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> Mean:
        options, weights = config["backbone"]["options"], read_both(folder, config)
        check_fit(planned(lambda: Mean(**options), folder), weights, folder)
        return filled(Mean(**options), {"": weights}, folder)

    def card(self, config: dict[str, Any], name: str) -> str:
        return vision_card(config, name, "A mean of channels.")

    def preprocess(self, model: Mean) -> dict[str, Any]:
        return {"size": model.size}

    def untrained(self) -> list[str]:
        return ["mean_grey"]


def grey(model: Mean) -> list[float]:
    return model(torch.zeros(1, 3, model.size, model.size))[0].tolist()
