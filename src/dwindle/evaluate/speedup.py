"""The speedup a model gets without training: fidelity and latency of methods at several budgets, and of smaller images.

All candidates are timed on one batch, taking turns in one process. The static model is timed in every variant that this
machine has, and the fastest one is the baseline. Adaptive models are timed as `prepare` makes them, a smaller image on
the static model built for that size.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..core.cost import static_macs
from ..core.method import constructor, methods_by_name
from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError
from ..io.encoders import with_image_size
from ..methods.resolution import Resolution
from ..methods.static import Static
from ..ops.patches import resized
from ..ops.timing import milliseconds
from ..runtime.prepared import prepared_or_self
from ..settings import parameters
from .bench import static_calls, variants_on
from .fidelity import Features, Tally, check_cosines, feature_extractor

BUDGETS = (0.85, 0.7, 0.55, 0.4)
AT_ONCE = 16  # images per forward pass while features are compared
WORTH = 1.05  # the least speedup that is recommended: a smaller one is within timing noise
STAGES = (1 / 3, 7 / 12, 10 / 12)  # shares of the depth at which a method with stages decides

Progress = Callable[[str, int, int], None]  # (what is being done, steps done, steps in all)


@dataclass(frozen=True)
class Goal:
    """What a faster model must keep, on average over the images. None: this number does not matter."""

    patch_cosine: float | None = None
    class_cosine: float | None = None
    max_drop: float | None = None  # points of accuracy; without labels, percent of images given another class

    def __str__(self) -> str:
        """The goal as part of a sentence."""
        parts = {
            "a patch cosine of {:g}": self.patch_cosine,
            "a class cosine of {:g}": self.class_cosine,
            "all but {:g} points": self.max_drop,
        }
        return " and ".join(text.format(value) for text, value in parts.items() if value is not None)

    def missing(self, row: Row) -> float:
        """How far a row falls short of the goal, in points; 0.0: it keeps it. A cosine of 0.01 counts as one point."""
        gaps = [0.0]
        for name, least in (("patch_cosine", self.patch_cosine), ("class_cosine", self.class_cosine)):
            gaps.append(0.0 if least is None else 100 * (least - row.metrics[name]))
        gaps.append(0.0 if self.max_drop is None else row.metrics["drop"] - self.max_drop)
        return max(gaps)


@dataclass
class Row:
    """One candidate, measured: a method at a budget, or a smaller image."""

    name: str
    kind: str  # 'adaptive' or 'smaller image'
    cost: float  # as a share of the static model's
    metrics: dict[str, Any]  # `Agreement.summary`, `drop`, and with labels `top1`
    model: AdaptiveViT
    ms: float = float("nan")
    speedup: float = float("nan")  # over the fastest variant of the static model
    kept: bool = False  # whether it keeps the goal

    @property
    def about(self) -> dict[str, Any]:
        """The row for a table and JSON."""
        names = ("patch_cosine", "patch_q05", "class_cosine", "neighbours", "same_class", "top1", "drop")
        metrics = {name: self.metrics[name] for name in names if name in self.metrics}
        about = {"name": self.name, "kind": self.kind, "cost": round(self.cost, 4)} | metrics
        return about | {"ms": round(self.ms, 3), "speedup": round(self.speedup, 3), "kept": self.kept}


@dataclass
class Speedup:
    """What `speedup` found.

    model: the fastest adapted model that keeps the goal; None: none is worth it. message: a sentence with the result.
    """

    model: AdaptiveViT | None
    message: str
    rows: list[Row]
    static: dict[str, float]  # milliseconds of each variant of the static model
    left_out: dict[str, str] = field(default_factory=dict)  # candidates that refused the model or the images, and why
    winner: Row | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The result as JSON."""
        winner = None if self.winner is None else self.winner.name
        static = {name: round(value, 3) for name, value in self.static.items()}
        rows = [row.about for row in self.rows]
        return {"winner": winner, "message": self.message, "static_ms": static, "rows": rows, "left_out": self.left_out}


def speedup(
    model: nn.Module,
    images: Tensor,
    *,
    patch_cosine: float | None = None,
    class_cosine: float | None = None,
    max_drop: float | None = None,
    labels: Tensor | None = None,
    budgets: Sequence[float] = BUDGETS,
    batch: int = 1,
    seconds: float = 10.0,
    progress: Progress | None = None,
) -> Speedup:
    """Measure every method that needs no training on these images, on the model's device. The model is not changed.

    model: a vision transformer, plain or adapted. The method of an adapted one is measured too, at its present setting.
    patch_cosine, class_cosine, max_drop: see `Goal`. Without any, a model with a head must keep all but one point, and
        a model without one must keep a patch cosine of 0.9.
    labels: (B,). batch: images per timed call. seconds: how long calls are timed.
    """
    _check_goal(patch_cosine, class_cosine, max_drop)
    _check_budgets(budgets)
    with torch.inference_mode(False):
        static, own = _copies(model)
    goal = Goal(patch_cosine, class_cosine, max_drop)
    if goal == Goal():
        goal = Goal(max_drop=1.0) if static.classes else Goal(patch_cosine=0.9)
    static.check_images(images)
    if goal.max_drop is not None and not static.classes:
        raise DwindleError("--max-drop counts answers, and this model has no head; give --patch-cosine instead.")
    search = _Search(static, images, labels, progress or (lambda what, done, total: None))
    left_out: dict[str, str] = {}
    candidates = _methods(static, budgets, left_out)
    if own is not None and type(own.method) is not Static:
        candidates.insert(0, Candidate(f"{type(own.method).__name__} as it is", own))
    rows = search.rows(candidates, left_out)
    times = search.timed(rows, batch, seconds)
    for row in rows:
        row.kept = goal.missing(row) <= 0
    winner, message = _chosen(rows, goal, times)
    return Speedup(None if winner is None else winner.model, message, rows, times, left_out, winner)


