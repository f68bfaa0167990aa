"""Predictions for a whole data set, in one parquet file with a row for each image."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.model import AdaptiveViT, Output
from ..errors import DwindleError
from ..io.checkpoint import WEIGHTS, find
from ..io.classes import class_names, known_classes
from ..io.config import CONFIG
from ..io.datasets import Images, matched, relabelled
from ..io.images import preprocess_of
from ..runtime.dtypes import check_runs, converted, dtype_of
from ..runtime.prepared import prepared_or_self
from ..tasks.classify import load_classifier
from .parts import PartFiles, Reading, identity, rows_left, write_rows

TOP = 5


def predict(
    checkpoint: str,
    data: str,
    out: str | os.PathLike,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    **reading: int | None,
) -> dict[str, Any]:
    """Classify every image and write the rows to `out`. Returns a summary for JSON.

    Images that cannot be read are listed in `<out>.errors.jsonl` with the reason. reading: fields of `parts.Reading`.
    """
    settings = Reading(**reading)  # type: ignore[arg-type]
    path = settings.checked(out, "predictions")
    check_runs(dtype, device)
    images = settings.images(data)
    task_identity = identity(lambda digest: _add_weights(checkpoint, digest), data, images, dtype, _schema())
    task = PartFiles(path, len(images), settings.part, task_identity, _schema())
    model = load_classifier(checkpoint)
    about, labels = _labels(model, images)
    if task.finished():
        return _summary(task) | about | {"done_before": len(images)}
    model = converted(model, dtype, device).to(device)
    images.transform = preprocess_of(model).eval_transform()
    fast, names = prepared_or_self(model, rows_left(task, settings)), class_names(model)

    def label(i: int) -> dict[str, Any]:
        return {"label": int(labels[i]) if labels[i] >= 0 else None}

    before = write_rows(task, images, settings, lambda x: classify(model, fast, x, names), device, label, progress)
    summary = _summary(task) | about if settings.rank == 0 else {"out": str(path)}
    return summary | {"done_before": before}


def _add_weights(checkpoint: str, digest: Any) -> None:
    """Add the checkpoint's files to a digest."""
    folder = find(checkpoint)
    for name in (CONFIG, WEIGHTS):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())


def _summary(task: PartFiles) -> dict[str, Any]:
    """The task's summary, with the top-1 accuracy where images have labels."""
    import pyarrow.parquet as pq

    summary = task.summary()
    table = pq.read_table(task.out, columns=["label", "prediction"])
    label, predicted = (table[name].to_numpy() for name in ("label", "prediction"))
    labelled = ~np.isnan(label.astype(float))
    if labelled.any():
        top1 = 100 * float((label == predicted)[labelled].mean())
        summary |= {"labelled": int(labelled.sum()), "top1": round(top1, 3)}
    return summary


def _labels(model: AdaptiveViT, images: Images) -> tuple[dict[str, Any], np.ndarray]:
    """How the data's classes match the model's, and the images' labels as the model's class numbers; -1: none."""
    no_labels = np.full(len(images), -1)
    if images.labels.max(initial=-1) < 0:
        return {}, no_labels
    try:
        labelled = images.select(np.flatnonzero(images.labels >= 0))
        match = matched(labelled, known_classes(model), model.classes).match
    except DwindleError as error:
        return {"matched": None, "why": str(error)}, no_labels
    assert match is not None
    return match.about(), relabelled(images, match).labels


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("row", pa.int64()),
            ("image", pa.string()),
            ("class", pa.string()),  # the data's name of its class; null: it has none
            ("label", pa.int64()),  # the model's number of that class; null: the model does not have it
            ("prediction", pa.int64()),
            ("name", pa.string()),  # of the predicted class; null: the model's classes have no names
            ("confidence", pa.float32()),
            ("top5", pa.list_(pa.int64())),
            ("top5_names", pa.list_(pa.string())),
            ("top5_confidence", pa.list_(pa.float32())),
            ("depth", pa.float32()),
            ("gmacs", pa.float32()),
        ]
    )


@torch.inference_mode()
def classify(
    model: AdaptiveViT, fast: Callable[..., Output], x: Tensor, names: list[str] | None = None
) -> dict[str, list]:
    """The columns of a batch. fast: the model prepared. names: of its classes; None: they have none."""
    out = fast(x.to(dtype_of(model)))
    confidence, best = out.logits.float().softmax(-1).topk(min(TOP, out.logits.shape[-1]))
    best_names = [[names[number] if names else None for number in row] for row in best.tolist()]
    return {
        "prediction": best[:, 0].tolist(),
        "name": [row[0] for row in best_names],
        "confidence": confidence[:, 0].tolist(),
        "top5": best.tolist(),
        "top5_names": best_names if names else [None] * len(best_names),
        "top5_confidence": confidence.tolist(),
        "depth": out.trace.mean_depth.tolist(),
        "gmacs": (model.macs(out.trace) / 1e9).tolist(),
    }
