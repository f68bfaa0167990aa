"""The base class of tasks: their data, their loss, and how a model's answers are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import DwindleError, brief, listed, unknown

# What a model answers. For one image: logits of classes; other numbers; numbers for each patch, which make a map; the
# state of each token. For a text: logits of the next character.
Answers = Literal["classes", "numbers", "maps", "features", "text"]
DESCRIPTIONS = {  # in errors, after "to tell"
    "classes": "which class an image shows",
    "numbers": "numbers of an image",
    "maps": "maps of an image",
    "features": "the features of an image",
    "text": "a text's next character",
}


@dataclass(frozen=True)
class Source:
    """Where a task's data comes from.

    opened: data that is open already: (training, evaluation) images, or a text. resident: images that an earlier run
    decoded. limit: the number of images to use of each part.
    """

    data: str | None
    eval_data: str | None = None
    limit: int | None = None
    opened: Any = None
    resident: Any = None

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments that a run's results depend on, as the run's state keeps them."""
        named = {"data": self.data, "eval_data": self.eval_data, "limit": self.limit}
        return {name: value for name, value in named.items() if value is not None}


class Task:
    """A task gives the trainer its batches, the learner its losses, and evaluation its metrics.

    Shapes: B images, C numbers of an answer, P patches, `...` several answers to one image, such as one per depth.
    """

    registry: ClassVar[dict[str, type[Task]]] = {}
    name: ClassVar[str]
    answers: ClassVar[Answers]
    distils: ClassVar[bool] = False  # whether a teacher's answers can be learnt
    needs_teacher: ClassVar[bool] = False  # whether a teacher's answers are all that is learnt
    unused: ClassVar[tuple[str, ...]] = ()  # settings of a recipe that have no effect on the task
    numbered_by: ClassVar[str] = "epoch"  # the column that numbers the rows of the metrics
    shown: ClassVar[tuple[str, ...]] = ("total", "cost", "top1", "gmacs")  # columns shown in the terminal
    needs_data: ClassVar[bool] = True  # whether data must be named
    # Set by the task when its data is open, or when the model's size is known.
    outputs: int  # numbers of an answer: the size of a head
    batch: int  # images of a batch, in this process
    steps: int  # steps of the whole run
    steps_per_epoch: int
    eval_every: int  # in epochs
    save_every: int  # in epochs
    holdout: dict[str, Any]  # which of the training data was held out for evaluation
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

    # The data.
    @property
    def epochs(self) -> int:
        """The number of epochs of the run; the last may be incomplete."""
        return -(-self.steps // self.steps_per_epoch)

    def batches(self, train: bool, epoch: int = 0) -> Iterable[tuple[Tensor, ...]]:
        """This process's batches of a training epoch, or of the evaluation data."""
        raise NotImplementedError

    def mix_batch(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The batch after mixup or cutmix, for tasks that have it."""
        return x, y

    @classmethod
    def evaluation_data(cls, model: Any, data: str, count: int | None = None, holdout: float | None = None) -> Any:
        """The data on which `dwindle eval` evaluates a model of this task. count: only the first images. holdout: see
        `evaluation_images`."""
        raise DwindleError(
            f"The task '{cls.name}' makes targets of its own, which dwindle eval does not know; a model is evaluated "
            "where it is trained, and its results stand in its card."
        )

    # The loss.
    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """(..., B) losses of answers (..., B, C), or (..., B, P, C) where each patch has one."""
        raise NotImplementedError

    def distill(self, answers: Tensor, teacher: Tensor) -> Tensor:
        """(..., B) losses of the same answers against a teacher's, for tasks that can be distilled."""
        raise NotImplementedError

    # The metrics.
    @staticmethod
    def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Values of each image by name, (B,) or (B, ...), which are summed over all images."""
        raise NotImplementedError

    @staticmethod
    def summary(sums: Mapping[str, Tensor], images: int) -> dict[str, float]:
        """The metrics, computed from these sums; unless a task overrides it, the means."""
        return {name: round(float(total) / images, 3) for name, total in sums.items()}

    # Descriptions.
    def about(self) -> dict[str, Any]:
        """Entries of a result beside its metrics."""
        return {}

    def evaluated_on(self) -> str | None:
        """A sentence for the terminal about the evaluation data."""
        return None

    def extra_metrics(self) -> dict[str, Any]:
        """More entries for the run's last line, such as the number of skipped images."""
        return {}

    def extra(self) -> dict[str, Any]:
        """Entries of the checkpoint's `extra`: the task, how data is prepared, names of classes."""
        return {"task": {"name": self.name, "answers": self.answers}}

    # Saving and resuming.
    def gather(self) -> None:
        """Called on every process before saving: exchange what each has recorded."""

    def write(self, out: Path) -> None:
        """Write the task's files beside the checkpoint."""

    def state(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return {}

    def check_state(self, state: dict[str, Any], out: Path) -> None:
        """Refuse to resume on other data."""


def task_named(name: str) -> type[Task]:
    """The task of this name."""
    if name not in Task.registry:
        raise unknown("task", name, Task.registry)
    return Task.registry[name]


# The answers of older checkpoints, which do not store them, by the recipe's task.
OLDER: dict[str, Answers] = {"segmentation": "maps", "depth": "maps", "language": "text"}


def answers_of(model: Any) -> tuple[str, Answers]:
    """The name of the task that a model was trained for, and what its answers are.

    A model that was never trained counts as trained to classify; with a head for patches, its task is "".
    """
    extra = getattr(model, "extra", {})
    stored = extra.get("task")
    if isinstance(stored, dict) and stored.get("answers") in DESCRIPTIONS and isinstance(stored.get("name"), str):
        return stored["name"], stored["answers"]
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
        kinds = listed([DESCRIPTIONS[kind] for kind in wanted], "or")
        told = DESCRIPTIONS[answers]
        raise DwindleError(f"{source} was trained to tell {told}; this takes a model that tells {kinds}.")


def task_of(model: Any, source: str) -> type[Task]:
    """The task that a checkpoint was trained for, by which it is evaluated."""
    name, answers = answers_of(model)
    if not name:
        told = DESCRIPTIONS[answers]
        raise DwindleError(f"{source} tells {told} and was trained for no task; evaluate it from Python.")
    if name not in Task.registry:
        raise unknown("task", name, Task.registry, hint=f"{source} was trained for it; import the file that defines it")
    return Task.registry[name]


def check_unused(task: type[Task], **given: Any) -> None:
    """Refuse options that have no effect on this task; an option that is None was not given."""
    for name, value in given.items():
        if value is not None and name in task.unused:
            option = f"--{name.replace('_', '-')} {value}"
            raise DwindleError(f"{option}: it has no effect on the task '{task.name}'; leave it out.")
