"""Folders of images: the files in them, which subfolders are classes, and which are splits."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import DwindleError, unknown
from ..files import shown

EVALUATION = ("validation", "val", "valid", "test")  # synonyms in the order they are tried: "test" often has no labels
SPLITS = ("train", *EVALUATION)
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMS = "expected class folders (folder/class_a/*.jpg, or folder/train/class_a/*.jpg) or Hugging Face parquet files."
PART_OF_A_SET = re.compile(
    r"(train|val|valid|validation|test|eval|dev|data)(ing|set)?([_-](256|large).*)?", re.IGNORECASE
)
# Places365 in its authors' (and torchvision's) layout: class folders below their first letter, val without folders.
PLACES = {
    "train": [f"data_{size}{kind}" for kind in ("", "_standard", "_challenge") for size in ("256", "large")],
    "val": ["val_256", "val_large"],
}
CATEGORIES, VAL_LIST = "categories_places365.txt", "places365_val.txt"
LISTS = ", ".join((CATEGORIES, VAL_LIST))

Identity = tuple[int, int]  # device and inode of a folder


class NoSplit(DwindleError):
    """The data set lacks the split asked for."""


@dataclass(frozen=True)
class Found:
    """Image files and their labels. split: which of the folder's `splits` they are; None where it has none."""

    root: Path
    names: list[str]  # relative to the root
    labels: list[int]
    classes: list[str]
    split: str | None = None
    splits: tuple[str, ...] = ()


def pick(split: str, there: list[str], name: str) -> str:
    """The split asked for; for a name of an evaluation split, the first of its synonyms that exists.

    there: the splits that exist. name: the data set's, for errors.
    """
    for word in (split, *(EVALUATION if split in EVALUATION else ())):
        if word in there:
            return word
    raise NoSplit(f"'{name}' has no split '{split}', it has {', '.join(there)}; ask for one of these.")


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def image_files(folder: Path, visited: set[Identity] | None = None) -> Iterator[str]:
    """Paths, relative to a folder, of the image files under it: its own in order, then those of its subfolders.

    Links are followed, but no subfolder is entered twice, nor one of `visited`, to which the folders are added. Pipes
    and devices are left out. A broken link is included, so that reading it gives an error.
    """
    visited = set() if visited is None else visited
    todo = [""]
    while todo:
        inner = todo.pop()
        at = folder / inner
        identity = _identity(at)
        if inner and identity in visited:
            continue
        visited.add(identity)
        entries = _entries(at)
        files = [e.name for e in entries if is_image(e.name) and (_is_file(e) or _leads_nowhere(e))]
        yield from (os.path.join(inner, name) for name in files)
        todo += [os.path.join(inner, e.name) for e in reversed(entries) if _is_dir(e) and not e.name.startswith(".")]


def subfolders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted, without hidden ones and links to the folder itself or one of its parents."""
    above = _above(folder)
    found = [e.name for e in _entries(folder) if not e.name.startswith(".") and _is_dir(e)]
    return [name for name in found if _identity(folder / name) not in above]


def _entries(folder: Path) -> list[os.DirEntry]:
    """What is in a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DwindleError(
            f"Cannot list the folder '{shown(str(folder))}' ({error.strerror}); make it readable, or give another."
        ) from error


def _identity(folder: Path) -> Identity:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def _above(folder: Path) -> set[Identity]:
    """The folder and its parents."""
    path = folder.resolve()
    return {_identity(part) for part in (path, *path.parents)}


