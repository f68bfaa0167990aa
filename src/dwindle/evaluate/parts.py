"""Answers to a whole data set, streamed into one parquet file.

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
from ..settings import Batch, Whole1, Workers, fitted

PART = 2048  # rows; what a kill can cost

Columns = dict[str, list]


@dataclass(frozen=True)
class Reading:
    """How a data set is gone through, and which of several processes this is."""

    batch: int = 64
    workers: int = 0
    part: int = PART
    rank: int = 0
    world: int = 1
    limit: int | None = None

    def checked(self, out: str | os.PathLike, what: str) -> Path:
        """The file to write. what: goes into it."""
        path = Path(out)
        if path.is_dir() or path.suffix != ".parquet":
            raise DwindleError(f"--out {path}: {what} go to a file that ends in .parquet; name one.")
        fitted(self.batch, Batch, "batch", what)
        fitted(self.part, Whole1, "part", what)
        fitted(self.workers, Workers, "workers", what)
        if self.limit is not None and self.limit < 1:
            raise DwindleError(f"--limit {self.limit}: it must be at least 1.")
        return path

    def images(self, data: str) -> Images:
        images = open_images(data)
        return images if self.limit is None else images.select(np.arange(min(self.limit, len(images))))


class PartFiles:
    """Where the parts lie, and how they become one file."""

    def __init__(self, out: Path, images: int, part: int, identity: str, schema: Any) -> None:
        """identity: of what is asked and of whom. schema: pyarrow's, of the rows."""
        self.out, self.images, self.part, self.schema = out, images, part, schema
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
            pq.write_table(pa.table(columns, schema=self.schema), scratch)

    def join(self) -> None:
        """Wait for the other processes' parts, then one file of all, a row group for each."""
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
    """Of the model, its number format and the data: parts of two tasks never meet in one file. Files are told apart by
    their names, sizes and times; what is no file by its name. model: puts what tells the model apart into a digest."""
    files = _files(images)
    digest = hashlib.sha256(",".join(schema.names).encode() + (b"" if files else data.encode()))
    digest.update(b"" if dtype == "fp32" else dtype.encode())
    for path in files:
        about = path.lstat()
        digest.update(os.fsencode(path) + f" {about.st_size} {about.st_mtime_ns}\n".encode())
    model(digest)
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


def carried_out(
    task: PartFiles,
    images: Images,
    reading: Reading,
    answer: Callable[[Tensor], Columns],
    device: str,
    beside: Callable[[int], dict[str, Any]] = lambda i: {},
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the parts of this process that are missing, and on the first one the file. How many rows were there before.

    images: as the model takes them. answer: columns of a batch. beside: what else goes into an image's row.
    """
    rank, world = reading.rank, reading.world
    task.begin(rank)
    own = range(rank, task.count, world)
    missing = [k for k in own if not task.file(k).exists()]
    before = sum(len(task.rows(k)) for k in own) - sum(len(task.rows(k)) for k in missing)
    for k, columns, errors in _answers(images, task, missing, reading, answer, device, beside):
        task.write(k, columns, errors)
        if progress:
            progress(k, len(task.rows(k)))
    if rank == 0:
        task.join()
    return before


def left(task: PartFiles, reading: Reading) -> int:
    """Rows that this process still has to answer."""
    return sum(len(task.rows(k)) for k in range(reading.rank, task.count, reading.world) if not task.file(k).exists())


def _answers(
    images: Images,
    task: PartFiles,
    parts: list[int],
    reading: Reading,
    answer: Callable[[Tensor], Columns],
    device: str,
    beside: Callable[[int], dict[str, Any]],
) -> Iterator[tuple[int, Columns, list[dict[str, Any]]]]:
    step = reading.batch
    pieces = [list(task.rows(k)[i : i + step]) for k in parts for i in range(0, len(task.rows(k)), step)]
    loader = DataLoader(
        _Read(images), batch_sampler=pieces, num_workers=min(reading.workers, len(pieces)), collate_fn=_as_it_is
    )
    columns: Columns = {name: [] for name in task.schema.names}
    errors: list[dict[str, Any]] = []
    for rows in loader:
        good = [(i, name, x) for i, name, x, _ in rows if x is not None]
        errors += [{"row": i, "image": name, "reason": why} for i, name, _, why in rows if why is not None]
        if good:
            for name, values in answer(torch.stack([x for _, _, x in good]).to(device)).items():
                columns[name] += values
            for i, name, _ in good:
                for column, value in ({"row": i, "image": name, "class": _class(images, i)} | beside(i)).items():
                    columns[column].append(value)
        k, last = rows[-1][0] // task.part, rows[-1][0]
        if last == task.rows(k)[-1]:
            yield k, columns, errors
            columns, errors = {name: [] for name in columns}, []


def _class(images: Images, i: int) -> str | None:
    number = int(images.labels[i])
    return images.classes[number] if images.classes and 0 <= number < len(images.classes) else None
