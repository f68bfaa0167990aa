"""Accuracy, cost and speed of an adaptive model on a data set; and the operating point that meets a budget."""

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
from ..runtime.prepared import Prepared, prepared_or_self
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
    """The task's metrics over all images, with cost, depth and speed.

    images_per_s is the model alone, at its median batch: it does not include loading or moving images, nor compiling.

    layout: 'packed', by a prepared copy of the model, or 'masked'.
    ask: called with the model (or its copy) and images in the place of calling the model, to pass it other settings.
    task: measures the outputs that `read` takes from the model's `Output`.
    lockstep: all processes must run the same number of batches, as sharded weights need it. A process without images
        left runs on a blank image, which is not counted.

    Each of several processes evaluates its own batches; all of them return the result over all batches.
    """
    training, place = model.training, torch.device(device)
    model.eval().to(place)
    # Sharded weights are gathered block by block, which only the model itself does, not a prepared copy.
    itself = layout != "packed" or lockstep
    details = read is not logits
    call: Callable[..., Output] = (
        partial(model, layout=layout) if itself else prepared_or_self(model, _count(batches), details)
    )
    call = call if ask is None else partial(ask, call)
    # Sharded weights are gathered into tensors that training uses afterwards: they must not be inference tensors.
    with torch.no_grad() if lockstep else torch.inference_mode():
        batches = _in_step(batches, model) if lockstep else batches
        sums = _sums(model, batches, call, place, task, read, progress)
    model.train(training)
    metrics, *counts = zip(*ranks.gathered(sums))
    images, macs, depth, speed = map(sum, counts)
    if not images:
        raise DwindleError("There are no images to evaluate: the data set is empty; give another.")
    names = list(dict.fromkeys(name for part in metrics for name in part))
    totals = {name: torch.stack([part[name] for part in metrics if name in part]).sum(0) for name in names}
    return task.summary(totals, images) | {
        "gmacs": round(macs / images / 1e9, 4),
        "gmacs_static": round(model.static_macs() / 1e9, 4),
        "depth": round(depth / images, 3),
        "images": images,
        "images_per_s": round(speed, 1),
    }


def _count(batches: Batches) -> int | None:
    """The number of images, None if it is not known before they are read."""
    if isinstance(batches, list | tuple):
        return sum(len(y) for _, y in batches)
    data: Any = getattr(batches, "dataset", None)
    return len(data) if hasattr(data, "__len__") else None


def _sums(
    model: AdaptiveViT,
    batches: Batches,
    call: Callable[[Tensor], Output],
    place: torch.device,
    task: Task | type[Task],
    read: Read,
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, Tensor], int, float, float, float]:
    """Sums over this process's images: the task's measures, images, MACs and mean depths; and images per second."""
    sums: dict[str, Tensor] = {}
    images, macs, depth = 0, 0.0, 0.0
    seconds, dtype = [], dtype_of(model)
    for x, y in batches:
        x, y = x.to(place, dtype), y.to(place)
        _synchronize(place)
        begin = time.perf_counter()
        out = call(x)
        _synchronize(place)
        if not len(y):
            continue
        seconds.append((time.perf_counter() - begin) / len(y))
        for name, values in task.measure(read(model, out), y).items():
            total = values.sum(0).double().cpu()
            sums[name] = sums[name] + total if name in sums else total
        macs += model.macs(out.trace).sum().item()
        depth += out.trace.mean_depth.sum().item()
        images += len(y)
        if progress:
            progress(len(y))
    return sums, images, macs, depth, 1 / statistics.median(seconds) if seconds else 0.0


def _in_step(batches: Batches, model: AdaptiveViT) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, and blank ones until every process has had as many. A blank batch has an image and no label."""
    shape, own = model.backbone.shape, iter(batches)
    blank = torch.zeros(1, shape.channels, *shape.image), torch.zeros(0, dtype=torch.long)
    while any(ranks.gathered((batch := next(own, None)) is not None)):
        yield batch or blank


@torch.no_grad()  # not inference mode: the operating point that it sets may be trained afterwards
def calibrate(model: AdaptiveViT, images: Tensor, budget: float | str, *, batch: int = 128, steps: int = 14) -> float:
    """Set the operating point so that `images` cost the budget, without training or labels.

    Returns the cost reached, as a share of the static cost. The operating point is found by bisection, since the cost
    rises along it. batch: images per forward pass. steps: of the bisection.
    """
    method, images = model.method, model.check_images(images)
    if method.operating_point is None:
        raise DwindleError(
            f"{type(method).__name__} has nothing to turn after training; for a budget take a method that has."
        )
    _, cheap, dear = method.operating_point
    goal = budget_share(budget, model.backbone.shape)
    method.warn_untrained()
    training, method.budget_held = model.training, True
    fast: Any = prepared_or_self(model.eval(), len(images) * steps)

    def cost(value: float, tried: bool = True) -> float:
        points = None
        if tried and method.per_image_point:  # passed as an input: a GPU's graph needs no new recording for it
            points = images.new_full((batch,), value)
        else:
            set_operating_point(fast, value)
        total = 0.0
        for part in images.split(batch):
            out = fast(part, operating_point=None if points is None else points[: len(part)])
            total += model.macs(out.trace).sum().item()
        return total / len(images) / model.static_macs()

    # The nearer end of the last interval: where many tokens stop at one threshold, the cost jumps within it.
    value = min(bisected(cost, goal, cheap, dear, steps), key=lambda v: abs(cost(v) - goal))
    reached = cost(value, tried=False)
    set_operating_point(model, value)
    model.train(training)
    return reached


def calibrate_or_refuse(model: AdaptiveViT, images: Tensor, budget: float | str) -> None:
    """`calibrate` the model to the budget. A budget that it misses by more than 5% is refused."""
    goal, reached = budget_share(budget, model.backbone.shape), calibrate(model, images, budget)
    if abs(reached / goal - 1) > 0.05:
        raise DwindleError(
            f"A budget of {budget} cannot be met: the nearest this model comes to it on {len(images)} typical images "
            f"is {reached:.2f} of the static cost; ask for that, or train it with another budget."
        )


def set_operating_point(model: AdaptiveViT | Prepared, value: float, name: str | None = None) -> None:
    """Set the method's operating point, or its attribute of this name, to a value."""
    if name is None:
        assert model.method.operating_point is not None
        name = model.method.operating_point[0]
    old = getattr(model.method, name)
    if isinstance(old, Tensor):
        with torch.no_grad():
            old.fill_(value)  # in place: a recorded training step reads this memory
    else:
        setattr(model.method, name, value)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