def _check_goal(patch_cosine: float | None, class_cosine: float | None, max_drop: float | None) -> None:
    check_cosines(patch_cosine, class_cosine)
    if max_drop is not None and not 0 <= max_drop <= 100:
        raise DwindleError(f"--max-drop {max_drop:g}: it is a number of points, from 0 to 100.")


def _check_budgets(budgets: Sequence[float]) -> None:
    for budget in budgets:
        if not 0 < budget < 1:
            raise DwindleError(f"--budgets {budget:g}: a budget is a share of the static cost, between 0 and 1.")
    if not budgets:
        raise DwindleError("There are no budgets to try; give one share of the static cost or more, such as 0.7.")


def _copies(model: Any) -> tuple[AdaptiveViT, AdaptiveViT | None]:
    """A static copy of the model, and an adaptive copy with the model's own method; None if it is not adapted.

    The two copies share their weights.
    """
    if isinstance(model, AdaptiveViT):
        adaptive = copy.deepcopy(model).eval().requires_grad_(False)
        return adaptive.with_method(Static()), adaptive
    return adapt(copy.deepcopy(model).eval().requires_grad_(False), Static()).eval(), None


@dataclass
class Candidate:
    """A model to compare with the static one."""

    name: str
    model: AdaptiveViT


def _methods(static: AdaptiveViT, budgets: Sequence[float], left_out: dict[str, str]) -> list[Candidate]:
    """The methods that need no training, at each budget. Budgets that a method cannot reach go into `left_out`."""
    candidates, shape = [], static.backbone.shape
    stages = tuple(sorted({min(max(round(share * shape.blocks), 1), shape.blocks - 1) for share in STAGES}))
    for method_name, kind in methods_by_name().items():
        options = parameters(kind)
        if kind.needs_training or kind.baseline or kind.exits_by_confidence or "budget" not in options:
            continue
        for budget in budgets:
            name = f"{method_name} at {budget:g}"
            try:
                method = constructor(method_name)(budget=budget, **({"stages": stages} if "stages" in options else {}))
                candidates.append(Candidate(name, static.with_method(method)))
            except DwindleError as error:
                left_out[name] = str(error)
    return candidates


class _Sums:
    """A model's features compared with the static model's, and its correct answers, summed over batches."""

    def __init__(self, model: AdaptiveViT, gmacs_static: float) -> None:
        self.features, self.tally, self.correct = feature_extractor(model), Tally(gmacs_static), 0

    def add(self, x: Tensor, y: Tensor | None, reference: Features | None = None) -> Features:
        """The model's features of a batch. reference: the static model's; None: this is the static model."""
        features = self.features(x)
        if reference is not None:
            self.tally.add(features, reference)
        if y is not None and features.best is not None:
            self.correct += int((features.best == y).sum())
        return features


