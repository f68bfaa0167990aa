"""Recorded graphs kept on disk, so that the next process need not record them again.

A file holds operations and no weights. The model supplies its own weights, so an old file cannot use old ones. The
file's name is a hash of everything the recording depends on, and a file is used only if its checksum is right.
$DWINDLE_CACHE names another folder than the user's cache; with `off` nothing is kept.
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

MAX_FILES = 256  # a graph without weights takes a quarter of a megabyte
PACKAGES = ("torch", "timm", "transformers", "onnx", "onnxscript", "onnxruntime")
PROGRESS = ("trained", "budget_held", "warned", "progress")  # attributes of a method that do not change its output

log = logging.getLogger("dwindle")


class NotDescribable(Exception):
    """Part of the model cannot be described as JSON, so its graph is not kept."""


def folder() -> Path | None:
    """The folder of the graphs; None: none are kept."""
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
    """The graph kept under this key; None if there is none or its checksum is wrong."""
    cache = folder()
    if key is None or cache is None:
        return None
    path = cache / f"{key}.onnx"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, graph = content[:32], content[32:]
    if hashlib.sha256(graph).digest() != checksum:
        log.warning("'%s' is damaged and is recorded again.", path)
        return None
    return graph


def write(key: str | None, graph: bytes) -> None:
    """Keep a graph. If the folder cannot be written to, nothing is raised: the next process records again."""
    cache = folder()
    if key is None or cache is None:
        return
    with suppress(OSError, DwindleError):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with draft(cache / f"{key}.onnx") as path:
            path.write_bytes(hashlib.sha256(graph).digest() + graph)
        files = sorted(cache.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
        for oldest in files[:-MAX_FILES]:
            oldest.unlink(missing_ok=True)


def key_of(model: AdaptiveViT, **details: Any) -> str | None:
    """A hash of the model's structure, its settings, this code and `details`; None: part of it cannot be described."""
    try:
        modules = [_described_module(model, name, module) for name, module in model.named_modules()]
        description = [_described(details), _versions(), _sources(), modules]
    except NotDescribable as reason:
        log.info("The graph of this model is not kept: %s.", reason)
        return None
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


@cache
def _versions() -> list[str]:
    versions = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return versions


@cache
def _sources() -> str:
    """A hash of Dwindle's source files, which may be edited without a new version."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


TORCHS_OWN = frozenset(vars(nn.Module()))  # the attributes that torch sets on every module


def _described_module(model: AdaptiveViT, name: str, module: nn.Module) -> list[Any]:
    """Everything a module's forward may read, except the values of its weights."""
    own = {key: value for key, value in vars(module).items() if key not in TORCHS_OWN}
    if module is model:  # its attributes are the backbone, which is described as the wrapped model, and unused ones
        own = {}
    if module is model.method:
        point = model.method.operating_point if model.method.per_image_point else None  # it is an input of the graph
        own = {key: value for key, value in own.items() if key not in (*PROGRESS, point and point[0])}
    tensors = {
        key: None if value is None else [list(value.shape), str(value.dtype)]
        for key, value in (module._parameters | module._buffers).items()
    }
    return [name, _qualified_name(type(module)), tensors, {key: _described(value) for key, value in own.items()}]


def _described(value: Any) -> Any:
    """A value as JSON. Equal values give equal JSON, in other processes too."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (float, complex, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_described(each), sort_keys=True) for each in value)
    if isinstance(value, Tensor):
        return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, partial):
        return [_described(value.func), _described(value.args), _described(value.keywords)]
    if isinstance(value, nn.Module):
        return _qualified_name(type(value))  # `key_of` describes every module of the model itself
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
        return _qualified_name(value)
    if isinstance(value, Backbone):
        return _qualified_name(type(value))
    if dataclasses.is_dataclass(value):
        return [_qualified_name(type(value)), _described(vars(value))]
    if callable(to_dict := getattr(value, "to_dict", None)) and of_a_library(type(value)):  # transformers' settings
        return [_qualified_name(type(value)), _described(to_dict())]
    raise NotDescribable(f"it holds {value!r:.80}")


def _qualified_name(kind: Any) -> str:
    """The full name of a class or function. It must come from a library and be defined at module level: then its name
    determines it."""
    module, name = getattr(kind, "__module__", None) or "", getattr(kind, "__qualname__", "<lambda>")
    if not of_a_library(kind) or "<" in name:
        raise NotDescribable(f"{module}.{name} is none of the libraries'")
    return f"{module}.{name}"
