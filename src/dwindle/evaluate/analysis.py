"""Analysis of a model on a data set: sums over its traces, and accuracy and cost at other operating points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.model import AdaptiveViT
from ..io.batches import loader
from ..io.datasets import Images
from ..io.images import preprocess_of
from ..methods.static import Static
from ..runtime.prepared import prepared_or_self
from .evaluate import set_operating_point

Progress = Callable[[str, int, int], None]  # (what is being done, images done, images in all)

TURNED, TURNED_IMAGES = 7, 1000  # settings of the operating point that are measured, and the images for it
PROBED, PROBED_IMAGES = 16, 32  # settings tried to choose these, and the images for it


@dataclass
class Stream:
    """A data set, read in batches with a model's transform."""

    images: Images
    batch: int
    device: str
    progress: Progress | None = None

    def batches(self, model: AdaptiveViT, what: str, rows: np.ndarray | None = None) -> Iterator[Tensor]:
        """Batches for this model, on its device. what: is being done, for `progress`. rows: indices; None: all."""
        model.eval().to(self.device)
        part = self.images.select(np.arange(len(self.images)) if rows is None else rows)
        part.transform = preprocess_of(model).eval_transform()
        done = 0
        for x, _ in loader(part, self.batch):
            yield x.to(self.device)
            done += len(x)
            if self.progress:
                self.progress(what, done, len(part))


@dataclass
class Measured:
    """Sums and means over the traces of a data set."""

    labels: np.ndarray  # (n,)
    top1: np.ndarray  # (n,) bool
    top5: np.ndarray  # (n,) bool
    depth: np.ndarray  # (n,) mean over the image's tokens
    gmacs: np.ndarray  # (n,)
    stops: np.ndarray  # (L,) tokens that stopped after each block
    patches: np.ndarray  # (rows, columns) mean depth of each position
    scores: np.ndarray | None  # (L, n) mean over live tokens, NaN where none is live; None: the method has no scores
    gmacs_static: float


@dataclass
class Baseline:
    """The static model on the same images."""

    name: str
    top1: np.ndarray  # (n,) bool
    gmacs: float


@torch.inference_mode()
def measure(model: AdaptiveViT, stream: Stream) -> Measured:
    """Run the adaptive model on the data set once."""
    columns: dict[str, list[np.ndarray]] = {"best": [], "depth": [], "gmacs": [], "scores": []}
    stops, patches = np.zeros(model.backbone.shape.blocks, dtype=np.int64), np.zeros(())
    fast = prepared_or_self(model.eval().to(stream.device), len(stream.images), details=True)
    for x in stream.batches(model, "measuring"):
        result = fast(x)
        trace = result.trace
        columns["best"].append(_numpy(result.logits.topk(min(5, result.logits.shape[-1])).indices))
        columns["depth"].append(_numpy(trace.mean_depth))
        columns["gmacs"].append(_numpy(model.macs(trace) / 1e9))
        stops += _numpy(torch.bincount(trace.depth.flatten(), minlength=trace.blocks + 1)[1:])
        patches = patches + _numpy(trace.patches.double().sum(0))
        if scored := [block for block, values in enumerate(trace.values) if "score" in values]:
            scores = torch.full_like(trace.counts, torch.nan, dtype=torch.float64)
            scores[scored] = trace.scores[scored].double().sum(-1) / trace.counts[scored]  # 0 / 0 is NaN
            columns["scores"].append(_numpy(scores))
    labels, best = stream.images.labels, np.concatenate(columns["best"])
    hits = best == labels[:, None]
    return Measured(
        labels,
        hits[:, 0],
        hits.any(1),
        np.concatenate(columns["depth"]),
        np.concatenate(columns["gmacs"]),
        stops,
        patches / len(labels),
        np.concatenate(columns["scores"], 1) if columns["scores"] else None,
        model.static_macs(trace) / 1e9,
    )


@torch.inference_mode()
def measure_static(model: AdaptiveViT, name: str, stream: Stream) -> Baseline:
    """Run the same weights without the method on the data set once. name: of the baseline."""
    static = model.with_method(Static()).eval().to(stream.device)
    fast, predictions = prepared_or_self(static, len(stream.images)), []
    for x in stream.batches(static, "comparing with static"):
        result = fast(x)
        predictions.append(_numpy(result.logits.argmax(-1)))
    correct = np.concatenate(predictions) == stream.images.labels
    return Baseline(name, correct, model.static_macs(result.trace) / 1e9)


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def operating_points(model: AdaptiveViT) -> list[tuple[str, float, float]]:
    """What can be set after training, as (name, cheapest, dearest). AHT has two: its bar and its threshold."""
    own = [] if model.method.operating_point is None else [model.method.operating_point]
    if own and own[0][0] == "bar":
        own.append(("threshold", 1e-3, float(model.backbone.shape.blocks)))
    return own


@torch.inference_mode()
def sweep(
    model: AdaptiveViT, stream: Stream, rows: np.ndarray, operating_point: tuple[str, float, float]
) -> list[dict[str, float]]:
    """Accuracy and cost at settings of the operating point; the first is the trained one. The model is not changed.

    rows: indices of the images to measure on. operating_point: one of `operating_points`.
    """
    name, cheap, dear = operating_point
    trained = float(getattr(model.method, name))
    fast: Any = prepared_or_self(model.eval().to(stream.device), len(rows) * TURNED)
    few = torch.cat(list(stream.batches(model, "probing the operating point", rows[:PROBED_IMAGES])))

    def cost(value: float) -> float:
        set_operating_point(fast, value, name)
        return model.macs(fast(few).trace).mean().item()

    try:
        settings = [trained, *spread_settings(cost, cheap, dear, TURNED, PROBED)]
        points = [{"setting": setting, "gmacs": 0.0, "top1": 0.0} for setting in settings]
        labels, at = stream.images.labels[rows], 0
        for x in stream.batches(model, "turning the operating point", rows):
            y, at = labels[at : at + len(x)], at + len(x)
            for point in points:
                set_operating_point(fast, point["setting"], name)
                result = fast(x)
                point["gmacs"] += model.macs(result.trace).sum().item() / 1e9 / len(rows)
                point["top1"] += 100 * int((_numpy(result.logits.argmax(-1)) == y).sum()) / len(rows)
    finally:
        set_operating_point(fast, trained, name)
    return points


def spread_settings(cost: Callable[[float], float], one: float, other: float, count: int, probes: int) -> list[float]:
    """At most `count` settings between two, about evenly spread in cost, cheapest first.

    The setting in the middle of the widest gap in cost is tried next, until `probes` are tried: for most operating
    points nearly all of the change in cost happens in a small part of the range.
    """
    known = {value: cost(value) for value in (one, other)}
    finest = 1e-4 * abs(other - one)  # narrower intervals are not halved: at a jump of the cost this would not end
    while len(known) < probes:
        gaps = [(low, high) for low, high in pairwise(sorted(known)) if high - low > finest]
        low, high = max(gaps, key=lambda gap: abs(known[gap[1]] - known[gap[0]]))
        known[(low + high) / 2] = cost((low + high) / 2)
    goals = np.linspace(min(known.values()), max(known.values()), count)
    chosen = {min(known, key=lambda value: abs(known[value] - goal)) for goal in goals}
    return sorted(chosen, key=lambda value: known[value])
