"""Training AdaPerceiver (Algorithm 3, D.1-D.2) on the repository's data, batches and atomic state.

B images, G granularities, L blocks, S answers to one image (G or L of them).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core import processes as ranks
from ...errors import DwindleError
from ...io.batches import Resident, loader
from ...io.datasets import Images, check_labels
from ...io.draws import mix, seeded
from ...io.images import Preprocess
from ...ops.half import autocast
from ...train.build import teacher_classes
from ...train.loop import Run, seed_everything, whole_if_small
from ...train.record import Recorded, record
from ...train.state import Claim
from ...train.step import WORTH_COMPILING, make_mixup
from ...train.teacher import Answers as TeacherAnswers
from ...train.teacher import kept_answers
from .grid import grid
from .model import AdaPerceiver, Answers
from .recipe import AdaRecipe
from .start import begin_from
from .teacher import Teacher

COSINE, MAGNITUDE = 0.9, 0.1  # of the two feature losses (D.1)


class AdaRun(Run):
    """As `Run`, for a network of its own: three stages, each beginning from the average of the one before."""

    recipe: AdaRecipe
    model: Any
    teacher: Any
    optimizer: Any
    recorded: Recorded | None = None
    inputs: list[str]

    def __init__(
        self,
        recipe: AdaRecipe,
        data: str,
        out: str | os.PathLike,
        *,
        eval_data: str | None = None,
        device: str | None = None,
        resume: bool = False,
        limit: int | None = None,
        train_images: Images | None = None,
        eval_images: Images | None = None,
        resident: dict[str, Resident] | None = None,
        answers: TeacherAnswers | None = None,
    ) -> None:
        self.recipe, self.out = recipe, Path(out)
        self.data = {"train": data, "eval": eval_data or data}
        self.given = dataclasses.asdict(recipe) | {"data": data, "eval_data": eval_data, "limit": limit}
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        recipe.check()
        self.halves = recipe.halves(self.device)
        if ranks.started() > 1:
            raise DwindleError(f"AdaPerceiver trains in one process, not {ranks.started()}; start it without torchrun.")
        self.claim = Claim(self.out, resume)
        self._open(eval_data, limit, train_images, eval_images)
        seed_everything(recipe.seed)
        kept = kept_answers(recipe, answers)
        self.teacher = None if recipe.teacher is None else Teacher(recipe.teacher, self.device, self.halves, kept)
        self.model = self._build()
        self.model.attention = recipe.attention
        self.preprocess = whole_if_small(Preprocess(size=self.model.image), self.train_images)
        if recipe.weights is not None:
            begin_from(
                self.model,
                recipe.weights,
                self._some_images(),
                recipe.freeze_backbone,
                recipe.reinit_from is not None,
                self.head_fits,
            )
        self.model.to(self.device)
        if recipe.freeze_backbone:
            _freeze(self.model, recipe.reinit_from)
        self.resident = self._decoded(resident)
        self.batch = min(recipe.batch, len(self.train_images))
        if recipe.mixup or recipe.cutmix:
            self.batch -= self.batch % 2
        if not self.batch:
            least = 2 if recipe.mixup or recipe.cutmix else 1
            raise DwindleError(f"{len(self.train_images)} training images are too few; give at least {least}.")
        self.steps_per_epoch = len(self.train_images) // self.batch
        self.average = self._average()
        self.sharded = False
        self.optimizer = self._optimizer()
        self.schedule = SimpleNamespace(step_update=self._set_rate)
        images = recipe.epochs * self.steps_per_epoch * self.batch
        able = self.device.type == "cuda" and images >= WORTH_COMPILING
        compiled = able if recipe.compile is None else recipe.compile
        if compiled:
            # A graph for each kind of stage, and in evaluation for each width, number of tokens and size of batch.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            for readout in self.model.readouts:
                readout.write.compiled = True
            for block in self.model.blocks:
                block.compile(dynamic=False)
            if self.teacher is not None:
                self.teacher.compiled = True
        self.learn: Any = SimpleNamespace(bare=SimpleNamespace(compiled=compiled))
        self.mixup = make_mixup(recipe, self.model.classes)
        self.epoch, self.step, self.noted, self.seconds_per_epoch = 0, 0, 0, 0.0
        self.history = []
        if resume:
            self._restore()

    def _some_images(self, count: int = 128) -> Tensor:
        """Prepared as in evaluation."""
        rows = np.random.default_rng(self.recipe.seed).permutation(len(self.train_images))[:count]
        some = self.train_images.select(rows)
        some.transform = self.preprocess.eval_transform()
        return torch.cat([x for x, _ in loader(some, 32)])

    def _build(self) -> AdaPerceiver:
        recipe, teacher = self.recipe, self.teacher
        options = dict(recipe.method_options)
        options.setdefault("classes", self.train_images.num_classes)
        if recipe.image_size:
            options["image"] = recipe.image_size
        if recipe.distill == "features":  # D.1: a dense network whose head, an MLP, predicts the teacher's features
            if teacher is None:
                raise DwindleError("distill = features needs a teacher; give one with --set teacher=FOLDER.")
            if not teacher.dense:
                raise DwindleError(
                    f"The teacher {recipe.teacher} has no patch features; take a dense one (outputs=dense)."
                )
            options |= {"outputs": "dense", "head": "mlp", "classes": teacher.width}
        model = AdaPerceiver.preset(recipe.model, **options)
        if recipe.distill == "features":
            teacher.grid = model.grid((model.image, model.image))
            return model
        if teacher is not None:
            assert recipe.teacher is not None
            teacher.rows = teacher_classes(teacher.network, self.train_images, recipe.teacher, self.device)
        for images in (self.train_images, self.eval_images):
            check_labels(images.labels, model.classes)
        return model

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        kinds: dict[tuple[float, float], list[nn.Parameter]] = {}  # by weight decay and share of the learning rate
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                free = parameter.dim() <= 1 or name.rpartition(".")[2] in ("position", "latent", "output")
                share = recipe.block_lr if name.startswith("blocks.") else 1.0
                kinds.setdefault((0.0 if free else recipe.weight_decay, share), []).append(parameter)
        groups = [{"params": those, "weight_decay": decay, "share": share} for (decay, share), those in kinds.items()]
        if recipe.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.999), fused=self.device.type == "cuda")
        try:
            from pytorch_optimizer import SOAP
        except ImportError as error:
            raise DwindleError(
                "optimizer = soap needs the package pytorch-optimizer; install dwindle[soap], or take adamw."
            ) from error
        soap = {"precondition_frequency": 100, "max_precondition_dim": 8192}  # D.1
        return SOAP(groups, lr=recipe.lr, betas=(0.9, 0.999), **soap)

    @property
    def stage(self) -> int:
        """0: tokens; 1: and depths; 2: and widths."""
        return next((i for i, end in enumerate(self.recipe.ends()) if self.epoch < end), 2)

    def _set_rate(self, step: int) -> None:
        """Each stage warms up and falls by a cosine of its own; without `restart` there is one for all."""
        recipe, stage = self.recipe, self.stage if self.recipe.restart else 0
        ends = [0, *(end * self.steps_per_epoch for end in (recipe.ends() if recipe.restart else [recipe.epochs]))]
        at, total = step - ends[stage], max(ends[stage + 1] - ends[stage], 1)
        warm = min(int(recipe.warmup_epochs * self.steps_per_epoch), total // 2)
        peak = recipe.lr * recipe.stage_lr[stage]
        if at < warm:
            rate = 1e-6 + (peak - 1e-6) * at / warm
        else:
            low = min(1e-5, peak)
            rate = low + (peak - low) * (1 + math.cos(math.pi * min((at - warm) / max(total - warm, 1), 1.0))) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]

    def _begin_stage(self) -> None:
        """D.1: from the averaged weights of the stage before; the optimiser begins anew."""
        starts = [0, *self.recipe.ends()][:3]
        if self.recipe.restart and self.epoch and self.epoch == starts[self.stage]:
            if self.average:
                self.model.load_state_dict(self.average.module.state_dict())
            self.optimizer = self._optimizer()

    def _train_epoch(self, tick: Any) -> dict[str, float]:
        self._begin_stage()
        self.model.train()
        begin, total_steps = time.perf_counter(), self.recipe.epochs * self.steps_per_epoch
        sums: dict[str, Tensor] = {}
        for x, y in self.batches(train=True):
            self._set_rate(self.step)
            terms = self._step(x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True))
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            if tick:
                tick(self.step, total_steps, terms)
        means = {name: float(value) / self.steps_per_epoch for name, value in sums.items()}
        self.seconds_per_epoch = time.perf_counter() - begin
        if not np.isfinite(means["total"]):
            raise DwindleError(f"The loss became {means['total']} in epoch {self.epoch + 1}; lower lr.")
        return means | {"lr": self.optimizer.param_groups[0]["lr"], "stage": float(self.stage + 1)}

    def _step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.mixup is not None:
            with seeded(self.recipe.seed, self.seen_step):
                x, y = self.mixup(x, y)
                y = y.to(x.device)
        given = {"x": x, "y": y, "taught": self._taught(x)} | self._sample(len(x))
        terms = self._gradients({name: value for name, value in given.items() if value is not None})
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.step += 1
        if self.average:
            self.average.update(self.model, step=self.step)
        return terms

    def _gradients(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        if not (self.learn.bare.compiled and self.device.type == "cuda"):
            self.optimizer.zero_grad(set_to_none=True)
            return self.backward(**given)
        if self.recorded is None or self.inputs != list(given):  # a stage may need other inputs than the one before
            self.recorded, self.inputs = None, list(given)

            def backward(*values: Tensor) -> dict[str, Tensor]:
                return self.backward(**dict(zip(given, values)))

            self.recorded = record(backward, self.model, *given.values(), what="AdaPerceiver")
        return self.recorded(*given.values())

    def backward(
        self,
        x: Tensor,
        y: Tensor,
        taught: Tensor | None = None,
        widths: Tensor | None = None,
        sampled: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Leaves gradients on the parameters, and returns the terms."""
        with autocast(self.device, self.halves):
            terms = self.terms(self.model.answers(x, widths, sampled, drawn), y, taught, drawn)
        terms["total"].backward()
        return {name: value.detach().float() for name, value in terms.items()}

    def _sample(self, count: int) -> dict[str, Tensor]:
        """A width per image and a granularity per depth, as the stage asks, and the steps of an open mask; a function
        of (seed, step).
        """
        draw, model = torch.Generator().manual_seed(mix(self.recipe.seed, self.step)), self.model

        def there(value: Tensor) -> Tensor:
            # From pinned memory a copy does not wait for the steps before.
            return value.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else value

        def of(choices: Tensor, n: int, most: float = 0.0) -> Tensor:
            """most: share of them that are the last choice in any case."""
            picked = choices[torch.randint(len(choices), (n,), generator=draw)]
            if most:
                picked[torch.rand(n, generator=draw) < most] = choices[-1]
            return there(picked)

        found, tokens = {}, torch.tensor(model.tokens)
        if model.mask == "open" and len(tokens) > 1:
            drawn = torch.rand(len(tokens), generator=draw) < self.recipe.mask_steps
            drawn[-1] = True
            found["drawn"], tokens = there(drawn), tokens[drawn]
        if self.stage >= 1:
            found["sampled"] = of(tokens, model.depth)
        if self.recipe.stages[2] and len(model.widths) > 1:  # full until its stage: one recording serves all stages
            choices = model.widths if self.stage >= 2 else model.widths[-1:]
            found["widths"] = of(torch.tensor(choices), count, self.recipe.full_width)
        return found

    def terms(
        self, answers: Answers, y: Tensor, taught: Tensor | None = None, drawn: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Algorithm 3: means over images and granularities (of an open mask those drawn), and over depths at weight
        l / L.
        """
        recipe = self.recipe
        losses = self.loss(answers.tokens, y, taught)  # (G,), the most tokens last
        terms = {"tokens": losses.mean() if drawn is None else (losses * drawn).sum() / drawn.sum()}
        terms["total"] = recipe.token_weight * terms["tokens"] + recipe.largest_weight * losses[-1]
        if answers.depths is not None:
            losses = self.loss(answers.depths, y, taught)  # (L,)
            weights = torch.arange(1, len(losses) + 1, device=losses.device) / len(losses)
            terms["depths"] = (weights * losses).mean()
            terms["total"] = terms["total"] + recipe.depth_weight * terms["depths"]
        return terms | {"cost": torch.ones((), device=y.device)}

    def _taught(self, x: Tensor) -> Tensor | None:
        return None if self.teacher is None else self.teacher(x, self.seen_step)

    def loss(self, answers: Tensor, y: Tensor, taught: Tensor | None) -> Tensor:
        """(S,) of answers (S, B, ...), each a mean over images."""
        if self.recipe.distill == "features":
            assert taught is not None
            return feature_loss(answers, taught)
        recipe, count = self.recipe, len(answers)
        flat = answers.flatten(0, 1).float()
        total = flat.new_zeros(count)
        if recipe.label_weight:
            labels = y.repeat(count, *[1] * (y.dim() - 1))
            task = F.cross_entropy(flat, labels, label_smoothing=recipe.smoothing, reduction="none")
            total = total + recipe.label_weight * task.view(count, -1).mean(-1)
        if taught is not None:
            wanted, heat = taught.float(), recipe.teacher_temperature
            if recipe.distill == "hard":
                told = F.cross_entropy(flat, wanted.argmax(-1).repeat(count), reduction="none")
            else:
                said, truth = F.log_softmax(flat / heat, -1), F.log_softmax(wanted / heat, -1).repeat(count, 1)
                told = F.kl_div(said, truth, reduction="none", log_target=True).sum(-1) * heat**2
            total = total + recipe.teacher_weight * told.view(count, -1).mean(-1)
        return total

    def _meet_budget(self) -> None:
        """The setting is chosen when the network runs; there is none to hold."""

    @property
    def best_model(self) -> Any:
        return self.average.module if self.average else self.model

    def evaluate(self, layout: str = "packed", model: Any = None) -> dict[str, float]:
        """Top-1 of the largest setting, and of it with each axis at its smallest (depth: half)."""
        if self.recipe.distill == "features":
            return {}
        model = model or self.best_model
        found = grid(model, self.batches(train=False), device=self.device, amp=self.recipe.amp)
        top1 = 100 * found.correct.double().mean(-1)  # (W, L, G)
        half = (model.depth + 1) // 2 - 1
        return {
            "top1": round(float(top1[-1, -1, -1]), 3),
            "top1_fewest_tokens": round(float(top1[-1, -1, 0]), 3),
            "top1_half_depth": round(float(top1[-1, half, -1]), 3),
            "top1_least_width": round(float(top1[0, -1, -1]), 3),
            "gmacs": round(model.static_macs() / 1e9, 4),
            "images": found.correct.shape[-1],
        }


def feature_loss(answers: Tensor, wanted: Tensor) -> Tensor:
    """(S,) of (S, B, P, D): 0.9 of 1 - cosine and 0.1 of smooth L1 (D.1)."""
    wanted = wanted.float().expand_as(answers)
    cosine = 1 - F.cosine_similarity(answers.float(), wanted, dim=-1)
    size = F.smooth_l1_loss(answers.float(), wanted, reduction="none").mean(-1)
    return (COSINE * cosine + MAGNITUDE * size).flatten(1).mean(-1)


def _freeze(model: AdaPerceiver, reinit_from: dict[int, int] | None) -> None:
    """D.2: the write head, the output tokens and the last linear layer learn on; or those of some depths, as
    `reinit_from` says."""
    model.requires_grad_(False)
    if reinit_from is None:
        model.readouts.requires_grad_(True)
        return
    depths = range(1, model.depth + 1)
    if not all(depth in depths for pair in reinit_from.items() for depth in pair):
        raise DwindleError(f"reinit_from = {reinit_from}: the network has read-outs for depths 1 to {model.depth}.")
    held = {source: copy.deepcopy(model.readout(source).state_dict()) for source in reinit_from.values()}
    for depth, source in reinit_from.items():
        model.readout(depth).load_state_dict(held[source])
        model.readout(depth).requires_grad_(True)
