"""Latency of the static and the adaptive model, timed in turns in one process, so that both see the same machine."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..core.backbone import Shape, backbone_of
from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError, unknown
from ..io.checkpoint import is_checkpoint, load_as, shipped
from ..io.sets import evaluation_images
from ..methods.aht import AHT
from ..ops.int8 import is_int8
from ..ops.timing import milliseconds
from ..runtime import onnx_graph
from ..runtime.cuda.recording import captured
from ..runtime.dtypes import DTYPES
from ..runtime.int8 import quantize

INT8 = "int8"  # the linear layers of the blocks, on a CPU; the rest of the model is fp32


def model_to_bench(name: str) -> AdaptiveViT:
    """The checkpoint of this name; else the timm model with random weights, and AHT with planners at each quarter."""
    import timm

    if is_checkpoint(name):
        return load_as(AdaptiveViT, name)
    if not timm.is_model(name):
        hint = "give a timm model's name, a checkpoint folder or a shipped name"
        raise unknown("model or checkpoint", name, [*timm.list_models(), *shipped()], hint)
    vit = timm.create_model(name)
    blocks = backbone_of(vit).shape.blocks
    return adapt(vit, AHT(stages=(max(blocks // 4, 1), max(blocks // 2, 1), max(3 * blocks // 4, 1))))


def forced_depths(images: int, shape: Shape, fraction: float, seed: int = 0) -> Tensor:
    """(B, N) random exit depths with exactly this share of token-blocks computed; prefix tokens run all blocks.

    A depth is L u^a, u uniform, with mean `fraction` L: so images differ in their number of live tokens at every block.
    """
    if not 0 < fraction <= 1:
        raise DwindleError(f"fraction = {fraction}: it is the share of token-blocks still computed, in (0, 1].")
    generator = torch.Generator().manual_seed(seed)
    patches, blocks = shape.tokens() - shape.prefix, shape.blocks
    least = (shape.prefix * blocks + patches) / (shape.tokens() * blocks)
    if fraction < least:
        raise DwindleError(
            f"fraction = {fraction}: every token runs the first of {blocks} blocks, class tokens run all; give a share "
            f"from {math.ceil(100 * least) / 100} to 1."
        )
    wanted = round(fraction * images * shape.tokens() * blocks) - images * shape.prefix * blocks
    drawn = torch.rand(images * patches, generator=generator, dtype=torch.float64)
    depths = (blocks * drawn ** (1 / fraction - 1)).ceil().long().clamp(1, blocks)
    while (gap := wanted - int(depths.sum())) != 0:
        step = 1 if gap > 0 else -1
        movable = (depths < blocks if gap > 0 else depths > 1).nonzero()[:, 0]
        chosen = movable[torch.randperm(len(movable), generator=generator)[: abs(gap)]]
        depths[chosen] += step
    full = torch.full((images, shape.prefix), blocks)
    return torch.cat([full, depths.view(images, patches)], 1)


def some_photos(model: AdaptiveViT, data: str, count: int) -> Tensor:
    """Up to `count` evaluation images, at most 256, drawn at random and transformed for the model."""
    images = evaluation_images(model, data, min(count, 256), seed=0, labelled=False)
    return torch.stack([images[i][0] for i in range(len(images))])


def variants_on(place: torch.device, dtype: str) -> tuple[str, ...]:
    """The variants of the static model that this machine can run; see `static_calls`."""
    if place.type == "cuda":
        return "eager", "graph", "compile"
    if dtype != "fp32" or onnx_graph.missing():
        return ("eager",)
    return ("eager", "onnxruntime", *(["openvino"] if find_spec("openvino") else []))


def static_calls(model: AdaptiveViT, images: Tensor, variants: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Calls of the wrapped model itself, without Dwindle, by variant.

    'eager', 'graph' (a CUDA graph), 'onnxruntime' and 'openvino' (on a CPU), 'compile' (torch.compile, max-autotune).
    """
    with torch.inference_mode(False):  # a recording must read plain tensors
        vit = copy.deepcopy(model).unwrap().requires_grad_(False)
    calls: dict[str, Callable[[], Any]] = {"eager": partial(vit, images)}
    if "graph" in variants:
        graph = captured(partial(vit, images))

        def replay(keep_alive: Any = (vit, images)) -> None:  # the graph reads their memory
            graph.replay()

        calls["graph"] = replay
    if "onnxruntime" in variants:
        calls["onnxruntime"] = partial(onnx_graph.static(vit, images), images)
    if "openvino" in variants:
        calls["openvino"] = partial(onnx_graph.static_in_openvino(vit, images), images)
    if "compile" in variants:
        # Kernels for one batch size: those for any size are slower and would make the baseline too weak.
        calls["compile"] = partial(torch.compile(vit, mode="max-autotune", dynamic=False), images)
    return {name: calls[name] for name in variants}


