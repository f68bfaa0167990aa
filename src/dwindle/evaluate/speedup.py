"""What can be had of a model without training: fidelity and time of methods at several budgets, and of smaller images.

Times are of answers to one batch, turn about in one process: the static model in the ways this machine knows, the best
of which counts; adaptive copies as `prepare` makes them; for a smaller image the static model built for that size.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.cost import static_macs
from ..core.method import constructor, ways
from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError
from ..io.encoders import with_image_size
from ..methods.resolution import Resolution
from ..methods.static import Static
from ..ops.patches import resized
from ..ops.timing import milliseconds
from ..runtime.prepared import quickest
from ..settings import parameters
from .bench import static_calls, variants_on
from .fidelity import Tally, asking

BUDGETS = (0.85, 0.7, 0.55, 0.4)
AT_ONCE = 16  # images
WORTH = 1.05  # times as fast: less is lost in the noise of a machine
STAGES = (1 / 3, 7 / 12, 10 / 12)  # of the depth, where a method that has stages decides

Tried = tuple[str, AdaptiveViT]  # by what name
Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Goal:
    """What a faster model must keep, on average over the images."""

    patch_cosine: float | None = None
    class_cosine: float | None = None
    max_drop: float | None = None  # points of accuracy; without labels, percent of images given another class

    @property
    def told(self) -> str:
        parts = {
            "a patch cosine of {:g}": self.patch_cosine,
            "a class cosine of {:g}": self.class_cosine,
            "all but {:g} points": self.max_drop,
        }
        return " and ".join(text.format(value) for text, value in parts.items() if value is not None)

    def missing(self, row: Row) -> float:
        """How far a row falls short; 0: it keeps all. Cosines count as points do, a hundredth each."""
        short = [0.0]
        for name, wanted in (("patch_cosine", self.patch_cosine), ("class_cosine", self.class_cosine)):
            short.append(0.0 if wanted is None else 100 * (wanted - row.told[name]))
        short.append(0.0 if self.max_drop is None else row.told["drop"] - self.max_drop)
        return max(short)


@dataclass
class Row:
    """One way to answer for less."""

    name: str
    kind: str  # 'adaptive', or 'smaller image'
    cost: float  # of the static model's
    told: dict[str, Any]  # fidelity, by `Agreement.summary`; `drop`, and with labels `top1`
    model: AdaptiveViT
    ms: float = float("nan")
    speedup: float = float("nan")
    kept: bool = False

    @property
    def about(self) -> dict[str, Any]:
        names = ("patch_cosine", "patch_q05", "class_cosine", "neighbours", "same_class", "top1", "drop")
        found = {name: self.told[name] for name in names if name in self.told}
        about = {"name": self.name, "kind": self.kind, "cost": round(self.cost, 4)} | found
        return about | {"ms": round(self.ms, 3), "speedup": round(self.speedup, 3), "kept": self.kept}


@dataclass
class Speedup:
    """model: the fastest that keeps the goal, adapted; None: nothing is worth it. said: which, or why none."""

    model: AdaptiveViT | None
    said: str
    rows: list[Row]
    static: dict[str, float]  # milliseconds of each way to run the static model
    left_out: dict[str, str] = field(default_factory=dict)  # what was not tried, and why
    winner: Row | None = None

    @property
    def about(self) -> dict[str, Any]:
        won = None if self.winner is None else self.winner.name
        static = {name: round(value, 3) for name, value in self.static.items()}
        rows = [row.about for row in self.rows]
        return {"winner": won, "said": self.said, "static_ms": static, "rows": rows, "left_out": self.left_out}


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
    """Try what needs no training on these images, where the model lies. The model stays as it is.

    model: a vision transformer, plain or adapted; of an adapted one its own method at its setting is tried too.
    max_drop: points of accuracy with labels (B,), else percent of images given another class. Of no goal at all a model
    with a head has to keep all but one point, another one a patch cosine of 0.9. batch: images of what is timed.
    """
    goal = _goal(model, patch_cosine, class_cosine, max_drop)
    _check_budgets(budgets)
    with torch.inference_mode(False):
        static, own = _taken(model)
    static.check_images(images)
    if goal.max_drop is not None and not static.classes:
        raise DwindleError("--max-drop counts answers, and this model has no head; give --patch-cosine instead.")
    search = _Search(static, images, labels, progress or (lambda what, done, total: None))
    left_out: dict[str, str] = {}
    tried = _methods(static, budgets, left_out)
    if own is not None and type(own.method) is not Static:
        tried.insert(0, (f"{type(own.method).__name__} as it is", own))
    rows = search.rows(tried)
    times = search.timed(rows, batch, seconds)
    for row in rows:
        row.kept = goal.missing(row) <= 0
    found, said = _chosen(rows, goal, times)
    return Speedup(None if found is None else found.model, said, rows, times, left_out, found)


def _goal(model: Any, patch: float | None, whole: float | None, drop: float | None) -> Goal:
    for name, given in (("patch-cosine", patch), ("class-cosine", whole)):
        if given is not None and not 0 < given < 1:
            raise DwindleError(f"--{name} {given:g}: it is a cosine to the static features, between 0 and 1.")
    if drop is not None and not 0 <= drop <= 100:
        raise DwindleError(f"--max-drop {drop:g}: it is a number of points, from 0 to 100.")
    if patch is None and whole is None and drop is None:
        headed = _taken(model)[0].classes
        return Goal(max_drop=1.0) if headed else Goal(patch_cosine=0.9)
    return Goal(patch, whole, drop)


def _check_budgets(budgets: Sequence[float]) -> None:
    for budget in budgets:
        if not 0 < budget < 1:
            raise DwindleError(f"--budgets {budget:g}: a budget is a share of the static cost, between 0 and 1.")
    if not budgets:
        raise DwindleError("There are no budgets to try; give one share of the static cost or more, such as 0.7.")


def _taken(model: Any) -> tuple[AdaptiveViT, AdaptiveViT | None]:
    """A copy in which nothing halts, and one as it was, if it was adapted; they share their weights."""
    if isinstance(model, AdaptiveViT):
        made = copy.deepcopy(model).eval().requires_grad_(False)
        return made.with_method(Static()), made
    return adapt(copy.deepcopy(model).eval().requires_grad_(False), Static()).eval(), None


def _methods(static: AdaptiveViT, budgets: Sequence[float], left_out: dict[str, str]) -> list[tuple[str, AdaptiveViT]]:
    """Those that need no training, at each budget they reach."""
    found, shape = [], static.backbone.shape
    stages = tuple(sorted({min(max(round(share * shape.blocks), 1), shape.blocks - 1) for share in STAGES}))
    for name, kind in ways().items():
        takes = parameters(kind)
        if kind.needs_training or kind.rival or kind.judges_answers or "budget" not in takes:
            continue
        for budget in budgets:
            try:
                method = constructor(name)(budget=budget, **({"stages": stages} if "stages" in takes else {}))
                adapted = static.with_method(method)
            except DwindleError as error:
                left_out[f"{name} at {budget:g}"] = str(error)
            else:
                found.append((f"{name} at {budget:g}", adapted))
    return found


class _Search:
    """The images, and the static model's features of them, which all else is compared with."""

    def __init__(self, static: AdaptiveViT, images: Tensor, labels: Tensor | None, progress: Progress) -> None:
        self.static, self.images, self.labels, self.progress = static, images, labels, progress
        self.place = next(static.parameters()).device
        self.macs = static_macs(static.backbone.shape, (images.shape[-2], images.shape[-1]))

    @torch.inference_mode()
    def rows(self, tried: list[Tried]) -> list[Row]:
        tallies = [Tally(self.macs / 1e9) for _ in tried]
        right = torch.zeros(len(tried) + 1)
        asked = [asking(self.static), *(asking(model) for _, model in tried)]
        for begin in range(0, len(self.images), AT_ONCE):
            x = self.images[begin : begin + AT_ONCE].to(self.place)
            y = None if self.labels is None else self.labels[begin : begin + AT_ONCE].to(self.place)
            wanted = asked[0](x)
            answers = [wanted]
            for tally, ask in zip(tallies, asked[1:]):
                found = ask(x)
                tally.add(found, wanted)
                answers.append(found)
            if y is not None:
                right += torch.tensor([0.0 if a.best is None else float((a.best == y).sum()) for a in answers])
            self.progress("comparing features", min(begin + AT_ONCE, len(self.images)), len(self.images))
        top1 = None if self.labels is None or not self.static.classes else (100 * right / len(self.images)).tolist()
        return [self._row(model, tally, top1, number) for number, (model, tally) in enumerate(zip(tried, tallies), 1)]

    def _row(self, tried: Tried, tally: Tally, top1: list[float] | None, number: int) -> Row:
        name, model = tried
        told = tally.agreement().summary()
        if top1 is not None:
            told |= {"top1": round(top1[number], 3), "drop": round(top1[0] - top1[number], 3)}
        elif "same_class" in told:
            told["drop"] = round(100 - told["same_class"], 3)
        kind = "smaller image" if isinstance(model.method, Resolution) else "adaptive"
        return Row(name, kind, told["cost"], told, model)

    def _ways(self, row: Row, x: Tensor, variants: Sequence[str]) -> list[Callable[[], Any]]:
        """The calls of which the fastest is what a user would run, recorded now and not while others are timed."""
        if row.kind == "smaller image":
            size = row.model.method.seen_size((x.shape[-2], x.shape[-1]))
            if size[0] == size[1]:
                made = static_calls(_at_size(self.static, size), resized(x, size), variants)
                return [made[name] for name in variants]
        fast = quickest(row.model, details=not row.model.classes)
        fast(x)
        return [partial(fast, x)]

    @torch.inference_mode()
    def timed(self, rows: list[Row], batch: int, seconds: float) -> dict[str, float]:
        """Sets milliseconds and speedups; those of the static model by variant."""
        x = self.images[torch.arange(batch) % len(self.images)].to(self.place)
        variants = variants_on(self.place, "fp32" if x.dtype == torch.float32 else str(x.dtype))
        calls = static_calls(self.static, x, variants)
        each: list[Callable[[], Any]] = []
        ways: list[int] = []  # of each row
        for number, row in enumerate(rows, 1):
            own = self._ways(row, x, variants)
            ways.append(len(own))
            each += own
            self.progress("preparing", number, len(rows))
        spent = milliseconds([*calls.values(), *each], seconds, self.place)
        static = {name: statistics.median(times) for name, times in zip(calls, spent)}
        best = spent[list(calls).index(min(static, key=lambda name: static[name]))]
        rest = iter(spent[len(calls) :])
        for row, count in zip(rows, ways):
            times = min((next(rest) for _ in range(count)), key=statistics.median)
            row.ms = statistics.median(times)
            row.speedup = statistics.median(s / t for s, t in zip(best, times))  # a slow moment hits both of a round
        return static


