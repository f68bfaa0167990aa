"""Labelled images, found by name. images.py decodes and transforms them, batches.py serves them in batches."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import DwindleError, unknown
from ..files import shown
from .classes import Match, by_name, match
from .folders import FORMS, class_folders, pick
from .images import CorruptImage, Transform, load_image

KNOWN = ("cifar100", "imagenet", "places365")
LABELS = ("fine_label", "label", "labels")
MEMORY = 2 << 30  # bytes of encoded images held at once


Source = Callable[[int], Image.Image]  # decodes row i; worker processes can copy it


def from_file(folder: Path, paths: np.ndarray, i: int) -> Image.Image:
    return load_image(folder / os.fsdecode(paths[i]))


def _from_array(pixels: np.ndarray, i: int) -> Image.Image:
    return Image.fromarray(pixels[i])  # pixels: (n, H, W, 3) uint8


def _from_hub(rows: Any, column: str, name: str, i: int) -> Image.Image:
    return _from_cell(rows[i][column], f"in row {i} of '{name}'")


def _from_cell(cell: dict | None, what: str) -> Image.Image:
    if not cell or not (cell["bytes"] or cell["path"]):
        raise CorruptImage(f"There is no image {what}; remove that row.")
    return load_image(cell["bytes"] or cell["path"], what)


class Parquet:
    """Rows of parquet shards, held by row group in at most `memory` bytes: the group longest unused goes first."""

    def __init__(self, files: list[Path], column: str, memory: int = MEMORY):
        metas = [(path, _parquet_file(path).metadata) for path in files]
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

    def __getstate__(self) -> dict:  # a spawned worker reads its own rows rather than unpickling them all
        return {name: value for name, value in self.__dict__.items() if name not in ("held", "lock")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.held, self.lock = OrderedDict(), Lock()

    @property
    def window(self) -> int:
        """Bytes of the row groups that are shuffled together, and so are in use at once."""
        return self.memory // 4

    def _group(self, g: int) -> Any:
        with self.lock:
            if g in self.held:
                self.held.move_to_end(g)
                return self.held[g]
            while self.held and sum(c.nbytes for c in self.held.values()) + self.sizes[g] > self.room:
                self.held.popitem(last=False)  # before the read: a group larger than the room is held alone
            path, part = self.groups[g]
            with _reading(path):
                table = _parquet_file(path).read_row_group(part, columns=[self.column], use_threads=False)
            self.held[g] = table.column(self.column)
            return self.held[g]

    def _groups_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def fits(self, rows: np.ndarray) -> bool:
        return sum(self.sizes[g] for g in np.unique(self._groups_of(rows))) <= self.memory

    def warm(self, rows: np.ndarray) -> None:
        for g in np.unique(self._groups_of(rows)):
            self._group(int(g))

    def windows(self, rows: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """The window each row falls into, when the row groups in random order fill one window after the other."""
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
        """What the file says the image was called."""
        cell, _ = self._cell(i)
        return cell["path"].as_py() if cell.is_valid and "path" in cell else None

    def __call__(self, i: int) -> Image.Image:
        cell, g = self._cell(i)
        return _from_cell(cell.as_py(), f"in row {i} ('{self.groups[g][0]}')")


class Images(Dataset):
    """A map-style data set: `images[i]` is (RGB image or `transform` of it, label).

    split: which one of the data's `splits` these are; None where it has none. where: the same for people.
    match: how their labels became a model's.
    skip: whether corrupt images are skipped, by whoever reads in batches; None: who asks for these cannot choose.
    corrupt: those met, by their rows in the source, and why.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        labels: np.ndarray,
        classes: list[str] | None = None,
        split: str | None = None,
        splits: Iterable[str] = (),
    ):
        self.name, self.source, self.classes, self.split = name, source, classes, split
        self.splits = tuple(splits)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.num_classes = len(classes) if classes else int(self.labels.max(initial=-1)) + 1
        self.transform: Transform | None = None
        self.rows = np.arange(len(self.labels))
        self.where = f"split {split} of {name}" if split else f"all of {name}"
        self.match: Match | None = None
        self.skip: bool | None = None
        self.corrupt: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def about(self) -> dict[str, Any]:
        """Which images these are, for JSON, and how their labels were found."""
        on = f"{self.where}: {len(self) - len(self.corrupt):,} images"
        broken = {"corrupt": len(self.corrupt)} if self.corrupt else {}
        return {"on": on} | broken | (self.match.about() if self.match else {})

    def told(self) -> str:
        """The same for people."""
        broken = f" {len(self.corrupt)} corrupt ones are skipped." if self.corrupt else ""
        return f"{self.about()['on']}.{broken}" + (f" {self.match.told()}" if self.match else "")

    def row(self, i: int) -> int:
        """Where the source has image i."""
        return int(self.rows[i])

    def image(self, i: int) -> Image.Image:
        """The decoded image, before `transform`."""
        return self.source(self.row(i))

    def file(self, i: int) -> str | None:
        """What image i is called, where it is."""
        return self.file_of(self.row(i))

    def file_of(self, row: int) -> str | None:
        if isinstance(self.source, partial) and self.source.func is from_file:
            return shown(os.fsdecode(self.source.args[1][row]))
        return self.source.path(row) if isinstance(self.source, Parquet) else None

    def sample(self) -> Image.Image:
        """The first image that can be read, or whatever is wrong with the first."""
        for i in range(len(self)):
            try:
                return self.image(i)
            except CorruptImage as error:
                self.corrupt |= self.skipped(i, error)
        raise CorruptImage(f"None of the images of '{self.name}' can be read; give others.")

    def skipped(self, i: int, error: CorruptImage) -> dict[int, str]:
        """Image i, noted as corrupt; the error itself where those are not skipped."""
        if self.skip is not True:
            hint = "" if self.skip is None else "; --skip-corrupt (--set skip_corrupt=true) goes on without it"
            raise CorruptImage(f"{str(error).removesuffix('.')}{hint}.") from error
        return {self.row(i): str(error)}

    def corrupt_files(self) -> list[tuple[str, str]]:
        """Those skipped: what they are called, and what is wrong."""
        return [(self.file_of(row) or f"row {row}", why) for row, why in sorted(self.corrupt.items())]

    def instead_of(self, i: int) -> Iterator[int]:
        """Image i, then the following ones of its class, round to those before it."""
        yield i
        like = np.flatnonzero(self.labels == self.labels[i])
        at = int(np.searchsorted(like, i))
        yield from (int(j) for j in (*like[at + 1 :], *like[:at]))

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image = self.image(i)
        return (self.transform(image) if self.transform else image), int(self.labels[i])

    @property
    def streams(self) -> bool:
        """Whether the images are too many to hold at once, so that the order they are read in matters."""
        return isinstance(self.source, Parquet) and not self.source.fits(self.rows)

    def warm(self) -> None:
        """Read what threads and forked workers can then share."""
        if isinstance(self.source, Parquet) and not self.streams:
            self.source.warm(self.rows)

    def share_memory(self, workers: int) -> None:
        """In a worker: hold a worker's part of the memory, yet never less than what is shuffled together."""
        if isinstance(self.source, Parquet) and self.streams:
            self.source.room = max(self.source.memory // workers, self.source.window)

    def shuffled(self, generator: torch.Generator) -> np.ndarray:
        """Every index once, in random order; where images stream, window after window of row groups."""
        order = torch.randperm(len(self), generator=generator).numpy()
        if isinstance(self.source, Parquet) and self.streams:
            order = order[np.argsort(self.source.windows(self.rows, generator)[order], kind="stable")]
        return order

    def with_transform(self, transform: Transform) -> Self:
        """The same images, transformed; corrupt ones are noted for both."""
        made = copy.copy(self)
        made.transform = transform
        return made

    def select(self, indices: np.ndarray | slice) -> Self:
        """A view on some of the images; classes stay those of the whole."""
        part = copy.copy(self)
        part.rows, part.labels, part.corrupt = self.rows[indices], self.labels[indices], {}
        return part


Some = TypeVar("Some", bound=Images)


def limit(images: Some, n: int, seed: int | None = None) -> Some:
    """The first n images, or n drawn at random with `seed`; all of them when there are fewer."""
    if n < 1:
        raise DwindleError(f"Cannot limit '{images.name}' to {n} images; give a positive number.")
    if n >= len(images) and seed is None:
        return images
    order = np.arange(len(images)) if seed is None else np.random.default_rng(seed).permutation(len(images))
    part = images.select(order[:n])
    part.where = f"{'the first' if seed is None else 'some'} {len(part)} images of {images.where}"
    return part


def hold_out(images: Images, share: float, seed: int = 0) -> tuple[Images, Images]:
    """The images without a share of them, and that share: of each class as large a part as of the whole, within one."""
    n = len(images)
    if not 0 < share < 1 or n < 2:
        raise DwindleError(
            f"Cannot hold out {share} of the {n} images of '{images.name}'; give a share between 0 and 1."
        )
    rng = np.random.default_rng(seed)
    by_class = np.lexsort((rng.permutation(n), images.labels))
    count = min(max(round(share * n), 1), n - 1)
    # Evenly spaced along the classes laid end to end, so that classes of one image are sampled fairly too.
    held = np.zeros(n, dtype=bool)
    held[by_class[((np.arange(count) + rng.random()) * n / count).astype(np.int64)]] = True
    parts = images.select(np.flatnonzero(~held)), images.select(np.flatnonzero(held))
    whole = images.where.removeprefix("all of ")
    parts[0].where, parts[1].where = f"the rest of {whole}", f"{100 * share:g}% held out of {whole} by seed {seed}"
    return parts


def matched(images: Images, names: list[str] | None, count: int, owner: str = "the model") -> Images:
    """The images of the classes that are among `count`, perhaps with names, of a model's; labelled by its numbers."""
    high = int(images.labels.max(initial=-1))
    check_labels(images.labels, high + 1)
    if high >= images.num_classes:
        raise DwindleError(
            f"'{images.name}' holds label {high}, but names {images.num_classes} classes; complete them."
        )
    found = match(images.classes, images.num_classes, names, count, named=images.name, owner=owner)
    part = relabelled(images, found)
    part = part.select(np.flatnonzero(part.labels >= 0))
    if len(images) and not len(part):
        raise DwindleError(
            f"'{images.name}' has no image of a class that {owner} has too ({found.told()}); give other images."
        )
    part.classes, part.num_classes = names or (images.classes if found.same else None), count
    part.match = dataclasses.replace(found, left_out=len(images) - len(part))
    return part


def relabelled(images: Images, found: Match) -> Images:
    """All of them; -1 labels those of classes that have no number."""
    part = images.select(slice(None))
    part.labels = np.where(images.labels < 0, -1, found.numbers[images.labels])
    return part


def in_order(images: Images, names: list[str]) -> Images:
    """Numbered as a head does whose classes have these names, in another order; without names of their own by these."""
    if images.classes is None:
        part = images.select(slice(None))
        part.classes = names
        return part
    found = by_name(images.classes, names)
    part = relabelled(images, found)
    part.classes = [images.classes[i] for i in np.argsort(found.numbers)]
    return part


def check_labels(labels: Any, num_classes: int) -> None:
    """Refuse labels beyond `num_classes`."""
    labels = np.asarray(labels)
    low, high = int(labels.min(initial=0)), int(labels.max(initial=0))
    if low < 0:
        raise DwindleError(f"The data holds label {low}; labels start at 0; use a split that is labelled.")
    if high >= num_classes:
        raise DwindleError(
            f"The highest label in the data is {high}, but the head has {num_classes} classes; "
            f"use a model with at least {high + 1} classes, or data whose labels the head covers."
        )


def open_data(name: str, split: str = "train", root: str | None = None, memory: int = MEMORY) -> Images:
    """Open a known name, a folder, or a Hub id. Names are looked for under `root`, $DWINDLE_DATA or ./data.

    Parquet files of more than `memory` bytes stream.
    """
    given = Path(name).expanduser()
    base = Path(root or os.environ.get("DWINDLE_DATA") or "data").expanduser()
    places = [base / given, given] if name in KNOWN else [given, base / given]
    if name == "cifar100":
        places.insert(1, base / "cifar-100-python")  # where torchvision puts it when told to download into `base`
    folder = next((p for p in places if p.exists()), None)
    if folder is not None:
        return _open_folder(folder, split, name, memory)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _open_hub(name, split)
    looked = "looked at " + ", ".join(f"'{p}'" for p in dict.fromkeys(places))
    point = f"{looked}; set DWINDLE_DATA to the folder that holds it, or pass the folder itself"
    if name in KNOWN or given.name != name:
        raise DwindleError(f"Data set '{name}' was not found; {point}.")
    raise unknown("data set", name, KNOWN, point)


def _open_folder(folder: Path, split: str, name: str, memory: int) -> Images:
    if not folder.is_dir():
        raise DwindleError(f"'{folder}' is a file, not a folder; {FORMS}")
    for at in (folder, folder / "cifar-100-python"):
        if at.name == "cifar-100-python" and at.is_dir():
            return _open_cifar(at.parent, split, name)
    for at in (folder, folder / "data"):
        if shards := sorted(p for p in at.glob("*.parquet") if not p.name.startswith(".")):
            return _open_parquet(shards, split, name, memory)
    found = class_folders(folder, split, name)
    names = np.array(
        [os.fsencode(name) for name in found.names]
    )  # one buffer: workers would come to copy a list of str
    source = partial(from_file, found.root, names)
    return Images(name, source, np.array(found.labels), [*map(shown, found.classes)], found.split, found.splits)


def _open_cifar(root: Path, split: str, name: str) -> Images:
    from torchvision.datasets import CIFAR100  # verifies checksums before it unpickles

    splits = ["train", "test"]
    chosen = pick(split, splits, name)
    try:
        data = CIFAR100(str(root), train=chosen == "train")
    except RuntimeError as error:
        raise DwindleError(f"CIFAR-100 in '{root}' is incomplete or altered; download it again.") from error
    source = partial(_from_array, data.data)
    return Images(name, source, np.array(data.targets), list(data.classes), chosen, splits)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DwindleError:
        raise
    except (OSError, ValueError) as error:  # arrow's own errors derive from these, and may have lines
        why = " ".join(str(error).split()).rstrip(".")
        raise DwindleError(f"Cannot read parquet file '{path}': {why}; download or write it again.") from error


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet as pq

    with _reading(path):
        return pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)


