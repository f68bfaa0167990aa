"""Metrics of a language model on a text (loss, bits per character, cost saved), and operating points by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import processes as ranks
from ...core.cost import bisected
from ...core.method import require
from ...errors import DwindleError
from ...io.text import windows
from .execute import AdaptiveLM, tlops_saved
from .routing import Control, Random, Router, Static
from .tsa import TSA

LOGITS = 1 << 28  # of one batch, which is cut to so many: a batch of 64 windows has gigabytes of a tokenizer's


@torch.inference_mode()
def evaluate(
    model: AdaptiveLM,
    ids: Tensor,
    *,
    layout: str = "packed",
    batch: int = 32,
    limit: int | None = None,
    device: str | torch.device = "cpu",
    name: str = "the text",
    amp: bool = False,
    context: int | None = None,
    per_token: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Metrics over windows of the model's context; `rates` and `means`: each block's share of skips, and its mean p.

    context: shorter windows, of so many tokens. limit: only so many windows. amp: bf16 autocast, as in training on a
    GPU. per_token: characters of one token, so that `bpc` is bits per character with a tokenizer too. Several processes
    share the windows, and each returns the metrics over all of them.
    """
    place = torch.device(device)
    model = model.eval().to(place)
    blocks = model.backbone.shape.blocks
    sums = torch.zeros(3, dtype=torch.float64, device=place)
    skipped, probability = (torch.zeros(blocks, dtype=torch.float64, device=place) for _ in range(2))
    count, begin = 0, time.perf_counter()
    context = context or model.backbone.shape.context
    batch = min(batch, max(LOGITS // (context * model.backbone.shape.vocabulary), 1))
    for x, y in windows(ids, context, batch, name, limit, ranks.rank(), ranks.world()):
        x, y = x.to(place, non_blocking=True), y.to(place, non_blocking=True)
        with torch.autocast(place.type, torch.bfloat16, enabled=amp):
            out = model(x, layout)
        loss = F.cross_entropy(out.logits.flatten(0, 1).float(), y.flatten(), reduction="none").double().mean()
        saved = torch.stack([loss, tlops_saved(out.trace).mean(), model.macs_saved(out.trace).mean()])
        sums += len(x) * saved
        skipped += len(x) * (1 - out.trace.live.double().mean((1, 2)))
        means = [values["p"].double().mean() if "p" in values else saved.new_ones(()) for values in out.trace.values]
        probability += len(x) * torch.stack(means)
        count += len(x)
        if progress:
            progress(len(x))
    mine = torch.cat([sums, skipped, probability]).cpu()
    speed = count * context / (time.perf_counter() - begin)
    totals, counts, speeds = zip(*ranks.gathered((mine, count, speed)))
    count, (sums, skipped, probability) = sum(counts), sum(totals).split([3, blocks, blocks])
    loss_, tlops, macs = (sums / count).tolist()
    if not math.isfinite(loss_):
        raise DwindleError(f"The loss on {name} is {loss_}: the model's weights are damaged; take another copy.")
    return {
        "loss": loss_,
        "bpc": loss_ / math.log(2) / per_token,
        "tlops_saved": tlops,
        "macs_saved": macs,
        "rates": (skipped / count).tolist(),
        "means": (probability / count).tolist(),
        "tokens_per_s": round(sum(speeds), 1),
        "windows": count,
    }


def rivals(model: AdaptiveLM, found: dict[str, Any], ids: Tensor, **options: Any) -> dict[str, dict[str, Any]]:
    """`evaluate` of the same weights without the router ("static"), with as many tokens of each block skipping by
    chance ("random"), and of TSA's the same with its p scaling those that run ("control"). found: the router's result.
    """
    rates = tuple(found["rates"])
    others: dict[str, Router] = {"static": Static(), "random": Random(rates, model.method.keys)}
    if isinstance(model.method, TSA):
        others["control"] = Control(model.method, "layer", rates)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of what the control draws
        return {name: evaluate(AdaptiveLM(model.lm, other), ids, **options) for name, other in others.items()}


def calibrate(model: AdaptiveLM, ids: Tensor, saved: float, steps: int = 12, **options: Any) -> float:
    """Set the operating point so that this share of token-layer operations is skipped; returns the share reached."""
    name, cheapest, costliest = _operating_point(model)

    def cost(value: float) -> float:
        setattr(model.method, name, value)
        return 1 - evaluate(model, ids, **options)["tlops_saved"]

    ends = bisected(cost, 1 - saved, cheapest, costliest, steps=steps)
    best = min(ends, key=lambda value: abs(cost(value) - (1 - saved)))
    return 1 - cost(best)


def affordable(model: AdaptiveLM, ids: Tensor, allowed: float, steps: int = 8, **options: Any) -> dict[str, Any]:
    """Set the operating point to the cheapest whose loss is at most (1 + allowed) times the loss with nothing skipped;
    returns the operating point, both losses and the cost saved. Bisection finds it to 1 / 2^steps of its range.
    """
    require(0 <= allowed < 1, f"allowed = {allowed}", "it is a share of the loss, such as 0.005, from 0 to below 1")
    name, cheapest, costliest = _operating_point(model)

    def measured(value: float) -> dict[str, Any]:
        setattr(model.method, name, value)
        return evaluate(model, ids, **options)

    full = measured(costliest)
    fits, fails, found = costliest, cheapest, full
    for _ in range(steps):
        middle = (fits + fails) / 2
        tried = measured(middle)
        if tried["loss"] <= full["loss"] * (1 + allowed):
            fits, found = middle, tried
        else:
            fails = middle
    setattr(model.method, name, fits)
    return {name: fits, "loss_full": full["loss"]} | {k: found[k] for k in ("loss", "tlops_saved", "macs_saved")}


def _operating_point(model: AdaptiveLM) -> tuple[str, float, float]:
    """The router's setting, its cheapest and its costliest value."""
    if model.method.operating_point is None:
        raise DwindleError(f"{type(model.method).__name__} has nothing to turn after training; train it to save more.")
    return model.method.operating_point
