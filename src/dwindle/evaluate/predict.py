"""Classes of a whole data set, in one parquet file: a row for each image."""

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
from ..runtime.prepared import quickest
from ..tasks.classify import load_classifier
from .parts import PartFiles as PartFiles
from .parts import Reading, carried_out, identity, left

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
    """Classify every image. Those that cannot be read are listed in `<out>.errors.jsonl`, with the reason. reading:
    fields of `Reading`."""
    how = Reading(**reading)  # type: ignore[arg-type]
    path = how.checked(out, "predictions")
    check_runs(dtype, device)
    images = how.images(data)
    named = identity(lambda digest: _weights(checkpoint, digest), data, images, dtype, _schema())
    task = PartFiles(path, len(images), how.part, named, _schema())
    model = load_classifier(checkpoint)
    about, labels = _labels(model, images)
    if task.finished():
        return _summary(task) | about | {"done_before": len(images)}
    model = converted(model, dtype, device).to(device)
    images.transform = preprocess_of(model).eval_transform()
    fast, names = quickest(model, left(task, how)), class_names(model)

    def label(i: int) -> dict[str, Any]:
        return {"label": int(labels[i]) if labels[i] >= 0 else None}

    done = {
        "done_before": carried_out(
            task, images, how, lambda x: classify(model, fast, x, names), device, label, progress
        )
    }
    return _summary(task) | about | done if how.rank == 0 else {"out": str(path)} | done


def _weights(checkpoint: str, digest: Any) -> None:
    folder = find(checkpoint)
    for name in (CONFIG, WEIGHTS):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())


def _summary(task: PartFiles) -> dict[str, Any]:
    import pyarrow.parquet as pq

    told = task.summary()
    answers = pq.read_table(task.out, columns=["label", "prediction"])
    label, predicted = (answers[name].to_numpy() for name in ("label", "prediction"))
    labelled = ~np.isnan(label.astype(float))
    if labelled.any():
        told |= {"labelled": int(labelled.sum()), "top1": round(100 * float((label == predicted)[labelled].mean()), 3)}
    return told


def _labels(model: AdaptiveViT, images: Images) -> tuple[dict[str, Any], np.ndarray]:
    """How the data's classes are the model's, and the images' labels by the model's numbers, -1 where it has none."""
    nothing = np.full(len(images), -1)
    if images.labels.max(initial=-1) < 0:
        return {}, nothing
    try:
        given = images.select(np.flatnonzero(images.labels >= 0))
        found = matched(given, known_classes(model), model.classes).match
    except DwindleError as error:
        return {"matched": None, "why": str(error)}, nothing
    assert found is not None
    return found.about(), relabelled(images, found).labels


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("row", pa.int64()),
            ("image", pa.string()),
            ("class", pa.string()),  # what the data calls it; null where it says nothing
            ("label", pa.int64()),  # the model's number of that class; null where it has none
            ("prediction", pa.int64()),
            ("name", pa.string()),  # null where the model's classes have none
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
    """fast: the model prepared. names: of its classes."""
    out = fast(x.to(dtype_of(model)))
    confidence, best = out.logits.float().softmax(-1).topk(min(TOP, out.logits.shape[-1]))
    named = [[names[number] if names else None for number in row] for row in best.tolist()]
    return {
        "prediction": best[:, 0].tolist(),
        "name": [row[0] for row in named],
        "confidence": confidence[:, 0].tolist(),
        "top5": best.tolist(),
        "top5_names": named if names else [None] * len(named),
        "top5_confidence": confidence.tolist(),
        "depth": out.trace.mean_depth.tolist(),
        "gmacs": (model.macs(out.trace) / 1e9).tolist(),
    }
