"""The images an AdaPerceiver is asked about, prepared as it was trained."""

from __future__ import annotations

from typing import Any

from ..images import Preprocess
from ..train.batches import Resident, loader
from ..train.data import check_labels, open_data
from ..train.data import limit as first


def preprocess_for(model: Any) -> Any:
    saved = model.extra.get("preprocess")
    return Preprocess.from_dict(saved) if saved else Preprocess(size=model.image)


def images_for(model: Any, data: str, split: str, limit: int | None) -> Any:
    """The first so many of a split, with labels the network knows."""
    images = open_data(data, split)
    images = first(images, limit) if limit else images
    check_labels(images.labels, model.classes)
    return images


def served_from(
    model: Any, data: str, split: str, device: str, limit: int | None, resident: Resident | None = None
) -> Any:
    """Images ready on the device: a function (batch, epoch or None) -> batches, in order where there is no epoch.
    resident: the same images, where they were decoded before.
    """
    images, wanted = images_for(model, data, split, limit), preprocess_for(model)
    if resident is None and len(images) <= 100_000:
        resident = Resident(images, wanted.size, device)

    def serve(batch: int, epoch: int | None = None) -> Any:
        train = epoch is not None
        if resident is not None:
            return resident.batches(batch, train, 0, epoch or 0, wanted.mean, wanted.std)
        images.transform = wanted.train_transform(min_scale=0.35) if train else wanted.eval_transform()
        ready = loader(images, batch, train, workers=2)
        ready.set_epoch(epoch or 0)
        return ready

    serve.count = len(images)  # type: ignore[attr-defined]
    return serve
