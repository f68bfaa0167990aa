"""Embeddings of a whole data set, in one parquet file: a row for each image, with its patch features where wanted."""

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
from ..runtime.prepared import quickest
from .fidelity import embedding
from .parts import Columns, PartFiles, Reading, carried_out, identity, left

HELD = 256 << 20  # bytes of features in a part


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
    """Write `embedding` (float32) for every image; `patches` too (float16), row after row of the grid that the file's
    metadata names. Those that cannot be read are listed in `<out>.errors.jsonl`. reading: fields of `parts.Reading`.
    """
    how = Reading(**reading)  # type: ignore[arg-type]
    path = how.checked(out, "embeddings")
    preprocess = preprocess_of(model)
    model = converted(model.eval(), dtype, device).to(device)
    size, shape = preprocess.size, model.backbone.shape
    blank = torch.zeros(1, shape.channels, size, size, device=device, dtype=dtype_of(model))
    sizes = embedding(model, model(blank)).shape[1], (*shape.grid((size, size)), shape.width)
    if patches and reading.get("part") is None:
        one = 2 * sizes[1][0] * sizes[1][1] * sizes[1][2]
        how = dataclasses.replace(how, part=max(1, min(how.part, HELD // one)))
    schema, images = _schema(model, sizes, patches), how.images(data)
    named = identity(lambda digest: _weights(model, digest), data, images, dtype, schema)
    task, promise = PartFiles(path, len(images), how.part, named, schema), promise_of(model)
    about = {"width": sizes[0], "promise": promise} | ({"grid": list(sizes[1][:2])} if patches else {})
    if task.finished():
        return task.summary() | about | {"done_before": len(images)}
    images.transform = preprocess.eval_transform()
    # A graph on a CPU gives answers; where more is read of the model it must be told so.
    details = patches or bool(model.classes)
    fast = quickest(model, left(task, how), details)
    done = carried_out(task, images, how, lambda x: features(model, fast, x, patches), device, lambda i: {}, progress)
    told = task.summary() | about if how.rank == 0 else {"out": str(path)}
    return told | {"done_before": done}


@torch.inference_mode()
def features(model: AdaptiveViT, fast: Callable[..., Output], x: Tensor, patches: bool = False) -> Columns:
    """Columns of a batch. fast: the model prepared, with details where those are read."""
    out = fast(x.to(dtype_of(model)))
    whole = embedding(model, out).float().cpu()
    if not whole.isfinite().all():
        raise DwindleError("The model's embeddings hold NaN or infinite values; load its weights from another copy.")
    columns: Columns = {
        "embedding": list(whole.numpy()),
        "depth": out.trace.mean_depth.tolist(),
        "gmacs": (model.macs(out.trace) / 1e9).tolist(),
    }
    if patches:
        states = model.states(out)[:, model.backbone.shape.prefix :].flatten(1)
        columns["patches"] = list(states.half().cpu().numpy())
    return columns


def _schema(model: AdaptiveViT, sizes: tuple[int, tuple[int, int, int]], patches: bool) -> Any:
    import pyarrow as pa

    width, (rows, columns, deep) = sizes
    fields = [
        ("row", pa.int64()),
        ("image", pa.string()),
        ("class", pa.string()),  # what the data calls it; null where it says nothing
        ("embedding", pa.list_(pa.float32(), width)),
        ("depth", pa.float32()),
        ("gmacs", pa.float32()),
    ]
    fields += [("patches", pa.list_(pa.float16(), rows * columns * deep))] if patches else []
    about: dict[str, Any] = {"gmacs_static": model.static_macs() / 1e9, "promise": promise_of(model)}
    about |= {"grid": [rows, columns], "width": deep} if patches else {}
    return pa.schema(fields).with_metadata({"features": json.dumps(about)})


def _weights(model: AdaptiveViT, digest: Any) -> None:
    """What the model computes by."""
    described = family_of(model).describe(model)
    digest.update(json.dumps([described, preprocess_of(model).to_dict()], sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
