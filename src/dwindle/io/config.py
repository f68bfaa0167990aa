"""The config of a checkpoint: what it may hold, and the check that it is unchanged since it was saved.

A checkpoint has two checksums: `weights_sha256` is that of the weights' file, so that config and weights belong
together, and `config_sha256` that of the config's content, the first one included. To edit a config by hand, remove its
`config_sha256`. Checkpoints without checksums are read as they are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, TypedDict

from ..core.registry import families
from ..errors import DwindleError, brief
from ..settings import Word, options
from .promise import Promise

CONFIG, FORMAT = "config.json", 1
LARGEST = 64 << 20  # bytes that a config may have, far more than ImageNet-21k's class names take
DAMAGED = "the checkpoint is damaged, take another copy"
OTHER_VERSION = "update dwindle, or take another copy"  # for a checkpoint that this version cannot build
SAVED = ("all", "method")


class Backbone(TypedDict):
    family: Word
    model: Word | None
    options: dict[str, Any] | None


class Method(TypedDict, total=False):
    name: Word | None
    options: dict[str, Any]
    trained: bool  # older checkpoints lack it, and count as trained


class Config(TypedDict, total=False):
    format: int
    library: str
    backbone: Backbone
    method: Method
    head: dict[str, Any]  # settings of a head for patches
    give_back: dict[str, Any]  # settings of the state that stopped tokens get at the end
    saved: Literal["all", "method"]
    weights: Word  # 'float' or 'int8'
    extra: dict[str, Any]
    id: str  # in older checkpoints, where the weights' file holds the same id
    weights_sha256: str
    tokenizer_sha256: str  # of tokenizer.json, where one is beside the weights
    config_sha256: str


class Extra(TypedDict, total=False):
    """The entries of `extra` that Dwindle reads; users may add others."""

    preprocess: dict[str, Any]
    classes: list[str] | None
    data: dict[str, Any]
    recipe: dict[str, Any]
    task: dict[str, Any]
    results: dict[str, Any]
    vocabulary: str | None
    promise: Promise


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, checked to be complete, unchanged and of the right types. Another library's config is
    translated by the family that knows it."""
    path = folder / CONFIG
    if not path.is_file():
        raise DwindleError(
            f"{folder} holds no {CONFIG}, so it is no Dwindle checkpoint; make one with dwindle.save(model, folder)."
        )
    config = _parsed(path)
    if isinstance(config, dict) and "library" not in config:
        config = next(filter(None, (family.foreign(config) for family in families())), config)
    if not isinstance(config, dict) or config.get("library") != "dwindle":
        raise DwindleError(f"{path} was not written by Dwindle; adapt the model it describes and save that.")
    if config.get("format") != FORMAT:
        raise DwindleError(
            f"{path} has format {brief(config.get('format'))}, this version reads {FORMAT}; update dwindle."
        )
    if config.get("config_sha256", "") != (signed(config)["config_sha256"] if "config_sha256" in config else ""):
        raise DwindleError(
            f"{path} was changed after it was saved; take another copy, or, if the change is meant, remove its "
            "config_sha256."
        )
    try:
        config = options(config, Config, CONFIG)
        check_extra(config.get("extra", {}))
    except DwindleError as error:
        raise DwindleError(f"{path} is not what Dwindle writes ({str(error).rstrip('.')}); {DAMAGED}.") from error
    parts = (("backbone", ("family", "model", "options")), ("method", ("name", "options")))
    if "saved" not in config or any(name not in config.get(part, ()) for part, names in parts for name in names):
        raise DwindleError(f"{path} lacks what describes the model; {DAMAGED}.")
    return config


def _parsed(path: Path) -> Any:
    if path.stat().st_size > LARGEST:
        raise DwindleError(f"{path} has {path.stat().st_size} bytes, a config up to {LARGEST}; {DAMAGED}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DwindleError(f"{path} is not valid JSON ({error}); {DAMAGED}.") from error
    except OSError as error:
        raise DwindleError(f"{path} cannot be read ({error.strerror}); check the path and who may read it.") from error


def signed(config: dict[str, Any]) -> dict[str, Any]:
    """The config as JSON reads it back, with its checksum, which ignores the order of names and spaces."""
    try:
        kept = json.loads(json.dumps({name: value for name, value in config.items() if name != "config_sha256"}))
        text = json.dumps(kept, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise DwindleError(f"The config is no JSON ({error}); give `extra` of plain numbers, texts, lists.") from error
    return kept | {"config_sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_extra(extra: dict[str, Any]) -> None:
    """Refuse values of the wrong type in the entries of `extra` that Dwindle reads."""
    known = Extra.__annotations__
    options({name: value for name, value in extra.items() if name in known}, Extra, "extra")
