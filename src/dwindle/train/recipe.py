"""A recipe: everything a training run depends on. Recipes are Python functions that return one."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch

from ..core.losses import DISTILLATIONS
from ..core.method import require
from ..errors import DwindleError, unknown
from ..io.augment import planner
from ..methods import Method
from ..ops.half import halves
from ..settings import Above0, AtLeast0, Batch, ImageSize, Seed, Share, Whole0, Whole1, Within, Workers, check_fields
from ..tasks.base import task_named
from .learner import Learner
from .vit import ViTLearner

Layout = Literal["masked", "packed"]
Parallel = Literal["ddp", "fsdp"]


@dataclass
class Training:
    """The settings that the trainer reads, for any model. A family's recipe adds its own settings."""

    task: str = "classify"
    method: str = "AHT"
    method_options: dict[str, Any] = field(default_factory=dict)
    batch: Batch = 256
    lr: AtLeast0 = 1e-4
    weight_decay: AtLeast0 = 0.05
    clip: AtLeast0 = 1.0
    ema: Share = 0.0  # decay of the average of the weights that is evaluated and saved; 0: no average
    amp: bool = True  # bf16 autocast on a GPU
    cpu_amp: bool = False  # the same on a CPU, one that multiplies in bf16 (AMD since Zen 4, Intel since Cooper Lake)
    compile: bool | None = None  # None: on a GPU, when the run is long enough to win the time back
    accumulate: Whole1 = 1  # micro-batches a batch is cut into
    parallel: Parallel = "ddp"  # under torchrun: 'ddp', or 'fsdp' to spread the weights of a large backbone
    views: Whole0 = 0  # epochs after which the same batches repeat, so that a teacher's outputs are reused; 0: never
    seed: Seed = 0

    def halves(self, device: torch.device) -> bool:
        """Whether training uses bf16 autocast on this device."""
        return halves(device, self.amp, self.cpu_amp)

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is read or written."""
        check_fields(self)

    def learner(self) -> type[Learner]:
        """The family's class that this recipe trains."""
        raise NotImplementedError

    def on(self, data: str | None) -> Self:
        """The recipe with this data, for recipes that hold the name of their data."""
        return self

    def settings(self) -> dict[str, Any]:
        """The settings as a checkpoint holds them: without this machine's folders and those the task does not use."""
        unused = task_named(self.task).unused
        settings = {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}
        return settings | {"weights": Path(settings["weights"] or "none").name}


@dataclass
class Recipe(Training):
    """The recipe of a vision transformer. Defaults are those of AHT-ViT section 3.5 and of DeiT's fine-tuning."""

    model: str = "deit_small_patch16_224"  # timm model name
    weights: str | None = "pretrained"  # 'pretrained' (timm's on the Hub), a .safetensors/.pth file, a checkpoint, None
    image_size: ImageSize | None = None  # None: the model's own
    heads: Whole1 | None = None  # only the model's first so many heads, and the channels of these; None: all

    epochs: Whole1 = 50
    steps: Whole0 = 0  # of the whole run, in place of `epochs`; the last epoch may be incomplete; 0: `epochs`
    global_batch: Batch | Literal[0] = 0  # images of a step over all processes, in place of `batch` of each; 0: `batch`
    lr_batch: Batch | Literal[0] = 0  # lr is meant for this batch over all processes, and scaled to another; 0: never
    keep_method: bool = False  # start from the method's weights in the checkpoint `weights`, not from new ones
    method_lr: AtLeast0 = 1e-3  # higher than lr: planners and scalars are not pretrained, as the backbone is
    warmup_epochs: AtLeast0 = 1.0
    smoothing: Share = 0.1
    freeze_backbone: bool = False
    small: bool = False  # train only norms, scales and biases of the backbone
    give_back: dict[str, Any] = field(default_factory=dict)  # settings of `core.give_back.GiveBack`; {}: do not use it
    layout: Layout = "masked"  # 'packed': only live tokens; for methods whose decisions are hard in training

    teacher: str | None = None  # 'static': the backbone as it was before training; a checkpoint; a timm model's name
    teacher_weights: str | None = None  # a file with a timm teacher's weights; None: its pretrained ones
    distill: str = "soft"  # 'soft' or 'hard' labels of the teacher; 'token': hard, on DeiT's distillation token
    teacher_weight: AtLeast0 = 1.0  # weight of the distillation loss
    teacher_temperature: Above0 = 1.0
    label_weight: AtLeast0 = 1.0  # weight of the cross-entropy with the labels

    resident: bool | None = None  # keep the data on the device as uint8; None: on a GPU, if it fits
    augment: str | None = "rand-m9-mstd0.5-inc1"  # timm's name of a RandAugment
    min_scale: Share = 0.08  # least share of the image's area in a random crop
    jitter: Share = 0.0  # strength of changes in brightness, contrast and saturation
    erase: Share = 0.25  # share of the images of which a rectangle is erased
    mixup: AtLeast0 = 0.0  # alpha of timm's Mixup and CutMix
    cutmix: AtLeast0 = 0.0
    mix_prob: Share = 1.0  # share of the batches that are mixed
    skip_corrupt: bool = False  # replace images that cannot be read by others of their class
    workers: Workers = 2
    eval_every: Whole1 = 1  # epochs
    holdout: Annotated[float, Within(0, 1, under=True)] = 0.1  # share of images to evaluate on, if there is no split
    save_every: Whole1 = 1  # epochs between saves, if they take less than a minute; a kill loses those since the last

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is read or written."""
        check_fields(self)
        if self.distill not in DISTILLATIONS:
            raise unknown("distill", self.distill, DISTILLATIONS)
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

    def share(self, processes: int) -> int:
        """Images per step of each of so many processes."""
        if not self.global_batch:
            return self.batch
        fits = self.global_batch % processes == 0
        require(fits, f"global_batch = {self.global_batch}", f"{processes} processes must share it evenly")
        return self.global_batch // processes

    def scaled(self, processes: int) -> float:
        """The factor of the learning rates, which is linear in the batch over all processes."""
        return self.share(processes) * processes / self.lr_batch if self.lr_batch else 1.0

    def learner(self) -> type[Learner]:
        return ViTLearner

    def make_method(self) -> Method:
        return made("method", self.method, Method.registry, self.method_options)


def made(role: str, name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The method (or router) of this name with these options. role: names it in the error for an unknown name."""
    if name not in known:
        raise unknown(role, name, known)
    return known[name](**options)


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
            recipe = dataclasses.replace(recipe, **{key: value})
            check_fields(recipe)
        else:
            raise unknown(
                "recipe setting", key, fields - {"method_options"}, hint="settings of the method are method.NAME"
            )
    return recipe


def _value(text: str) -> Any:
    """The text as a Python literal, if it is one; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
