"""Measurements of a network at all its settings: accuracy and confidence on every image, and latency.

One run per width gives the answers of all depths and numbers of tokens (with an open mask, one run per width and number
of tokens).

W widths, L depths, G granularities, n images.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.trace import Trace
from ...ops.timing import milliseconds
from ...runtime.cuda.keep import GRAPHS
from .cost import setting_macs
from .model import AdaPerceiver
from .prepared import PreparedPerceiver
from .settings import Exits

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass
class Grid:
    """The result of every setting on every image."""

    correct: Tensor  # (W, L, G, n) bool
    confidence: Tensor  # (W, L, G, n), the highest probability

    @property
    def top1(self) -> Tensor:
        """(W, L, G) in percent."""
        return 100 * self.correct.double().mean(-1)


@torch.no_grad()
def grid(
    model: AdaPerceiver,
    batches: Batches,
    *,
    device: str | torch.device = "cpu",
    amp: bool = True,
    widths: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Grid:
    """Runs the network at every setting on (images, labels). amp: in bf16 on a GPU. widths: only these; None: all."""
    place, training = torch.device(device), model.training
    fast = model.eval().to(place).prepare()
    right, sure = [], []
    for x, y in batches:
        x, y = x.to(place), y.to(place)
        with torch.autocast(place.type, torch.bfloat16, enabled=amp and place.type == "cuda"):
            patches = fast.embed(x)
            # (W, L, G, B, classes)
            logits = torch.stack([fast.every(x, width, patches=patches) for width in widths or model.widths])
        best = logits.float().softmax(-1).max(-1)
        right.append((best.indices == y).cpu())
        sure.append(best.values.cpu())
        if progress:
            progress(len(y))
    model.train(training)
    return Grid(torch.cat(right, -1), torch.cat(sure, -1))


def rows(model: AdaPerceiver, found: Grid) -> list[dict[str, Any]]:
    """A row per setting, for JSON and figures."""
    top1 = found.top1
    return [
        {
            "tokens": tokens,
            "depth": depth,
            "width": width,
            "top1": round(float(top1[w, depth - 1, g]), 3),
            "gmacs": round(setting_macs(model, tokens, depth, width) / 1e9, 4),
        }
        for w, width in enumerate(model.widths)
        for depth in range(1, model.depth + 1)
        for g, tokens in enumerate(model.tokens)
    ]


def falls(found: Grid) -> dict[str, float]:
    """The largest fall of top-1 from a setting to the next larger one along each axis; 0 where it never falls."""
    return {
        name: round(max(0.0, float(-found.top1.diff(dim=axis).min())) if found.top1.shape[axis] > 1 else 0.0, 3)
        for name, axis in (("width", 0), ("depth", 1), ("tokens", 2))
    }


def lagging(found: Grid) -> list[int]:
    """The depths whose answers are worse than those of the depth before, at every width and number of tokens, and on
    average by more than two standard errors. With a read-out for each depth, theirs was badly trained.
    """
    worse = (found.top1.diff(dim=1) < 0).all(2).all(0)  # (L - 1,)
    gain = found.correct.double().mean((0, 2)).diff(dim=0)  # (L - 1, n), of each image
    noise = gain.std(-1) / gain.shape[-1] ** 0.5
    return [depth for depth, lags in enumerate((worse & (gain.mean(-1) < -2 * noise)).tolist(), 2) if lags]


@torch.no_grad()
def between(
    model: AdaPerceiver,
    batches: Batches,
    tokens: Sequence[int],
    device: str | torch.device = "cpu",
    amp: bool = True,
) -> list[dict[str, Any]]:
    """Fig. 10: a row for each number of tokens, also untrained ones, at full depth and width. amp: as for `grid`."""
    place = torch.device(device)
    fast = model.eval().to(place).prepare()
    right, count = dict.fromkeys(tokens, 0), 0
    for x, y in batches:
        x, y, count = x.to(place), y.to(place), count + len(y)
        for t in tokens:
            with torch.autocast(place.type, torch.bfloat16, enabled=amp and place.type == "cuda"):
                logits = fast(x, tokens=t).logits
            right[t] += int((logits.argmax(-1) == y).sum())
    gmacs = {t: round(setting_macs(model, t, model.depth, model.width) / 1e9, 4) for t in tokens}
    return [
        {"tokens": t, "top1": round(100 * right[t] / count, 3), "gmacs": gmacs[t], "trained": t in model.tokens}
        for t in tokens
    ]


@torch.no_grad()
def latencies(
    model: AdaPerceiver,
    settings: Sequence[tuple[int, int, int]],
    batch: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seconds: float = 4.0,
) -> list[dict[str, Any]]:
    """A row for each setting (tokens, depth, width): milliseconds, timed in alternation, and speedup over the first."""
    place = torch.device(device)
    ready = copy.deepcopy(model).eval().to(place, dtype)
    fast = PreparedPerceiver(ready, recordings=max(GRAPHS, len(settings)))  # all are kept, as calls alternate
    images = torch.randn(batch, model.channels, model.image, model.image, device=place, dtype=dtype)
    spent = milliseconds([partial(fast, images, t, d, w) for t, d, w in settings], seconds, place)
    return [
        {"tokens": t, "depth": d, "width": w, "gmacs": round(setting_macs(model, t, d, w) / 1e9, 4)}
        | _timed(times, spent[0])
        for (t, d, w), times in zip(settings, spent)
    ]


@torch.no_grad()
def exit_latencies(
    model: AdaPerceiver,
    images: Tensor,
    conditions: Sequence[tuple[float, Exits]],
    batch: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seconds: float = 4.0,
) -> list[dict[str, Any]]:
    """A row for the whole network, and one for early exit by each of `conditions`, (confidence, depths), on images.

    All are timed in alternation. `promised`: the speedup if time were proportional to MACs, with read-outs. The first
    images are repeated to fill the last batch.
    """
    place = torch.device(device)
    fast = copy.deepcopy(model).eval().to(place, dtype).prepare()
    filled = torch.arange(-(-len(images) // batch) * batch) % len(images)
    batches = images[filled].to(place, dtype).split(batch)

    def run(exit: float | None, exit_depths: Exits) -> list[Trace]:
        return [fast(part, exit=exit, exits=exit_depths).trace for part in batches]

    calls = [partial(run, tau, exit_depths) for tau, exit_depths in [(None, None), *conditions]]
    macs = [float(torch.cat([model.macs(trace) for trace in call()]).mean()) for call in calls]
    spent = [[t / len(batches) for t in times] for times in milliseconds(calls, seconds, place)]
    return [
        {"exit": tau, "exits": exit_depths, "gmacs": round(cost / 1e9, 4), "promised": round(macs[0] / cost, 3)}
        | _timed(times, spent[0])
        for (tau, exit_depths), cost, times in zip([(None, None), *conditions], macs, spent)
    ]


def _timed(times: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
    """Median milliseconds, and the median over rounds of the speedup over the first call."""
    return {
        "ms": round(statistics.median(times), 3),
        "speedup": round(statistics.median(a / b for a, b in zip(first, times)), 3),
        "rounds": len(times),
    }
