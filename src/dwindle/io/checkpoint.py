"""Checkpoints: a folder (or Hub repository) of `config.json` and `model.safetensors`. Loading never runs code from it.

The weights keep their names: the ViT's are those of timm or Hugging Face, the method's begin with "method.", and those
of a head for patches with "dense_head.". With `what="method"` only what was added is saved, to be loaded beside the
original ViT.
"""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.registry import Family, families, family_named, family_of
from ..errors import DwindleError, brief, listed, printable, unknown
from ..files import packaged, put_weights, scratch
from .classes import known_classes
from .config import CONFIG, FORMAT, OTHER_VERSION, SAVED, check_extra, read_config, signed
from .download import download, is_hub_id
from .tokenizer import SUM, TOKENIZER, checksum

WEIGHTS = "model.safetensors"
ADDED = ("method.", "dense_head.", "give_back.")  # prefixes of the weights that the wrapped model does not have
Model = TypeVar("Model", bound=nn.Module)


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    what: str = "all",
    half: bool = False,
    extra: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint folder, and return its path. A new folder appears whole or not at all, even if the process is
    killed. In an existing folder weights and config are replaced one after the other; if a kill leaves the two of
    different models, `load` refuses them.

    what: 'all', or 'method' for only what the method added. half: store weights in float16.
    extra: JSON kept in the config (data, preprocessing, results); `load` sets it as `model.extra`.
    weights: the model's state dict, where it was gathered from several processes.

    A language model's tokenizer (`model.tokenizer`, the content of its tokenizer.json) is written beside the weights.
    """
    folder = Path(folder)
    if folder.is_file():
        raise DwindleError(f"{folder} is a file; a checkpoint is a folder, so give the name of a new one.")
    if what not in SAVED:
        raise unknown("choice of what to save", what, SAVED)
    config: dict[str, Any] = {
        "format": FORMAT,
        "library": "dwindle",
        **family_of(model).describe(model),
        "saved": what,
        "extra": {**_classes(model), **getattr(model, "extra", {}), **(extra or {})},
    }
    check_extra(config["extra"])
    tokenizer: bytes | None = getattr(model, "tokenizer", None)
    config |= {} if tokenizer is None else {SUM: checksum(tokenizer)}
    state = plain_names(model.state_dict() if weights is None else weights)
    chosen = {name: value for name, value in state.items() if what == "all" or name.startswith(ADDED)}
    stored = {name.removeprefix("vit."): _storable(value, half) for name, value in chosen.items()}
    signed(config)  # refuses values that JSON does not have, before anything is written
    with scratch(folder) as place:
        place.mkdir()
        put_weights(place / WEIGHTS, stored, {"format": "pt"})
        config = signed(config | {"weights_sha256": _sha256(place / WEIGHTS)})
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            (place / TOKENIZER).write_bytes(tokenizer)
        _swap_in(place, folder)
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _classes(model: Any) -> dict[str, Any]:
    """The class names of a Hugging Face or timm config, as `extra` keeps them, because a rebuilt model lacks them."""
    names = known_classes(model)
    return {} if names is None else {"classes": names}


def _swap_in(new: Path, folder: Path) -> None:
    """Put the folder `new` in the place of `folder`, and keep the other files of `folder`."""
    if not folder.exists():
        new.rename(folder)
        return
    for name in (WEIGHTS, TOKENIZER, CONFIG):  # the config last, so that it is never beside weights older than itself
        if (new / name).exists():
            os.replace(new / name, folder / name)


def _storable(value: Tensor, half: bool) -> Tensor:
    """A contiguous copy on the CPU. half: of floats in float16, scalars excepted."""
    value = value.detach().cpu()
    if half and value.is_floating_point() and value.dim():
        value = value.half()
    return value.contiguous().clone()


def load(source: str | os.PathLike[str], *, vit: nn.Module | None = None, revision: str | None = None) -> Any:
    """The model of a checkpoint, in eval mode, on the CPU.

    source: a folder, the name of a checkpoint that ships with Dwindle, or a Hub id.
    vit: put the weights into this model instead of building one; needed where only the method was saved.
    """
    folder = find(source, revision)
    config = read_config(folder)
    model: Any = family_named(config["backbone"]["family"]).load(folder, config, vit)
    model.extra = config.get("extra", {})
    return model.eval()


def load_as(kind: type[Model], source: str | os.PathLike[str], *, inner: nn.Module | None = None) -> Model:
    """`load` for models of this class; another family's checkpoint is refused by its name. inner: `vit` of `load`."""
    found = family_at(source)
    wanted = next(family for family in families() if issubclass(family.model, kind))
    if found is not wanted:
        commands = listed(found.commands)
        raise DwindleError(f"{source} is {found.one}, and this takes {wanted.many}; with it use dwindle {commands}.")
    model: Model = load(source, vit=inner)
    return model


