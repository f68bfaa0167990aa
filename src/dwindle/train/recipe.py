"""A recipe: everything a training run depends on. Recipes are Python functions that return one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import DwindleError, unknown
from ..methods import Method
from ..methods.base import require
from ..model import DISTILLATIONS, LAYOUTS
from ..ops.half import halves
from .augment import planner

PARALLELS = ("ddp", "fsdp")


@dataclass
class Recipe:
    """Defaults are AHT-ViT section 3.5 and DeiT's fine-tuning."""

    model: str = "deit_small_patch16_224"  # timm model name
    weights: str | None = "pretrained"  # 'pretrained' (timm's on the Hub), a .safetensors/.pth file, a checkpoint, None
    method: str = "AHT"
    method_options: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None  # None: the model's own

    epochs: int = 50
    batch: int = 256
    lr: float = 1e-4
    method_lr: float = 1e-3  # planners and scalars start from nothing, the backbone does not
    warmup_epochs: float = 1.0
    weight_decay: float = 0.05
    smoothing: float = 0.1
    clip: float = 1.0
    ema: float = 0.0  # decay of the average of the weights that is evaluated and saved; 0: no average
    freeze_backbone: bool = False
    amp: bool = True  # bf16 autocast on a GPU
    cpu_amp: bool = False  # the same on a CPU, one that multiplies in bf16 (AMD since Zen 4, Intel since Cooper Lake)
    layout: str = "masked"  # 'packed': only live tokens are computed; for methods whose decisions are hard in training
    compile: bool | None = None  # None: on a GPU, when the run is long enough to win the time back
    accumulate: int = 1  # micro-batches a batch is cut into
    parallel: str = "ddp"  # under torchrun: 'ddp', or 'fsdp' to spread the weights of a large backbone

    teacher: str | None = None  # 'static': the backbone as it was before training; or a checkpoint
    distill: str = "soft"  # 'soft' or 'hard' answers of the teacher; 'token': hard, on DeiT's distillation token
    teacher_weight: float = 1.0  # of the distillation beside the task loss
    teacher_temperature: float = 1.0
    label_weight: float = 1.0  # of the cross-entropy with the labels

    resident: bool | None = None  # data on the device as uint8; None: on a GPU, when it fits
    augment: str | None = "rand-m9-mstd0.5-inc1"  # timm's name of a RandAugment
    min_scale: float = 0.08
    jitter: float = 0.0  # of brightness, contrast and saturation
    erase: float = 0.25  # share of the images of which a rectangle is erased
    mixup: float = 0.0  # alpha of timm's Mixup and CutMix
    cutmix: float = 0.0
    mix_prob: float = 1.0  # share of the batches that are mixed
    views: int = 0  # epochs after which batches come again as they were, so that a teacher is asked once; 0: never
    skip_corrupt: bool = False  # images that cannot be read: others of their class in their place
    workers: int = 2
    seed: int = 0
    eval_every: int = 1  # epochs
    holdout: float = 0.1  # share of the training images to evaluate on, where the data has no others
    save_every: int = 1  # epochs; what a kill may cost, if they take less than a minute together

    def halves(self, device: torch.device) -> bool:
        """Whether training computes in bf16 on this device."""
        return halves(device, self.amp, self.cpu_amp)

    def check(self) -> None:
        """Settings that cannot work, before anything is read or written."""
        lowest = dict.fromkeys(("epochs", "batch", "eval_every", "save_every", "accumulate"), 1)
        lowest |= dict.fromkeys(("workers", "seed", "lr", "method_lr", "weight_decay", "clip", "warmup_epochs"), 0)
        require(
            self.teacher_temperature > 0,
            f"teacher_temperature = {self.teacher_temperature}",
            "answers are divided by it, so it must be above 0",
        )
        lowest |= dict.fromkeys(("mixup", "cutmix", "teacher_weight", "label_weight", "views"), 0)
        for name, low in lowest.items():
            require(getattr(self, name) >= low, f"{name} = {getattr(self, name)}", f"it must be at least {low}")
        require(0 <= self.holdout < 1, f"holdout = {self.holdout}", "it is a share, from 0 to below 1")
        require(self.seed < 2**32, f"seed = {self.seed}", "it must be below 2^32")
        for name in ("smoothing", "ema", "min_scale", "mix_prob", "jitter", "erase"):
            require(0 <= getattr(self, name) <= 1, f"{name} = {getattr(self, name)}", "it must lie between 0 and 1")
        for name, known in (("distill", DISTILLATIONS), ("parallel", PARALLELS), ("layout", tuple(LAYOUTS))):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        packed = self.layout == "packed"
        require(
            not (packed and self.compile), "compile = True", "packed rows are of any number; train with layout=masked"
        )
        mixes = bool(self.mixup or self.cutmix)
        require(not (mixes and self.batch % 2), f"batch = {self.batch}", "mixup pairs images, so it must be even")
        if self.augment is not None:
            named = self.augment.startswith("rand")
            require(named, f"augment = {self.augment}", "it names timm's RandAugment, such as rand-m9-mstd0.5-inc1")
            planner(self.augment, 224, (0.5, 0.5, 0.5), "bicubic")

    def runner(self) -> Any:
        """What trains it."""
        from .loop import Run

        return Run

    def make_method(self) -> Method:
        return made("method", self.method, Method.registry, self.method_options)


