"""What the trainer asks of a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import unknown


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
    """Where batches come from, how many make an epoch, and what a checkpoint says of the data."""

    registry: ClassVar[dict[str, type[Task]]] = {}
    numbered_by = "epoch"  # the column of the metrics that counts
    shown: tuple[str, ...] = ("total", "cost", "top1", "gmacs")  # columns that people are told
    holdout: dict[str, Any] = {}  # what of the training data was held out to evaluate on
    resident: Any = None  # images decoded on the device, for tasks that keep them there
    shared: Any = None  # data that a later run may take as it is (`Source.opened`)
    needs_data = True  # whether data must be named
    # Set by the task when its data is open, or when the model's size is known.
    batch: int  # of this process
    steps: int  # of the whole run
    steps_per_epoch: int
    eval_every: int  # epochs
    save_every: int

    def __init_subclass__(cls, name: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if name is not None:
            Task.registry[name] = cls

    def __init__(self, recipe: Any, source: Source, device: torch.device) -> None:
        """Open the data."""
        self.recipe, self.source, self.device = recipe, source, device

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)

    def batches(self, train: bool, epoch: int = 0) -> Iterable[tuple[Tensor, ...]]:
        """This process's share of an epoch, or of what is evaluated on."""
        raise NotImplementedError

    def mixed(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The batch with its images mixed, for tasks that do."""
        return x, y

    def about(self) -> dict[str, Any]:
        """What a result says beside its numbers."""
        return {}

    def told(self) -> str | None:
        """What people are told once, of the data the model is evaluated on."""
        return None

    def noticed(self) -> dict[str, Any]:
        """What is said once more at the end, if there is anything."""
        return {}

    def extra(self) -> dict[str, Any]:
        """What the checkpoint keeps, to prepare data and to name answers."""
        return {}

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