def planned(make: Callable[[], Any], folder: Path) -> Any:
    """The model that `make` builds from the config, on the meta device: names and shapes without memory. If it fits the
    weights beside the config, it is no larger than they are, and is safe to build in memory."""
    with by_config(folder), torch.device("meta"), _Unfilled():
        return make()


class _Unfilled(TorchFunctionMode):
    """Skips the initialisation of weights, which on the meta device takes longer than all the rest."""

    draws = frozenset(("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (args or (kwargs["tensor"],))[0] if func.__name__ in self.draws else func(*args, **kwargs)


def check_method(own: Callable[[], Any], shape: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Refuse weights that do not fit the method (or router) of the config, before memory is taken for it.

    own: builds the method. shape: what it is bound to.
    """
    with by_config(folder), torch.device("meta"):
        method = own()
        try:
            method.bind(shape)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            return  # its `bind` computes with tensors' values, which the meta device lacks, so it cannot be checked
    check_fit(method, weights, folder)


def filled(model: Any, parts: Mapping[str, dict[str, Tensor]], folder: Path) -> Any:
    """The model, after loading these weights into its submodules. parts: weights by the submodule's name."""
    for name, weights in parts.items():
        fill(model.get_submodule(name), weights, folder)
    return model


@contextmanager
def by_config(folder: Path) -> Iterator[None]:
    """Turn errors in building a model into a refusal of its config."""
    try:
        yield
    except DwindleError as error:
        reason = str(error).removesuffix(".")
        raise DwindleError(
            f"{folder / CONFIG} has settings this version does not know, so that it cannot be built ({reason}); "
            f"{OTHER_VERSION}."
        ) from error
    except Exception as error:  # another library's constructor may raise anything
        reason = printable(str(error).partition("\n")[0])
        raise DwindleError(
            f"{folder / CONFIG} describes a model that cannot be built ({type(error).__name__}: {reason}); "
            f"{OTHER_VERSION}."
        ) from error


def shipped() -> dict[str, Path]:
    """Checkpoints that come with the package, by name."""
    return {folder.name: folder for folder in sorted(packaged("assets").iterdir()) if (folder / CONFIG).is_file()}


def find(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint, given by its path, a shipped name or a Hub id, which is downloaded."""
    if not isinstance(source, str | os.PathLike):
        raise DwindleError(f"{brief(source)} names no checkpoint; give a folder, a shipped name or a Hub id.")
    name = os.fspath(source)
    if os.path.isdir(name):  # unlike Path.is_dir, it takes names that no file can have
        return Path(name)
    if name in shipped():
        return shipped()[name]
    if os.path.exists(name):
        raise DwindleError(f"{name} is a file; a checkpoint is a folder holding {CONFIG} and {WEIGHTS}.")
    if not is_hub_id(name):
        hint = "give a folder, a shipped name (a wheel holds fewer than the repository) or a Hub id (owner/name)"
        raise unknown("checkpoint", name, shipped(), hint)
    return download(name, revision, [CONFIG, WEIGHTS, TOKENIZER])


def family_at(source: str | os.PathLike[str]) -> Family:
    """The family of a checkpoint, given by its path, a shipped name or a Hub id."""
    return family_named(read_config(find(source))["backbone"]["family"])


def is_checkpoint(name: str) -> bool:
    """Whether a name is a folder or a shipped checkpoint, or may be a Hub id."""
    return name in shipped() or os.path.isdir(name) or "/" in name


def read_both(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights beside this config; refused if they were not saved with it."""
    weights = read_weights(folder / WEIGHTS, config.get("weights_sha256"))
    if "weights_sha256" not in config:  # a checkpoint older than checksums: both files name the same id, or neither any
        with safe_open(folder / WEIGHTS, "pt") as file:
            saved = (file.metadata() or {}).get("id")
        if saved is not None and saved != config.get("id"):
            raise DwindleError(
                f"{folder} holds {CONFIG} and {WEIGHTS} of two different models, since saving one over the other was "
                "cut short; save it again, or take another copy."
            )
    return weights


def read_weights(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The weights of a safetensors file, by name. sha256: the checksum that the file must have."""
    if not path.is_file():
        raise DwindleError(f"{path} is missing; check the path, or take another copy of the checkpoint.")
    try:
        with path.open("rb") as file:
            if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise DwindleError(
                    f"{path} is not the file that {CONFIG} beside it was saved with: it is damaged or truncated, or "
                    "they are of two different models, as saving one over the other was cut short or is going on; "
                    "load it again, take another copy, or save the model again."
                )
            weights = load_file(path)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise DwindleError(f"{path} was replaced while it was read; load it again.")
    except DwindleError:
        raise
    except Exception as error:  # the header may hold anything
        raise DwindleError(
            f"{path} cannot be read ({type(error).__name__}: {printable(str(error))}): it is truncated or no "
            "safetensors file; take another copy."
        ) from error
    return plain_names(weights)


def plain_names(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights without the prefixes that DistributedDataParallel and torch.compile add to names."""
    names = [name.replace("_orig_mod.", "") for name in weights]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names, weights.values()))


def fill(module: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights into a module; all must fit. The module keeps its own precision, also where they are float16.

    source: where they are from, for errors.
    """
    check_fit(module, weights, source)
    module.load_state_dict(plain_names(weights))


def check_fit(module: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Refuse weights that are not those of the module by name and shape; the error names the first difference."""
    own, weights = module.state_dict(), plain_names(weights)
    missing, foreign = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [n for n in own.keys() & weights.keys() if _shape_and_type(own[n]) != _shape_and_type(weights[n])]
    if missing or foreign or wrong:
        what = (
            f"'{missing[0]}' is missing"
            if missing
            else f"{brief(foreign[0])} is not part of it"
            if foreign
            else f"'{wrong[0]}' is {_shape_and_type(weights[wrong[0]])}, not {_shape_and_type(own[wrong[0]])}"
        )
        raise DwindleError(
            f"{source} does not fit this {type(module).__name__}: {what}; it was saved from another model or method."
        )


def _shape_and_type(weight: Any) -> str:
    """A weight's shape, and its type unless it is a float: all floats may be loaded into one another."""
    if not isinstance(weight, Tensor):
        return type(weight).__name__
    kind = "" if weight.is_floating_point() else f" {weight.dtype}".replace("torch.", "")
    return f"{tuple(weight.shape)}{kind}"


NESTED = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")  # keys that training codes use


def load_vit_weights(vit: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """The ViT, after loading plain weights from a .safetensors, or from a .pth without running code from it."""
    path = Path(path)
    weights = read_weights(path) if path.suffix == ".safetensors" else _read_pickled(path)
    fill(vit, weights, path)
    return vit


def _read_pickled(path: Path) -> dict[str, Any]:
    """The weights of a .pth, under whichever key the training code put them; no code in it is run."""
    if not path.is_file():
        raise DwindleError(f"{path} does not exist; give a .safetensors or .pth file of weights.")
    try:
        with torch.serialization.safe_globals([Namespace]):  # the arguments of a training script: plain values
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DwindleError(
            f"{path} cannot be read as plain weights ({type(error).__name__}); convert it to safetensors."
        ) from error
    while isinstance(content, dict) and (key := next((n for n in NESTED if isinstance(content.get(n), dict)), None)):
        content = content[key]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        kind = type(content).__name__
        raise DwindleError(f"{path} holds a {kind}, not weights by name; give a model's state_dict().")
    return content
