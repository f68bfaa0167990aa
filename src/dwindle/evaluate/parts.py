"""A model's outputs for a whole data set, streamed into one parquet file.

The rows are cut into parts. A part is written whole or not at all, so a killed run continues with the first missing
part, and no row is lost or doubled. Each of several processes (torchrun) takes its own parts. Processes exchange no
messages: they wait only for each other's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import DwindleError
from ..files import draft, write_text
from ..io.datasets import Images, from_file
from ..io.parquet import Parquet
from ..io.sets import open_images
from ..settings import Batch, Whole1, Workers, checked_value

PART = 2048  # rows of a part; a kill loses at most one part

Columns = dict[str, list]


@dataclass(frozen=True)
class Reading:
    """How a data set is read, and which of several processes this is."""

    batch: int = 64
    workers: int = 0
    part: int = PART  # rows of a part
    rank: int = 0
    world: int = 1  # processes
    limit: int | None = None  # only the first so many images; None: all

    def checked(self, out: str | os.PathLike, what: str) -> Path:
        """`out` as a path, if it and these settings can be used. what: the file's content, for the error."""
        path = Path(out)
        if path.is_dir() or path.suffix != ".parquet":
            raise DwindleError(f"--out {path}: {what} go to a file that ends in .parquet; name one.")
        checked_value(self.batch, Batch, "batch", what)
        checked_value(self.part, Whole1, "part", what)
        checked_value(self.workers, Workers, "workers", what)
        if self.limit is not None and self.limit < 1:
            raise DwindleError(f"--limit {self.limit}: it must be at least 1.")
        return path

    def images(self, data: str) -> Images:
        images = open_images(data)
        return images if self.limit is None else images.select(np.arange(min(self.limit, len(images))))


