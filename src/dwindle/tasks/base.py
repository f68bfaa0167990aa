"""What a task is: its data, its loss, and how a model's answers are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import DwindleError, brief, listed, unknown

# What a model's answer to one image is: a number for each class; other numbers; numbers for each patch, which make a
# map; the state of each token. Or a text's next character.
Answers = Literal["classes", "numbers", "maps", "features", "text"]
SAID = {
    "classes": "which class an image shows",
    "numbers": "numbers of an image",
    "maps": "maps of an image",
    "features": "the features of an image",
    "text": "a text's next character",
}


@dataclass(frozen=True)
class Source:
    """Where a task's data comes from.

    opened: the data itself, where it is open already: (training, evaluation) images, or a text. resident: images that
    an earlier run decoded. limit: use only so many images of each part.
    """

    data: str | None
    eval_data: str | None = None
    limit: int | None = None
    opened: Any = None
    resident: Any = None

    @property
    def given(self) -> dict[str, Any]:
        """What a run depends on, as its state keeps it."""
        named = {"data": self.data, "eval_data": self.eval_data, "limit": self.limit}
        return {name: value for name, value in named.items() if value is not None}


class Task:
    """The trainer asks it for batches, the learner for losses, evaluation for what counts.

    Shapes: B images, C numbers of an answer, `...` several answers to one image, such as one per depth.
    """

    registry: ClassVar[dict[str, type[Task]]] = {}
    name: ClassVar[str]
    answers: ClassVar[Answers]
    distils: ClassVar[bool] = False  # a teacher's answers can be learnt
    needs_teacher: ClassVar[bool] = False  # and nothing else is
    unused: ClassVar[tuple[str, ...]] = ()  # settings of a recipe that have no effect on it
    numbered_by: ClassVar[str] = "epoch"  # the column of the metrics that counts
    shown: ClassVar[tuple[str, ...]] = ("total", "cost", "top1", "gmacs")  # columns shown in the terminal
    needs_data: ClassVar[bool] = True  # whether data must be named
    # Set by the task when its data is open, or when the model's size is known.
    outputs: int  # numbers of an answer: the size of a head
    batch: int  # of this process
    steps: int  # of the whole run
    steps_per_epoch: int
    eval_every: int  # epochs
    save_every: int
    holdout: dict[str, Any]  # what of the training data was held out to evaluate on
    resident: Any = None  # images decoded on the device, for tasks that keep them there
    shared: Any = None  # data that a later run may take as it is (`Source.opened`)

    def __init_subclass__(cls, name: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if name is not None:
            cls.name = name
            Task.registry[name] = cls

    def __init__(self, recipe: Any, source: Source, device: torch.device) -> None:
        """Open the data."""
        self.recipe, self.source, self.device = recipe, source, device
        self.holdout = {}

    # Its data.
    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)

    def batches(self, train: bool, epoch: int = 0) -> Iterable[tuple[Tensor, ...]]:
        """This process's share of an epoch, or of what is evaluated on."""
        raise NotImplementedError

    def mixed(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The batch with its images mixed, for tasks that do."""
        return x, y

    @classmethod
    def evaluation_data(cls, model: Any, data: str, count: int | None = None, holdout: float | None = None) -> Any:
        """What `dwindle eval` opens for a model of this task: the first `count`; holdout: see `evaluation_images`."""
        raise DwindleError(
            f"The task '{cls.name}' makes targets of its own, which dwindle eval does not know; a model is evaluated "
            "where it is trained, and its results stand in its card."
        )

    # Its loss.
    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """(..., B) of answers (..., B, C), or (..., B, P, C) where there is one for each patch."""
        raise NotImplementedError

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        """(..., B) of the same answers and a teacher's to the batch, for tasks that can be distilled."""
        raise NotImplementedError

    # How answers are measured.
    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Numbers of each image by name, (B,) or (B, ...). They are added up over all images."""
        raise NotImplementedError

    @staticmethod
    def summary(sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        """What is told of these sums: by itself their means."""
        return {name: round(float(total) / images, 3) for name, total in sums.items()}

    # What is said of it.
    def about(self) -> dict[str, Any]:
        """What a result says beside its numbers."""
        return {}

    def told(self) -> str | None:
        """A sentence for the terminal on the data that the model is evaluated on."""
        return None

    def noticed(self) -> dict[str, Any]:
        """More numbers for the run's last line, such as images that were skipped."""
        return {}

    def extra(self) -> dict[str, Any]:
        """What the checkpoint keeps: to prepare data, to name answers, and what they are."""
        return {"task": {"name": self.name, "answers": self.answers}}

    # Saving and resuming.
    def gather(self) -> None:
        """Before saving, on every process: bring together what each noticed."""

    def write(self, out: Path) -> None:
        """Files of the task beside the checkpoint."""

    def state(self) -> dict[str, Any]:
        """What a resumed run must find again."""
        return {}

    def check_state(self, state: dict[str, Any], out: Path) -> None:
        """Refuse to resume on other data."""


def task_named(name: str) -> type[Task]:
    if name not in Task.registry:
        raise unknown("task", name, Task.registry)
    return Task.registry[name]


# Of checkpoints that do not say what they answer: by the recipe's task.
OLDER: dict[str, Answers] = {"segmentation": "maps", "depth": "maps", "language": "text"}


def answers_of(model: Any) -> tuple[str, Answers]:
    """The task a model was trained for, and what its answers are. One that was never trained has no task ("") if its
    head is for patches; else its answers are classes."""
    extra = getattr(model, "extra", {})
    kept = extra.get("task")
    if isinstance(kept, dict) and kept.get("answers") in SAID and isinstance(kept.get("name"), str):
        return kept["name"], kept["answers"]
    recipe = extra.get("recipe", {})
    if recipe.get("distill") == "features":
        return "features", "features"
    if "task" not in recipe and getattr(model, "dense_head", None) is not None:
        return "", "maps"
    name = recipe.get("task", "classify")
    if not isinstance(name, str):
        raise DwindleError(
            f"The checkpoint says that it was trained for {brief(name)}, which names no task; it is damaged, take "
            "another copy."
        )
    return name, OLDER.get(name, "classes")


def check_answers(model: Any, source: str, *wanted: Answers) -> None:
    """Refuse a model whose answers a command would misread."""
    _, answers = answers_of(model)
    if answers not in wanted:
        kinds = listed([SAID[kind] for kind in wanted], "or")
        raise DwindleError(f"{source} was trained to tell {SAID[answers]}; this takes a model that tells {kinds}.")


def task_of(model: Any, source: str) -> type[Task]:
    """The task that a checkpoint was trained for, to evaluate it on."""
    name, answers = answers_of(model)
    if not name:
        raise DwindleError(f"{source} tells {SAID[answers]} and was trained for no task; evaluate it from Python.")
    if name not in Task.registry:
        raise unknown("task", name, Task.registry, hint=f"{source} was trained for it; import the file that defines it")
    return Task.registry[name]


def check_unused(task: type[Task], **given: Any) -> None:
    """Refuse options that have no effect on this task; None: not given."""
    for name, value in given.items():
        if value is not None and name in task.unused:
            option = f"--{name.replace('_', '-')} {value}"
            raise DwindleError(f"{option}: it has no effect on the task '{task.name}'; leave it out.")
