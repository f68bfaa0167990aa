"""Checkpoints: a folder (or Hub repository) of `config.json` and `model.safetensors`. Loading never runs code from it.

The weights keep their names: those of the ViT as timm or Hugging Face call them, those of the method behind
"method.". With `what="method"` only the latter are saved, to be put beside an untouched ViT.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from .backbones.base import Backbone, backbone_of
from .classes import known_classes
from .errors import DwindleError, unknown
from .files import write_weights
from .int8 import is_int8, to_int8
from .methods import Method
from .model import AdaptiveViT, adapt

if TYPE_CHECKING:
    from .adaperceiver import AdaPerceiver

CONFIG, WEIGHTS, FORMAT = "config.json", "model.safetensors", 1
LANGUAGE = ("charlm", "hf_lm")  # families of language models
WEIGHT_KINDS = ("float", "int8")
OTHER_VERSION = "update dwindle, or take another copy"  # of a checkpoint that makes no sense here
OWN = "adaperceiver"  # the family of networks that are no conversion


def save(
    model: AdaptiveViT | AdaPerceiver,
    folder: str | os.PathLike,
    *,
    what: str = "all",
    half: bool = False,
    extra: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint folder. A new one appears whole or not at all, also when the process is killed. In one that is
    there already weights and config are replaced one after the other; `load` refuses those that a kill kept apart.

    what: 'all', or 'method' for only what the method added. half: store weights in float16.
    extra: JSON kept in the config (data, preprocessing, results); `load` hands it back as `model.extra`.
    weights: the model's state dict, where it was gathered from several processes.
    """
    folder = Path(folder)
    if folder.is_file():
        raise DwindleError(f"{folder} is a file; a checkpoint is a folder, so give the name of a new one.")
    if what not in ("all", "method"):
        raise unknown("choice of what to save", what, ("all", "method"))
    config = {
        "format": FORMAT,
        "library": "dwindle",
        **_described(model),
        "saved": what,
        "extra": {**_named(model), **getattr(model, "extra", {}), **(extra or {})},
    }
    state = model.state_dict() if weights is None else weights
    chosen = {name: value for name, value in state.items() if what == "all" or name.startswith("method.")}
    stored = {name.removeprefix("vit."): _storable(value, half) for name, value in chosen.items()}

    config["id"] = hashlib.sha256(json.dumps(config).encode()).hexdigest()  # which config and weights belong together

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.parent / f".{folder.name}-{uuid4().hex}"
    scratch.mkdir()
    try:
        (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_weights(scratch / WEIGHTS, stored, metadata={"format": "pt", "id": config["id"]})
        _swap_in(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _named(model: Any) -> dict[str, Any]:
    """What a Hugging Face or timm config calls the classes: what is rebuilt from ours would not know."""
    names = known_classes(model)
    return {} if names is None else {"classes": names}


def _described(model: Any) -> dict[str, Any]:
    """Which network, and which method on it. A network of its own is described by its settings alone."""
    if not hasattr(model, "method"):
        options = {"family": OWN, "model": type(model).__name__, "options": model.config}
        return {"backbone": options, "method": {"name": None, "options": {}}}
    before = getattr(model.backbone, "described", None)  # a language model's layers are not exchanged
    described = before or model.backbone.describe() or {"model": None, "options": None}
    config = {
        "backbone": {"family": model.backbone.family, **described},
        "method": {"name": type(model.method).__name__, "options": model.method.config},
    }
    return config | ({"weights": "int8"} if is_int8(model) else {})


def _swap_in(scratch: Path, folder: Path) -> None:
    """Put `scratch` in the place of `folder`, keeping other files that lie there."""
    if not folder.exists():
        scratch.rename(folder)
        return
    for name in (WEIGHTS, CONFIG):  # the weights first: a config never stands beside weights older than itself
        os.replace(scratch / name, folder / name)


def _storable(value: Tensor, half: bool) -> Tensor:
    value = value.detach().cpu()
    if half and value.is_floating_point() and value.dim():
        value = value.half()
    return value.contiguous().clone()


def load(source: str | os.PathLike, *, vit: nn.Module | None = None, revision: str | None = None) -> AdaptiveViT:
    """Read a checkpoint: a folder, the name of one that ships with Dwindle, or a Hub id. In eval mode, on the CPU.

    vit: put the weights into this model instead of building one; needed where only the method was saved.
    """
    folder = find(source, revision)
    config = read_config(folder)
    backbone, method = config["backbone"], config["method"]
    if backbone["family"] in LANGUAGE:
        from .lm.load import load_lm

        return load_lm(folder, lm=vit)  # type: ignore[return-value]  # an AdaptiveLM: lm/ stands beside the ViTs
    if backbone["family"] == OWN:
        return _own(folder, config)
    if method["name"] not in Method.registry:
        raise unknown("method", method["name"], Method.registry, hint=f"{folder / CONFIG} was saved with it")
    weights = read_both(folder, config)
    if vit is None:
        if config["saved"] == "method" or backbone["options"] is None:
            raise DwindleError(
                f"{folder} does not hold its {backbone['family']} backbone; pass the model it belongs to as vit=..."
            )
        families = {family.family: family for family in _families()}
        if backbone["family"] not in families:
            raise unknown("backbone family", backbone["family"], families)
        try:
            vit = families[backbone["family"]].rebuild(backbone)
        except (TypeError, RuntimeError, AssertionError) as error:
            described = f"{folder / CONFIG} describes a {backbone['model']}"
            raise DwindleError(f"{described} that cannot be built ({error}); {OTHER_VERSION}.") from error
    elif (family := backbone_of(vit).family) != backbone["family"]:
        raise DwindleError(
            f"{folder} belongs to a {backbone['family']} model, but vit is a {family} model; pass one it fits."
        )

    try:
        model = adapt(vit, Method.registry[method["name"]](**as_options(method["options"])))
    except TypeError as error:
        raise DwindleError(
            f"{folder / CONFIG} has settings this version's {method['name']} does not know ({error}); {OTHER_VERSION}."
        ) from error
    if config.get("weights", "float") not in WEIGHT_KINDS:
        raise unknown("kind of weights", config["weights"], WEIGHT_KINDS, hint=f"{folder / CONFIG} names it")
    if config.get("weights") == "int8":
        to_int8(model)
    fill(model.method, {n.removeprefix("method."): w for n, w in weights.items() if n.startswith("method.")}, folder)
    if config["saved"] == "all":
        fill(model.vit, {n: w for n, w in weights.items() if not n.startswith("method.")}, folder)
    model.extra = config.get("extra", {})  # type: ignore[assignment]
    return model.eval()


def load_halting(source: str | os.PathLike) -> AdaptiveViT:
    """A checkpoint of a vision transformer whose tokens halt; the others are refused by what they are."""
    model: Any = load(source)
    if isinstance(model, AdaptiveViT):
        return model
    if hasattr(model, "lm"):
        raise DwindleError(f"{source} is a language model and takes no images; use dwindle view, eval or generate.")
    raise DwindleError(
        f"{source} is an AdaPerceiver, whose tokens do not halt; use dwindle eval, bench, view, grid or policies."
    )


def _own(folder: Path, config: dict[str, Any]) -> Any:
    """An AdaPerceiver. Typed Any, as callers that take either kind ask which it is."""
    from .adaperceiver import AdaPerceiver

    options, weights = as_options(config["backbone"]["options"]), read_both(folder, config)
    try:
        model = AdaPerceiver(**options)
    except (TypeError, DwindleError) as error:
        reason = str(error).removesuffix(".")
        raise DwindleError(
            f"{folder / CONFIG} has settings this version does not know ({reason}); {OTHER_VERSION}."
        ) from error
    if "readouts" not in options:  # saved when there was one, which had no name
        nameless = ("write.", "output", "head.")
        weights = {f"readouts.0.{n}" if n.startswith(nameless) else n: w for n, w in weights.items()}
    fill(model, weights, folder)
    model.extra = config.get("extra", {})
    return model.eval()


def shipped() -> dict[str, Path]:
    """Checkpoints that come with the package, by name."""
    assets = Path(str(files("dwindle"))) / "assets"
    return {folder.name: folder for folder in sorted(assets.iterdir()) if (folder / CONFIG).is_file()}


def find(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder behind a path, a shipped name or a Hub id."""
    name = os.fspath(source)
    if Path(name).is_dir():
        return Path(name)
    if name in shipped():
        return shipped()[name]
    if Path(name).exists():
        raise DwindleError(f"{name} is a file; a checkpoint is a folder holding {CONFIG} and {WEIGHTS}.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise unknown("checkpoint", name, shipped(), hint="give a folder, a shipped name or a Hub id (owner/name)")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:
        raise DwindleError(
            f"'{name}' is no folder here and could not be fetched from the Hub ({type(error).__name__}); check the "
            "name, the network, or give a local folder."
        ) from error


def family_of(name: str) -> str | None:
    """The backbone's, of the folder, shipped name or Hub id of that name. None: it is none of these."""
    there = name in shipped() or Path(name).is_dir() or "/" in name
    return read_config(find(name))["backbone"]["family"] if there else None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise DwindleError(
            f"{folder} holds no {CONFIG}, so it is no Dwindle checkpoint; make one with dwindle.save(model, folder)."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise DwindleError(
            f"{path} is not valid JSON ({error}); the checkpoint is damaged, take another copy."
        ) from error
    if not isinstance(config, dict) or config.get("library") != "dwindle":
        raise DwindleError(f"{path} was not written by Dwindle; adapt the model it describes and save that.")
    if config.get("format") != FORMAT:
        raise DwindleError(f"{path} has format {config.get('format')}, this version reads {FORMAT}; update dwindle.")
    parts = (("backbone", ("family", "model", "options")), ("method", ("name", "options")))
    if "saved" not in config or any(name not in (config.get(part) or {}) for part, names in parts for name in names):
        raise DwindleError(f"{path} lacks what describes the model; the checkpoint is damaged, take another copy.")
    return config


def read_both(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that were saved with this config."""
    from safetensors import safe_open

    weights = read_weights(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, "pt") as file:
        saved = (file.metadata() or {}).get("id")
    if saved is not None and saved != config.get("id"):
        raise DwindleError(
            f"{folder} holds {CONFIG} and {WEIGHTS} of two different models, since saving one over the other was cut "
            "short; save it again, or take another copy."
        )
    return weights


def read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise DwindleError(f"{path} is missing; check the path, or take another copy of the checkpoint.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DwindleError(
            f"{path} cannot be read ({error}): it is truncated or no safetensors file; take another copy."
        ) from error


def fill(module: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Strict, with the first difference named. float16 is a way of storing: the module keeps its own precision."""
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [n for n in own.keys() & weights.keys() if _outline(own[n]) != _outline(weights[n])]
    if missing or foreign or wrong:
        what = (
            f"'{missing[0]}' is missing"
            if missing
            else f"'{foreign[0]}' is not part of it"
            if foreign
            else f"'{wrong[0]}' is {_outline(weights[wrong[0]])}, not {_outline(own[wrong[0]])}"
        )
        raise DwindleError(
            f"{folder} does not fit this {type(module).__name__}: {what}; it was saved from another model or method."
        )
    module.load_state_dict(weights)


def _outline(weight: Tensor) -> str:
    """Its shape; and that it is int8, where it is."""
    return f"{tuple(weight.shape)}{' int8' if weight.dtype == torch.int8 else ''}"


def as_options(options: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments from JSON, which knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _families() -> list[type[Backbone]]:
    from .backbones import hf, timm  # noqa: F401  (they register themselves)

    return Backbone.families


def load_vit_weights(vit: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Plain ViT weights from .safetensors, or from a legacy .pth without running code from it."""
    path = Path(path)
    if path.suffix == ".safetensors":
        weights = read_weights(path)
    else:
        if not path.is_file():
            raise DwindleError(f"{path} does not exist; give a .safetensors or .pth file of weights.")
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DwindleError(
                f"{path} cannot be read as plain weights ({type(error).__name__}); convert it to safetensors."
            ) from error
        weights = weights.get("model", weights.get("state_dict", weights))
    fill(vit, weights, path)
    return vit
