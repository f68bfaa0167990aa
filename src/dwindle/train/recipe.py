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
    """What every run depends on, whatever learns. The trainer reads these, a family's recipe adds its own."""

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
    views: Whole0 = 0  # epochs after which batches come again as they were, so that a teacher is asked once; 0: never
    seed: Seed = 0

    def halves(self, device: torch.device) -> bool:
        """Whether training computes in bf16 on this device."""
        return halves(device, self.amp, self.cpu_amp)

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is read or written."""
        check_fields(self)

    def learner(self) -> type[Learner]:
        """What of a family is trained by this recipe."""
        raise NotImplementedError

    def on(self, data: str | None) -> Self:
        """The recipe with this data, for those that name their own."""
        return self

    def told(self) -> dict[str, Any]:
        """As a checkpoint keeps it: without folders of this machine, and what the task does not look at."""
        unused = task_named(self.task).unused
        given = {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}
        return given | {"weights": Path(given["weights"] or "none").name}


@dataclass
class Recipe(Training):
    """Defaults are AHT-ViT section 3.5 and DeiT's fine-tuning."""

    model: str = "deit_small_patch16_224"  # timm model name
    weights: str | None = "pretrained"  # 'pretrained' (timm's on the Hub), a .safetensors/.pth file, a checkpoint, None
    image_size: ImageSize | None = None  # None: the model's own
    heads: Whole1 | None = None  # so many of the model's, and the channels that go with them; None: all

    epochs: Whole1 = 50
    global_batch: Batch | Literal[0] = 0  # images of a step, of all processes together, in place of `batch`; 0: so many
    # times `batch`
    lr_batch: Batch | Literal[0] = 0  # the batch, of all processes, that lr is meant for: with another it is scaled, in
    # proportion; 0: lr is as given
    keep_method: bool = False  # the method goes on as it was trained in the checkpoint `weights`, not as it begins
    method_lr: AtLeast0 = 1e-3  # planners and scalars start from nothing, the backbone does not
    warmup_epochs: AtLeast0 = 1.0
    smoothing: Share = 0.1
    freeze_backbone: bool = False
    small: bool = False  # of the backbone only norms, scales and biases learn
    give_back: dict[str, Any] = field(default_factory=dict)  # settings of `core.give_back.GiveBack`; {}: none of it
    layout: Layout = "masked"  # 'packed': only live tokens; for methods whose decisions are hard in training

    teacher: str | None = None  # 'static': the backbone as it was before training; a checkpoint; a timm model's name
    teacher_weights: str | None = None  # of a timm model, a file; None: its pretrained ones
    distill: str = "soft"  # 'soft' or 'hard' answers of the teacher; 'token': hard, on DeiT's distillation token
    teacher_weight: AtLeast0 = 1.0  # of the distillation beside the task loss
    teacher_temperature: Above0 = 1.0
    label_weight: AtLeast0 = 1.0  # of the cross-entropy with the labels

    resident: bool | None = None  # data on the device as uint8; None: on a GPU, when it fits
    augment: str | None = "rand-m9-mstd0.5-inc1"  # timm's name of a RandAugment
    min_scale: Share = 0.08
    jitter: Share = 0.0  # of brightness, contrast and saturation
    erase: Share = 0.25  # share of the images of which a rectangle is erased
    mixup: AtLeast0 = 0.0  # alpha of timm's Mixup and CutMix
    cutmix: AtLeast0 = 0.0
    mix_prob: Share = 1.0  # share of the batches that are mixed
    skip_corrupt: bool = False  # images that cannot be read: others of their class in their place
    workers: Workers = 2
    eval_every: Whole1 = 1  # epochs
    holdout: Annotated[float, Within(0, 1, under=True)] = 0.1  # of the images, to evaluate on where there are no others
    save_every: Whole1 = 1  # epochs; what a kill may cost, if they take less than a minute together

    def check(self) -> None:
        """Settings that cannot work, before anything is read or written."""
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
        """Images of a step of one of so many processes."""
        if not self.global_batch:
            return self.batch
        fits = self.global_batch % processes == 0
        require(fits, f"global_batch = {self.global_batch}", f"{processes} processes must share it evenly")
        return self.global_batch // processes

    def scaled(self, processes: int) -> float:
        """What learning rates are multiplied by: linear in the batch."""
        return self.share(processes) * processes / self.lr_batch if self.lr_batch else 1.0

    def learner(self) -> type[Learner]:
        return ViTLearner

    def make_method(self) -> Method:
        return made("method", self.method, Method.registry, self.method_options)


def made(role: str, name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The method (or router) of that name with these options, or what is wrong with them."""
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
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
