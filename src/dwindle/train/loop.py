"""The training loop of every model on every task."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import processes as ranks
from ..errors import DwindleError, listed
from ..io.card import write_card
from ..io.checkpoint import save
from ..io.draws import mix
from ..tasks.base import Source, Task, task_named
from .learner import Learner
from .recipe import Training
from .state import Claim, random_state, read_state, restore_random, write_metrics, write_state
from .step import Step, full_state, load_full_state, shard
from .teacher import TeacherCache

PATIENCE = 60.0  # seconds since the last save after which every epoch is saved: `save_every` is for short epochs
Tick = Callable[[int, int, dict[str, Tensor]], None]


class Run:
    """A training run: a recipe on its data, writing to a folder. `epochs()` yields the metrics of each epoch."""

    def __init__(
        self,
        recipe: Training,
        data: str | None,
        out: str | os.PathLike,
        *,
        eval_data: str | None = None,
        device: str | None = None,
        resume: bool = False,
        limit: int | None = None,
        opened: Any = None,
        resident: Any = None,
        answers: TeacherCache | None = None,
    ) -> None:
        """data, eval_data: names or folders. limit: only so many images of each. opened, resident: the data opened and
        decoded by an earlier run (see `Source`). answers: the teacher's outputs of earlier runs on the same batches, to
        which this run adds its own.
        """
        self.recipe: Any = recipe.on(data)
        self.out = Path(out)
        recipe = self.recipe
        recipe.check()
        kind = check_task(recipe)
        if ranks.started() > 1 and not kind.several:
            raise DwindleError(f"{kind.what} trains in one process, not {ranks.started()}; start it without torchrun.")
        self.device = torch.device(ranks.join(device) or ("cuda" if torch.cuda.is_available() else "cpu"))
        source = Source(data, eval_data, limit, opened, resident)
        self.given = dataclasses.asdict(recipe) | source.identity
        self.claim = Claim(self.out, resume)
        self.task: Any = task_named(recipe.task)(recipe, source, self.device)
        seed_everything(recipe.seed)
        self.learner = kind(recipe, self.task, self.device)
        if self.learner.teacher is not None and answers is not None:
            self.learner.teacher.answers = answers
        self.model, self.sharded = self.learner.model, self.learner.sharded
        self.average = self._average()
        if self.sharded:
            shard(self.model)
        self.optimizer = self.learner.optimizer()
        self.learn = Step(self.learner)
        if self.learner.worth_compiling():
            self.learner.compile()
        self.epoch, self.step = 0, 0
        self.seconds_per_epoch = 0.0  # of the latest epoch, without evaluation and saving
        self.history: list[dict[str, float]] = []
        self.logged = 0  # rows of the history that are in TensorBoard's file
        if ranks.rank():  # from here on each process has its own random numbers, such as for dropout
            torch.manual_seed(mix(recipe.seed, ranks.rank()))
        if resume:
            self._restore()

    def _average(self) -> Any:
        decay = self.learner.averaging()
        if not decay:
            return None
        if self.sharded:
            raise DwindleError(f"ema = {decay} cannot be kept of sharded weights; set ema=0, or parallel=ddp.")
        from timm.utils import ModelEmaV3

        return ModelEmaV3(self.model, decay=decay, use_warmup=True)

    @property
    def best_model(self) -> Any:
        """The model to evaluate and save: the one with averaged weights, if they are averaged."""
        return self.average.module if self.average else self.model

    @property
    def steps_per_epoch(self) -> int:
        return self.task.steps_per_epoch

    def seen(self, epoch: int) -> int:
        """The first epoch with the same batches as this one."""
        return epoch % self.recipe.views if self.recipe.views else epoch

    @property
    def seen_step(self) -> int:
        """The first step with the same batch as the present one."""
        epoch, at = divmod(self.step, self.steps_per_epoch)
        return self.seen(epoch) * self.steps_per_epoch + at

    def epochs(self, tick: Tick | None = None) -> Iterator[dict[str, float]]:
        """Train the epochs that are left and yield their metrics. `tick(step, steps, terms)` is called at each step."""
        with self.claim:
            yield from self._epochs(tick)

    def _epochs(self, tick: Tick | None) -> Iterator[dict[str, float]]:
        task, saved = self.task, time.monotonic()
        while self.step < task.steps:
            since = self.step
            numbers = self._train_epoch(tick)
            self.epoch += 1
            last = self.step == task.steps
            if last:
                self.learner.finish(list({id(model): model for model in (self.model, self.best_model)}.values()))
            if last or self.epoch % task.eval_every == 0:
                numbers |= self.evaluate()
            at = {"epoch": self.epoch, "step": self.step}[task.numbered_by]
            numbers = {task.numbered_by: at, **numbers, **self.learner.row(self.seconds_per_epoch, self.step - since)}
            self.history.append(numbers)
            due = ranks.gathered(time.monotonic() - saved > PATIENCE)[0]  # all processes must save together
            if last or due or self.epoch % task.save_every == 0:
                self._save()
                saved = time.monotonic()
            yield numbers

    def evaluate(self, model: Any = None, **options: Any) -> dict[str, float]:
        """The family's metrics of a model; None: of the best model."""
        return self.learner.evaluate(model or self.best_model, **options)

    def _train_epoch(self, tick: Tick | None) -> dict[str, float]:
        learner, task, since = self.learner, self.task, self.step
        learner.begin_epoch(self)
        if self.average:
            self.average.decay = learner.averaging()
        self.model.train()
        if learner.teacher is not None:
            learner.teacher.computed = 0
        begin = time.perf_counter()
        sums: dict[str, Tensor] = {}
        for x, y in task.batches(train=True, epoch=self.seen(self.epoch)):
            learner.begin_step(self.step / task.steps)
            terms = self._step(x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True))
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            if tick:
                tick(self.step, task.steps, terms)
            if self.step == task.steps:
                break
        learner.begin_step(self.step / task.steps)
        means = {name: float(value) / (self.step - since) for name, value in sums.items()}
        self.seconds_per_epoch = time.perf_counter() - begin
        if not np.isfinite(means["total"]):
            raise DwindleError(
                f"The loss became {means['total']} in epoch {self.epoch + 1}; lower lr or the loss weights."
            )
        return means | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learner.rate(self.step, group)
        inputs = self.learner.inputs(x, y, self.step, self.seen_step)
        terms = self.learn(inputs, self.optimizer)
        self.learner.end_step(terms)
        self.step += 1
        if self.average:
            self.average.update(self.model, step=self.step)
        return terms

    def _save(self) -> None:
        """Save the checkpoint first, then the state: after a kill in between, this epoch is trained and saved again."""
        task = self.task
        task.gather()
        extra = task.extra() | {"recipe": self.recipe.settings(), "results": self.history[-1] | task.about()}
        weights = full_state(self.model) if self.sharded else self.model.state_dict()
        moments = full_state(self.model, self.optimizer) if self.sharded else self.optimizer.state_dict()
        randoms = ranks.gathered(random_state(self.device))
        if ranks.rank():
            return ranks.wait()
        save(self.best_model, self.out, extra=extra, weights=weights if self.sharded else None)
        write_card(self.out)
        task.write(self.out)
        self.logged = write_metrics(self.out, self.history, self.logged, by=task.numbered_by)
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "model": weights,
            "average": self.average.module.state_dict() if self.average else None,
            "optimizer": moments,
            "history": self.history,
            "given": json.dumps(self.given),
            "random": randoms,
        }
        write_state(self.out, state | task.state())
        ranks.wait()

    def _restore(self) -> None:
        state = read_state(self.out, self.given, self.recipe)
        self.epoch, self.step, self.history = state["epoch"], state["step"], state["history"]
        self.logged = len(self.history)
        self.task.check_state(state, self.out)
        randoms = state["random"]
        if len(randoms) != ranks.world() and not getattr(self.recipe, "global_batch", 0):
            raise DwindleError(
                f"{self.out} was started by {len(randoms)} processes; resume with as many (a run whose batch was given "
                "by global_batch goes on with any number)."
            )
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
        if len(randoms) == ranks.world():
            restore_random(randoms[ranks.rank()], self.device)
        else:  # images and augmentation follow from seed and epoch; other random numbers, as of dropout, start anew
            torch.manual_seed(mix(self.recipe.seed, self.step, ranks.rank()))


def check_task(recipe: Training) -> type[Learner]:
    """The class that the recipe trains. Refuses a task it cannot learn, and settings that the task does not use."""
    kind, task = recipe.learner(), task_named(recipe.task)
    if task.answers not in kind.learns:
        known = listed(sorted(name for name, other in Task.registry.items() if other.answers in kind.learns))
        raise DwindleError(f"task = {recipe.task}: {kind.what} learns {known}; take another recipe for this task.")
    for field in dataclasses.fields(recipe):
        given = getattr(recipe, field.name)
        if field.name in task.unused and given != field.default:
            raise DwindleError(f"{field.name} = {given}: it has no effect on the task '{recipe.task}'; leave it out.")
    if task.needs_teacher and getattr(recipe, "teacher", None) is None:
        raise DwindleError(
            f"task = {recipe.task}: it is learnt from a teacher; give one, by --set teacher=static or a checkpoint."
        )
    return kind


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
