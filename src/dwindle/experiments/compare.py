"""A comparison: train and measure what a plan lists, one JSON per result.

A comparison that was stopped continues: a result whose JSON exists is not made again, and a killed training resumes.
The `Plan` of a family of models defines what is compared and how the tables look. Several processes with the same
folders share the work, one result at a time, whether torchrun started them or not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import DwindleError, unknown
from ..files import check_folder, lock, unlock, write_errors, write_text
from ..io.checkpoint import load
from ..train.loop import Run
from ..train.recipe import Training
from ..train.state import STATE, defaults, differing
from ..train.teacher import CacheBudget, TeacherCache
from .results import machine, read_result, slug

# Settings that do not change a result, such as where and how often a run saves: results may differ in them.
INCIDENTAL = ("weights", "save_every", "eval_every", "workers", "compile", "resident", "parallel", "layout")

# The settings that a teacher's outputs depend on, besides the data.
SOURCE = ("teacher", "model", "seed", "batch", "global_batch", "image_size", "amp", "cpu_amp", "compile")
BATCHES = (*SOURCE, "min_scale", "jitter", "augment", "erase", "mixup", "cutmix", "mix_prob", "views", "holdout")


@dataclass(frozen=True)
class Job:
    """One result of a comparison: its name, the conditions it depends on, and the function that makes it."""

    name: str
    recipe: Any
    conditions: dict[str, Any]
    make: Callable[[], dict[str, Any]]
    target_cost: float | None = None  # the cost asked for, if one name has results at several costs
    needs: Path | None = None  # a checkpoint that other results use: if it is missing, the result is made again
    folder: str | None = None  # the training's, if several results are made of it: then one process makes all of them

    @property
    def stem(self) -> str:
        return stem(self.name, self.recipe.seed, self.target_cost)


def stem(name: str, seed: int, target_cost: float | None = None) -> str:
    """The name of a result's file without its suffix, and of the folder of a training."""
    return f"{slug(name)}{'' if target_cost is None else f'-{target_cost:.2f}'}-s{seed}"


@dataclass(frozen=True)
class Report:
    """The report of a comparison."""

    results: list[dict[str, Any]]
    tables: list[tuple[str, list[str], list[list[Any]]]]  # (title, columns, rows) each
    markdown: str  # the table for a page
    files: dict[str, Any] = field(default_factory=dict)  # paths of written files, by name


class Plan:
    """The definition of a comparison. `base`: the recipe with the conditions that all results share."""

    part: ClassVar[str] = "result"  # the word for what `only` names, for errors
    independent: ClassVar[bool] = False  # whether results depend on no others except those with `needs`
    base: Any

    def names(self) -> list[str]:
        """The names of all results, as `only` takes them."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a comparison that cannot work, before anything is read or written."""

    def jobs(self, work: Compare) -> Iterator[Job]:
        """The results to make, in their order. A result that depends on another's numbers comes after that one."""
        raise NotImplementedError

    def line(self, row: dict[str, Any]) -> str:
        """A result in one line."""
        raise NotImplementedError

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        """Tables of the results, and figures, written to the folder."""
        raise NotImplementedError


