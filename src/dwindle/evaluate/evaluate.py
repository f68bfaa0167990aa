"""Accuracy, cost and speed of an adaptive model on a data set; and the threshold that meets a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core import processes as ranks
from ..core.cost import bisected, budget_share
from ..core.model import AdaptiveViT, Output
from ..errors import DwindleError
from ..runtime.dtypes import dtype_of
from ..runtime.prepared import Prepared, quickest
from ..tasks.base import Task
from ..tasks.classify import Classify

Batches = Iterable[tuple[Tensor, Tensor]]
Read = Callable[[AdaptiveViT, Output], Tensor]


def logits(model: AdaptiveViT, out: Output) -> Tensor:
    return out.logits


def evaluate(
    model: AdaptiveViT,
    batches: Batches,
    *,
    layout: str = "packed",
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
    lockstep: bool = False,
    ask: Callable[[Callable[..., Output], Tensor], Output] | None = None,
    task: Task | type[Task] = Classify,
    read: Read = logits,
) -> dict[str, float]:
    """Every image counts once. images_per_s is the model alone, at its median batch: loading and moving images is not
    in it, nor what the first batch compiles. layout: 'packed', by a prepared copy of the model, or 'masked'. ask: a
    call of that copy with other settings. task: measures answers, which `read` finds in what the model gives.

    Of several processes each gives its own batches, and all get the result for all. lockstep: they must run the same
    number of times (sharded weights); who has no images left runs on a blank one, uncounted.
    """
    training, place = model.training, torch.device(device)
    model.eval().to(place)
    # Sharded weights come together block by block, and only in the model itself.
    own = layout != "packed" or lockstep
    details = read is not logits
    call: Callable[..., Output] = partial(model, layout=layout) if own else quickest(model, _count(batches), details)
    asked = call if ask is None else partial(ask, call)
    # Sharded weights are gathered into tensors that training goes on with, which inference mode would spoil.
    with torch.no_grad() if lockstep else torch.inference_mode():
        given = _in_step(batches, model) if lockstep else batches
        sums = _sums(model, given, asked, place, task, read, progress)
    model.train(training)
    found, *counts = zip(*ranks.gathered(sums))
    images, macs, depth, speed = map(sum, counts)
    if not images:
        raise DwindleError("There are no images to evaluate: the data set is empty; give another.")
    names = list(dict.fromkeys(name for part in found for name in part))
    totals = {name: torch.stack([part[name] for part in found if name in part]).sum(0) for name in names}
    return task.summary(totals, images) | {
        "gmacs": round(macs / images / 1e9, 4),
        "gmacs_static": round(model.static_macs() / 1e9, 4),
        "depth": round(depth / images, 3),
        "images": images,
        "images_per_s": round(speed, 1),
    }


def _count(batches: Batches) -> int | None:
    """How many images there are, where that is known beforehand."""
    if isinstance(batches, list | tuple):
        return sum(len(y) for _, y in batches)
    data: Any = getattr(batches, "dataset", None)
    return len(data) if hasattr(data, "__len__") else None


def _sums(
    model: AdaptiveViT,
    batches: Batches,
    ask: Callable[[Tensor], Output],
    place: torch.device,
    task: Task | type[Task],
    read: Read,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Tensor], int, float, float, float]:
    """Over this process's images: what was measured, images, MACs, mean depths, images a second."""
    found: dict[str, Tensor] = {}
    images, macs, depth = 0, 0.0, 0.0
    spent, number = [], dtype_of(model)
    for x, y in batches:
        x, y = x.to(place, number), y.to(place)
        _wait(place)
        begin = time.perf_counter()
        out = ask(x)
        _wait(place)
        if not len(y):
            continue
        spent.append((time.perf_counter() - begin) / len(y))
        for name, values in task.measure(read(model, out), y).items():
            total = values.sum(0).double().cpu()
            found[name] = found[name] + total if name in found else total
        macs += model.macs(out.trace).sum().item()
        depth += out.trace.mean_depth.sum().item()
        images += len(y)
        if progress:
            progress(len(y))
    return found, images, macs, depth, 1 / statistics.median(spent) if spent else 0.0


def _in_step(batches: Batches, model: AdaptiveViT) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches on every rank; those made up here have an image, but no label."""
    shape, own = model.backbone.shape, iter(batches)
    blank = torch.zeros(1, shape.channels, *shape.image), torch.zeros(0, dtype=torch.long)
    while any(ranks.gathered((batch := next(own, None)) is not None)):
        yield batch or blank


@torch.no_grad()  # not inference mode: the operating point it leaves behind may be trained on
def calibrate(model: AdaptiveViT, images: Tensor, budget: float | str, *, batch: int = 128, steps: int = 14) -> float:
    """Turn the operating point until `images` cost the budget, without training or labels. Returns their cost's share.

    Cost rises along the operating point (a token needs more to stop), so bisection finds it.
    """
    method, images = model.method, model.check_images(images)
    if method.operating_point is None:
        raise DwindleError(
            f"{type(method).__name__} has nothing to turn after training; for a budget take a method that has."
        )
    _, cheap, dear = method.operating_point
    goal = budget_share(budget, model.backbone.shape)
    method.tell_unready()
    training, method.held = model.training, True
    fast: Any = quickest(model.eval(), len(images) * steps)

    def cost(value: float, tried: bool = True) -> float:
        points = None
        if tried and method.per_image_point:  # given, not set: a GPU's recording would be made anew for every setting
            points = images.new_full((batch,), value)
        else:
            turn(fast, value)
        total = 0.0
        for part in images.split(batch):
            out = fast(part, operating_point=None if points is None else points[: len(part)])
            total += model.macs(out.trace).sum().item()
        return total / len(images) / model.static_macs()

    # The nearer of the two sides: a threshold at which many tokens stop at once can leave a step between them.
    value = min(bisected(cost, goal, cheap, dear, steps), key=lambda v: abs(cost(v) - goal))
    reached = cost(value, tried=False)
    turn(model, value)
    model.train(training)
    return reached


def meet(model: AdaptiveViT, images: Tensor, budget: float | str) -> None:
    """`calibrate`, or what the model can do if it cannot do this."""
    goal, reached = budget_share(budget, model.backbone.shape), calibrate(model, images, budget)
    if abs(reached / goal - 1) > 0.05:
        raise DwindleError(
            f"A budget of {budget} cannot be met: the nearest this model comes to it on {len(images)} typical images "
            f"is {reached:.2f} of the static cost; ask for that, or train it with another budget."
        )


def turn(model: AdaptiveViT | Prepared, value: float, name: str | None = None) -> None:
    """Set the method's operating point, or another of its numbers."""
    if name is None:
        assert model.method.operating_point is not None
        name = model.method.operating_point[0]
    old = getattr(model.method, name)
    if isinstance(old, Tensor):
        with torch.no_grad():
            old.fill_(value)  # in place: a recorded training step reads it where it lies
    else:
        setattr(model.method, name, value)


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