def _is_dir(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _is_file(entry: os.DirEntry) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _leads_nowhere(entry: os.DirEntry) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def class_folders(folder: Path, split: str, name: str) -> Found:
    """The images of a folder of class folders, or of one of its splits."""
    if places := _places_parts(folder):
        return _places(folder, places, split, name)
    here = subfolders(folder)
    splits = {word.lower(): word for word in here if word.lower() in SPLITS}
    # A class may be called "train" too. Such folders are splits only if they hold class folders, or if all are splits.
    if splits and (len(splits) == len(here) or any(subfolders(folder / s) for s in splits.values())):
        chosen = pick(split, list(splits), name)
        part = folder / splits[chosen]
        # Labels are numbered by the training folders, so that a class missing from evaluation shifts nothing.
        classes = subfolders(folder / splits["train"] if "train" in splits else part)
        if extra := set(subfolders(part)) - set(classes):
            raise DwindleError(
                f"'{part}' has classes that 'train' lacks: {', '.join(map(shown, sorted(extra)[:5]))}; rename them."
            )
        return dataclasses.replace(_in_classes(part, classes), split=chosen, splits=tuple(splits))
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if here and all(PART_OF_A_SET.fullmatch(word) for word in here):
        raise DwindleError(
            f"'{name}' holds {', '.join(map(shown, here[:5]))}, which are parts of a data set and no classes; {FORMS}"
        )
    if here and all(len(word) == 1 for word in here):
        letters = [(letter, word) for letter in here for word in subfolders(folder / letter)]
        if letters and all(word.lower().startswith(letter.lower()) for letter, word in letters):
            return _by_letter(folder)
    return _in_classes(folder, here)


def _in_classes(part: Path, classes: list[str]) -> Found:
    """The images of a folder whose subfolders are these classes."""
    roots: dict[Identity, str] = {}
    for word in classes:
        if (part / word).is_dir() and (same := roots.setdefault(_identity(part / word), word)) != word:
            raise DwindleError(
                f"'{shown(str(part / same))}' and '{shown(word)}' are one folder, so its images would have two labels; "
                "remove the link."
            )
    names: list[str] = []
    labels: list[int] = []
    visited = _above(part) | roots.keys()
    for label, word in enumerate(classes):
        if not (part / word).is_dir():  # a class of the training folders that this split lacks
            continue
        found = [os.path.join(word, inner) for inner in image_files(part / word, visited)]
        names += found
        labels += [label] * len(found)
    if not names:
        hint = (
            f" Places365's {part.name} needs {LISTS} beside it: give the folder that holds them."
            if (part.name in PLACES["val"])
            else ""
        )
        raise DwindleError(f"'{part}' holds no images in class folders; {FORMS}{hint}")
    _check_depth(part, names)
    return Found(part, names, labels, classes)


def _check_depth(part: Path, names: list[str]) -> None:
    """Refuse a tree whose folders hold nothing but folders, because the classes may be the inner folders."""
    inner = {name.split(os.sep, 2)[1] for name in names if name.count(os.sep) > 1}
    if any(name.count(os.sep) == 1 for name in names) or len(inner) == 1:  # one: as in class/images/*.jpg
        return
    outer = {name.split(os.sep, 1)[0] for name in names}
    give = f"give '{shown(str(part / outer.pop()))}'" if len(outer) == 1 else "give the folder that holds the classes"
    raise DwindleError(
        f"The images of '{part}' lie a level deeper than its folders ({shown(names[0])}), so what a class is remains "
        f"open; {give}, or move the images up."
    )


def _places_parts(folder: Path) -> dict[str, Path]:
    """The folders of Places365's splits, by split; empty for another data set."""
    found = {split: [folder / word for word in words if (folder / word).is_dir()] for split, words in PLACES.items()}
    return {split: places[0] for split, places in found.items() if places}


def _places(folder: Path, parts: dict[str, Path], split: str, name: str) -> Found:
    """The images of one of Places365's splits."""
    chosen = pick(split, list(parts), name)
    part, listed = parts[chosen], _read_list(folder / CATEGORIES)
    classes = None if listed is None else [_place_name(word) for word, _ in sorted(listed, key=lambda row: row[1])]
    if chosen == "train":
        return dataclasses.replace(_by_letter(part, classes), split=chosen, splits=tuple(parts))
    rows = _read_list(folder / VAL_LIST)
    if classes is None or rows is None:
        raise DwindleError(
            f"'{part}' holds images without class folders, and what they show stands in {LISTS}; put these (from "
            f"filelist_places365-standard.tar) into '{folder}'."
        )
    there, (names, labels) = set(image_files(part)), zip(*rows)
    lacking = [name for name in names if name not in there]
    if lacking or max(labels) >= len(classes):
        what = f"names {lacking[0]}, which '{part}' lacks" if lacking else f"has the class {max(labels)}"
        raise DwindleError(f"'{folder / VAL_LIST}' {what}; take lists and images of the same set, whole.")
    return Found(part, list(names), list(labels), classes, chosen, tuple(parts))


def _read_list(path: Path) -> list[tuple[str, int]] | None:
    """The lines of a file, each a name and a number; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        rows = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
        found = [(name, int(number)) for name, number in rows]
    except ValueError as error:
        raise DwindleError(f"'{path}' is no list of names and numbers ({error}); fetch it again.") from error
    if not found or min(number for _, number in found) < 0:
        raise DwindleError(f"'{path}' is no list of names and numbers from 0 on; fetch it again.")
    return found


def _place_name(path: str) -> str:
    """The class of a path: '/b/bow_window/indoor' is bow_window/indoor."""
    return re.sub(r"^/?[a-z]/", "", path)


def _by_letter(part: Path, classes: list[str] | None = None) -> Found:
    """The images of class folders below folders of their first letter; every folder that holds images is a class.

    classes: all classes in order; None: those that are found, sorted.
    """
    names = list(image_files(part))
    words = [_place_name(os.path.dirname(name).replace(os.sep, "/")) for name in names]
    if not names:
        raise DwindleError(f"'{part}' holds no images; {FORMS}")
    classes = sorted(set(words)) if classes is None else classes
    number = {word: i for i, word in enumerate(classes)}
    if strange := next((word for word in words if word not in number), None):
        raise DwindleError(
            f"'{part}' has the class '{shown(strange)}', which {CATEGORIES} lacks; take both of one set."
        )
    return Found(part, names, [number[word] for word in words], classes)
