"""Static and adaptive timed in one run, turn about, so that both see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .backbones.base import Shape, backbone_of
from .checkpoint import load, shipped
from .errors import DwindleError, unknown
from .methods.aht import AHT
from .model import AdaptiveViT, adapt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_to_bench(name: str) -> AdaptiveViT:
    """A checkpoint; or a timm model with random weights and AHT, its planners at the quarters of the depth."""
    import timm

    if name in shipped() or Path(name).exists() or "/" in name:
        return load(name)
    if not timm.is_model(name):
        raise unknown("model or checkpoint", name, [*timm.list_models(), *shipped()])
    vit = timm.create_model(name)
    blocks = backbone_of(vit).shape.blocks
    return adapt(vit, AHT(stages=(max(blocks // 4, 1), max(blocks // 2, 1), max(3 * blocks // 4, 1))))


def forced_depths(images: int, shape: Shape, fraction: float, seed: int = 0) -> Tensor:
    """(B, N) random exit depths that leave exactly this share of token-blocks, prefix tokens to the end.

    Drawn as L u^a with mean `fraction` L, so that images differ in their number of live tokens at every block.
    """
    if not 0 < fraction <= 1:
        raise DwindleError(f"fraction = {fraction}: it is the share of token-blocks still computed, in (0, 1].")
    generator = torch.Generator().manual_seed(seed)
    patches, blocks = shape.tokens() - shape.prefix, shape.blocks
    wanted = round(fraction * images * shape.tokens() * blocks) - images * shape.prefix * blocks
    wanted = min(max(wanted, images * patches), images * patches * blocks)
    drawn = torch.rand(images * patches, generator=generator, dtype=torch.float64)
    depths = (blocks * drawn ** (1 / fraction - 1)).ceil().long().clamp(1, blocks)
    while (gap := wanted - int(depths.sum())) != 0:
        step = 1 if gap > 0 else -1
        movable = (depths < blocks if gap > 0 else depths > 1).nonzero()[:, 0]
        chosen = movable[torch.randperm(len(movable), generator=generator)[: abs(gap)]]
        depths[chosen] += step
    full = torch.full((images, shape.prefix), blocks)
    return torch.cat([full, depths.view(images, patches)], 1)


def milliseconds(calls: Sequence[Callable[[], Any]], seconds: float, device: torch.device) -> list[list[float]]:
    """Time the calls in turn for about `seconds` in all (at least five rounds): one list of milliseconds per call."""

    def once(call: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e3

    for call in calls:  # warm-up
        once(call)
        once(call)
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for spent, call in zip(times, calls):
            spent.append(once(call))
    return times


@torch.inference_mode()
def bench(
    model: AdaptiveViT,
    batches: Sequence[int],
    fractions: Sequence[float],
    device: str = "cpu",
    dtype: str = "fp32",
    seconds: float = 4.0,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Forced depths replace only the outcome of decisions: the method's scores and the compaction run and are timed."""
    place = torch.device(device)
    model = model.eval().to(place, DTYPES[dtype])
    rows = []
    for batch in batches:
        images = torch.randn(batch, model.backbone.shape.channels, *model.backbone.shape.image).to(place, DTYPES[dtype])
        for fraction in fractions:
            depths = forced_depths(batch, model.backbone.shape, fraction).to(place)
            calls = [partial(model.vit, images), partial(model, images, depths=depths)]
            static, adaptive = milliseconds(calls, seconds, place)
            row = {
                "batch": batch,
                "fraction": fraction,
                "static_ms": round(statistics.median(static), 3),
                "adaptive_ms": round(statistics.median(adaptive), 3),
                # Each round's own ratio: a slow moment of the machine hits both sides of it.
                "speedup": round(statistics.median(s / a for s, a in zip(static, adaptive)), 3),
                "spread": round(statistics.pstdev(s / a for s, a in zip(static, adaptive)), 3),
                "rounds": len(static),
            }
            rows.append(row)
            if progress:
                progress(row)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    return {"rows": rows, "device": name, "dtype": dtype, "torch": torch.__version__}
