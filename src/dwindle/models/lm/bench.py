"""Timing of a language model with and without skipping, in one process and in alternation."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import DwindleError
from ...ops.timing import milliseconds
from ...runtime.dtypes import DTYPES
from .execute import AdaptiveLM, LMOutput, adapt_lm, tlops_saved
from .generate import generate
from .routing import Static


def forced_keep(blocks: int, shape: tuple[int, int], fraction: float, seed: int = 0) -> Tensor:
    """(L, B, N) bool, at random: exactly this share of token-blocks runs, and every token runs the first block."""
    if not 1 / blocks <= fraction <= 1:
        raise DwindleError(
            f"fraction = {fraction}: it is the share of token-blocks computed, and every token runs the first of "
            f"{blocks}; give one in [{1 / blocks:.2f}, 1]."
        )
    count = shape[0] * shape[1]
    chosen = round((fraction * blocks - 1) * count)
    order = torch.randperm((blocks - 1) * count, generator=torch.Generator().manual_seed(seed))
    later = torch.zeros((blocks - 1) * count, dtype=torch.bool).index_fill(0, order[:chosen], True)
    return torch.cat([torch.ones(1, *shape, dtype=torch.bool), later.view(blocks - 1, *shape)])


@torch.inference_mode()
def bench_lm(
    model: AdaptiveLM,
    batches: Sequence[int],
    fractions: Sequence[float],
    device: str = "cpu",
    dtype: str = "fp32",
    seconds: float = 4.0,
    ids: Tensor | None = None,
    context: int | None = None,
    compiled: bool = True,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Times the static and the adaptive model on windows of `context` tokens (None: the model's), for each batch size
    and share of token-blocks.

    A forced share replaces only the router's decisions: its gates run and are timed. ids: a text (N,); adds a row with
    the router's own decisions on it. compiled: both models run compiled code.
    """
    place = torch.device(device)
    model = model.eval().to(place, DTYPES[dtype])
    shape = model.backbone.shape
    context = context or shape.context
    static: Callable[[Tensor], Tensor] = _logits(model.lm)
    adaptive: Callable[..., LMOutput] = partial(model, layout="packed")
    if compiled:
        static = torch.compile(static)
        model.compile_blocks()
    rows = []
    # Compiled code is for one batch size: from the second size on torch would compile code for any size.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False) if compiled else nullcontext():
        for batch in batches:
            size = (batch, context)
            drawn = torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(0)).to(place)
            jobs: list[tuple[str, Tensor, Tensor | None]] = [
                ("forced", drawn, forced_keep(shape.blocks, size, f).to(place)) for f in fractions
            ]
            if ids is not None and len(ids) >= batch * context:
                jobs.append(("own", ids[: batch * context].view(size).long().to(place), None))
            for kind, x, keep in jobs:
                trace = model(x, keep=keep).trace
                saved, macs = tlops_saved(trace).mean().item(), model.macs_saved(trace).mean().item()
                static_ms, adaptive_ms = milliseconds(
                    [partial(static, x), partial(adaptive, x, keep=keep)], seconds, place
                )
                row = _row(static_ms, adaptive_ms, saved, macs) | {"batch": batch, "decisions": kind}
                row["tokens_per_s"] = round(batch * context / row["adaptive_ms"] * 1e3)
                rows.append(row)
                if progress:
                    progress(row)
    return {"rows": rows, "context": context} | _conditions(place, dtype)


@torch.inference_mode()
def bench_generation(
    model: AdaptiveLM,
    batches: Sequence[int],
    length: int,
    device: str = "cpu",
    dtype: str = "fp32",
    seconds: float = 4.0,
) -> dict[str, Any]:
    """Times writing `length` tokens after 16 random ones, in alternation: by the model without its router (static),
    with it and every update computed (all), and skipping. The last two write the same text. `speedup`: all / skipping.
    """
    place = torch.device(device)
    model = model.eval().to(place, DTYPES[dtype])
    static, known, rows = adapt_lm(model.lm, Static()).eval(), model.backbone.shape.vocabulary, []
    for batch in batches:
        prompt = torch.randint(0, known, (batch, 16), generator=torch.Generator().manual_seed(0)).to(place)
        calls = [partial(generate, static, prompt, length, seed=0)]
        calls += [partial(generate, model, prompt, length, seed=0, layout=layout) for layout in ("masked", "packed")]
        saved = 1 - float(calls[-1]().live.double().mean())
        spent = milliseconds(calls, seconds, place)
        names = ("static", "all", "skipping")
        row = {f"{name}_ms": round(statistics.median(times), 2) for name, times in zip(names, spent)}
        ratios = [a / b for a, b in zip(spent[1], spent[2])]
        against = statistics.median(a / b for a, b in zip(spent[0], spent[2]))
        row |= {"batch": batch, "speedup": round(statistics.median(ratios), 3), "against_static": round(against, 3)}
        rows.append(row | {"spread": round(statistics.pstdev(ratios), 3), "tlops_saved": round(saved, 4)})
    return {"rows": rows, "length": length} | _conditions(place, dtype)


def _conditions(place: torch.device, dtype: str) -> dict[str, Any]:
    """What a timing depends on beside the model: device, dtype and torch's version."""
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    return {"device": name, "dtype": dtype, "torch": torch.__version__}


def compilable(device: str) -> bool:
    """Whether torch.compile finds a compiler for this device."""
    if device.startswith("cuda"):
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _row(static: list[float], adaptive: list[float], saved: float, macs: float) -> dict[str, Any]:
    """A row of `bench_lm` from rounds of milliseconds. saved, macs: shares of TLOps and of multiply-accumulates saved.

    promised: the speedup if time were proportional to token-layer operations; reached: the measured speedup as a share
    of it. `_macs`: the same by multiply-accumulates, which also count the gates and the keys of tokens that skip.
    """
    speedup = statistics.median(s / a for s, a in zip(static, adaptive))
    return {
        "fraction": round(1 - saved, 4),
        "static_ms": round(statistics.median(static), 3),
        "adaptive_ms": round(statistics.median(adaptive), 3),
        "speedup": round(speedup, 3),
        "spread": round(statistics.pstdev(s / a for s, a in zip(static, adaptive)), 3),
        "promised": round(1 / (1 - saved), 3),
        "reached": round(speedup * (1 - saved), 3),
        "promised_macs": round(1 / (1 - macs), 3),
        "reached_macs": round(speedup * (1 - macs), 3),
        "rounds": len(static),
    }


def _logits(lm: Any) -> Callable[[Tensor], Tensor]:
    """A function from ids to logits, for a CharLM or a Hugging Face model."""

    def run(ids: Tensor) -> Tensor:
        out = lm(ids)
        return out if isinstance(out, Tensor) else out.logits

    return run
