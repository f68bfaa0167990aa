"""One training loop for every method."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import logging
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint import load_vit_weights, save
from ..cost import budget_share
from ..errors import DwindleError, unknown
from ..images import Preprocess
from ..methods.static import Static
from ..model import AdaptiveViT, adapt
from .batches import CROP_PCT, Resident, loader
from .data import check_labels, open_data
from .data import limit as first
from .evaluate import calibrate, evaluate
from .recipe import Recipe

log = logging.getLogger("dwindle")
STATE = "state.pt"


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
    ) -> None:
        self.recipe, self.out = recipe, Path(out)
        self.given = dataclasses.asdict(recipe) | {"data": data, "eval_data": eval_data, "limit": limit}
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        recipe.check()
        self._claim_folder(resume)
        self.train_images = open_data(data, "train")
        self.eval_images = open_data(eval_data or data, "test")
        if limit is not None:
            self.train_images, self.eval_images = first(self.train_images, limit), first(self.eval_images, limit)
        _seed(recipe.seed)
        vit = build_vit(recipe, self.train_images.num_classes)
        self.preprocess = dataclasses.replace(Preprocess.of(vit), crop_pct=CROP_PCT)
        for images in (self.train_images, self.eval_images):
            check_labels(images.labels, vit.num_classes)
        self.teacher = self._teacher(vit)
        self.model = adapt(vit, recipe.make_method()).to(self.device)
        patch = self.model.backbone.shape.patch
        if any(self.preprocess.size % side for side in patch):
            raise DwindleError(f"image_size = {self.preprocess.size} is no multiple of the patch size {patch}.")
        if recipe.freeze_backbone:
            self.model.vit.requires_grad_(False)
        self.resident = self._resident()
        self.steps_per_epoch = len(self.train_images) // min(recipe.batch, len(self.train_images))
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, recipe), lr=recipe.lr)
        self.schedule = self._schedule()
        self.average = self._average()
        self.epoch, self.step = 0, 0
        self.history: list[dict[str, float]] = []
        if resume:
            self._restore()

    def _claim_folder(self, resume: bool) -> None:
        if self.out.is_file():
            raise DwindleError(f"{self.out} is a file; --out is a folder.")
        if not resume and (self.out / STATE).exists():
            raise DwindleError(f"{self.out} holds a run already; go on with --resume, or choose another --out.")
        if resume and not (self.out / STATE).exists():
            raise DwindleError(f"{self.out} holds no run to resume; leave --resume out to start one.")
        if any(parent.is_file() for parent in self.out.parents):
            raise DwindleError(f"{self.out} cannot be a folder, a part of it is a file; choose another --out.")

    def _teacher(self, vit: nn.Module) -> AdaptiveViT | None:
        if self.recipe.teacher is None:
            return None
        if self.recipe.teacher != "static":
            raise unknown("teacher", self.recipe.teacher, ["static"])
        teacher = adapt(copy.deepcopy(vit), Static(attention=True))
        return teacher.eval().requires_grad_(False).to(self.device)

    def _resident(self) -> dict[str, Resident] | None:
        recipe = self.recipe
        small = len(self.train_images) + len(self.eval_images) <= 100_000
        wanted = recipe.resident if recipe.resident is not None else self.device.type == "cuda" and small
        if not wanted:
            return None
        size = self.preprocess.size
        return {
            "train": Resident(self.train_images, size, self.device),
            "eval": Resident(self.eval_images, size, self.device),
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
        from timm.utils import ModelEmaV3

        return ModelEmaV3(self.model, decay=self.recipe.ema, use_warmup=True)

    @property
    def best_model(self) -> AdaptiveViT:
        """The one to evaluate and save: the average of the weights where there is one."""
        return self.average.module if self.average else self.model

    def batches(self, train: bool, epoch: int | None = None) -> Iterable[tuple[Tensor, Tensor]]:
        recipe, pre = self.recipe, self.preprocess
        epoch = self.epoch if epoch is None else epoch
        images = self.train_images if train else self.eval_images
        batch = min(recipe.batch, len(images)) if train else 128
        if self.resident:
            store = self.resident["train" if train else "eval"]
            return store.batches(
                batch,
                train,
                recipe.seed,
                epoch,
                pre.mean,
                pre.std,
                min_scale=recipe.min_scale,
                jitter=recipe.jitter,
            )
        images.transform = (
            pre.train_transform(randaugment=recipe.augment, min_scale=recipe.min_scale)
            if train
            else pre.eval_transform()
        )
        ready = loader(images, batch, train, recipe.workers, recipe.seed)
        ready.set_epoch(epoch)
        return ready

    def epochs(self, tick: Any = None) -> Iterator[dict[str, float]]:
        """Train what is left to train. `tick(step, steps, terms)` is called after every step."""
        recipe = self.recipe
        while self.epoch < recipe.epochs:
            numbers = self._train_epoch(tick)
            self.epoch += 1
            last = self.epoch == recipe.epochs
            if last:
                self._meet_budget()
            if last or self.epoch % recipe.eval_every == 0:
                numbers |= evaluate(self.best_model, self.batches(train=False), device=self.device)
            numbers = {"epoch": self.epoch, **numbers}
            self.history.append(numbers)
            self._save()
            yield numbers

    def _train_epoch(self, tick: Any) -> dict[str, float]:
        self.model.train()
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
        if not np.isfinite(means["total"]):
            raise DwindleError(
                f"The loss became {means['total']} in epoch {self.epoch + 1}; lower lr or the loss weights."
            )
        return means | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        recipe = self.recipe
        with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.amp and self.device.type == "cuda"):
            out = self.model(x)
            taught = None
            if self.teacher is not None:
                with torch.no_grad():
                    taught = self.teacher(x, layout="masked")
            terms = self.model.loss(
                out,
                y,
                taught,
                label_weight=recipe.label_weight,
                teacher_weight=recipe.teacher_weight,
                temperature=recipe.teacher_temperature,
                label_smoothing=recipe.smoothing,
            )
        self.optimizer.zero_grad(set_to_none=True)
        terms["total"].backward()
        if recipe.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.step += 1
        self.schedule.step_update(self.step)
        if self.average:
            self.average.update(self.model, step=self.step)
        return {name: value.detach().float() for name, value in terms.items()} | {"cost": self.model.cost(out.trace)}

    def _meet_budget(self) -> None:
        """Take up what is left between the budget asked for and the one held, on images seen as in training: clean
        training images are a little cheaper than unseen ones."""
        budget = getattr(self.model.method, "budget", None)
        if budget is None:
            return
        images = self._augmented(1024 if self.device.type == "cuda" else 128)
        for model in {id(m): m for m in (self.model, self.best_model)}.values():
            goal, reached = budget_share(budget, model.backbone.shape), calibrate(model, images, budget)
            if abs(reached / goal - 1) > 0.02:
                log.warning(
                    "asked for %.3f of the static cost, reached %.3f: the method cannot go there", goal, reached
                )

    def _augmented(self, count: int) -> Tensor:
        """Training images under augmentation; a small data set is drawn from more than once."""
        seen: list[Tensor] = []
        for draw in range(count):
            for x, _ in self.batches(train=True, epoch=self.recipe.epochs + draw):
                seen.append(x)
                if sum(map(len, seen)) >= count:
                    return torch.cat(seen)[:count].to(self.device)
        raise AssertionError("every draw gives at least one image")

    def _save(self) -> None:
        """The model first, then the state that vouches for it: a kill in between repeats this epoch's saving."""
        extra = {
            "preprocess": self.preprocess.to_dict(),
            "classes": self.train_images.classes,
            "recipe": dataclasses.asdict(self.recipe) | {"weights": Path(self.recipe.weights or "none").name},
            "results": self.history[-1],
        }
        save(self.best_model, self.out, extra=extra)
        self._write_metrics()
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict() if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "given": json.dumps(self.given),
            "random": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            },
        }
        scratch = self.out / f".{STATE}"
        torch.save(state, scratch)
        os.replace(scratch, self.out / STATE)

    def _restore(self) -> None:
        path = self.out / STATE
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DwindleError(
                f"{path} cannot be read ({type(error).__name__}): it is damaged; start again with another --out."
            ) from error
        mine = json.dumps(self.given)
        if state["given"] != mine:
            old, new = json.loads(state["given"]), json.loads(mine)
            differing = ", ".join(f"{k}={old.get(k)} (now {new.get(k)})" for k in new if old.get(k) != new.get(k))
            raise DwindleError(f"{self.out} was started with other settings: {differing}; resume with the same ones.")
        self.epoch, self.step, self.history = state["epoch"], state["step"], state["history"]
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise DwindleError(
                f"{self.out} does not fit this data any more; resume with the data as it was."
            ) from error
        if self.average:
            self.average.module.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.step_update(self.step)
        torch.set_rng_state(state["random"]["torch"])
        if state["random"]["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def _write_metrics(self) -> None:
        names = list(dict.fromkeys(name for row in self.history for name in row))
        scratch = self.out / ".metrics.csv"
        with scratch.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.history)
        os.replace(scratch, self.out / "metrics.csv")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with SummaryWriter(str(self.out / "tensorboard")) as board:
            for name, value in self.history[-1].items():
                board.add_scalar(name, value, self.epoch)


