"""What a checkpoint is saved with, one answer of the model it holds, and a config changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dwindle
from shared.tiny import images_for

IDS = torch.arange(8)[None] % 5
EXTRA = {
    "preprocess": {"size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    "classes": ["a", "b", "c"],
    "data": {"train": "here", "eval": "there"},
    "recipe": {"epochs": 3, "stages": [1, 2]},
    "results": {"top1": 1.0, "top5": 2.0, "gmacs": 1.0, "gmacs_static": 2.0, "images": 3},
    "note": "a note",
}


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the config of a checkpoint as one who means it: without the checksum of what it said."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("config_sha256", None)
    change(config)
    path.write_text(json.dumps(config))


@torch.inference_mode()
def answer(model: Any) -> torch.Tensor:
    if hasattr(model, "lm"):
        return model(IDS).logits
    if isinstance(model, dwindle.AdaPerceiver):
        return model(torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)).logits
    return model(images_for(model, 2)).logits
