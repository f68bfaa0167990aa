"""One comparison at a time: train and measure what a plan asks for, one JSON per result.

A comparison goes on where it was: a result whose JSON exists is not made again, a training that was killed resumes.
What is compared, and what a table of it looks like, a family of models says by its `Plan`. Processes that are given the
same folders share the work, a result at a time: those of a torchrun, or others.
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
from ..files import check_folder, lock, unlock, write_text, writing
from ..io.checkpoint import load
from ..train.loop import Run
from ..train.recipe import Training
from ..train.state import STATE, defaults, differing
from ..train.teacher import Answers, Room
from .results import machine, read_result, slug

# Settings that say where and how often, not what: two results may differ in them and still be comparable.
INCIDENTAL = ("weights", "save_every", "eval_every", "workers", "compile", "resident", "parallel", "layout")

# What a teacher's answers depend on, beside the data.
SOURCE = ("teacher", "model", "seed", "batch", "global_batch", "image_size", "amp", "cpu_amp", "compile")
BATCHES = (*SOURCE, "min_scale", "jitter", "augment", "erase", "mixup", "cutmix", "mix_prob", "views", "holdout")


@dataclass(frozen=True)
class Job:
    """One result: its name, what it depends on, and how it is made."""

    name: str
    recipe: Any
    conditions: dict[str, Any]
    make: Callable[[], dict[str, Any]]
    asked: float | None = None  # the cost, where one name has several
    needs: Path | None = None  # the checkpoint that others build on: without it the result is made again
    folder: str | None = None  # of the training it is made of, where several results are; one process at a time

    @property
    def stem(self) -> str:
        return stem(self.name, self.recipe.seed, self.asked)


def stem(name: str, seed: int, asked: float | None = None) -> str:
    """Of a result's file, and of the folder of a training."""
    return f"{slug(name)}{'' if asked is None else f'-{asked:.2f}'}-s{seed}"


@dataclass(frozen=True)
class Report:
    """What is shown of a comparison: tables as (title, columns, rows), the one for a page, and files by name."""

    results: list[dict[str, Any]]
    tables: list[tuple[str, list[str], list[list[Any]]]]
    markdown: str
    files: dict[str, Any] = field(default_factory=dict)


class Plan:
    """What is compared. `base` holds the conditions that all share."""

    part: ClassVar[str] = "result"  # what `only` names
    independent: ClassVar[bool] = False  # results depend only on those that `needs` marks
    base: Any

    def names(self) -> list[str]:
        """Of all results, as `only` may name them."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what cannot be compared, before anything is read or written."""

    def jobs(self, work: Compare) -> Iterator[Job]:
        """The results in their order. One that depends on another's numbers comes after it, once these are there."""
        raise NotImplementedError

    def told(self, row: dict[str, Any]) -> str:
        """A result in one line."""
        raise NotImplementedError

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        """Tables of the results, and figures, written to the folder."""
        raise NotImplementedError


class Compare:
    """`results()` yields every result that was asked for as it comes, those of earlier calls too."""

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
        """only: names, as `plan.names()` has them. until: seconds after which no further training is begun. patience:
        seconds between two looks at what another process is making."""
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
        self.opened: Any = None  # data that all runs share
        self.resident: Any = None  # images, decoded once for all runs
        self.answers: dict[str, Answers] = {}  # of each teacher, who is asked once for all runs on the same batches
        self.room = Room()
        self.last: tuple[Path, Run, Any] | None = None

    @property
    def late(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def results(self) -> Iterator[dict[str, Any]]:
        others: list[Job] = []  # that another process is making
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
        """Make a result, unless another process is at it."""
        mark = self.out / f".{job.folder or job.stem}.made"
        fresh = not self.out.exists()
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        held = lock(mark)
        if held is None:
            return False
        try:
            if not self._there(job):  # else it was made since
                write_text(self._path(job), json.dumps(self._made(job), indent=1) + "\n")
        finally:
            mark.unlink(missing_ok=True)
            unlock(held)
            if fresh and not any(self.out.iterdir()):  # what fails at once leaves nothing
                self.out.rmdir()
        return True

    def _wait(self, job: Job) -> None:
        """Until the other process has made it; where that came to its end before, this one goes on with it."""
        while not self._there(job) and not self.late and not self._make(job):
            time.sleep(self.patience)

    def kept(self) -> list[dict[str, Any]]:
        """All results that are there, asked for or not, in the plan's order."""
        paths = (self.folder / f"{job.stem}.json" for job in self.plan.jobs(self))
        return [read_result(path) for path in paths if path.exists()]

    def report(self) -> Report:
        return self.plan.report(self.name, self.kept(), self.folder)

    def _has(self, path: Path, job: Job) -> bool:
        """Whether the result is there. One made under other conditions is not it; settings that were not there yet
        count as what they are in a plain recipe of the same kind.
        """
        if not path.exists():
            return False
        if others := differing(defaults(job.recipe) | read_result(path).get("conditions", {}), job.conditions):
            raise DwindleError(f"{path} was made with {others}; choose another --results, or delete it.")
        return True

    def _made(self, job: Job) -> dict[str, Any]:
        asked = {} if job.asked is None else {"asked": job.asked}
        told = {"comparison": self.name, "name": job.name, "seed": job.recipe.seed, **asked}
        return told | job.make() | {"conditions": job.conditions, "machine": machine(self.device)}

    def conditions(self, recipe: Training, incidental: Sequence[str] = INCIDENTAL) -> dict[str, Any]:
        """What a result depends on, as it is kept beside it: without folders of this machine."""
        names = {"data": self.data, "eval_data": self.eval_data}
        named = {name: Path(given).name if given else None for name, given in names.items()}
        settings = recipe.told()
        settings |= {"teacher": Path(settings["teacher"]).name} if settings.get("teacher") else {}
        kept = {name: value for name, value in settings.items() if name not in incidental}
        return named | {"limit": self.limit} | kept

    # What plans make results of.
    def open(self, recipe: Training, folder: Path, resume: bool = False) -> Run:
        """A run that is not begun: its model and its data."""
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

    def _answers(self, recipe: Any) -> Answers | None:
        """Kept for runs that differ in nothing an image on its way to the teacher meets."""
        if getattr(recipe, "teacher", None) in (None, "static"):  # 'static': the run's own weights
            return None
        batches = json.dumps([getattr(recipe, name) for name in BATCHES])
        return self.answers.setdefault(batches, Answers(self.room))

    def trained(self, recipe: Training, folder: Path) -> tuple[Run, Any]:
        """A finished run and its model as saved. The latest is kept, for plans that make several results of it."""
        if self.last is None or self.last[0] != folder:
            self.last = None
            run = self.open(recipe, folder, resume=(folder / STATE).exists())
            for _ in run.epochs(self.tick and partial(self.tick, folder.name)):
                pass
            run.learn.forget()  # its memory, before the next run takes its own
            self.last = folder, run, self.loaded(folder)
        return self.last[1:]

    def loaded(self, folder: Path) -> Any:
        model: Any = load(folder)
        return model.eval().to(self.device)