def made(role: str, name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The method (or router) of that name with these options, or what is wrong with them."""
    if name not in known:
        raise unknown(role, name, known)
    parameters = inspect.signature(known[name]).parameters
    for option in options:
        if option not in parameters:
            raise unknown(f"option of {name}", option, parameters)
    try:
        return known[name](**options)
    except DwindleError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{n}={v!r}" for n, v in options.items())
        raise DwindleError(
            f"{name}({given}) has a setting of the wrong type ({error}); see its constructor."
        ) from error


def changed(recipe: Any, settings: Iterable[str]) -> Any:
    """The recipe with `key=value` settings applied; `method.key=value` goes to the method."""
    fields = {f.name for f in dataclasses.fields(recipe)}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise DwindleError(f"--set {setting}: expected key=value, such as epochs=20 or method.budget=0.67.")
        value = _value(text)
        if key.startswith("method."):
            recipe = dataclasses.replace(
                recipe, method_options={**recipe.method_options, key.removeprefix("method."): value}
            )
        elif key in fields and key != "method_options":
            wanted = typing.get_type_hints(type(recipe))[key]
            kinds = set(typing.get_args(wanted) or (wanted,))
            if type(value) not in kinds | ({int} if float in kinds else set()):
                names = sorted("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise DwindleError(f"--set {setting}: {key} is {' or '.join(names)}, and '{text}' is not.")
            recipe = dataclasses.replace(recipe, **{key: value})
        else:
            raise unknown(
                "recipe setting", key, fields - {"method_options"}, hint="settings of the method are method.NAME"
            )
    return recipe


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def find_recipe(name: str) -> Callable[[], Recipe]:
    """A recipe function by name."""
    return _find(name, "recipe", "Recipe")


def find_comparison(name: str) -> Callable[[], Any]:
    """A comparison's function by name."""
    return _find(name, "comparison", "Comparison")


def _find(name: str, kind: str, returns: str) -> Callable[[], Any]:
    from .. import recipes
    from ..lm import recipes as language

    everything = {**vars(recipes), **vars(language)}
    kinds = getattr(recipes, returns), getattr(recipes, f"Ada{returns}"), getattr(language, f"LM{returns}")
    public = {n: f for n, f in everything.items() if inspect.isfunction(f) and not n.startswith("_")}
    known = {n: f for n, f in public.items() if f.__annotations__["return"] in kinds}
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]
