"""Files that appear whole or not at all, also when the process is killed; folders that one process writes to; names."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import DwindleError

try:
    import fcntl
except ImportError:  # not a Unix: nothing is locked
    fcntl = None  # type: ignore[assignment]

SCRATCH = re.compile(r"\.[0-9a-f]{32}\.tmp")
LOCK = "lock"  # in a scratch folder: held by who writes there, so that others know whether he lives
_held: set[int] = set()  # open locks of this process


def shown(name: str) -> str:
    """A file's name as text that can be printed and stored: bytes that are no UTF-8 by their value."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def packaged(*parts: str) -> Path:
    """What comes with the package."""
    return Path(str(files("dwindle"))).joinpath(*parts)


def photographs() -> list[Path]:
    """Those that come with the package."""
    return sorted(packaged("assets", "photos").glob("*.jpg"))


def check_folder(out: Path, option: str = "--out") -> None:
    """That results can go there; best asked before the work."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise DwindleError(f"'{out}' cannot be a folder, '{there}' is a file; choose another {option}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DwindleError(f"'{there}' cannot be written to by this user; choose another {option}.")


def lock(path: Path, trusting: bool = True) -> int | None:
    """The file, open and locked by this process until it gives it back or ends, however it ends; None: another has it,
    or it is gone. trusting: take it, too, where the file system knows no locks."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(os.fstat(file), path.stat()) and (trusting or fcntl is not None)
    except (BlockingIOError, FileNotFoundError):  # somebody holds it, or did and took it away
        free = False
    except OSError:
        free = trusting
    if not free:
        os.close(file)
        return None
    _held.add(file)
    return file


def unlock(file: int) -> None:
    if file in _held:
        _held.remove(file)
        os.close(file)


def _forget() -> None:
    """In a process forked from this one, whose locks die with this one alone."""
    for file in list(_held):
        unlock(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that is full, or a place that may not be written to, in one sentence."""
    try:
        yield
    except OSError as error:
        raise DwindleError(
            f"'{path}' could not be written ({error.strerror or error}); make room for it, or choose another place."
        ) from error


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A name in a folder of its own beside `path`, for what shall take its place; afterwards the folder is gone.

    One that a killed process left there is removed, unless somebody holds its lock.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path.parent)
        place, file = _own_folder(path.parent)
        try:
            yield place / "new"
        finally:
            shutil.rmtree(place, ignore_errors=True)
            unlock(file)


def _own_folder(parent: Path) -> tuple[Path, int]:
    while True:
        place = parent / f".{uuid4().hex}.tmp"
        place.mkdir()
        if (file := lock(place / LOCK)) is not None:
            return place, file


def _remove_left(parent: Path) -> None:
    for entry in os.scandir(parent):
        if SCRATCH.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with suppress(OSError):
                if (file := lock(Path(entry.path) / LOCK, trusting=False)) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    unlock(file)


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A place to write to, which takes the place of `path` once it is written; in a folder that is made if need be."""
    with scratch(path) as place:
        yield place
        os.replace(place, path)


def write_text(path: Path, text: str) -> Path:
    with draft(path) as place:
        place.write_text(text, encoding="utf-8")
    return path


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    with draft(path) as place:
        put_weights(place, weights, metadata)
    return path


def put_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, readable as the umask says: safetensors itself lets only the owner."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(weights, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)
