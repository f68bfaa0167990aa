"""The learner of wrapped vision transformers: backbone and method come from the recipe, the loss from `AdaptiveViT`."""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.backbone import backbone_of
from ..core.cost import budget_share
from ..core.give_back import GiveBack
from ..core.model import AdaptiveViT, Output, adapt
from ..errors import DwindleError
from ..evaluate.evaluate import calibrate, evaluate
from ..io.checkpoint import load_as
from ..io.images import Preprocess
from ..methods import Method
from ..methods.static import Static
from ..tasks.images import is_checkpoint
from .build import build_head, build_vit, fill_method, own_preprocess, parameter_groups, teacher_classes
from .foreign import foreign, is_foreign
from .learner import Learner
from .schedule import cosine, ramp
from .teacher import Teacher, fast

if TYPE_CHECKING:
    from ..tasks.images import ImageTask
    from .recipe import Recipe

log = logging.getLogger("dwindle")
LEAST = 1e-6  # the learning rate at the first and the last step


class ViTLearner(Learner):
    recipe: Recipe
    task: ImageTask
    model: AdaptiveViT
    learns = ("classes", "numbers", "maps", "features")
    what = "A vision transformer"
    searchable = True

    def __init__(self, recipe: Recipe, task: ImageTask, device: torch.device) -> None:
        super().__init__(recipe, task, device)
        whole = task.answers in ("classes", "numbers")  # the task uses the family's own head, for whole images
        vit = build_vit(recipe, task.outputs if whole else None)
        shape = backbone_of(vit).shape
        if whole and not task.head_fits:
            backbone_of(vit).reset_head(task.outputs)
        head = build_head(recipe, shape.width, task.outputs) if task.answers == "maps" else None
        method = recipe.make_method()
        self.teacher = self._teacher(vit, method)
        back = GiveBack(**recipe.give_back) if recipe.give_back else None
        self.model = adapt(vit, method, head, back).to(device)
        if recipe.keep_method:
            fill_method(self.model, recipe)
        preprocess, patch = Preprocess(**(self.model.backbone.preprocess | own_preprocess(recipe))), shape.patch
        if any(preprocess.size % side for side in patch):
            raise DwindleError(
                f"image_size = {preprocess.size} is no multiple of the patch size, {patch[0]} x {patch[1]}; give one "
                "that is."
            )
        task.prefix = shape.prefix
        if recipe.freeze_backbone or recipe.small:
            for weight in self.model.vit.parameters():
                weight.requires_grad_(not recipe.freeze_backbone and weight.dim() == 1)
        task.fit(preprocess)
        self.term_names: list[str] = []  # of the loss, known after the first step

    @property
    def name(self) -> str:
        return type(self.model.method).__name__

    def _teacher(self, vit: nn.Module, method: Method) -> Teacher | None:
        """The static teacher: the backbone before training, a checkpoint's, or a timm model; None: the recipe has none.

        vit: the student's backbone. method: the student's.
        """
        named, rows = self.recipe.teacher, None
        signals = {
            "logits": self.task.distils and not self._features,
            "states": self._features,
            "attention": method.needs_teacher_attention,
            "features": method.needs_teacher_features,
        }
        names = tuple(name for name, wanted in signals.items() if wanted)
        if named is None:
            return None
        if not names:
            raise DwindleError(
                f"teacher = {named}: the task '{self.task.name}' learns from its targets alone, and "
                f"{type(method).__name__} asks a teacher nothing; leave it out."
            )
        if named == "static":
            if signals["logits"] and not self.task.head_fits:
                raise DwindleError(
                    f"teacher = static: the head of {self.recipe.weights} has other classes than the data, so it "
                    "begins anew and has nothing to teach; train without a teacher first."
                )
            taught: Any = copy.deepcopy(vit)
        elif not is_checkpoint(named) and is_foreign(named):
            return self._foreign(vit, named, names)
        else:
            try:
                model = load_as(AdaptiveViT, named)
            except DwindleError as error:
                raise DwindleError(f"teacher = {named}: {error}") from error
            if signals["logits"]:
                rows = teacher_classes(model, self.task.train_images, named, self.device)
            taught = model.unwrap()
            _check_tokens(vit, taught, named, [name for name in names if name != "logits"])
        teacher = Teacher(
            adapt(taught, Static(attention=method.needs_teacher_attention)), self.recipe, self.device, names
        )
        teacher.classes = rows
        return teacher

    def _foreign(self, vit: nn.Module, named: str, names: tuple[str, ...]) -> Teacher:
        """A timm model as the teacher, such as a CNN. Only its logits can be learnt."""
        if beyond := [name for name in names if name != "logits"]:
            raise DwindleError(
                f"teacher = {named}: of a timm model only answers can be learnt, and {self.recipe.method} on the task "
                f"'{self.task.name}' asks for its {beyond[0]}; give a checkpoint of a vision transformer."
            )
        prepared = Preprocess(**(backbone_of(vit).preprocess | own_preprocess(self.recipe)))
        model = foreign(named, self.recipe.teacher_weights, prepared, self.task.outputs)
        return Teacher(model, self.recipe, self.device)

    @property
    def _features(self) -> bool:
        return self.task.answers == "features"

    def parameter_groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.model, self.recipe)

    def worth_compiling(self) -> bool:
        able = not self.sharded and self.recipe.layout == "masked" and importlib.util.find_spec("triton") is not None
        return super().worth_compiling() and (able or self.recipe.compile is True)

    def compile(self) -> None:
        super().compile()
        self.task.compiled = True

    def rate(self, step: int, group: dict[str, Any]) -> float:
        total = self.task.steps
        warmup = min(int(self.recipe.warmup_epochs * self.task.steps_per_epoch), total // 2)
        if step < warmup:
            return ramp(step, warmup, LEAST, group["peak"])
        return cosine(step, total, group["peak"], LEAST)

    def begin_step(self, progress: float) -> None:
        self.model.method.progress = progress

    def inputs(self, x: Tensor, y: Tensor, step: int, seen: int) -> dict[str, Tensor]:
        x, y = self.task.mix_batch(x, y, seen)
        if self.teacher is None:
            return {"x": x, "y": y}
        signals = self.teacher(x, seen, self.recording)
        return {"x": x, "y": y} | {f"teacher_{name}": value for name, value in signals.items()}

    def weights(self) -> Tensor:
        """The weights of the terms in their order, padded to 32; methods change them during training."""
        weights = torch.zeros(32)
        by_name = self.model.weights(self.recipe.label_weight, self.recipe.teacher_weight)
        weights[: len(self.term_names)] = torch.tensor([by_name[name] for name in self.term_names])
        return weights

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        model, teacher, recipe, x = self.model, self.teacher, self.recipe, inputs["x"]
        with fast(model, self.compiled):
            out = model(x, layout=recipe.layout)
        taught = None
        if teacher is not None:
            taught = teacher.output({name: inputs[f"teacher_{name}"] for name in teacher.names}, x)
        terms = model.loss(
            out,
            inputs["y"],
            taught,
            label_weight=recipe.label_weight,
            teacher_weight=recipe.teacher_weight,
            weights=inputs.get("weights"),
            distill=recipe.distill,
            answers=model.states(out) if self._features else None,
            task_loss=self.task.loss,
            teacher_loss=self.task.distill if self.task.distils else None,
        )
        self.term_names = [name for name in terms if name != "total"]
        return terms | {"cost": model.cost(out.trace)}

    def end_step(self, terms: dict[str, Tensor]) -> None:
        self.model.method.hold_budget(terms["cost"])

    def finish(self, models: list[nn.Module]) -> None:
        """Calibrate the models to the method's budget, since the cost held in training may differ from it."""
        budget = getattr(self.model.method, "budget", None)
        if budget is None:
            return
        images = self.task.typical()
        for model in models:
            assert isinstance(model, AdaptiveViT)
            goal, reached = budget_share(budget, model.backbone.shape), calibrate(model, images, budget)
            if abs(reached / goal - 1) > 0.02:
                log.warning(
                    "asked for %.3f of the static cost, reached %.3f: the method cannot go there", goal, reached
                )

    def evaluate(self, model: AdaptiveViT, layout: str = "packed", **options: Any) -> dict[str, float]:
        """The task's metrics on the evaluation images; each image is evaluated by one process."""
        # Sharded weights are gathered block by block, so no process may skip a block that others compute.
        layout = "masked" if self.sharded else layout
        batches: Any = self.task.batches(train=False)
        if self._features:
            assert self.teacher is not None
            batches = _WithFeatures(batches, self.teacher, self.device)
        return evaluate(
            model, batches, layout=layout, device=self.device, lockstep=self.sharded, task=self.task, read=self.read
        )

    def read(self, model: AdaptiveViT, out: Output) -> Tensor:
        """The part of an output that the task measures."""
        return model.states(out) if self._features else out.logits


class _WithFeatures:
    """Batches of images, with the teacher's features of them in the place of labels."""

    def __init__(self, batches: Any, teacher: Teacher, device: torch.device) -> None:
        self.batches, self.teacher, self.device = batches, teacher, device
        self.dataset = getattr(batches, "dataset", None)  # `evaluate` reads the number of images from it

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, _ in self.batches:
            yield x, self.teacher.ask(x.to(self.device))["states"].float()


def _check_tokens(vit: nn.Module, teacher: nn.Module, named: str, per_token: list[str]) -> None:
    """Refuse a teacher with other tokens than the student, if its attention or features are learnt per token."""
    own, theirs = backbone_of(vit).shape, backbone_of(teacher).shape
    if per_token and (own.prefix, own.grid()) != (theirs.prefix, theirs.grid()):
        raise DwindleError(
            f"teacher = {named}: it has {theirs.tokens()} tokens of an image ({theirs.prefix} and a grid of "
            f"{theirs.grid()}), the student {own.tokens()} ({own.prefix} and {own.grid()}), and its {per_token[0]} is "
            "learnt token by token; take one of the same patch and image size, or a method that asks for answers only."
        )
