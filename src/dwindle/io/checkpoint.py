"""Checkpoints: a folder (or Hub repository) of `config.json` and `model.safetensors`. Loading never runs code from it.

The weights keep their names: those of the ViT as timm or Hugging Face call them, those of the method behind
"method.", those of a head for patches behind "dense_head.". With `what="method"` only what was added is saved, to be
put beside an untouched ViT.
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
from .download import fetched, is_hub_id

WEIGHTS = "model.safetensors"
ADDED = ("method.", "dense_head.", "give_back.")  # so begin the names of weights that the wrapped model does not have
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
    """Write a checkpoint folder. A new one appears whole or not at all, also when the process is killed. In one that is
    there already weights and config are replaced one after the other; `load` refuses those that a kill kept apart.

    what: 'all', or 'method' for only what the method added. half: store weights in float16.
    extra: JSON kept in the config (data, preprocessing, results); `load` hands it back as `model.extra`.
    weights: the model's state dict, where it was gathered from several processes.
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
        "extra": {**_named(model), **getattr(model, "extra", {}), **(extra or {})},
    }
    check_extra(config["extra"])
    state = plain_names(model.state_dict() if weights is None else weights)
    chosen = {name: value for name, value in state.items() if what == "all" or name.startswith(ADDED)}
    stored = {name.removeprefix("vit."): _storable(value, half) for name, value in chosen.items()}
    signed(config)  # what is no JSON is refused before anything is written
    with scratch(folder) as place:
        place.mkdir()
        put_weights(place / WEIGHTS, stored, {"format": "pt"})
        config = signed(config | {"weights_sha256": _sha256(place / WEIGHTS)})
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _swap_in(place, folder)
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(model: Any) -> dict[str, Any]:
    """What a Hugging Face or timm config calls the classes: what is rebuilt from ours would not know."""
    names = known_classes(model)
    return {} if names is None else {"classes": names}


def _swap_in(made: Path, folder: Path) -> None:
    """Put the folder `made` in the place of `folder`, keeping other files that lie there."""
    if not folder.exists():
        made.rename(folder)
        return
    for name in (WEIGHTS, CONFIG):  # the weights first: a config never stands beside weights older than itself
        os.replace(made / name, folder / name)


def _storable(value: Tensor, half: bool) -> Tensor:
    value = value.detach().cpu()
    if half and value.is_floating_point() and value.dim():
        value = value.half()
    return value.contiguous().clone()


def load(source: str | os.PathLike[str], *, vit: nn.Module | None = None, revision: str | None = None) -> Any:
    """Read a checkpoint: a folder, the name of one that ships with Dwindle, or a Hub id. In eval mode, on the CPU.

    vit: put the weights into this model instead of building one; needed where only the method was saved.
    """
    folder = find(source, revision)
    config = read_config(folder)
    model: Any = family_named(config["backbone"]["family"]).load(folder, config, vit)
    model.extra = config.get("extra", {})
    return model.eval()


def load_as(kind: type[Model], source: str | os.PathLike[str], *, inner: nn.Module | None = None) -> Model:
    """`load`, where only models of this class will do; others are refused by what they are. inner: as `vit` there."""
    found = family_at(source)
    wanted = next(family for family in families() if issubclass(family.model, kind))
    if found is not wanted:
        own = listed(found.commands)
        raise DwindleError(f"{source} is {found.one}, and this takes {wanted.many}; with it use dwindle {own}.")
    model: Model = load(source, vit=inner)
    return model


def planned(make: Callable[[], Any], folder: Path) -> Any:
    """What `make` makes by the config, on the meta device: names and shapes without memory. What fits the weights that
    lie beside the config is no larger than these, and may be made."""
    with by_config(folder), torch.device("meta"), _Unfilled():
        return make()