def build_vit(recipe: Recipe, classes: int) -> Any:
    """The backbone a recipe names, with its weights. A head of another size than the weights' starts anew."""
    import timm

    if not timm.is_model(recipe.model):
        raise unknown("model", recipe.model, timm.list_models())
    options: dict[str, Any] = {"img_size": recipe.image_size} if recipe.image_size else {}
    if recipe.weights in (None, "pretrained"):
        try:
            return timm.create_model(
                recipe.model, pretrained=recipe.weights is not None, num_classes=classes, **options
            )
        except TypeError as error:
            raise DwindleError(f"{recipe.model} is no plain ViT that can be built with {options} ({error}).") from error
        except (OSError, RuntimeError) as error:
            raise DwindleError(
                f"Weights for {recipe.model} could not be fetched ({type(error).__name__}); "
                "give a file with --set weights=PATH."
            ) from error
    vit: Any = timm.create_model(recipe.model, num_classes=1000)
    load_vit_weights(vit, recipe.weights)
    if classes != vit.num_classes:
        vit.reset_classifier(classes)
    if recipe.image_size:
        vit.set_input_size(img_size=(recipe.image_size, recipe.image_size))
    return vit


def parameter_groups(model: AdaptiveViT, recipe: Recipe) -> list[dict[str, Any]]:
    """Backbone and method each at its learning rate; no decay for vectors, scalars and embeddings."""
    undecayed = set(getattr(model.vit, "no_weight_decay", set)())
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = recipe.method_lr if name.startswith("method.") else recipe.lr
        plain = parameter.dim() <= 1 or name.removeprefix("vit.") in undecayed
        groups.setdefault((lr, 0.0 if plain else recipe.weight_decay), []).append(parameter)
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