class PartFiles:
    """The files of the parts, and the file they are joined to."""

    def __init__(self, out: Path, images: int, part: int, identity: str, schema: Any) -> None:
        """images, part: rows in all and of a part. identity: see `identity`. schema: pyarrow's, of the rows."""
        self.out, self.images, self.part, self.schema = out, images, part, schema
        self.folder = out.with_name(f"{out.name}.parts")
        self.errors = out.with_name(f"{out.name}.errors.jsonl")
        self.task = {"images": images, "part": part, "task": identity}

    @property
    def count(self) -> int:
        """The number of parts."""
        return -(-self.images // self.part)

    def rows(self, k: int) -> range:
        return range(k * self.part, min((k + 1) * self.part, self.images))

    def file(self, k: int) -> Path:
        return self.folder / f"{k:08d}.parquet"

    def of_process(self, reading: Reading) -> range:
        """The parts that this process writes."""
        return range(reading.rank, self.count, reading.world)

    def finished(self) -> bool:
        """Whether `out` is written already. A file of another task is refused."""
        import pyarrow.parquet as pq

        if not self.out.exists():
            return False
        try:
            task = json.loads((pq.read_schema(self.out).metadata or {}).get(b"dwindle", b"null"))
        except (OSError, ValueError):
            task = None
        if task != self.task:
            raise DwindleError(
                f"{self.out} exists and holds something else than this checkpoint's answers to this data; move it away."
            )
        shutil.rmtree(self.folder, ignore_errors=True)  # it remains after a kill between joining and removing it
        return True

    def begin(self, rank: int) -> None:
        """Make the folder of the parts. A folder of another task is refused."""
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
        """Write a part. Its errors are written first, so that a part that exists has its errors beside it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        lines = "".join(json.dumps(error) + "\n" for error in errors)
        write_text(self.file(k).with_suffix(".jsonl"), lines)
        with draft(self.file(k)) as scratch:
            pq.write_table(pa.table(columns, schema=self.schema), scratch)

    def join(self) -> None:
        """Wait for the other processes' parts, then write all of them to one file, each as a row group."""
        import pyarrow.parquet as pq

        while not all(self.file(k).exists() for k in range(self.count)):
            time.sleep(0.5)
        schema = self.schema.with_metadata({**(self.schema.metadata or {}), b"dwindle": json.dumps(self.task)})
        with draft(self.errors) as scratch, scratch.open("w", encoding="utf-8") as to:
            for k in range(self.count):
                to.write(self.file(k).with_suffix(".jsonl").read_text(encoding="utf-8"))
        with draft(self.out) as scratch, pq.ParquetWriter(scratch, schema) as writer:
            for k in range(self.count):
                writer.write_table(pq.read_table(self.file(k)).cast(schema))
        shutil.rmtree(self.folder)

    def summary(self) -> dict[str, Any]:
        """The paths written and the numbers of rows, for JSON."""
        import pyarrow.parquet as pq

        failed = sum(1 for _ in self.errors.open()) if self.errors.exists() else 0
        return {
            "out": str(self.out),
            "errors": str(self.errors),
            "images": self.images,
            "rows": pq.read_metadata(self.out).num_rows,
            "failed": failed,
        }


def identity(model: Callable[[Any], None], data: str, images: Images, dtype: str, schema: Any) -> str:
    """A hash of the model, its number format, the columns and the data: parts of two tasks never get into one file.

    The images' files count by their names, sizes and times. Data that is no file counts by its name.
    model: adds the model's weights and settings to a digest.
    """
    files = _files(images)
    digest = hashlib.sha256(",".join(schema.names).encode() + (b"" if files else data.encode()))
    digest.update(b"" if dtype == "fp32" else dtype.encode())
    for path in files:
        status = path.lstat()
        digest.update(os.fsencode(path) + f" {status.st_size} {status.st_mtime_ns}\n".encode())
    model(digest)
    return digest.hexdigest()


def _files(images: Images) -> list[Path]:
    """The files that the images are read from; empty if they do not come from files."""
    source = images.source
    if isinstance(source, Parquet):
        return sorted({path.resolve() for path, _ in source.groups})
    if isinstance(source, partial) and source.func is from_file:
        folder = source.args[0].resolve()
        return [folder / os.fsdecode(name) for name in source.args[1]]
    return []


class _ReadImages(Dataset):
    """(index, name, tensor, None) for each image; (index, name, None, reason) for one that cannot be read."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __getitem__(self, i: int) -> tuple[int, str | None, Tensor | None, str | None]:
        name = None
        try:
            name = self.images.file(i)
            return i, name, self.images[i][0], None
        except (DwindleError, OSError, MemoryError) as error:
            return i, name, None, str(error) or type(error).__name__


def _uncollated(rows: list) -> list:
    return rows


def write_rows(
    task: PartFiles,
    images: Images,
    reading: Reading,
    compute: Callable[[Tensor], Columns],
    device: str,
    extra: Callable[[int], dict[str, Any]] = lambda i: {},
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write this process's missing parts; the first process then joins all parts. Returns the rows written before.

    images: with the model's transform. compute: the columns of a batch. extra: more columns of the image of this index.
    progress: called with each part's number and its rows.
    """
    task.begin(reading.rank)
    own = task.of_process(reading)
    missing = [k for k in own if not task.file(k).exists()]
    before = sum(len(task.rows(k)) for k in own) - sum(len(task.rows(k)) for k in missing)
    for k, columns, errors in _computed(images, task, missing, reading, compute, device, extra):
        task.write(k, columns, errors)
        if progress:
            progress(k, len(task.rows(k)))
    if reading.rank == 0:
        task.join()
    return before


def rows_left(task: PartFiles, reading: Reading) -> int:
    """How many rows this process still has to write."""
    return sum(len(task.rows(k)) for k in task.of_process(reading) if not task.file(k).exists())


def _computed(
    images: Images,
    task: PartFiles,
    parts: list[int],
    reading: Reading,
    compute: Callable[[Tensor], Columns],
    device: str,
    extra: Callable[[int], dict[str, Any]],
) -> Iterator[tuple[int, Columns, list[dict[str, Any]]]]:
    """The number, the columns and the errors of each of these parts."""
    step = reading.batch
    batches = [list(task.rows(k)[i : i + step]) for k in parts for i in range(0, len(task.rows(k)), step)]
    workers = min(reading.workers, len(batches))
    loader = DataLoader(_ReadImages(images), batch_sampler=batches, num_workers=workers, collate_fn=_uncollated)
    columns: Columns = {name: [] for name in task.schema.names}
    errors: list[dict[str, Any]] = []
    for rows in loader:
        good = [(i, name, x) for i, name, x, _ in rows if x is not None]
        errors += [{"row": i, "image": name, "reason": reason} for i, name, _, reason in rows if reason is not None]
        if good:
            for name, values in compute(torch.stack([x for _, _, x in good]).to(device)).items():
                columns[name] += values
            for i, name, _ in good:
                for column, value in ({"row": i, "image": name, "class": _class(images, i)} | extra(i)).items():
                    columns[column].append(value)
        k, last = rows[-1][0] // task.part, rows[-1][0]
        if last == task.rows(k)[-1]:
            yield k, columns, errors
            columns, errors = {name: [] for name in columns}, []


def _class(images: Images, i: int) -> str | None:
    """The data's name of the image's class; None: it has no label, or its class has no name."""
    number = int(images.labels[i])
    return images.classes[number] if images.classes and 0 <= number < len(images.classes) else None
