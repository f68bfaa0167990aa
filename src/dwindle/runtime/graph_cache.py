"""Recorded graphs kept on disk, so that the next process need not record them again.

A file holds operations and no weights: the model brings its own, so an old file cannot answer by old weights. It is
found by a hash of all that the recording depends on, and read only if its checksum is right. $DWINDLE_CACHE names
another folder than the user's cache; `off` keeps nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.backbone import Backbone
from ..core.model import AdaptiveViT
from ..core.parts import of_a_library
from ..errors import DwindleError
from ..files import draft

MOST = 256  # files; a graph without weights takes a quarter of a megabyte
PACKAGES = ("torch", "timm", "transformers", "onnx", "onnxscript", "onnxruntime")
PROGRESS = ("trained", "held", "told", "progress")  # of a method: they change nothing about an answer

log = logging.getLogger("dwindle")


class Untold(Exception):
    """Something of the model cannot be put into words, so a graph of it is not kept."""


def folder() -> Path | None:
    """Where graphs are kept; None: nowhere."""
    chosen = os.environ.get("DWINDLE_CACHE")
    if chosen is not None:
        return None if chosen.lower() in ("", "0", "off", "none") else Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dwindle"


def read(key: str | None) -> bytes | None:
    """The graph kept under this key, if it is whole."""
    where = folder()
    if key is None or where is None:
        return None
    try:
        held = (where / f"{key}.onnx").read_bytes()
    except OSError:
        return None
    checksum, graph = held[:32], held[32:]
    if hashlib.sha256(graph).digest() != checksum:
        log.warning("'%s' is damaged and is recorded again.", where / f"{key}.onnx")
        return None
    return graph


def write(key: str | None, graph: bytes) -> None:
    """Keep a graph. A folder that cannot be written to is no reason to fail: the next process records again."""
    where = folder()
    if key is None or where is None:
        return
    with suppress(OSError, DwindleError):
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        with draft(where / f"{key}.onnx") as place:
            place.write_bytes(hashlib.sha256(graph).digest() + graph)
        kept = sorted(where.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST]:
            old.unlink(missing_ok=True)


def key_of(model: AdaptiveViT, **details: Any) -> str | None:
    """A hash of the model's structure, its settings, this code and these details; None: some of it cannot be told."""
    try:
        parts = [_module(model, name, part) for name, part in model.named_modules()]
        told = [_told(details), _versions(), _sources(), parts]
    except Untold as reason:
        log.info("The graph of this model is not kept: %s.", reason)
        return None
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@cache
def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return found


@cache
def _sources() -> str:
    """Of this code, as it may be edited without another version."""
    made = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        made.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return made.hexdigest()


PLAIN = frozenset(vars(nn.Module()))  # what torch itself keeps on a module


def _module(model: AdaptiveViT, name: str, module: nn.Module) -> list[Any]:
    """Everything a module's forward may read, apart from the values of its weights."""
    own = {key: value for key, value in vars(module).items() if key not in PLAIN}
    if module is model:  # its own are the backbone, which is the wrapped model, and what no forward reads
        own = {}
    if module is model.method:
        point = model.method.operating_point if model.method.per_image_point else None  # then an input of the graph
        own = {key: value for key, value in own.items() if key not in (*PROGRESS, point and point[0])}
    tensors = {
        key: None if value is None else [list(value.shape), str(value.dtype)]
        for key, value in (module._parameters | module._buffers).items()
    }
    return [name, _named(type(module)), tensors, {key: _told(value) for key, value in own.items()}]


def _told(value: Any) -> Any:
    """A value as JSON; the same for the same, in another process too."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (float, complex, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _told(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_told(each), sort_keys=True) for each in value)
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, partial):
        return [_told(value.func), _told(value.args), _told(value.keywords)]
    if isinstance(value, nn.Module):
        return _named(type(value))  # a module of the model is told by itself
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return _named(value)
    if isinstance(value, Backbone):
        return _named(type(value))
    if dataclasses.is_dataclass(value):
        return [_named(type(value)), _told(vars(value))]
    if callable(to_dict := getattr(value, "to_dict", None)) and of_a_library(type(value)):  # transformers' settings
        return [_named(type(value)), _told(to_dict())]
    raise Untold(f"it holds {value!r:.80}")


def _named(kind: Any) -> str:
    """A class or a function by its name, if that says all: it is a library's, and made with its module."""
    module, name = getattr(kind, "__module__", None) or "", getattr(kind, "__qualname__", "<lambda>")
    if not of_a_library(kind) or "<" in name:
        raise Untold(f"{module}.{name} is none of the libraries'")
    return f"{module}.{name}"
