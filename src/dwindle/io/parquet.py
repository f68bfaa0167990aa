"""Images in the rows of parquet files, as on the Hub: their columns, and how much of them is held in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import DwindleError
from .images import CorruptImage, load_image

LABELS = ("fine_label", "label", "labels")
MEMORY = 2 << 30  # bytes of encoded images held at once


def from_cell(cell: dict | None, what: str) -> Image.Image:
    """Decode the image of a cell {bytes, path}. what: where it is, for errors."""
    if not cell or not (cell["bytes"] or cell["path"]):
        raise CorruptImage(f"There is no image {what}; remove that row.")
    return load_image(cell["bytes"] or cell["path"], what)


class Parquet:
    """Images in the rows of parquet shards. Row groups are cached in at most `memory` bytes; the least recently used is
    dropped first."""

    def __init__(self, files: list[Path], column: str, memory: int = MEMORY):
        metas = [(path, parquet_file(path).metadata) for path in files]
        self.groups = [(path, g) for path, meta in metas for g in range(meta.num_row_groups)]
        self.sizes, counts = [], []
        for _, meta in metas:
            leaves = [c for c in range(meta.num_columns) if meta.schema.column(c).path.startswith(f"{column}.")]
            for group in map(meta.row_group, range(meta.num_row_groups)):
                counts.append(group.num_rows)
                pages = sum(group.column(c).total_uncompressed_size for c in leaves)
                self.sizes.append(pages + 16 * group.num_rows)  # and arrow's offsets
        self.starts = np.cumsum([0, *counts])
        self.column, self.memory, self.room = column, memory, memory
        self.held: OrderedDict[int, Any] = OrderedDict()
        self.lock = Lock()

    def __getstate__(self) -> dict:  # a spawned worker reads the rows it needs instead of unpickling all
        return {name: value for name, value in self.__dict__.items() if name not in ("held", "lock")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.held, self.lock = OrderedDict(), Lock()

    @property
    def window(self) -> int:
        """Bytes of the row groups that are shuffled together, and so are in use at once."""
        return self.memory // 4

    def _group(self, g: int) -> Any:
        """The image column of row group g, from the cache or the file."""
        with self.lock:
            if g in self.held:
                self.held.move_to_end(g)
                return self.held[g]
            while self.held and sum(c.nbytes for c in self.held.values()) + self.sizes[g] > self.room:
                self.held.popitem(last=False)  # dropped before the read; a group larger than the room is held alone
            path, part = self.groups[g]
            with reading(path):
                table = parquet_file(path).read_row_group(part, columns=[self.column], use_threads=False)
            self.held[g] = table.column(self.column)
            return self.held[g]

    def _groups_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def fits(self, rows: np.ndarray) -> bool:
        """Whether the row groups of these rows fit in memory together."""
        return sum(self.sizes[g] for g in np.unique(self._groups_of(rows))) <= self.memory

    def warm(self, rows: np.ndarray) -> None:
        """Read the row groups of these rows into the cache."""
        for g in np.unique(self._groups_of(rows)):
            self._group(int(g))

    def windows(self, rows: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """The number of each row's window, when the row groups in random order fill one window after the other."""
        groups = self._groups_of(rows)
        touched = np.unique(groups)
        window_of = np.zeros(len(self.groups), dtype=np.int64)
        window = filled = 0
        for g in touched[torch.randperm(len(touched), generator=generator).numpy()]:
            if filled and filled + self.sizes[g] > self.window:
                window, filled = window + 1, 0
            window_of[g], filled = window, filled + self.sizes[g]
        return window_of[groups]

    def _cell(self, i: int) -> tuple[Any, int]:
        g = int(self._groups_of(np.array(i)))
        return self._group(g)[i - int(self.starts[g])], g

    def path(self, i: int) -> str | None:
        """The image's file name as stored in row i, if there is one."""
        cell, _ = self._cell(i)
        return cell["path"].as_py() if cell.is_valid and "path" in cell else None

    def __call__(self, i: int) -> Image.Image:
        cell, g = self._cell(i)
        return from_cell(cell.as_py(), f"in row {i} ('{self.groups[g][0]}')")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn arrow's errors in reading this file into a `DwindleError`."""
    try:
        yield
    except DwindleError:
        raise
    except (OSError, ValueError) as error:  # arrow's own errors derive from these, and may have several lines
        why = " ".join(str(error).split()).rstrip(".")
        raise DwindleError(f"Cannot read parquet file '{path}': {why}; download or write it again.") from error


def parquet_file(path: Path) -> Any:
    import pyarrow.parquet as pq

    with reading(path):
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)


def columns(schema: Any, name: str) -> tuple[str, str, list[str] | None]:
    """Image column, label column and class names of a Hugging Face arrow schema."""
    from pyarrow import types

    images = [f.name for f in schema if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0]
    integers = [f.name for f in schema if types.is_integer(f.type)]
    label = next((c for c in LABELS if c in integers), integers[0] if len(integers) == 1 else None)
    if not images or label is None:
        raise DwindleError(
            f"'{name}' has columns {', '.join(schema.names)}; "
            f"expected an image column of {{bytes, path}} and an integer column named {' or '.join(LABELS)}."
        )
    return images[0], label, _names_in(schema.metadata or {}, label)


def _names_in(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    """Class names in the metadata of Hugging Face's library; None where there are none in its form."""
    try:
        found: Any = json.loads(metadata.get(b"huggingface", b"{}"))
    except ValueError:
        return None
    for key in ("info", "features", label, "names"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None
