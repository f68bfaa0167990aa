"""One training loop for every method."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..core.cost import budget_share
from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError
from ..evaluate.evaluate import calibrate, evaluate
from ..files import write_text
from ..io.augment import Augment
from ..io.batches import CROP_PCT, RESAMPLED, Resident, loader
from ..io.card import write_card
from ..io.checkpoint import load_as, save
from ..io.classes import by_name
from ..io.datasets import Images, check_labels, in_order, matched
from ..io.datasets import limit as first
from ..io.draws import mix
from ..io.images import Preprocess
from ..io.sets import training_and_evaluation
from ..methods import Method
from ..methods.static import Static
from ..runtime.memory import kept_pages
from .build import build_vit, parameter_groups, teacher_classes, weights_classes
from .recipe import Recipe
from .state import Claim, random_state, read_state, restore_random, write_metrics, write_state
from .step import WORTH_COMPILING, Step, full_state, load_full_state, shard
from .teacher import Answers, kept_answers

log = logging.getLogger("dwindle")
PATIENCE = 60.0  # seconds after which an epoch is saved whatever `save_every` says: it is for epochs of seconds
CORRUPT = "corrupt.jsonl"
LARGE = 10_000  # training images; fewer are learnt by heart


class Run:
    """A recipe on a data set, writing to a folder. `epochs()` yields the numbers of each epoch as it ends."""

    def __init__(
        self,
        recipe: Recipe,
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
        answers: Answers | None = None,
    ) -> None:
        """data, eval_data: names or folders (train_images, eval_images: the same, opened; resident: also decoded, by an
        earlier run). limit: only so many images of each. answers: the teacher's, see `Step`."""
        self.recipe, self.out = recipe, Path(out)
        self.data = {"train": data, "eval": eval_data or data}
        self.given = dataclasses.asdict(recipe) | {"data": data, "eval_data": eval_data, "limit": limit}
        self.device = torch.device(ranks.join(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
        recipe.check()
        self.halves = recipe.halves(self.device)
        self.claim = Claim(self.out, resume)
        self._open(eval_data, limit, train_images, eval_images)
        seed_everything(recipe.seed)
        vit = build_vit(recipe, self.train_images.num_classes)
        if not self.head_fits:
            vit.reset_classifier(self.train_images.num_classes)
        self.preprocess = whole_if_small(Preprocess.of(vit), self.train_images)
        method = recipe.make_method()
        self.taught_classes: Tensor | None = None  # the numbers that the teacher knows the data's classes by
        self.teacher = self._teacher(vit, method)
        self.model = adapt(vit, method).to(self.device)
        patch = self.model.backbone.shape.patch
        if any(self.preprocess.size % side for side in patch):
            raise DwindleError(
                f"image_size = {self.preprocess.size} is no multiple of the patch size, {patch[0]} x {patch[1]}; give "
                "one that is."
            )
        if recipe.freeze_backbone:
            self.model.vit.requires_grad_(False)
        self.resident = self._decoded(resident)
        self.batch = min(recipe.batch, len(self.train_images) // ranks.world())  # of this process
        if recipe.mixup or recipe.cutmix:
            self.batch -= self.batch % 2  # images are mixed in pairs
        if not self.batch:
            least = ranks.world() * (2 if recipe.mixup or recipe.cutmix else 1)
            raise DwindleError(
                f"{len(self.train_images)} training images are too few for {ranks.world()} processes; give at least "
                f"{least}."
            )
        self.steps_per_epoch = len(self.train_images) // (self.batch * ranks.world())
        self.average = self._average()
        self.sharded = ranks.together() and recipe.parallel == "fsdp"
        if self.sharded:
            shard(self.model)
        fused = self.device.type == "cuda" and not self.sharded
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, recipe), lr=recipe.lr, fused=fused)
        self.schedule = self._schedule()
        answers = answers if self.resident else None
        kept = kept_answers(recipe, answers)
        self.learn = Step(self.model, self.teacher, recipe, self.device, kept, self.taught_classes)
        if self._worth_compiling():
            self.learn.compile()
        self.epoch, self.step = 0, 0
        self.seconds_per_epoch = 0.0  # of the latest, evaluation and saving left out
        self.history: list[dict[str, float]] = []
        self.noted = 0  # rows of it that TensorBoard has
        if ranks.rank():  # from here on chance, such as dropout, is each process's own
            torch.manual_seed(mix(recipe.seed, ranks.rank()))
        if resume:
            self._restore()

    def _open(
        self, eval_data: str | None, limit: int | None, train_images: Images | None, eval_images: Images | None
    ) -> None:
        """The images, numbered as the weights' head numbers its classes where it has the same (`head_fits`)."""
        self.holdout: dict[str, Any] = {}
        train, held, data = train_images, eval_images, self.data["train"]
        if train is None or held is None:
            opened = training_and_evaluation(data, eval_data, self.recipe.holdout)
            train, held, self.holdout = train or opened[0], held or opened[1], opened[2]
        check_labels(train.labels, train.num_classes)
        if held.classes != train.classes or (eval_data not in (None, data) and train.classes is None):
            held = matched(held, train.classes, train.num_classes, "the training data")
        check_labels(held.labels, train.num_classes)
        known = weights_classes(self.recipe, train)
        self.head_fits = known is None or train.classes is None or by_name(train.classes, known).both == len(known)
        if known is not None and self.head_fits:
            train, held = in_order(train, known), in_order(held, known)
        for images in (train, held):
            images.skip = self.recipe.skip_corrupt
        parts = (train, held) if limit is None else (first(train, limit), first(held, limit))
        self.train_images, self.eval_images = parts

    def _worth_compiling(self) -> bool:
        if self.recipe.compile is not None:
            return self.recipe.compile
        images = self.recipe.epochs * self.steps_per_epoch * self.batch
        able = self.device.type == "cuda" and not self.sharded and self.recipe.layout == "masked"
        able = able and importlib.util.find_spec("triton") is not None
        return able and images >= WORTH_COMPILING

    def _teacher(self, vit: nn.Module, method: Method) -> AdaptiveViT | None:
        """The backbone as it is now, or a checkpoint's; with nothing halted either way."""
        named = self.recipe.teacher
        if named is None:
            return None
        if named == "static":
            if not self.head_fits:
                raise DwindleError(
                    f"teacher = static: the head of {self.recipe.weights} has other classes than the data, so it "
                    "begins anew and has nothing to teach; train without a teacher first."
                )
            taught: Any = copy.deepcopy(vit)
        else:
            try:
                model = load_as(AdaptiveViT, named)
            except DwindleError as error:
                raise DwindleError(f"teacher = {named}: {error}") from error
            self.taught_classes = teacher_classes(model, self.train_images, named, self.device)
            taught = model.unwrap()
        teacher = adapt(taught, Static(attention=method.asks_attention))
        teacher.checks = False
        return teacher.eval().requires_grad_(False).to(self.device)

    def _decoded(self, before: dict[str, Resident] | None) -> dict[str, Resident] | None:
        """Images that lie decoded on the device, by an earlier run or this one."""
        found = before or self._resident()
        for images, store in zip(self._images(), (found or {}).values()):
            images.corrupt |= store.corrupt
        return found

    def _resident(self) -> dict[str, Resident] | None:
        recipe = self.recipe
        small = len(self.train_images) + len(self.eval_images) <= 100_000
        wanted = recipe.resident if recipe.resident is not None else self.device.type == "cuda" and small
        if not wanted:
            return None
        pre = self.preprocess
        if recipe.resident is None and pre.interpolation not in RESAMPLED:
            return None
        settings: dict[str, Any] = {"crop_pct": pre.crop_pct, "interpolation": pre.interpolation}
        return {
            "train": Resident(self.train_images, pre.size, self.device, **settings, replace=True),
            "eval": Resident(self.eval_images, pre.size, self.device, **settings),
        }

    def _schedule(self) -> Any:
        from timm.scheduler import CosineLRScheduler

        total = self.recipe.epochs * self.steps_per_epoch
        warmup = min(int(self.recipe.warmup_epochs * self.steps_per_epoch), total // 2)
        return CosineLRScheduler(
            self.optimizer,
            t_initial=total,
            warmup_t=warmup,
            warmup_lr_init=1e-6,
            warmup_prefix=False,
            t_in_epochs=False,
            lr_min=1e-6,
        )

    def _average(self) -> Any:
        if not self.recipe.ema:
            return None
        if ranks.together() and self.recipe.parallel == "fsdp":
            raise DwindleError(
                f"ema = {self.recipe.ema} cannot be kept of sharded weights; set ema=0, or parallel=ddp."
            )
        from timm.utils import ModelEmaV3

        return ModelEmaV3(self.model, decay=self.recipe.ema, use_warmup=True)

    @property
    def best_model(self) -> AdaptiveViT:
        """The one to evaluate and save: the average of the weights where there is one."""
        return self.average.module if self.average else self.model

    def batches(self, train: bool, epoch: int | None = None, alike: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's share of the images; `alike`: the joint batches, for every process."""
        recipe, pre = self.recipe, self.preprocess
        epoch = self.seen(self.epoch) if epoch is None else epoch
        images = self.train_images if train else self.eval_images
        batch = self.batch if train else 128
        part = (ranks.rank(), ranks.world())
        how: dict[str, Any] = {"min_scale": recipe.min_scale, "jitter": recipe.jitter, "erase": recipe.erase}
        how["randaugment"] = recipe.augment
        if alike:
            batch, part = batch * ranks.world(), (0, 1)
        if self.resident:
            store = self.resident["train" if train else "eval"]
            return store.batches(
                batch,
                train,
                recipe.seed,
                epoch,
                pre.mean,
                pre.std,
                **how,
                dtype=torch.bfloat16 if train and self.halves else torch.float32,
                part=part,
                compiled=self.learn.bare.compiled,
            )
        images.transform = pre.eval_transform()
        ready = loader(images, batch, train, recipe.workers, recipe.seed, *part, Augment.of(pre, **how))
        ready.set_epoch(epoch)
        return ready

    def seen(self, epoch: int) -> int:
        """The first epoch that saw what this one sees."""
        return epoch % self.recipe.views if self.recipe.views else epoch

    @property
    def seen_step(self) -> int:
        """The first step that saw what this one sees."""
        epoch, at = divmod(self.step, self.steps_per_epoch)
        return self.seen(epoch) * self.steps_per_epoch + at

    def epochs(self, tick: Any = None) -> Iterator[dict[str, float]]:
        """Train what is left to train. `tick(step, steps, terms)` is called after every step."""
        with self.claim:
            yield from self._epochs(tick)

    def _epochs(self, tick: Any) -> Iterator[dict[str, float]]:
        recipe, saved = self.recipe, time.monotonic()
        while self.epoch < recipe.epochs:
            with kept_pages(self.device.type == "cpu"):
                numbers = self._train_epoch(tick)
            self.epoch += 1
            last = self.epoch == recipe.epochs
            if last:
                self._meet_budget()
            if last or self.epoch % recipe.eval_every == 0:
                numbers |= self.evaluate()
            numbers = {"epoch": self.epoch, **numbers}
            self.history.append(numbers)
            due = ranks.gathered(time.monotonic() - saved > PATIENCE)[0]  # saving is the work of all processes
            if last or due or self.epoch % recipe.save_every == 0:
                self._save()
                saved = time.monotonic()
            yield numbers

    def evaluate(self, layout: str = "packed", model: AdaptiveViT | None = None) -> dict[str, float]:
        """The best model, or another, on the evaluation images, each counted once by one of the processes."""
        # Sharded weights are gathered block by block: no process may leave out a block the others compute.
        layout = "masked" if self.sharded else layout
        batches = self.batches(train=False)
        return evaluate(model or self.best_model, batches, layout=layout, device=self.device, lockstep=self.sharded)

    def _train_epoch(self, tick: Any) -> dict[str, float]:
        self.model.train()
        if (teacher := getattr(self.learn, "teacher", None)) is not None:
            teacher.asked = 0
        begin = time.perf_counter()
        total_steps = self.recipe.epochs * self.steps_per_epoch
        sums: dict[str, Tensor] = {}
        for x, y in self.batches(train=True):
            self.model.method.progress = self.step / total_steps
            terms = self._step(x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True))
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            if tick:
                tick(self.step, total_steps, terms)
        self.model.method.progress = self.step / total_steps
        means = {name: float(value) / self.steps_per_epoch for name, value in sums.items()}
        self.seconds_per_epoch = time.perf_counter() - begin
        if not np.isfinite(means["total"]):
            raise DwindleError(
                f"The loss became {means['total']} in epoch {self.epoch + 1}; lower lr or the loss weights."
            )
        return means | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        terms = self.learn(x, y, self.optimizer, self.seen_step)
        self.step += 1
        self.schedule.step_update(self.step)
        if self.average:
            self.average.update(self.model, step=self.step)
        return terms

    def _meet_budget(self) -> None:
        """Take up what is left between the budget asked for and the one held while training."""
        budget = getattr(self.model.method, "budget", None)
        if budget is None:
            return
        images = self.typical()
        for model in {id(m): m for m in (self.model, self.best_model)}.values():
            goal, reached = budget_share(budget, model.backbone.shape), calibrate(model, images, budget)
            if abs(reached / goal - 1) > 0.02:
                log.warning(
                    "asked for %.3f of the static cost, reached %.3f: the method cannot go there", goal, reached
                )

    def typical(self, count: int | None = None) -> Tensor:
        """Training images that cost what unseen ones will, to set a budget on; the same for every process.

        As in evaluation. A small data set is known by heart, and costs less than unseen images seen so; augmented, it
        costs more: half of each.
        """
        count = count or (1024 if self.device.type == "cuda" else 128)
        clean = count if len(self.train_images) >= LARGE else (count + 1) // 2
        rows = np.random.default_rng(self.recipe.seed).permutation(len(self.train_images))[:clean]
        if self.resident:
            views = self.resident["train"].view(torch.from_numpy(rows), self.preprocess.mean, self.preprocess.std)
        else:
            some = self.train_images.select(rows)
            some.transform = self.preprocess.eval_transform()
            views = torch.cat([x for x, _ in loader(some, self.batch)]).to(self.device)
        return torch.cat([views, *self._augmented(count - clean)])

    def _augmented(self, count: int) -> Iterator[Tensor]:
        """A small data set is drawn from more than once."""
        draw = 0
        while count > 0:
            for x, _ in self.batches(train=True, epoch=self.recipe.epochs + draw, alike=True):
                yield x[:count].to(self.device)
                count -= len(x)
                if count <= 0:
                    break
            draw += 1

    def _save(self) -> None:
        """The model first, then the state that vouches for it: a kill in between repeats this epoch's saving."""
        for images in self._images():
            for found in ranks.gathered(images.corrupt):
                images.corrupt |= found
        extra = {
            "preprocess": self.preprocess.to_dict(),
            "classes": self.train_images.classes,
            "data": self.data,
            "recipe": dataclasses.asdict(self.recipe) | {"weights": Path(self.recipe.weights or "none").name},
            "holdout": self.holdout,
            "results": self.history[-1] | self.eval_images.about(),
        }
        weights = full_state(self.model) if self.sharded else self.model.state_dict()
        moments = full_state(self.model, self.optimizer) if self.sharded else self.optimizer.state_dict()
        randoms = ranks.gathered(random_state(self.device))
        if ranks.rank():
            return ranks.wait()
        save(self.best_model, self.out, extra=extra, weights=weights if self.sharded else None)
        write_card(self.out)
        if skipped := {why: name for images in self._images() for name, why in images.corrupt_files()}:
            note_corrupt(self.out, skipped)
        self.noted = write_metrics(self.out, self.history, self.noted)
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "model": weights,
            "average": self.average.module.state_dict() if self.average else None,
            "optimizer": moments,
            "history": self.history,
            "classes": self.train_images.classes,
            "given": json.dumps(self.given),
            "random": randoms,
        }
        write_state(self.out, state)
        ranks.wait()

    def _images(self) -> tuple[Images, Images]:
        return self.train_images, self.eval_images

    def _restore(self) -> None:
        state = read_state(self.out, self.given, self.recipe)
        self.epoch, self.step, self.history = state["epoch"], state["step"], state["history"]
        self.noted = len(self.history)
        if state.get("classes", self.train_images.classes) != self.train_images.classes:
            raise DwindleError(f"The classes of the data are not those {self.out} began with; resume with these.")
        randoms = state["random"]
        if len(randoms) != ranks.world():
            raise DwindleError(f"{self.out} was started by {len(randoms)} processes; resume with as many.")
        try:
            if self.sharded:
                load_full_state(self.model, state["model"], self.optimizer, state["optimizer"])
            else:
                self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise DwindleError(
                f"{self.out} does not fit this data any more; resume with the data as it was."
            ) from error
        if self.average:
            self.average.module.load_state_dict(state["average"])
        if not self.sharded:
            self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.step_update(self.step)
        restore_random(randoms[ranks.rank()], self.device)


def whole_if_small(wanted: Preprocess, images: Images) -> Preprocess:
    """Images below the model's size are enlarged whole: of those nothing is to be cut off."""
    small = min(images.sample().size) < wanted.size
    return dataclasses.replace(wanted, crop_pct=1.0 if small else CROP_PCT)


def note_corrupt(out: Path, found: dict[str, str]) -> None:
    """corrupt.jsonl: the images that were skipped, those of before a kill too. found: their names by what is wrong."""
    path = out / CORRUPT
    if path.exists():
        before = map(json.loads, path.read_text("utf-8").splitlines())
        found = {line["reason"]: line["image"] for line in before} | found
    write_text(path, "".join(json.dumps({"image": found[why], "reason": why}) + "\n" for why in sorted(found)))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
