"""Files that appear whole or not at all, also when the process is killed; and their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from .errors import DwindleError

if TYPE_CHECKING:
    from torch import Tensor


def shown(name: str) -> str:
    """A file's name as text that can be printed and stored: bytes that are no UTF-8 by their value."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_folder(out: Path, option: str = "--out") -> None:
    """That results can go there; best asked before the work."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise DwindleError(f"'{out}' cannot be a folder, '{there}' is a file; choose another {option}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DwindleError(f"'{there}' cannot be written to by this user; choose another {option}.")


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A place to write to, which takes the place of `path` once it is written; in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{uuid4().hex}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    with draft(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
    return path


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file, readable as the umask says: safetensors itself lets only the owner."""
    from safetensors.torch import save_file

    with draft(path) as scratch:
        scratch.touch()
        mode = scratch.stat().st_mode
        save_file(weights, scratch, metadata)
        scratch.chmod(mode)
    return path