class _Search:
    """Measures candidates on the images: first their features, then their latency."""

    def __init__(self, static: AdaptiveViT, images: Tensor, labels: Tensor | None, progress: Progress) -> None:
        self.static, self.images, self.labels, self.progress = static, images, labels, progress
        self.place = next(static.parameters()).device
        self.gmacs = static_macs(static.backbone.shape, (images.shape[-2], images.shape[-1])) / 1e9

    @torch.inference_mode()
    def rows(self, candidates: list[Candidate], left_out: dict[str, str]) -> list[Row]:
        """A row for each candidate. One that refuses the images goes into `left_out` with its reason."""
        static = _Sums(self.static, self.gmacs)
        measured = [(candidate, _Sums(candidate.model, self.gmacs)) for candidate in candidates]
        for begin in range(0, len(self.images), AT_ONCE):
            x = self.images[begin : begin + AT_ONCE].to(self.place)
            y = None if self.labels is None else self.labels[begin : begin + AT_ONCE].to(self.place)
            reference = static.add(x, y)
            accepted = []
            for candidate, sums in measured:
                try:
                    sums.add(x, y, reference)
                except DwindleError as error:
                    left_out[candidate.name] = str(error)
                else:
                    accepted.append((candidate, sums))
            measured = accepted
            self.progress("comparing features", min(begin + AT_ONCE, len(self.images)), len(self.images))
        return [self._row(candidate, sums, static.correct) for candidate, sums in measured]

    def _row(self, candidate: Candidate, sums: _Sums, static_correct: int) -> Row:
        metrics = sums.tally.agreement().summary()
        if self.labels is not None and self.static.classes:
            top1, static_top1 = (100 * correct / len(self.images) for correct in (sums.correct, static_correct))
            metrics |= {"top1": round(top1, 3), "drop": round(static_top1 - top1, 3)}
        elif "same_class" in metrics:
            metrics["drop"] = round(100 - metrics["same_class"], 3)
        kind = "smaller image" if isinstance(candidate.model.method, Resolution) else "adaptive"
        return Row(candidate.name, kind, metrics["cost"], metrics, candidate.model)

    def _calls(self, row: Row, x: Tensor, variants: Sequence[str]) -> list[Callable[[], Any]]:
        """The calls of a row, of which the fastest counts. They are recorded here, before anything is timed."""
        if row.kind == "smaller image":
            size = row.model.method.resized_size((x.shape[-2], x.shape[-1]))
            if size[0] == size[1]:
                calls = static_calls(_at_size(self.static, size), resized(x, size), variants)
                return [calls[name] for name in variants]
        fast = prepared_or_self(row.model, details=not row.model.classes)
        fast(x)
        return [partial(fast, x)]

    @torch.inference_mode()
    def timed(self, rows: list[Row], batch: int, seconds: float) -> dict[str, float]:
        """Set `ms` and `speedup` of every row. Returns the static model's milliseconds by variant."""
        x = self.images[torch.arange(batch) % len(self.images)].to(self.place)
        variants = variants_on(self.place, "fp32" if x.dtype == torch.float32 else str(x.dtype))
        static = static_calls(self.static, x, variants)
        calls_of_rows: list[list[Callable[[], Any]]] = []
        for number, row in enumerate(rows, 1):
            calls_of_rows.append(self._calls(row, x, variants))
            self.progress("preparing", number, len(rows))
        times = iter(milliseconds([*static.values(), *chain(*calls_of_rows)], seconds, self.place))
        static_times = {name: next(times) for name in static}
        baseline = min(static_times.values(), key=statistics.median)
        for row, calls in zip(rows, calls_of_rows):
            own_times = min((next(times) for _ in calls), key=statistics.median)
            row.ms = statistics.median(own_times)
            # The ratio is taken within each round: a slow moment of the machine hits both sides of it.
            row.speedup = statistics.median(b / t for b, t in zip(baseline, own_times))
        return {name: statistics.median(each) for name, each in static_times.items()}


def _at_size(static: AdaptiveViT, size: tuple[int, int]) -> AdaptiveViT:
    """The static model built for images of this size."""
    if static.backbone.any_size:
        return static
    with torch.inference_mode(False):
        vit = copy.deepcopy(static).unwrap()
        return adapt(with_image_size(vit, size[0]), Static()).eval().requires_grad_(False)


def _chosen(rows: list[Row], goal: Goal, static: dict[str, float]) -> tuple[Row | None, str]:
    """The fastest adaptive row that keeps the goal, None if it is not worth it; and a sentence with the result."""
    name = min(static, key=lambda variant: static[variant])
    against = f"static's best ({name}, {static[name]:.1f} ms)"
    if not rows:
        return None, "No method reaches any of these budgets on this model; give higher ones."
    kept = sorted((row for row in rows if row.kept), key=lambda row: -row.speedup)
    best = next((row for row in kept if row.kind == "adaptive"), kept[0] if kept else None)
    if best is None:
        near = min(rows, key=goal.missing)
        return None, (
            f"Nothing that needs no training keeps {goal}: the nearest is {near.name} with {_has(near, goal)}, "
            f"{near.speedup:.2f}x as fast as {against}; ask for less, or train it with dwindle fit."
        )
    message = f"{best.name} keeps {goal} ({_has(best, goal)}) and takes {best.ms:.1f} ms, {best.speedup:.2f}x as fast"
    small = kept[0]
    if small.kind == "smaller image" and small.speedup >= WORTH:
        other = "" if best is small else f", where {message}"
        return None, (
            f"A smaller image is better: {small.name} keeps {goal} ({_has(small, goal)}) at {small.speedup:.2f}x"
            f"{other} as {against}; build the model for that size."
        )
    if best.speedup < WORTH or best.kind == "smaller image":
        return None, f"Nothing is worth it on this machine: {message} as {against}."
    return best, f"{message} as {against}."


def _has(row: Row, goal: Goal) -> str:
    """The row's value of each number in the goal, as part of a sentence."""
    labels = {"patch_cosine": "patch cosine", "class_cosine": "class cosine"}
    parts = [f"{label} {row.metrics[name]:.3f}" for name, label in labels.items() if getattr(goal, name) is not None]
    parts += [f"{row.metrics['drop']:.1f} points lost"] if goal.max_drop is not None else []
    return ", ".join(parts)