def _columns(schema: Any, name: str) -> tuple[str, str, list[str] | None]:
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
    """Class names as Hugging Face's library notes them; None where they are not, or otherwise."""
    try:
        found: Any = json.loads(metadata.get(b"huggingface", b"{}"))
    except ValueError:
        return None
    for key in ("info", "features", label, "names"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


def _check_shards(files: list[Path], split: str, name: str) -> None:
    """Refuse shards of which one is missing or there twice, where they say how many they are."""
    told = [found.groups() for path in files if (found := re.search(r"-(\d+)-of-(\d+)", path.stem))]
    if not told:
        return
    total = int(told[0][1])
    numbers = sorted(int(number) for number, _ in told)
    if len(files) < total and len(set(numbers)) == len(files):
        raise DwindleError(f"'{name}' has {len(files)} of {total} '{split}' shards; fetch the missing ones.")
    if len({of for _, of in told}) > 1 or len(told) < len(files) or numbers != list(range(total)):
        named = ", ".join(path.name for path in files[:4]) + ", ..." * (len(files) > 4)
        raise DwindleError(
            f"The '{split}' files of '{name}' ({named}) are not the shards of one set, each once; remove those that "
            "do not belong there."
        )


def _open_parquet(shards: list[Path], split: str, name: str, memory: int) -> Images:
    splits: dict[str, list[Path]] = {}
    for path in shards:
        splits.setdefault(path.stem.split("-")[0], []).append(path)
    chosen = pick(split, list(splits), name)
    files = splits[chosen]
    _check_shards(files, split, name)
    image, label, classes = _columns(_parquet_file(files[0]).schema_arrow, name)
    parts = []
    for path in files:
        with _reading(path):
            shard = _parquet_file(path)
            if _columns(shard.schema_arrow, str(path))[:2] != (image, label):
                raise DwindleError(f"'{path}' has other columns than '{files[0].name}'; give shards of one data set.")
            column = shard.read(columns=[label]).column(label)
        if column.null_count:
            raise DwindleError(f"Column '{label}' of '{path}' has rows without a label; fill or remove them.")
        parts.append(column.to_numpy())
    if not sum(map(len, parts)):
        raise DwindleError(f"'{name}' has no image in its split '{chosen}'; give other data.")
    source = Parquet(files, image, memory)
    return Images(name, source, np.concatenate(parts), classes or _classes_beside(files[0].parent), chosen, splits)


def _classes_beside(folder: Path) -> list[str] | None:
    """Names from classes.json: a list of names, or of objects with a `name`."""
    path = folder / "classes.json"
    if not path.exists():
        return None
    try:
        return [str(c["name"] if isinstance(c, dict) else c) for c in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise DwindleError(f"'{path}' is not a JSON list of class names or of {{name}} objects; correct it.") from error


def _open_hub(name: str, split: str) -> Images:
    try:
        import datasets
    except ImportError as error:
        need = 'was taken for a Hub id, which needs: pip install "dwindle[hub]"'
        raise DwindleError(f"'{name}' is no folder here; it {need}.") from error
    try:
        splits = list(datasets.get_dataset_split_names(name))
        chosen = pick(split, splits, name)
        rows = datasets.load_dataset(name, split=chosen)
    except DwindleError:
        raise
    except Exception as error:  # the library raises a different type for each of missing, gated, offline, script
        raise DwindleError(f"Cannot open '{name}' from the Hub: {error}; check the id and the connection.") from error
    image, label, classes = _columns(rows.features.arrow_schema, name)
    raw = rows.cast_column(image, datasets.Image(decode=False))
    return Images(name, partial(_from_hub, raw, image, name), np.asarray(rows[label][:]), classes, chosen, splits)
