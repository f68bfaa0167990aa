"""Its commands."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from ...io.batches import loader
from ...io.checkpoint import load_as
from ...io.sets import evaluation_images
from ...show.terminal import Batch, Checkpoint, Data, finish, show_table
from . import Mean, grey


def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    brighter: Annotated[float, typer.Option(help="Added to every pixel.")] = 0.0,
    batch: Batch = 64,
) -> None:
    model = load_as(Mean, checkpoint)
    images = evaluation_images(model, data)
    with torch.no_grad():
        right = sum(int((model(x + brighter).argmax(-1) == y).sum()) for x, y in loader(images, batch))
    result = {"top1": 100 * right / len(images), "images": len(images), "brighter": brighter}
    show_table(f"{checkpoint} on {data}", list(result), [list(result.values())])
    finish(result)


def average(checkpoint: Checkpoint) -> None:
    finish({"logits": grey(load_as(Mean, checkpoint))})
