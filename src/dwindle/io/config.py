"""The config of a checkpoint: what it may hold, and that it is as it was saved.

Two checksums tie a checkpoint together: `weights_sha256` is of the weights' file, so that config and weights belong to
each other, and `config_sha256` of what the config says, the first one included. Whoever edits a config by hand takes
`config_sha256` out of it. Checkpoints without checksums are read as they are.
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
LARGEST = 64 << 20  # bytes of a config, of which an ImageNet-21k's class names are not one
DAMAGED = "the checkpoint is damaged, take another copy"
OTHER_VERSION = "update dwindle, or take another copy"  # of a checkpoint that makes no sense here
SAVED = ("all", "method")


class Backbone(TypedDict):
    family: Word
    model: Word | None
    options: dict[str, Any] | None


class Method(TypedDict, total=False):
    name: Word | None
    options: dict[str, Any]
    trained: bool  # of older ones it is taken to be


class Config(TypedDict, total=False):
    format: int
    library: str
    backbone: Backbone
    method: Method
    head: dict[str, Any]  # of one for patches
    give_back: dict[str, Any]  # what stopped tokens get at the end
    saved: Literal["all", "method"]
    weights: Word  # 'float' or 'int8'
    extra: dict[str, Any]
    id: str  # of older ones: the same in the weights' file
    weights_sha256: str
    config_sha256: str


class Extra(TypedDict, total=False):
    """What is read again of what a checkpoint says besides; the rest is its owner's."""

    preprocess: dict[str, Any]
    classes: list[str] | None
    data: dict[str, Any]
    recipe: dict[str, Any]
    task: dict[str, Any]
    results: dict[str, Any]
    vocabulary: str | None
    promise: Promise


def read_config(folder: Path) -> dict[str, Any]:
    """Whole, unchanged, and every part of the type it must have; another library's as the family says that knows it."""
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
    """The config as JSON has it, with its checksum. Neither the order of its names nor its spaces count."""
    try:
        kept = json.loads(json.dumps({name: value for name, value in config.items() if name != "config_sha256"}))
        text = json.dumps(kept, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise DwindleError(f"The config is no JSON ({error}); give `extra` of plain numbers, texts, lists.") from error
    return kept | {"config_sha256": hashlib.sha256(text.encode()).hexdigest()}


def check_extra(extra: dict[str, Any]) -> None:
    """The parts that are read again, of their types."""
    known = Extra.__annotations__
    options({name: value for name, value in extra.items() if name in known}, Extra, "extra")
