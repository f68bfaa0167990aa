"""Embeddings of a whole data set, in one parquet file with a row for each image; with patch features if wanted."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.model import AdaptiveViT, Output
from ..core.registry import family_of
from ..errors import DwindleError
from ..io.images import preprocess_of
from ..io.promise import promise_of
from ..runtime.dtypes import converted, dtype_of
from ..runtime.prepared import prepared_or_self
from .fidelity import embedding
from .parts import Columns, PartFiles, Reading, identity, rows_left, write_rows

PART_BYTES = 256 << 20  # of the patch features in a part: a process holds one part in memory


@torch.inference_mode()
def embed(
    model: AdaptiveViT,
    data: str,
    out: str | os.PathLike,
    *,
    patches: bool = False,
    device: str = "cpu",
    dtype: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    **reading: int | None,
) -> dict[str, Any]:
    """Write `embedding` (float32) for every image to `out`. Returns a summary for JSON.

    patches: write `patches` (float16) too, row by row of the grid that the file's metadata gives.
    reading: fields of `parts.Reading`. Images that cannot be read are listed in `<out>.errors.jsonl`.
    """
    settings = Reading(**reading)  # type: ignore[arg-type]
    path = settings.checked(out, "embeddings")
    preprocess = preprocess_of(model)
    model = converted(model.eval(), dtype, device).to(device)
    size, shape = preprocess.size, model.backbone.shape
    blank = torch.zeros(1, shape.channels, size, size, device=device, dtype=dtype_of(model))
    sizes = embedding(model, model(blank)).shape[1], (*shape.grid((size, size)), shape.width)
    if patches and reading.get("part") is None:
        row_bytes = 2 * sizes[1][0] * sizes[1][1] * sizes[1][2]
        settings = dataclasses.replace(settings, part=max(1, min(settings.part, PART_BYTES // row_bytes)))
    schema, images = _schema(model, sizes, patches), settings.images(data)
    task_identity = identity(lambda digest: _add_weights(model, digest), data, images, dtype, schema)
    task, promise = PartFiles(path, len(images), settings.part, task_identity, schema), promise_of(model)
    about = {"width": sizes[0], "promise": promise} | ({"grid": list(sizes[1][:2])} if patches else {})
    if task.finished():
        return task.summary() | about | {"done_before": len(images)}
    images.transform = preprocess.eval_transform()
    # By default a graph on a CPU returns logits and depths alone. Patches, and the embedding of a model with a head,
    # are read from its features.
    details = patches or bool(model.classes)
    fast = prepared_or_self(model, rows_left(task, settings), details)
    before = write_rows(task, images, settings, lambda x: features(model, fast, x, patches), device, progress=progress)
    summary = task.summary() | about if settings.rank == 0 else {"out": str(path)}
    return summary | {"done_before": before}


@torch.inference_mode()
def features(model: AdaptiveViT, fast: Callable[..., Output], x: Tensor, patches: bool = False) -> Columns:
    """The columns of a batch. fast: the model prepared, with details if `patches` or the model has a head."""
    out = fast(x.to(dtype_of(model)))
    embeddings = embedding(model, out).float().cpu()
    if not embeddings.isfinite().all():
        raise DwindleError("The model's embeddings hold NaN or infinite values; load its weights from another copy.")
    columns: Columns = {
        "embedding": list(embeddings.numpy()),
        "depth": out.trace.mean_depth.tolist(),
        "gmacs": (model.macs(out.trace) / 1e9).tolist(),
    }
    if patches:
        states = model.states(out)[:, model.backbone.shape.prefix :].flatten(1)
        columns["patches"] = list(states.half().cpu().numpy())
    return columns


def _schema(model: AdaptiveViT, sizes: tuple[int, tuple[int, int, int]], patches: bool) -> Any:
    """sizes: the embedding's width; the patches' rows, columns and width."""
    import pyarrow as pa

    width, (rows, columns, deep) = sizes
    fields = [
        ("row", pa.int64()),
        ("image", pa.string()),
        ("class", pa.string()),  # the data's name of its class; null: it has none
        ("embedding", pa.list_(pa.float32(), width)),
        ("depth", pa.float32()),
        ("gmacs", pa.float32()),
    ]
    fields += [("patches", pa.list_(pa.float16(), rows * columns * deep))] if patches else []
    about: dict[str, Any] = {"gmacs_static": model.static_macs() / 1e9, "promise": promise_of(model)}
    about |= {"grid": [rows, columns], "width": deep} if patches else {}
    return pa.schema(fields).with_metadata({"features": json.dumps(about)})


def _add_weights(model: AdaptiveViT, digest: Any) -> None:
    """Add the model's structure, preprocessing and weights to a digest."""
    described = family_of(model).describe(model)
    digest.update(json.dumps([described, preprocess_of(model).to_dict()], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
