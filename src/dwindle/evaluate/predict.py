"""Answers for a whole data set, streamed into one parquet file.

The rows are cut into parts. A part is written whole or not at all, so a killed run goes on with the first part that is
missing, and no row is lost or doubled. Of several processes (torchrun) each takes its own parts; nobody waits for
messages from another, only for its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..core.model import AdaptiveViT, Output
from ..errors import DwindleError
from ..files import draft, write_text
from ..io.checkpoint import WEIGHTS, find
from ..io.classes import class_names, known_classes
from ..io.config import CONFIG
from ..io.datasets import Images, Parquet, from_file, matched, open_data, relabelled
from ..io.folders import image_files
from ..io.images import preprocess_of
from ..runtime.dtypes import check_runs, converted, dtype_of
from ..runtime.prepared import quickest
from ..settings import Batch, Whole1, Workers, fitted
from ..tasks.classify import load_classifier

PART = 2048  # rows; what a kill can cost
TOP = 5


def predict(
    checkpoint: str,
    data: str,
    out: str | os.PathLike,
    *,
    batch: int = 64,
    workers: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    part: int = PART,
    rank: int = 0,
    world: int = 1,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Classify every image. Those that cannot be read are listed in `<out>.errors.jsonl`, with the reason."""
    path = Path(out)
    if path.is_dir() or path.suffix != ".parquet":
        raise DwindleError(f"--out {path}: predictions go to a file that ends in .parquet; name one.")
    batch, part = fitted(batch, Batch, "batch", "predict"), fitted(part, Whole1, "part", "predict")
    workers = fitted(workers, Workers, "workers", "predict")
    if limit is not None and limit < 1:
        raise DwindleError(f"--limit {limit}: it must be at least 1.")
    check_runs(dtype, device)
    images = open_images(data)
    if limit is not None:
        images = images.select(np.arange(min(limit, len(images))))
    task = Parts(path, len(images), part, _identity(checkpoint, data, images, dtype))
    model = load_classifier(checkpoint)
    about, labels = _labels(model, images)
    if task.finished():
        return task.summary() | about | {"done_before": len(images)}
    model = converted(model, dtype, device).to(device)
    task.begin(rank)
    missing = [k for k in range(rank, task.count, world) if not task.file(k).exists()]
    before = sum(len(task.rows(k)) for k in range(rank, task.count, world) if k not in set(missing))
    for k, columns, errors in _answers(model, images, labels, task, missing, batch, workers, device):
        task.write(k, columns, errors)
        if progress:
            progress(k, len(task.rows(k)))
    if rank == 0:
        task.join()
    done = {"done_before": before}
    return task.summary() | about | done if rank == 0 else {"out": str(path)} | done


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


