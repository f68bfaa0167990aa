"""A teacher's outputs for the batches of a run. Runs that see the same batches can share them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.model import AdaptiveViT, Output
from ..core.run import compiling
from ..core.tokens import Where
from ..core.trace import Trace
from ..ops.half import autocast
from ..ops.patches import cut_by_matmul
from .record import Recorded, record

KEPT = 6 << 30  # bytes of outputs that are kept
SMALL = ("logits", "attention")  # the outputs that are kept: features would fill the room within an epoch
Size = tuple[int, int]


class CacheBudget:
    """The memory for kept outputs, shared by several teachers."""

    def __init__(self, size: int = KEPT) -> None:
        self.left = size

    def take(self, value: Tensor) -> bool:
        """Reserve memory for a tensor. False if there is none left, or if less than a quarter of a GPU is free."""
        free, total = torch.cuda.mem_get_info(value.device) if value.is_cuda else (1, 1)
        fits = value.nbytes <= self.left and 4 * free > total
        self.left -= value.nbytes if fits else 0
        return fits


class TeacherCache:
    """A teacher's outputs by step, for runs with the same teacher, data, seed and augmentation.

    Outputs for which there is no room are not kept; the teacher computes them again.
    """

    def __init__(self, room: CacheBudget | None = None) -> None:
        self.by_step: dict[int, dict[str, Tensor]] = {}
        self.room = room or CacheBudget()

    def get(self, step: int, names: tuple[str, ...]) -> dict[str, Tensor] | None:
        """The outputs of these names for a step; None if not all of them are kept."""
        kept = self.by_step.get(step, {})
        return {name: kept[name] for name in names} if kept.keys() >= set(names) else None

    def keep(self, step: int, answers: dict[str, Tensor]) -> None:
        kept = self.by_step.setdefault(step, {})
        for name in SMALL:
            if name in answers and name not in kept and self.room.take(answers[name]):
                kept[name] = answers[name]


class Teacher:
    """A static network that teaches. `teacher(x, step)` returns its outputs for a batch by name.

    names: of "logits", "attention" (the mean over blocks), "features" and "states" (features after the last norm).
    image: the size to which images of another size are resampled. `grid`: if set, features are those of the patches,
    resampled to a grid of this size.
    """

    def __init__(
        self,
        model: Any,
        recipe: Any,
        device: torch.device,
        names: tuple[str, ...] = ("logits",),
        image: Size | None = None,
    ) -> None:
        if isinstance(model, AdaptiveViT):
            model.checks, model.layout = False, "masked"
        self.model = model.eval().requires_grad_(False).to(device)
        self.device, self.halves, self.parts = device, recipe.halves(device), recipe.accumulate
        self.names, self.image = names, image
        self.grid: Size | None = None
        self.cells: Size | None = None  # the grid of its own patches
        self.prefix = 0  # its tokens before the patches
        self.classes: Tensor | None = None  # its numbers of the data's classes; None: they are the data's
        self.answers: TeacherCache | None = TeacherCache() if recipe.views else None  # kept if batches repeat
        self.computed = 0  # batches of this epoch that it computed
        self.compiled = False
        self.recorded: Recorded | None = None

    def __call__(self, x: Tensor, step: int, recording: bool = False) -> dict[str, Tensor]:
        kept = self.answers.get(step, self.names) if self.answers else None
        if kept is not None:
            return kept
        self.computed += 1
        if recording and self.recorded is None:
            self.recorded = record(self.ask, self.model, x, what="its teacher")
        signals = self.ask(x) if self.recorded is None else self.recorded(x)
        if self.answers:
            self.answers.keep(step, signals)
        return signals

    def ask(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs for a batch, computed in as many micro-batches as the student's."""
        parts = [self._ask_part(part) for part in x.chunk(self.parts)]
        return parts[0] if len(parts) == 1 else {n: torch.cat([part[n] for part in parts]) for n in self.names}

    @torch.no_grad()
    def _ask_part(self, x: Tensor) -> dict[str, Tensor]:
        if self.image is not None and tuple(x.shape[-2:]) != self.image:
            x = x if x.is_cuda else x.float()  # on a CPU torch resamples no bf16
            x = F.interpolate(x, size=self.image, mode="bicubic", antialias=True)
        with autocast(self.device, self.halves), fast(self.model, self.compiled):
            out = self.model(x)
        signals = {}
        if "logits" in self.names:
            signals["logits"] = out.logits if self.classes is None else out.logits[:, self.classes]
        if "states" in self.names:
            states = self.model.states(out)
            signals["states"] = states if self.grid is None else self._on_grid(states)
        if "attention" in self.names:
            signals["attention"] = out.trace.stack("attention").mean(0)
        if "features" in self.names:
            signals["features"] = out.features if self.grid is None else self._on_grid(out.features)
        return signals

    def _on_grid(self, features: Tensor) -> Tensor:
        """The patches' features (B, P, D), resampled to `grid`."""
        assert self.cells is not None
        square = features[:, self.prefix :].unflatten(1, self.cells)  # (B, rows, columns, width)
        if self.cells != self.grid:
            square = F.interpolate(square.permute(0, 3, 1, 2), size=self.grid, mode="bilinear").permute(0, 2, 3, 1)
        return square.flatten(1, 2)

    def output(self, signals: dict[str, Tensor], x: Tensor) -> Output:
        """The outputs as losses take them. Each block's attention is the mean over blocks."""
        if not hasattr(self.model, "backbone"):  # it has no tokens, such as a CNN
            return Output(signals["logits"], Trace((len(x), 0), 0, (0, 0), 0), x.new_empty(0))
        shape = self.model.backbone.shape
        size = (x.shape[-2], x.shape[-1])
        trace = Trace((len(x), shape.tokens(size)), shape.prefix, shape.grid(size), shape.blocks)
        everyone = Where(trace.shape, live_BN=torch.ones(trace.shape, dtype=torch.bool, device=x.device))
        trace.lives = [everyone] * shape.blocks
        trace.values = [{"attention": signals["attention"]} if "attention" in signals else {}] * shape.blocks
        # Losses compare this with the student's output: logits, or features after the last norm. None: neither is used.
        answers: Any = signals.get("logits", signals.get("states"))
        return Output(answers, trace, signals.get("features", x.new_empty(0)))


@contextlib.contextmanager
def fast(model: Any, compiled: bool) -> Iterator[None]:
    """Within, if `compiled`: blocks run compiled, and a wrapped model's patches are cut by one matrix product."""
    cut = cut_by_matmul(model.vit) if compiled and isinstance(model, AdaptiveViT) else contextlib.nullcontext()
    with cut, compiling(compiled):
        yield
