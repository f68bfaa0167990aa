"""The interface between the trainer and a family of models."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..tasks.base import Answers
from .teacher import Teacher

WORTH_COMPILING = 200_000  # images of a run: compiling takes about as long as training on these without it


class Learner:
    """A model that learns a task: how a recipe builds it, the loss of a batch, and its evaluation.

    A family of models defines a subclass, which its recipe's `learner()` returns. `Run` has the loop, the processes,
    the averaging of weights and the saving.
    """

    several = True  # whether several processes may train it
    learns: ClassVar[tuple[Answers, ...]] = ()  # the kinds of outputs that it can learn
    searchable = False  # whether its metrics have `top1`, `gmacs` and `gmacs_static`, which a search needs
    what = "This model"  # its name in errors
    model: Any
    teacher: Teacher | None = None
    recording = False  # whether a step is recorded as a CUDA graph
    compiled = False

    def __init__(self, recipe: Any, task: Any, device: torch.device) -> None:
        """Build the model and its teacher, and let the task know how it wants its data."""
        self.recipe, self.task, self.device = recipe, task, device
        self.halves = recipe.halves(device)
        self.sharded = ranks.is_distributed() and recipe.parallel == "fsdp"

    @property
    def name(self) -> str:
        """The model's name in the error for a step that cannot be recorded."""
        return type(self.model).__name__

    # Before training.
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups, which `rate` is called with."""
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
    def averaging(self) -> float:
        """The decay of the averaged weights in the present epoch; 0: they are not averaged."""
        decay: float = self.recipe.ema
        return decay

    def rate(self, step: int, group: dict[str, Any]) -> float:
        """The learning rate of a parameter group at a step."""
        raise NotImplementedError

    def begin_epoch(self, run: Any) -> None:
        """Called before each epoch. run: the `Run`, whose optimiser and weights may be changed here."""

    def begin_step(self, progress: float) -> None:
        """Called before each step. progress: the share of the steps that are done."""

    def inputs(self, x: Tensor, y: Tensor, step: int, seen: int) -> dict[str, Tensor]:
        """All inputs of a step, by name. With several micro-batches they must have a row for each image or sequence.

        seen: the first step that saw the same batch.
        """
        return {"x": x, "y": y}

    def weights(self) -> Tensor | None:
        """Weights of the terms that change from step to step, as an input of a recorded step; None: there are none."""
        return None

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms of the loss of a micro-batch, and their sum as "total"."""
        raise NotImplementedError

    def end_step(self, terms: dict[str, Tensor]) -> None:
        """Called after each step. terms: their means over all processes."""

    def finish(self, models: list[nn.Module]) -> None:
        """Called after the last step, before evaluation. models: the trained one, and the averaged one if any."""

    # Metrics.
    def row(self, seconds: float, steps: int) -> dict[str, float]:
        """More columns of an epoch's metrics. seconds, steps: of the epoch's training."""
        return {}

    def evaluate(self, model: Any, **options: Any) -> dict[str, float]:
        raise NotImplementedError
