"""Batches of images for an AdaPerceiver, prepared as in its training."""

from __future__ import annotations

from typing import Any

from ...io.augment import Augment
from ...io.batches import loader
from ...io.datasets import Images
from ...io.images import preprocess_of
from ...io.resident import Resident


def served(model: Any, images: Images, device: str, resident: Resident | None = None) -> Any:
    """A function (batch size, epoch) to batches of the images on the device: augmented and shuffled by epoch, or
    unchanged and in order for None. resident: the same images, if already decoded. The function's `count` is the number
    of images, its `about` describes them.
    """
    preprocess = preprocess_of(model)
    if resident is None and len(images) <= 100_000:
        resident = Resident(
            images, preprocess.size, device, crop_pct=preprocess.crop_pct, interpolation=preprocess.interpolation
        )

    def serve(batch: int, epoch: int | None = None) -> Any:
        train = epoch is not None
        if resident is not None:
            return resident.batches(batch, train, 0, epoch or 0, preprocess.mean, preprocess.std)
        images.transform = preprocess.eval_transform()
        batches = loader(images, batch, train, workers=2, augment=Augment.of(preprocess, min_scale=0.35))
        batches.set_epoch(epoch or 0)
        return batches

    if resident is not None:
        images.corrupt |= resident.corrupt
    serve.count = len(images if resident is None else resident)  # type: ignore[attr-defined]
    serve.about = {"images": serve.count, **images.about()}  # type: ignore[attr-defined]
    return serve
