"""What the trainer asks of a family of models."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..tasks.base import Answers
from .teacher import Teacher

WORTH_COMPILING = 200_000  # images; compiling takes about as long as these take without


class Learner:
    """A model that learns a task: how a recipe builds it, what a batch teaches it, and how it is judged.

    A family of models defines one, and its recipe's `learner()` names it. The loop, the processes, the averaging and
    the saving are `Run`'s.
    """

    several = True  # whether several processes may train it
    learns: ClassVar[tuple[Answers, ...]] = ()  # the kinds of answers it can be taught
    searchable = False  # whether its rows say `top1`, `gmacs` and `gmacs_static`, which a search weighs
    what = "This model"  # in sentences
    model: Any
    teacher: Teacher | None = None
    recording = False  # whether a step is recorded as a CUDA graph
    compiled = False

    def __init__(self, recipe: Any, task: Any, device: torch.device) -> None:
        """Build the model and its teacher, and let the task know how it wants its data."""
        self.recipe, self.task, self.device = recipe, task, device
        self.halves = recipe.halves(device)
        self.sharded = ranks.together() and recipe.parallel == "fsdp"

    @property
    def name(self) -> str:
        """Whose step it is, where one cannot be recorded."""
        return type(self.model).__name__

    # Before training.
    def parameter_groups(self) -> list[dict[str, Any]]:
        """For the optimiser; `rate` may read what they hold."""
        raise NotImplementedError

    def optimizer(self) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda" and not self.sharded
        betas = (0.9, getattr(self.recipe, "beta2", 0.999))
        return torch.optim.AdamW(self.parameter_groups(), lr=self.recipe.lr, betas=betas, fused=fused)

    def worth_compiling(self) -> bool:
        if self.recipe.compile is not None:
            return self.recipe.compile
        return self.device.type == "cuda" and self.task.steps * self.task.batch >= WORTH_COMPILING

    def compile(self) -> None:
        self.compiled = True
        self.recording = self.device.type == "cuda"
        if self.teacher is not None:
            self.teacher.compiled = True

    # While training.
    def rate(self, step: int, group: dict[str, Any]) -> float:
        """The learning rate of these parameters."""
        raise NotImplementedError

    def begin_epoch(self, run: Any) -> None:
        """run: what trains it, whose optimiser and weights may be changed here."""

    def begin_step(self, progress: float) -> None:
        """progress: the share of the steps that are done."""

    def inputs(self, x: Tensor, y: Tensor, step: int, seen: int) -> dict[str, Tensor]:
        """All that a step needs, by name: one row for each image or sequence, unless the recipe has one micro-batch.

        seen: the first step that saw the same batch.
        """
        return {"x": x, "y": y}

    def weights(self) -> Tensor | None:
        """Numbers that change from step to step without being in `inputs`, for a recorded step."""
        return None

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss of a micro-batch in its terms, and their sum under "total"."""
        raise NotImplementedError

    def end_step(self, terms: dict[str, Tensor]) -> None:
        """terms: their means over all processes."""

    def finish(self, models: list[nn.Module]) -> None:
        """After the last step, before evaluation. models: the trained one, and the average where there is one."""

    # What is told.
    def row(self, seconds: float, steps: int) -> dict[str, float]:
        """More columns of the metrics. seconds: what the epoch's steps took."""
        return {}

    def evaluate(self, model: Any, **options: Any) -> dict[str, float]:
        raise NotImplementedError