class Parts:
    """Where the parts lie, and how they become one file."""

    def __init__(self, out: Path, images: int, part: int, identity: str) -> None:
        self.out, self.images, self.part = out, images, part
        self.folder = out.with_name(f"{out.name}.parts")
        self.errors = out.with_name(f"{out.name}.errors.jsonl")
        self.task = {"images": images, "part": part, "task": identity}

    @property
    def count(self) -> int:
        return -(-self.images // self.part)

    def rows(self, k: int) -> range:
        return range(k * self.part, min((k + 1) * self.part, self.images))

    def file(self, k: int) -> Path:
        return self.folder / f"{k:08d}.parquet"

    def finished(self) -> bool:
        import pyarrow.parquet as pq

        if not self.out.exists():
            return False
        try:
            held = json.loads((pq.read_schema(self.out).metadata or {}).get(b"dwindle", b"null"))
        except (OSError, ValueError):
            held = None
        if held != self.task:
            raise DwindleError(
                f"{self.out} exists and holds something else than this checkpoint's answers to this data; move it away."
            )
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a kill after the parts were joined
        return True

    def begin(self, rank: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "task.json"
        if note.exists():
            if json.loads(note.read_text()) != self.task:
                raise DwindleError(
                    f"{self.folder} belongs to another checkpoint, other data or another part size; finish that with "
                    "its own command, or remove the folder."
                )
        elif rank == 0:
            write_text(note, json.dumps(self.task))

    def write(self, k: int, columns: dict[str, list], errors: list[dict[str, Any]]) -> None:
        """The errors first: a part that is there has its errors beside it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        lines = "".join(json.dumps(error) + "\n" for error in errors)
        write_text(self.file(k).with_suffix(".jsonl"), lines)
        with draft(self.file(k)) as scratch:
            pq.write_table(pa.table(columns, schema=_schema()), scratch)

    def join(self) -> None:
        """Wait for the other processes' parts, then one file of all, a row group for each."""
        import pyarrow.parquet as pq

        while not all(self.file(k).exists() for k in range(self.count)):
            time.sleep(0.5)
        schema = _schema().with_metadata({"dwindle": json.dumps(self.task)})

        with draft(self.errors) as scratch, scratch.open("w", encoding="utf-8") as to:
            for k in range(self.count):
                to.write(self.file(k).with_suffix(".jsonl").read_text(encoding="utf-8"))
        with draft(self.out) as scratch, pq.ParquetWriter(scratch, schema) as writer:
            for k in range(self.count):
                writer.write_table(pq.read_table(self.file(k)).cast(schema))
        shutil.rmtree(self.folder)

    def summary(self) -> dict[str, Any]:
        import pyarrow.parquet as pq

        failed = sum(1 for _ in self.errors.open()) if self.errors.exists() else 0
        told = {
            "out": str(self.out),
            "errors": str(self.errors),
            "images": self.images,
            "rows": pq.read_metadata(self.out).num_rows,
            "failed": failed,
        }
        answers = pq.read_table(self.out, columns=["label", "prediction"])
        label, said = (answers[name].to_numpy() for name in ("label", "prediction"))
        labelled = ~np.isnan(label.astype(float))
        if labelled.any():
            told |= {"labelled": int(labelled.sum()), "top1": round(100 * float((label == said)[labelled].mean()), 3)}
        return told


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


def _identity(checkpoint: str, data: str, images: Images, dtype: str) -> str:
    """Of the model's weights, its number format and the data: parts of two tasks never meet in one file. Files are told
    apart by their names, sizes and times; what is no file by its name."""
    folder, files = find(checkpoint), _files(images)
    digest = hashlib.sha256(",".join(_schema().names).encode() + (b"" if files else data.encode()))
    digest.update(b"" if dtype == "fp32" else dtype.encode())
    for path in files:
        about = path.lstat()
        digest.update(os.fsencode(path) + f" {about.st_size} {about.st_mtime_ns}\n".encode())
    for name in (CONFIG, WEIGHTS):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _files(images: Images) -> list[Path]:
    """Those that the images are read from."""
    source = images.source
    if isinstance(source, Parquet):
        return sorted({path.resolve() for path, _ in source.groups})
    if isinstance(source, partial) and source.func is from_file:
        folder = source.args[0].resolve()
        return [folder / os.fsdecode(name) for name in source.args[1]]
    return []


def open_images(name: str) -> Images:
    """As `open_data`; a folder with images of its own is just images, those of its folders too, without labels."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or os.sep in next(image_files(folder), os.sep):  # its own come first
        return open_data(name, "test")
    paths = np.array([os.fsencode(path) for path in sorted(image_files(folder), key=Path)])
    return Images(name, partial(from_file, folder, paths), np.full(len(paths), -1))


class _Read(Dataset):
    """(index, name, tensor, None), or (index, name, None, why not)."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __getitem__(self, i: int) -> tuple[int, str | None, Tensor | None, str | None]:
        name = None
        try:
            name = self.images.file(i)
            return i, name, self.images[i][0], None
        except (DwindleError, OSError, MemoryError) as error:
            return i, name, None, str(error) or type(error).__name__


def _as_it_is(rows: list) -> list:
    return rows


def _answers(
    model: AdaptiveViT,
    images: Images,
    labels: np.ndarray,
    task: Parts,
    parts: list[int],
    batch: int,
    workers: int,
    device: str,
) -> Iterator[tuple[int, dict[str, list], list[dict[str, Any]]]]:
    images.transform = preprocess_of(model).eval_transform()
    pieces = [list(task.rows(k)[i : i + batch]) for k in parts for i in range(0, len(task.rows(k)), batch)]
    workers = min(workers, len(pieces))
    loader = DataLoader(_Read(images), batch_sampler=pieces, num_workers=workers, collate_fn=_as_it_is)
    columns: dict[str, list] = {name: [] for name in _schema().names}
    fast, names = quickest(model, sum(len(task.rows(k)) for k in parts)), class_names(model)
    errors: list[dict[str, Any]] = []
    for rows in loader:
        good = [(i, name, x) for i, name, x, _ in rows if x is not None]
        errors += [{"row": i, "image": name, "reason": why} for i, name, _, why in rows if why is not None]
        if good:
            for name, values in classify(model, fast, torch.stack([x for _, _, x in good]).to(device), names).items():
                columns[name] += values
            numbers = [i for i, _, _ in good]
            columns["row"] += numbers
            columns["image"] += [name for _, name, _ in good]
            columns["class"] += [_class(images, i) for i in numbers]
            columns["label"] += [int(labels[i]) if labels[i] >= 0 else None for i in numbers]
        k, last = rows[-1][0] // task.part, rows[-1][0]
        if last == task.rows(k)[-1]:
            yield k, columns, errors
            columns, errors = {name: [] for name in columns}, []


def _class(images: Images, i: int) -> str | None:
    number = int(images.labels[i])
    return images.classes[number] if images.classes and 0 <= number < len(images.classes) else None


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
