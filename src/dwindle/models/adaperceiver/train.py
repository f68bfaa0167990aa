"""Training of an AdaPerceiver (Algorithm 3, D.1-D.2): the stages, the random settings of a step, and the loss.

B images, G granularities, L blocks, S answers to one image (G or L of them).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import processes as ranks
from ...core.model import AdaptiveViT, adapt
from ...errors import DwindleError
from ...io.checkpoint import find, load
from ...io.config import read_config
from ...io.datasets import check_labels
from ...io.draws import mix
from ...io.encoders import timm_vit
from ...io.images import Preprocess, preprocess_of
from ...methods.static import Static
from ...tasks.images import ImageTask, is_checkpoint
from ...train.build import teacher_classes
from ...train.foreign import Foreign, foreign, is_foreign
from ...train.learner import Learner
from ...train.schedule import cosine, poly, ramp
from ...train.step import Step
from ...train.teacher import Teacher
from .grid import grid
from .model import AdaPerceiver, Answers
from .optimizers import nadamw, soap
from .start import begin_from

if TYPE_CHECKING:
    from .recipe import AdaRecipe

FIRST_LR = 1e-6  # the learning rate at which a stage begins
SHARED = ("sampled", "drawn")  # inputs of a step that are the same for all its images


class AdaLearner(Learner):
    """Trains in three stages, each of which begins from the averaged weights of the one before."""

    recipe: AdaRecipe
    task: ImageTask
    model: AdaPerceiver
    learns = ("classes", "numbers", "maps", "features")
    what = "AdaPerceiver"

    def __init__(self, recipe: AdaRecipe, task: ImageTask, device: torch.device) -> None:
        super().__init__(recipe, task, device)
        self.epoch = 0
        teacher_model = self._loaded_teacher()
        self.model = self._build(teacher_model)
        self.model.attention = recipe.attention
        # A teacher sees the images of its student, so that these are normalised as it takes them.
        own = preprocess_of(teacher_model) if self.teacher else _stored(recipe.weights) or Preprocess()
        task.fit(Preprocess(size=self.model.image, mean=own.mean, std=own.std))
        if recipe.weights is not None:
            images, reinit = task.some(128, 32), recipe.reinit_from is not None
            begin_from(self.model, recipe.weights, images, recipe.freeze_backbone, reinit, task.head_fits)
        self.model.to(device)
        if recipe.freeze_backbone:
            _freeze(self.model, recipe.reinit_from)

    def _loaded_teacher(self) -> Any:
        """The model that the recipe's `teacher` names, or None; also sets `self.teacher`: a transformer with nothing
        halted, or an AdaPerceiver at its largest setting."""
        named, features = self.recipe.teacher, self.task.answers == "features"
        if named is None:
            return None
        if not self.task.distils:
            raise DwindleError(f"teacher = {named}: the task '{self.task.name}' learns from its targets alone.")
        model = self._opened_teacher(named, features)
        if isinstance(model, Foreign):
            self.teacher = Teacher(model, self.recipe, self.device)
        elif isinstance(model, AdaptiveViT):
            network: Any = adapt(model.unwrap(), Static())
            shape, names = network.backbone.shape, ("states",) if features else ("logits",)
            self.teacher = Teacher(network, self.recipe, self.device, names, (shape.image[0], shape.image[1]))
            self.teacher.prefix, self.teacher.cells = shape.prefix, shape.grid()
        else:
            side, names = (model.image, model.image), ("features",) if features else ("logits",)
            self.teacher = Teacher(model, self.recipe, self.device, names, side)
            self.teacher.cells = model.grid(side)
        return model

    def _opened_teacher(self, named: str, features: bool) -> Any:
        """A checkpoint, or timm's model of this name, of which features are known if it is a plain ViT."""
        file = self.recipe.teacher_weights
        if is_checkpoint(named) or not is_foreign(named):
            try:
                return load(named)
            except DwindleError as error:
                raise DwindleError(f"teacher = {named}: {error}") from error
        if features:
            return adapt(timm_vit(named, file or "pretrained"), Static())
        import timm

        own: Any = timm.get_pretrained_cfg(named)
        images = _stored(self.recipe.weights) or Preprocess(mean=tuple(own.mean), std=tuple(own.std))
        model = foreign(named, file, images, self.task.outputs)
        model.extra = {"preprocess": images.to_dict()}  # type: ignore[assignment]
        return model

    def _build(self, teacher_model: Any) -> AdaPerceiver:
        """The network to train. teacher_model: the teacher as it was loaded."""
        recipe, teacher, answers = self.recipe, self.teacher, self.task.answers
        options = dict(recipe.method_options)
        if recipe.image_size:
            options["image"] = recipe.image_size
        if answers == "features":  # D.1: a dense network whose head, an MLP, predicts the teacher's features
            assert teacher is not None
            is_vit = isinstance(teacher_model, AdaptiveViT)
            if not is_vit and teacher_model.outputs != "dense":
                raise DwindleError(
                    f"The teacher {recipe.teacher} has no patch features; take a dense one (outputs=dense)."
                )
            width = teacher_model.backbone.shape.width if is_vit else teacher_model.width
            options |= {"outputs": "dense", "head": "mlp", "classes": width}
            model = AdaPerceiver.preset(recipe.model, **options)
            teacher.grid = model.grid((model.image, model.image))
            return model
        options.setdefault("classes", self.task.outputs)
        model = AdaPerceiver.preset(recipe.model, **options | ({"outputs": "dense"} if answers == "maps" else {}))
        if teacher is not None and not isinstance(teacher_model, Foreign):  # that has the data's classes
            assert recipe.teacher is not None
            teacher.classes = teacher_classes(teacher_model, self.task.train_images, recipe.teacher, self.device)
        if answers == "classes":
            for images in self.task.images:
                check_labels(images.labels, model.classes)
        return model

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters by weight decay (none for vectors and learned tokens) and by share of the learning rate."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}  # key: (weight decay, share)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                free = parameter.dim() <= 1 or name.rpartition(".")[2] in ("position", "latent", "output")
                share = self.recipe.block_lr if name.startswith("blocks.") else 1.0
                groups.setdefault((0.0 if free else self.recipe.weight_decay, share), []).append(parameter)
        return [{"params": group, "weight_decay": decay, "share": share} for (decay, share), group in groups.items()]

    def optimizer(self) -> torch.optim.Optimizer:
        if self.recipe.optimizer == "adamw":
            return super().optimizer()
        groups, recipe = self.parameter_groups(), self.recipe
        if recipe.optimizer == "nadamw":
            return nadamw(groups, recipe.lr)
        return soap(groups, recipe.lr, recipe.precondition_from, recipe.precondition_every)

    def averaging(self) -> float:
        return super().averaging() if self.recipe.stage_ema is None else self.recipe.stage_ema[self.stage]

    def compile(self) -> None:
        super().compile()
        self.task.compiled = True
        # A block is compiled for each stage, and in evaluation for each width, number of tokens and batch size.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for readout in self.model.readouts:
            readout.write.compiled = True  # type: ignore[union-attr]
        for block in self.model.blocks:
            block.compile(dynamic=False)

    @property
    def stage(self) -> int:
        """The stage of the present epoch: 0 varies tokens, 1 also depths, 2 also widths."""
        last = max(i for i, share in enumerate(self.recipe.stages) if share)
        return next((i for i, end in enumerate(self.ends) if self.epoch < end), last)

    @property
    def ends(self) -> list[int]:
        """The epoch at which each stage ends."""
        return self.recipe.ends(self.task.epochs)

    def begin_epoch(self, run: Any) -> None:
        """At the beginning of a stage, take the averaged weights of the one before and a new optimizer (D.1)."""
        self.epoch = run.epoch
        if not self.epoch or self.epoch != [0, *self.ends][self.stage]:
            return
        if self.recipe.restart:
            if run.average:
                self.model.load_state_dict(run.average.module.state_dict())
            run.optimizer = self.optimizer()
        if ranks.is_distributed():  # DDP keeps the graph of its first step, and each stage has another
            run.learn = Step(self)

    def rate(self, step: int, group: dict[str, Any]) -> float:
        """The learning rate: warm-up and schedule, anew in each stage; without `restart` once for all stages."""
        recipe, task, stage = self.recipe, self.task, self.stage if self.recipe.restart else 0
        each = task.steps_per_epoch
        ends = [0, *(min(end * each, task.steps) for end in (self.ends if recipe.restart else [task.epochs]))]
        at, total = step - ends[stage], max(ends[stage + 1] - ends[stage], 1)
        warm = min(recipe.warmup_steps or int(recipe.warmup_epochs * each), total // 2)
        peak = recipe.scaled(ranks.world()) * recipe.lr * recipe.stage_lr[stage]
        if at < warm:
            return ramp(at, warm, FIRST_LR, peak) * group["share"]
        schedule = recipe.schedule if isinstance(recipe.schedule, str) else recipe.schedule[stage]
        low, rate = min(recipe.min_lr, peak), peak
        if schedule == "cosine":
            rate = cosine(at - warm, total - warm, peak, low)
        elif schedule == "poly":
            rate = poly(at - warm, total - warm, peak, low, recipe.poly_power)
        return rate * group["share"]

    def row(self, seconds: float, steps: int) -> dict[str, float]:
        return {"stage": float(self.stage + 1)}

    def inputs(self, x: Tensor, y: Tensor, step: int, seen: int) -> dict[str, Tensor]:
        x, y = self.task.mix_batch(x, y, seen)
        inputs = {"x": x, "y": y}
        if self.teacher is not None:
            (inputs["teacher_answers"],) = self.teacher(x, seen, self.recording).values()
        drawn = self.drawn(len(x), step)
        # Micro-batches are cut by rows, so that what all images share is given to each.
        return inputs | {n: v.expand(len(x), -1) if n in SHARED else v for n, v in drawn.items()}

    def drawn(self, count: int, step: int) -> dict[str, Tensor]:
        """The random settings of a step, a function of (seed, step): a width for each image and a granularity for each
        depth, where the stage varies them, and the steps of an open mask. Several processes draw for all images of a
        step, so that they train as one does.
        """
        draw, model = torch.Generator().manual_seed(mix(self.recipe.seed, step)), self.model

        def on_device(value: Tensor) -> Tensor:
            # From pinned memory the copy does not wait for earlier steps.
            return value.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else value

        def sample(choices: Tensor, n: int, last: float = 0.0) -> Tensor:
            """(n,) random choices. last: the chance of each to be replaced by the last choice."""
            values = choices[torch.randint(len(choices), (n,), generator=draw)]
            if last:
                values[torch.rand(n, generator=draw) < last] = choices[-1]
            return on_device(values)

        settings, tokens = {}, torch.tensor(model.tokens)
        if model.mask == "open" and len(tokens) > 1:
            drawn = torch.rand(len(tokens), generator=draw) < self.recipe.mask_steps
            drawn[-1] = True
            settings["drawn"], tokens = on_device(drawn), tokens[drawn]
        if self.stage >= 1:
            settings["sampled"] = sample(tokens, model.depth)
        if self.recipe.stages[2] and len(model.widths) > 1:
            # Widths are inputs of every stage, all full before the last, so that one recording serves all stages.
            choices = model.widths if self.stage >= 2 else model.widths[-1:]
            widths = sample(torch.tensor(choices), ranks.world() * count, self.recipe.full_width)
            settings["widths"] = widths[ranks.rank() * count :][:count]
        return settings

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss terms of Algorithm 3 for a batch."""
        sampled, drawn = (inputs[name][0] if name in inputs else None for name in SHARED)
        answers = self.model.answers(inputs["x"], inputs.get("widths"), sampled, drawn)
        return self.loss_terms(answers, inputs["y"], inputs.get("teacher_answers"), drawn)

    def loss_terms(
        self, answers: Answers, y: Tensor, teacher_answers: Tensor | None = None, drawn: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Algorithm 3: "tokens", the mean loss over granularities (with an open mask, those drawn); "depths", the sum
        over depths at weight l / L, divided by L or, as published, by the sum of the weights; "total", weighted."""
        recipe = self.recipe
        losses = self.loss(answers.tokens, y, teacher_answers)  # (G,), the most tokens last
        terms = {"tokens": losses.mean() if drawn is None else (losses * drawn).sum() / drawn.sum()}
        terms["total"] = recipe.token_weight * terms["tokens"] + recipe.largest_weight * losses[-1]
        if answers.depths is not None:
            losses = self.loss(answers.depths, y, teacher_answers)  # (L,)
            weights = torch.arange(1, len(losses) + 1, device=losses.device) / len(losses)
            # The authors' public code divides by the sum of the weights, about L / 2.
            count = weights.sum() if recipe.depth_mean == "weights" else len(losses)
            terms["depths"] = (weights * losses).sum() / count
            terms["total"] = terms["total"] + recipe.depth_weight * terms["depths"]
        return terms | {"cost": torch.ones((), device=y.device)}

    def loss(self, answers: Tensor, y: Tensor, teacher_answers: Tensor | None) -> Tensor:
        """(S,) losses of answers (S, B, ...), each a mean over images."""
        recipe, answers = self.recipe, answers.float()
        total = answers.new_zeros(len(answers))
        if recipe.label_weight:
            total = total + recipe.label_weight * self.task.loss(answers, y).mean(-1)
        if teacher_answers is not None:
            total = total + recipe.teacher_weight * self.task.distill(answers, teacher_answers).mean(-1)
        return total

    def evaluate(self, model: AdaPerceiver, **options: Any) -> dict[str, float]:
        """Metrics at the largest setting, and with one axis of it at its smallest (depth: at half)."""
        if self.task.answers != "classes":
            return self._most_and_fewest(model)
        found = grid(model, self.task.batches(train=False), device=self.device, amp=self.recipe.amp)
        images = found.correct.shape[-1]
        correct, counts = zip(*ranks.gathered((found.correct.sum(-1).cpu(), images)))
        images = sum(counts)
        top1 = 100 * torch.stack(correct).sum(0).double() / images  # (W, L, G)
        half = (model.depth + 1) // 2 - 1
        return {
            "top1": round(float(top1[-1, -1, -1]), 3),
            "top1_fewest_tokens": round(float(top1[-1, -1, 0]), 3),
            "top1_half_depth": round(float(top1[-1, half, -1]), 3),
            "top1_least_width": round(float(top1[0, -1, -1]), 3),
            "gmacs": round(model.static_macs() / 1e9, 4),
            "images": images,
        }

    @torch.no_grad()
    def _most_and_fewest(self, model: AdaPerceiver) -> dict[str, float]:
        """The task's metrics with the most tokens and with the fewest."""
        training, images = model.training, 0
        sums: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        model.eval()
        for x, y in self.task.batches(train=False):
            x, images = x.to(self.device), images + len(x)
            targets = self._teacher_answers(x) if self._features else y.to(self.device)
            answers = model.every(x, depths=[model.depth])[0]  # (G, B, ...)
            for total, answer in zip(sums, (answers[-1], answers[0])):
                for name, values in self.task.measure(answer, targets).items():
                    total[name] = total.get(name, 0.0) + values.sum(0).double().cpu()
        model.train(training)
        found, counts = zip(*ranks.gathered((sums, images)))
        images = sum(counts)
        totals = ({name: sum(part[i].get(name, 0.0) for part in found) for name in found[0][i]} for i in range(2))
        most, fewest = (self.task.summary(total, images) for total in totals)
        fewest = {f"{name}_fewest_tokens": value for name, value in fewest.items()}
        return most | fewest | {"gmacs": round(model.static_macs() / 1e9, 4), "images": images}

    @property
    def _features(self) -> bool:
        return self.task.answers == "features"

    def _teacher_answers(self, x: Tensor) -> Tensor:
        """The teacher's answers to images."""
        assert self.teacher is not None
        (answers,) = self.teacher.ask(x).values()
        return answers


def _stored(weights: str | None) -> Preprocess | None:
    """How the weights to begin from take their images, if they say so."""
    kept = None if weights is None else read_config(find(weights)).get("extra", {}).get("preprocess")
    return Preprocess.from_dict(kept) if kept else None


def _freeze(model: AdaPerceiver, reinit_from: dict[int, int] | None) -> None:
    """Freeze all but the read-outs (D.2): write head, output token and head. reinit_from {depth: source}: freeze all
    but the read-outs of these depths, and initialise each from the one of its source."""
    model.requires_grad_(False)
    if reinit_from is None:
        model.readouts.requires_grad_(True)
        return
    depths = range(1, model.depth + 1)
    if not all(depth in depths for pair in reinit_from.items() for depth in pair):
        raise DwindleError(f"reinit_from = {reinit_from}: the network has read-outs for depths 1 to {model.depth}.")
    sources = {source: copy.deepcopy(model.readout(source).state_dict()) for source in reinit_from.values()}
    for depth, source in reinit_from.items():
        model.readout(depth).load_state_dict(sources[source])
        model.readout(depth).requires_grad_(True)