class Compare:
    """A comparison at work. `results()` yields every result that was asked for, those made by earlier calls too."""

    def __init__(
        self,
        name: str,
        plan: Any,
        data: str | None,
        out: str | os.PathLike,
        results: str | os.PathLike,
        *,
        eval_data: str | None = None,
        device: str | None = None,
        limit: int | None = None,
        only: Sequence[str] | None = None,
        tick: Callable[..., None] | None = None,
        until: float | None = None,
        patience: float = 2.0,
    ) -> None:
        """only: names of `plan.names()`. until: seconds after which no further training is begun. patience: seconds
        between two checks whether another process has made a result.
        """
        known = plan.names()
        for wanted in only or ():
            if wanted not in known:
                raise unknown(f"{plan.part} of this comparison", wanted, known)
        plan.check()
        self.name, self.plan, self.out, self.folder = name, plan, Path(out), Path(results) / name
        self.data, self.eval_data, self.limit = data, eval_data, limit
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.tick, self.only = tick, set(only or known)
        self.patience = patience
        self.end = None if until is None else time.monotonic() + until
        check_folder(self.folder, "--results")
        self.opened: Any = None  # the data, shared by all runs
        self.resident: Any = None  # the decoded images, shared by all runs
        self.answers: dict[str, TeacherCache] = {}  # teachers' outputs, shared by all runs on the same batches
        self.room = CacheBudget()
        self.last: tuple[Path, Run, Any] | None = None

    @property
    def late(self) -> bool:
        """Whether the time given by `until` is over."""
        return self.end is not None and time.monotonic() > self.end

    def results(self) -> Iterator[dict[str, Any]]:
        others: list[Job] = []  # another process is making them
        for job in self.plan.jobs(self):
            there = self._there(job)
            if job.name not in self.only:
                continue
            if not there and not self.late and not self._make(job):
                if self.plan.independent and job.needs is None:
                    others.append(job)
                    continue
                self._wait(job)
            if self._there(job):
                yield read_result(self._path(job))
        for job in others:
            self._wait(job)
            if self._there(job):
                yield read_result(self._path(job))

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.stem}.json"

    def _there(self, job: Job) -> bool:
        return self._has(self._path(job), job) and (job.needs is None or job.needs.exists())

    def _make(self, job: Job) -> bool:
        """Make a result. False: another process is making it."""
        mark = self.out / f".{job.folder or job.stem}.made"
        fresh = not self.out.exists()
        with write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        file = lock(mark)
        if file is None:
            return False
        try:
            if not self._there(job):  # else another process has made it before the lock was taken
                write_text(self._path(job), json.dumps(self._made(job), indent=1) + "\n")
        finally:
            mark.unlink(missing_ok=True)
            unlock(file)
            if fresh and not any(self.out.iterdir()):  # a job that fails at once leaves no folder behind
                self.out.rmdir()
        return True

    def _wait(self, job: Job) -> None:
        """Wait until another process has made a result. If that process ended before, this one makes the result."""
        while not self._there(job) and not self.late and not self._make(job):
            time.sleep(self.patience)

    def kept(self) -> list[dict[str, Any]]:
        """All results that exist, asked for or not, in the plan's order."""
        paths = (self.folder / f"{job.stem}.json" for job in self.plan.jobs(self))
        return [read_result(path) for path in paths if path.exists()]

    def report(self) -> Report:
        return self.plan.report(self.name, self.kept(), self.folder)

    def _has(self, path: Path, job: Job) -> bool:
        """Whether the result exists. Refuses one that was made under other conditions.

        Settings that did not exist when it was made have the defaults of the recipe's class.
        """
        if not path.exists():
            return False
        if others := differing(defaults(job.recipe) | read_result(path).get("conditions", {}), job.conditions):
            raise DwindleError(f"{path} was made with {others}; choose another --results, or delete it.")
        return True

    def _made(self, job: Job) -> dict[str, Any]:
        asked = {} if job.target_cost is None else {"asked": job.target_cost}
        about = {"comparison": self.name, "name": job.name, "seed": job.recipe.seed, **asked}
        return about | job.make() | {"conditions": job.conditions, "machine": machine(self.device)}

    def conditions(self, recipe: Training, incidental: Sequence[str] = INCIDENTAL) -> dict[str, Any]:
        """The conditions that a result depends on, as its JSON holds them: without this machine's folders."""
        paths = {"data": self.data, "eval_data": self.eval_data}
        data = {name: Path(path).name if path else None for name, path in paths.items()}
        settings = recipe.settings()
        settings |= {"teacher": Path(settings["teacher"]).name} if settings.get("teacher") else {}
        kept = {name: value for name, value in settings.items() if name not in incidental}
        return data | {"limit": self.limit} | kept

    # For plans, to make results.
    def open(self, recipe: Training, folder: Path, resume: bool = False) -> Run:
        """A run with its model and its data, before training."""
        run = Run(
            recipe,
            self.data,
            folder,
            eval_data=self.eval_data,
            device=str(self.device),
            limit=self.limit,
            resume=resume,
            opened=self.opened,
            resident=self.resident,
            answers=self._answers(recipe),
        )
        self.opened, self.resident = run.task.shared, run.task.resident
        return run

    def _answers(self, recipe: Any) -> TeacherCache | None:
        """The teacher's outputs, shared by runs whose `BATCHES` settings are the same; None: they cannot be shared."""
        if getattr(recipe, "teacher", None) in (None, "static"):  # 'static' is the run's own model
            return None
        batches = json.dumps([getattr(recipe, name) for name in BATCHES])
        return self.answers.setdefault(batches, TeacherCache(self.room))

    def trained(self, recipe: Training, folder: Path) -> tuple[Run, Any]:
        """A finished run and its saved model. The latest one is kept, for plans that make several results of it."""
        if self.last is None or self.last[0] != folder:
            self.last = None
            run = self.open(recipe, folder, resume=(folder / STATE).exists())
            for _ in run.epochs(self.tick and partial(self.tick, folder.name)):
                pass
            run.learn.forget()  # free its recordings before the next run allocates memory
            self.last = folder, run, self.loaded(folder)
        return self.last[1:]

    def loaded(self, folder: Path) -> Any:
        model: Any = load(folder)
        return model.eval().to(self.device)