class _Unfilled(TorchFunctionMode):
    """Nothing is drawn for weights that are only shapes: on the meta device that takes longer than all the rest."""

    draws = frozenset(("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (args or (kwargs["tensor"],))[0] if func.__name__ in self.draws else func(*args, **kwargs)


def check_method(own: Callable[[], Any], shape: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """That the method (or router) has these weights, before memory is taken for it."""
    with by_config(folder), torch.device("meta"):
        method = own()
        try:
            method.bind(shape)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            return  # it computes with tensors as it is bound: then it is made as it is
    check_fit(method, weights, folder)


def filled(model: Any, parts: Mapping[str, dict[str, Tensor]], folder: Path) -> Any:
    """With these weights in its submodules of these names."""
    for name, weights in parts.items():
        fill(model.get_submodule(name), weights, folder)
    return model


@contextmanager
def by_config(folder: Path) -> Iterator[None]:
    """What cannot be made is the config's fault: of this library's classes, which say so, or of another's."""
    try:
        yield
    except DwindleError as error:
        reason = str(error).removesuffix(".")
        raise DwindleError(
            f"{folder / CONFIG} has settings this version does not know, so that it cannot be built ({reason}); "
            f"{OTHER_VERSION}."
        ) from error
    except Exception as error:  # a backbone's own constructor may raise anything
        reason = printable(str(error).partition("\n")[0])
        raise DwindleError(
            f"{folder / CONFIG} describes a model that cannot be built ({type(error).__name__}: {reason}); "
            f"{OTHER_VERSION}."
        ) from error


def shipped() -> dict[str, Path]:
    """Checkpoints that come with the package, by name."""
    return {folder.name: folder for folder in sorted(packaged("assets").iterdir()) if (folder / CONFIG).is_file()}


def find(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder behind a path, a shipped name or a Hub id."""
    if not isinstance(source, str | os.PathLike):
        raise DwindleError(f"{brief(source)} names no checkpoint; give a folder, a shipped name or a Hub id.")
    name = os.fspath(source)
    if os.path.isdir(name):  # unlike Path, it knows of names that no file can have
        return Path(name)
    if name in shipped():
        return shipped()[name]
    if os.path.exists(name):
        raise DwindleError(f"{name} is a file; a checkpoint is a folder holding {CONFIG} and {WEIGHTS}.")
    if not is_hub_id(name):
        hint = "give a folder, a shipped name (a wheel holds fewer than the repository) or a Hub id (owner/name)"
        raise unknown("checkpoint", name, shipped(), hint)
    return fetched(name, revision, [CONFIG, WEIGHTS])


def family_at(source: str | os.PathLike[str]) -> Family:
    """Of the checkpoint at a path, of a shipped name or a Hub id."""
    return family_named(read_config(find(source))["backbone"]["family"])


def is_checkpoint(name: str) -> bool:
    """Whether a name is that of a folder, of what ships, or may be one on the Hub."""
    return name in shipped() or os.path.isdir(name) or "/" in name


def read_both(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that were saved with this config."""
    weights = read_weights(folder / WEIGHTS, config.get("weights_sha256"))
    if "weights_sha256" not in config:  # of before there were any, both name the same id, or neither one
        with safe_open(folder / WEIGHTS, "pt") as file:
            saved = (file.metadata() or {}).get("id")
        if saved is not None and saved != config.get("id"):
            raise DwindleError(
                f"{folder} holds {CONFIG} and {WEIGHTS} of two different models, since saving one over the other was "
                "cut short; save it again, or take another copy."
            )
    return weights


def read_weights(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """By name. sha256: what the file's bytes must have."""
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
    """Without what DistributedDataParallel and torch.compile put before the names of what they wrap."""
    names = [name.replace("_orig_mod.", "") for name in weights]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names, weights.values()))


def fill(module: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Strict, with the first difference named. float16 is a way of storing: the module keeps its own precision."""
    check_fit(module, weights, source)
    module.load_state_dict(plain_names(weights))


def check_fit(module: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    own, weights = module.state_dict(), plain_names(weights)
    missing, foreign = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    wrong = [n for n in own.keys() & weights.keys() if _outline(own[n]) != _outline(weights[n])]
    if missing or foreign or wrong:
        what = (
            f"'{missing[0]}' is missing"
            if missing
            else f"{brief(foreign[0])} is not part of it"
            if foreign
            else f"'{wrong[0]}' is {_outline(weights[wrong[0]])}, not {_outline(own[wrong[0]])}"
        )
        raise DwindleError(
            f"{source} does not fit this {type(module).__name__}: {what}; it was saved from another model or method."
        )


def _outline(weight: Any) -> str:
    """Its shape; and its type, where that is no way of storing the same numbers."""
    if not isinstance(weight, Tensor):
        return type(weight).__name__
    kind = "" if weight.is_floating_point() else f" {weight.dtype}".replace("torch.", "")
    return f"{tuple(weight.shape)}{kind}"


NESTED = ("model", "state_dict", "model_state_dict", "model_ema", "state_dict_ema")  # where training codes put them


def load_vit_weights(vit: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Plain ViT weights from .safetensors, or from a legacy .pth without running code from it."""
    path = Path(path)
    weights = read_weights(path) if path.suffix == ".safetensors" else _read_pickled(path)
    fill(vit, weights, path)
    return vit


def _read_pickled(path: Path) -> dict[str, Any]:
    """The weights of a .pth, wherever in it the training code put them; nothing of it is run."""
    if not path.is_file():
        raise DwindleError(f"{path} does not exist; give a .safetensors or .pth file of weights.")
    try:
        with torch.serialization.safe_globals([Namespace]):  # the arguments of a training script: plain values
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DwindleError(
            f"{path} cannot be read as plain weights ({type(error).__name__}); convert it to safetensors."
        ) from error
    while isinstance(held, dict) and (inner := next((n for n in NESTED if isinstance(held.get(n), dict)), None)):
        held = held[inner]
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise DwindleError(f"{path} holds a {type(held).__name__}, not weights by name; give a model's state_dict().")
    return held
