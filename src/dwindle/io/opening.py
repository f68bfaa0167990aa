"""Open labelled images by name: a known data set, a folder, parquet files, or a Hub id."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import DwindleError, unknown
from ..files import shown
from .datasets import Images, from_file
from .folders import FORMS, class_folders, pick
from .parquet import MEMORY, Parquet, columns, from_cell, parquet_file, reading

KNOWN = ("cifar100", "imagenet", "places365")


def _from_array(pixels: np.ndarray, i: int) -> Image.Image:
    return Image.fromarray(pixels[i])  # pixels: (n, H, W, 3) uint8


def _from_hub(rows: Any, column: str, name: str, i: int) -> Image.Image:
    return from_cell(rows[i][column], f"in row {i} of '{name}'")


def open_data(name: str, split: str = "train", root: str | None = None, memory: int = MEMORY) -> Images:
    """Open a known data set, a folder, or a Hub id. Names are looked up under `root`, $DWINDLE_DATA or ./data.

    memory: parquet files of more bytes are streamed.
    """
    path = Path(name).expanduser()
    base = Path(root or os.environ.get("DWINDLE_DATA") or "data").expanduser()
    places = [base / path, path] if name in KNOWN else [path, base / path]
    if name == "cifar100":
        places.insert(1, base / "cifar-100-python")  # where torchvision's download into `base` puts it
    folder = next((p for p in places if p.exists()), None)
    if folder is not None:
        return _open_folder(folder, split, name, memory)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _open_hub(name, split)
    looked = "looked at " + ", ".join(f"'{p}'" for p in dict.fromkeys(places))
    hint = f"{looked}; set DWINDLE_DATA to the folder that holds it, or pass the folder itself"
    if name in KNOWN or path.name != name:
        raise DwindleError(f"Data set '{name}' was not found; {hint}.")
    raise unknown("data set", name, KNOWN, hint)


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
    names = np.array([os.fsencode(name) for name in found.names])  # one buffer; workers would copy a list of str
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


def _check_shards(files: list[Path], split: str, name: str) -> None:
    """Refuse shards of which one is missing or present twice, where the file names say how many there are."""
    parts = [found.groups() for path in files if (found := re.search(r"-(\d+)-of-(\d+)", path.stem))]
    if not parts:
        return
    total = int(parts[0][1])
    numbers = sorted(int(number) for number, _ in parts)
    if len(files) < total and len(set(numbers)) == len(files):
        raise DwindleError(f"'{name}' has {len(files)} of {total} '{split}' shards; fetch the missing ones.")
    if len({of for _, of in parts}) > 1 or len(parts) < len(files) or numbers != list(range(total)):
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
    image, label, classes = columns(parquet_file(files[0]).schema_arrow, name)
    parts = []
    for path in files:
        with reading(path):
            shard = parquet_file(path)
            if columns(shard.schema_arrow, str(path))[:2] != (image, label):
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
    """Class names from classes.json: a list of names, or of objects with a `name`; None if there is no such file."""
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
    image, label, classes = columns(rows.features.arrow_schema, name)
    raw = rows.cast_column(image, datasets.Image(decode=False))
    return Images(name, partial(_from_hub, raw, image, name), np.asarray(rows[label][:]), classes, chosen, splits)
