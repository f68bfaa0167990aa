"""Writing files and folders so that they appear whole or not at all, even if the process is killed; locks; names."""

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

SCRATCH = re.compile(r"\.[0-9a-f]{32}\.tmp")  # names of scratch folders
LOCK = "lock"  # a file in each scratch folder; the process that writes there locks it, which shows that it is alive
_locked: set[int] = set()  # file descriptors that this process has locked


def shown(name: str) -> str:
    """A file's name as text that can be printed and stored; bytes that are no UTF-8 are written as escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def packaged(*parts: str) -> Path:
    """The path of a file or folder that comes with the package."""
    return Path(str(files("dwindle"))).joinpath(*parts)


def photographs() -> list[Path]:
    """The paths of the photographs that come with the package."""
    return sorted(packaged("assets", "photos").glob("*.jpg"))


def check_folder(out: Path, option: str = "--out") -> None:
    """Refuse a folder that results cannot be written to; to be called before the work. option: its name in errors."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DwindleError(f"'{out}' cannot be a folder, '{existing}' is a file; choose another {option}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DwindleError(f"'{existing}' cannot be written to by this user; choose another {option}.")


def lock(path: Path, trusting: bool = True) -> int | None:
    """Open and lock a file, until `unlock` or the end of the process, however it ends. Returns its descriptor; None if
    another process holds the lock, or if the file is gone.

    trusting: where the file system has no locks, count the file as locked by this process.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(os.fstat(file), path.stat()) and (trusting or fcntl is not None)
    except (BlockingIOError, FileNotFoundError):  # another process holds the lock, or has removed the file
        free = False
    except OSError:
        free = trusting
    if not free:
        os.close(file)
        return None
    _locked.add(file)
    return file


def unlock(file: int) -> None:
    """Release a lock, given the descriptor that `lock` returned."""
    if file in _locked:
        _locked.remove(file)
        os.close(file)


def _close_inherited() -> None:
    """Close the locked files in a forked process, so that the locks end with the process that took them."""
    for file in list(_locked):
        unlock(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an error in writing to a path, such as a full disk, into a `DwindleError`."""
    try:
        yield
    except OSError as error:
        raise DwindleError(
            f"'{path}' could not be written ({error.strerror or error}); make room for it, or choose another place."
        ) from error


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A path to write to, in a new folder beside `path`, which is removed at the end.

    Folders that killed processes left beside `path` are removed too: those whose lock nobody holds.
    """
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        folder, file = _locked_folder(path.parent)
        try:
            yield folder / "new"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            unlock(file)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new scratch folder, and the descriptor of its lock."""
    while True:
        folder = parent / f".{uuid4().hex}.tmp"
        folder.mkdir()
        if (file := lock(folder / LOCK)) is not None:
            return folder, file


def _remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders of processes that ended."""
    for entry in os.scandir(parent):
        if SCRATCH.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with suppress(OSError):
                if (file := lock(Path(entry.path) / LOCK, trusting=False)) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    unlock(file)


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` at the end. The folder of `path` is made if it does not exist."""
    with scratch(path) as new:
        yield new
        os.replace(new, path)


def write_text(path: Path, text: str) -> Path:
    """Write a UTF-8 file, whole or not at all, and return its path."""
    with draft(path) as new:
        new.write_text(text, encoding="utf-8")
    return path


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Write a safetensors file, whole or not at all, and return its path."""
    with draft(path) as new:
        put_weights(new, weights, metadata)
    return path


def put_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions of the umask; safetensors itself gives them to the owner only."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(weights, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)
