"""The images an AdaPerceiver is asked about, prepared as it was trained."""

from __future__ import annotations

from typing import Any

from ...io.augment import Augment
from ...io.batches import loader
from ...io.datasets import Images
from ...io.images import preprocess_of
from ...io.resident import Resident


def served(model: Any, images: Images, device: str, resident: Resident | None = None) -> Any:
    """Images ready on the device: a function (batch, epoch or None) -> batches, in order where there is no epoch.
    resident: the same images, where they were decoded before.
    """
    wanted = preprocess_of(model)
    if resident is None and len(images) <= 100_000:
        resident = Resident(images, wanted.size, device, crop_pct=wanted.crop_pct, interpolation=wanted.interpolation)

    def serve(batch: int, epoch: int | None = None) -> Any:
        train = epoch is not None
        if resident is not None:
            return resident.batches(batch, train, 0, epoch or 0, wanted.mean, wanted.std)
        images.transform = wanted.eval_transform()
        ready = loader(images, batch, train, workers=2, augment=Augment.of(wanted, min_scale=0.35))
        ready.set_epoch(epoch or 0)
        return ready

    if resident is not None:
        images.corrupt |= resident.corrupt
    serve.count = len(images if resident is None else resident)  # type: ignore[attr-defined]
    serve.about = {"images": serve.count, **images.about()}  # type: ignore[attr-defined]
    return serve
