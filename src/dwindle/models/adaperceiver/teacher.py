"""Who AdaPerceiver learns from: a checkpoint's transformer with nothing halted, or an AdaPerceiver at its largest."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.model import AdaptiveViT, adapt
from ...errors import DwindleError
from ...io.checkpoint import load
from ...methods.static import Static
from ...ops.half import autocast
from ...ops.patches import cut_by_matmul
from ...runtime.cuda.recording import captured
from ...train.teacher import Answers


class Teacher:
    """`teacher(x, step)`: its answers (B, classes) to images; with a grid its patch features (B, P, width) on it.

    It sees images of another size than its own resampled to its own. compiled: on a GPU, and as one CUDA graph.
    answers: what it said to the same batches, here or in an earlier run; features are too large to keep.
    """

    def __init__(self, named: str, device: torch.device, halves: bool, answers: Answers | None = None) -> None:
        try:
            model: Any = load(named)
        except DwindleError as error:
            raise DwindleError(f"teacher = {named}: {error}") from error
        self.halting, self.network = isinstance(model, AdaptiveViT), model
        self.rows: Tensor | None = None  # the numbers that it knows the data's classes by, where they are others
        if self.halting:
            model = adapt(model.unwrap(), Static())
            model.checks = False
            shape = model.backbone.shape
            self.classes, self.width, self.prefix = shape.classes, shape.width, shape.prefix
            self.image, self.cells = tuple(shape.image), shape.grid()
        else:
            self.classes, self.width, self.prefix = model.classes, model.width, 0
            self.image, self.cells = (model.image, model.image), model.grid((model.image, model.image))
        self.dense = self.halting or model.outputs == "dense"
        self.model = model.eval().requires_grad_(False).to(device)
        self.device, self.halves, self.compiled = device, halves, False
        self.grid: tuple[int, int] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.answers = answers

    def __call__(self, x: Tensor, step: int) -> Tensor:
        if self.answers is None or self.grid is not None:
            return self.ask(x)
        held = self.answers.get(step, ("logits",))
        if held is None:
            held = {"logits": self.ask(x).clone()}
            self.answers.keep(step, held)
        return held["logits"]

    @torch.no_grad()
    def ask(self, x: Tensor) -> Tensor:
        """Recorded, what is returned lies where the next answers will."""
        if not (self.compiled and x.is_cuda):
            return self._answer(x)
        if self.graph is None:
            self.asked = x.clone(memory_format=torch.preserve_format)
            self.graph = captured(self._record)
        self.asked.copy_(x)
        self.graph.replay()
        return self.said

    def _record(self) -> None:
        self.said = self._answer(self.asked)

    def _answer(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != self.image:
            x = x if x.is_cuda else x.float()  # on a CPU torch resamples no bf16
            x = F.interpolate(x, size=self.image, mode="bicubic", antialias=True)
        with autocast(self.device, self.halves), self._fast():
            out = self.model(x, layout="masked") if self.halting else self.model(x)
        if self.grid is not None:
            return self._on_grid(out.features).float()
        return (out.logits if self.rows is None else out.logits[:, self.rows]).float()

    @contextlib.contextmanager
    def _fast(self) -> Any:
        if self.compiled and self.halting:
            with cut_by_matmul(self.model.vit), self.model.backbone.compiling(True):
                yield
        else:
            yield

    def _on_grid(self, found: Tensor) -> Tensor:
        square = found[:, self.prefix :].unflatten(1, self.cells)  # (B, rows, columns, width)
        if self.cells != self.grid:
            square = F.interpolate(square.permute(0, 3, 1, 2), size=self.grid, mode="bilinear").permute(0, 2, 3, 1)
        return square.flatten(1, 2)