def _at_size(static: AdaptiveViT, size: tuple[int, int]) -> AdaptiveViT:
    """The static model for images of this size, as somebody has it who gives it smaller ones."""
    if static.backbone.any_size:
        return static
    with torch.inference_mode(False):
        vit = copy.deepcopy(static).unwrap()
        return adapt(with_image_size(vit, size[0]), Static()).eval().requires_grad_(False)


def _chosen(rows: list[Row], goal: Goal, static: dict[str, float]) -> tuple[Row | None, str]:
    """The fastest adaptive row that keeps the goal, if that is worth it, and the sentence that says so."""
    name = min(static, key=lambda way: static[way])
    against = f"static's best ({name}, {static[name]:.1f} ms)"
    if not rows:
        return None, "No method reaches any of these budgets on this model; give higher ones."
    kept = sorted((row for row in rows if row.kept), key=lambda row: -row.speedup)
    best = next((row for row in kept if row.kind == "adaptive"), kept[0] if kept else None)
    if best is None:
        near = min(rows, key=goal.missing)
        return None, (
            f"Nothing that needs no training keeps {goal.told}: the nearest is {near.name} with {_has(near, goal)}, "
            f"{near.speedup:.2f}x as fast as {against}; ask for less, or train it with dwindle fit."
        )
    told = f"{best.name} keeps {goal.told} ({_has(best, goal)}) and takes {best.ms:.1f} ms, {best.speedup:.2f}x as fast"
    small = kept[0]
    if small.kind == "smaller image" and small.speedup >= WORTH:
        other = "" if best is small else f", where {told}"
        return None, (
            f"A smaller image is better: {small.name} keeps {goal.told} ({_has(small, goal)}) at {small.speedup:.2f}x"
            f"{other} as {against}; build the model for that size."
        )
    if best.speedup < WORTH or best.kind == "smaller image":
        return None, f"Nothing is worth it on this machine: {told} as {against}."
    return best, f"{told} as {against}."


def _has(row: Row, goal: Goal) -> str:
    """What a row reaches of what is wanted."""
    named = {"patch_cosine": "patch cosine", "class_cosine": "class cosine"}
    parts = [f"{what} {row.told[name]:.3f}" for name, what in named.items() if getattr(goal, name) is not None]
    parts += [f"{row.told['drop']:.1f} points lost"] if goal.max_drop is not None else []
    return ", ".join(parts)