def bench(
    model: AdaptiveViT,
    batches: Sequence[int],
    fractions: Sequence[float],
    device: str = "cpu",
    dtype: str = "fp32",
    seconds: float = 4.0,
    progress: Callable[[dict[str, Any]], None] | None = None,
    static: Sequence[str] | None = None,
    photos: Tensor | None = None,
) -> dict[str, Any]:
    """Time the static and the adaptive model at each batch size and share of token-blocks. Returns the rows as JSON.

    Depths are forced. This replaces only the outcome of decisions: the method's scores and the compaction are timed.
    static: variants of the static model to time; None: those of `variants_on`. The fastest is the baseline.
    photos: real images. On these the model decides by itself, and `fractions` are not used.
    On a GPU the images lie where the graphs read them, for both models; `handed_ms` includes copying them there.
    """
    place = torch.device(device)
    on_gpu = place.type == "cuda"
    if dtype == INT8 or is_int8(model):
        if on_gpu or dtype not in (INT8, "fp32"):
            raise DwindleError(
                f"--dtype {dtype} on {place}: an int8 model runs on a CPU, and the rest of it in fp32; take "
                "--device cpu --dtype int8."
            )
        model, dtype = model if is_int8(model) else quantize(model), INT8
    number = DTYPES.get(dtype, torch.float32)
    model = model.eval().to(place, number)
    shape = model.backbone.shape
    variants = list(static or variants_on(place, dtype))
    rows = []
    for batch in batches:
        if photos is None:
            images = torch.randn(batch, shape.channels, *shape.image)
        else:
            images = photos[torch.arange(batch) % len(photos)]
        images = images.to(place, number)
        with torch.inference_mode():
            plain = static_calls(model, images, variants)
            for fraction in fractions if photos is None else [None]:
                row = _row(model, images, plain, fraction, seconds)
                rows.append(row)
                if progress:
                    progress(row)
    name = torch.cuda.get_device_name(place) if on_gpu else f"cpu ({torch.get_num_threads()} threads)"
    return {"rows": rows, "device": name, "dtype": dtype, "torch": torch.__version__}


def _row(
    model: AdaptiveViT,
    images: Tensor,
    plain: dict[str, Callable[[], Any]],
    fraction: float | None,
    seconds: float,
) -> dict[str, Any]:
    """The row of one batch. plain: calls of the static model. fraction: the share forced; None: the model decides."""
    place, fast = images.device, model.prepare()
    depths = None if fraction is None else forced_depths(len(images), model.backbone.shape, fraction).to(place)
    adaptive: dict[str, Callable[[], Any]] = {"adaptive": partial(fast, images, depths=depths)}
    if place.type == "cuda":
        adaptive["packed"] = partial(model, images, layout="packed", depths=depths)
        adaptive["handed"] = partial(fast, images, depths=depths)
        # The static model's graph reads the images without a copy, so the adaptive one does too.
        inputs: Any = fast.inputs(images, depths)
        adaptive["adaptive"] = partial(fast, inputs[0], depths=inputs[1])
        torch.cuda.reset_peak_memory_stats(place)
        fast(images, depths=depths)
        peak = torch.cuda.max_memory_allocated(place)
    calls = plain | adaptive
    spent = dict(zip(calls, milliseconds(list(calls.values()), seconds, place)))
    medians = {name: round(statistics.median(times), 4) for name, times in spent.items()}
    best = min(plain, key=lambda name: medians[name])
    # The ratio is taken within each round: a slow moment of the machine hits both sides of it.
    ratios = [s / a for s, a in zip(spent[best], spent["adaptive"])]
    row: dict[str, Any] = {
        "batch": len(images),
        "fraction": fraction,
        "static_ms": medians[best],
        "adaptive_ms": medians["adaptive"],
        "speedup": round(statistics.median(ratios), 3),
        "spread": round(statistics.pstdev(ratios), 3),
        "rounds": len(ratios),
    }
    if fraction is None:
        trace = fast(images).trace
        row["fraction"] = round(float(trace.live.float().mean()), 4)
    if len(plain) > 1 or place.type == "cuda":
        row |= {"static_ms": {name: medians[name] for name in plain}, "best": best}
    if place.type == "cuda":
        row |= {"handed_ms": medians["handed"], "packed_eager_ms": medians["packed"]}
        row |= {"peak_mib": round(peak / 2**20, 1)}
    return row | {"engine": fast.path(images)}


@torch.inference_mode()
def race(model: AdaptiveViT, small: AdaptiveViT, photos: Tensor, seconds: float) -> list[dict[str, Any]]:
    """Time the static and the adaptive model, in float and in int8, in turns. The model decides by itself.

    small: the int8 copy of the model. Returns a row for each batch size.
    """
    rows = []
    for batch in (1, 8):
        images = photos[torch.arange(batch) % len(photos)]
        calls: dict[str, Callable[[], Any]] = {
            "static_float": static_calls(model, images, ["eager"])["eager"],
            "static_int8": static_calls(small, images, ["eager"])["eager"],
            "adaptive_float": partial(model.prepare(), images),
            "adaptive_int8": partial(small.prepare(), images),
        }
        times = dict(zip(calls, milliseconds(list(calls.values()), seconds, images.device)))
        ratios = {
            "speedup": [s / a for s, a in zip(times["static_int8"], times["adaptive_int8"])],
            "over_float": [f / i for f, i in zip(times["adaptive_float"], times["adaptive_int8"])],
        }
        rows.append(
            {"batch": batch, "threads": torch.get_num_threads()}
            | {f"{name}_ms": round(statistics.median(spent), 3) for name, spent in times.items()}
            | {name: round(statistics.median(values), 3) for name, values in ratios.items()}
        )
    return rows
