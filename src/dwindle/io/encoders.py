"""Open a vision transformer by name: timm's, a Hugging Face folder or a checkpoint. A folder's own code never runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ..core.method import Method, constructor, methods_by_name
from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError, printable, unknown
from ..settings import parameters
from .checkpoint import WEIGHTS, find, is_checkpoint, load_as, load_vit_weights, shipped
from .config import CONFIG
from .download import offline_if_unreachable
from .images import Preprocess

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # the numbers in Hugging Face's configs


def open_encoder(source: str, weights: str | None = None, image_size: int | None = None) -> AdaptiveViT | nn.Module:
    """The adapted model of a checkpoint; of any other source the plain model, not yet adapted. Both in eval mode.

    weights: for a timm name, a file or a folder that holds `model.safetensors`; None: those that timm fetches.
    image_size: for a timm name, the side of its images; None: the size the model was built for.
    """
    import timm

    if timm.is_model(source):
        vit = timm_vit(source, weights or "pretrained")
        return (vit if image_size is None else with_image_size(vit, image_size)).eval()
    if not is_checkpoint(source):
        hint = "give a timm model's name, a folder of Hugging Face's or a checkpoint"
        raise unknown("model or checkpoint", source, [*timm.list_models(), *shipped()], hint)
    for option, value in (("--weights", weights), ("--image-size", image_size)):
        if value is not None:
            raise DwindleError(f"{option} {value}: it is for a timm name, and {source} brings its own; leave it out.")
    folder = find(source)
    return load_as(AdaptiveViT, folder) if not _architectures(folder) else hugging_face_model(folder)


def timm_vit(name: str, weights: str | None, image_size: int | None = None, classes: int | None = None) -> Any:
    """timm's model of this name.

    weights: 'pretrained' (timm fetches them), a file or a folder; None: random weights. image_size: the side of its
    images, for random or fetched weights. classes: outputs of its head; None: as timm builds it.
    """
    import timm

    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models(), hint="timm.list_models('*vit*') names them")
    options: dict[str, Any] = {"img_size": image_size} if image_size else {}
    options |= {} if classes is None else {"num_classes": classes}
    if weights in (None, "pretrained"):
        pretrained = weights is not None
        try:
            with offline_if_unreachable() if pretrained else nullcontext():
                return timm.create_model(name, pretrained=pretrained, **options)
        except TypeError as error:
            raise DwindleError(
                f"{name} is no plain ViT that can be built with {options} ({error}); set another model."
            ) from error
        except (OSError, RuntimeError) as error:
            raise DwindleError(
                f"Weights for {name} could not be fetched ({type(error).__name__}); "
                "give a file with --weights PATH, or --set weights=PATH to dwindle train."
            ) from error
    vit: Any = timm.create_model(name)
    path = Path(str(weights))
    load_vit_weights(vit, path / WEIGHTS if path.is_dir() else path)
    return vit


def with_image_size(vit: Any, size: int) -> Any:
    """The same model set to square images of this side, with its position embedding resampled; refused if it cannot."""
    current = tuple(vit.patch_embed.img_size) if hasattr(vit, "patch_embed") else None
    if current == (size, size):
        return vit
    if not hasattr(vit, "set_input_size"):
        built = "another size" if current is None else str(current[0])
        raise DwindleError(
            f"image_size = {size}: {type(vit).__name__} was built for {built}; leave it out, or build the model for "
            "that size."
        )
    patch = vit.patch_embed.patch_size[0]
    if size < patch or size % patch:
        raise DwindleError(
            f"image_size = {size}: images are cut into patches of {patch} pixels; give a multiple of {patch}, such as "
            f"{max(round(size / patch), 1) * patch}."
        )
    vit.set_input_size(img_size=(size, size))
    return vit


def _architectures(folder: Path) -> list[str]:
    """The model classes that a Hugging Face config names; empty for a config of Dwindle's, or where there is none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) and config.get("library") != "dwindle" else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def hugging_face_model(folder: Path) -> nn.Module:
    """The model of a folder in Hugging Face's format, of the class that its config names, in eval mode."""
    try:
        import transformers
    except ImportError as error:
        raise DwindleError(
            f'{folder} holds a model of Hugging Face\'s; install what reads it with: pip install "dwindle[hf]"'
        ) from error

    name = _architectures(folder)[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise DwindleError(
            f"{folder} holds a {printable(name)}, which transformers {transformers.__version__} does not have, and a "
            "folder's own code is not run; give a model that it has."
        )
    try:
        with _without_bars():
            model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, trust_remote_code=False)
    except Exception as error:  # a config from anywhere may raise anything
        why = printable(str(error).partition("\n")[0])
        raise DwindleError(f"{folder} cannot be read by transformers ({why}); take another copy.") from error
    return model.eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within, transformers shows no progress: a bar among a command's messages is taken for one of them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def prepared_as(source: str) -> dict[str, Any]:
    """{"preprocess": ...}: the preprocessing that a Hugging Face folder states, as `extra` keeps it; else {}."""
    path = Path(source) / "preprocessor_config.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DwindleError(f"{path} is not valid JSON ({error}); take another copy.") from error
    if not isinstance(stated, dict) or not stated:
        return {}
    crop, size = stated.get("crop_size"), stated.get("size")
    side = _side(crop) if crop and stated.get("do_center_crop", True) else _side(size)
    fields: dict[str, Any] = {"size": side, "mean": stated.get("image_mean"), "std": stated.get("image_std")}
    fields["interpolation"] = RESAMPLING.get(stated.get("resample", 3), "bicubic")
    short = _side(size)
    fields["crop_pct"] = side / short if side and short and short >= side else None
    return {"preprocess": Preprocess(**{n: v for n, v in fields.items() if v is not None}).to_dict()}


def _side(size: Any) -> int | None:
    if isinstance(size, dict):
        return size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) else None


def adapted_encoder(
    source: str,
    weights: str | None = None,
    image_size: int | None = None,
    method: str | None = None,
    budget: float | None = None,
    by_itself: str = "ToMe.for_features",
) -> tuple[AdaptiveViT, bool]:
    """The adapted model, and whether it was adapted here: a plain model is, by a method that needs no training.

    method: what to adapt a plain model by; None: `by_itself`. budget: its share of the static cost; None: 0.5.
    """
    chosen = untrained(method or by_itself, budget)
    model = open_encoder(source, weights, image_size)
    if isinstance(model, AdaptiveViT):
        if method is not None:
            raise DwindleError(f"--method {method}: {source} is adapted already; leave it out.")
        return model, False
    adaptive = adapt(model, chosen)
    adaptive.extra = prepared_as(source) if Path(source).is_dir() else {}  # type: ignore[assignment]
    return adaptive, True


def untrained(name: str, budget: float | None = None) -> Method:
    """A method of this name, if it needs no training. budget: its share of the static cost; None: 0.5."""
    ready = {full_name: kind for full_name, kind in methods_by_name().items() if not kind.needs_training}
    if name not in ready:
        hint = "others are trained first" if name in Method.registry else ""
        raise unknown("method without training", name, ready, hint)
    if "budget" not in parameters(ready[name]):
        return ready[name]()
    return constructor(name)(budget=0.5 if budget is None else budget)
