"""Which tiles are fastest for the linear layers and the attention of a width, on the GPU at hand.

python benchmarks/tiles.py --width 384 --heads 6 --tokens 197 --batch 1,8,32,128,512

One JSON line per layer and batch: the fastest tiles (microseconds in a CUDA graph) beside cuBLAS or SDPA on the
same numbers. What `linear_tile` and `attention_tile` in src/dwindle/ops/launch.py return comes from here. Kernels are
compiled by several processes first (Triton keeps them on disk), then timed by one.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dwindle.ops import rows as ops
from dwindle.ops.launch import Tile

LINEAR = [
    *product((64, 128), (64, 128), (64,), (4,), (3, 4)),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 8, 4),
    (32, 64, 64, 4, 4),
    (64, 32, 64, 4, 4),
    (32, 64, 128, 4, 3),
    (32, 32, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 32, 128, 2, 4),
    (32, 32, 128, 2, 4),
]
PERSISTENT = [
    (128, 128, 64, 8, 2),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 64, 64, 4, 3),
    (128, 64, 64, 4, 4),
    (128, 64, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (64, 256, 64, 4, 3),
]
STAY = (1, 2, 3, 1000)  # programs per multiprocessor; the last: one for each tile
ATTENTION = [
    *product((64, 128), (32, 64, 128), (0,), (4, 8), (2, 3)),
    *product((16, 32), (64, 128), (0,), (2, 4), (2, 3)),
    *product((64,), (256,), (0,), (4, 8), (1, 2)),
]


def layers(width: int) -> dict[str, tuple[int, int, str | None]]:
    """Rows of the weight, columns, and the activation; None: added to the stream."""
    return {
        "qkv": (3 * width, width, "none"),
        "proj": (width, width, None),
        "fc1": (4 * width, width, "gelu"),
        "fc2": (width, 4 * width, None),
    }


def some(images: int, tokens: int, share: float) -> ops.Rows:
    live = torch.rand(images, tokens, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < share
    return ops.compact_ref(live, live)[0]


def linear_call(
    width: int, name: str, images: int, tokens: int, share: float = 1.0
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and cuBLAS's on as many rows."""
    out, inner, act = layers(width)[name]
    rows, dtype = some(images, tokens, share), torch.bfloat16
    h, weight = (torch.randn(n, inner, device="cuda").to(dtype) for n in (images * tokens, out))
    bias = torch.zeros(out, device="cuda")
    theirs = partial(torch.addmm, bias.to(dtype), h[: len(rows.live())], weight.T)
    if act is not None:
        layer = ops.Affine.of(weight, bias, nn.LayerNorm(inner, device="cuda"))
        probe = torch.empty(images * tokens, device="cuda") if name == "fc1" else None
        return partial(ops.normed_linear, h, rows, layer, act, probe, 0), theirs
    x = torch.zeros(images * tokens, out, device="cuda", dtype=dtype)
    return partial(ops.add_linear, x, rows, h, ops.Affine.of(weight, bias), torch.ones_like(bias)), theirs


def attention_call(
    width: int, heads: int, images: int, tokens: int, share: float = 1.0
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    qkv = torch.randn(images * tokens, 3 * width, device="cuda").to(torch.bfloat16)
    q, k, v = qkv.view(images, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scale = (width // heads) ** -0.5
    ours = partial(ops.attend_rows, qkv, some(images, tokens, share), heads, tokens, scale, None)
    return ours, partial(F.scaled_dot_product_attention, q, k, v)


def use(linear: tuple | None = None, attention: tuple | None = None) -> None:
    if linear is not None:
        ops.linear_tile = lambda *_: Tile(*linear)  # type: ignore[assignment]
    if attention is not None:
        ops.attention_tile = lambda *_: Tile(*attention)  # type: ignore[assignment]


def choices() -> Iterator[tuple]:
    yield from ((*tile, 0) for tile in LINEAR)
    yield from ((*tile, stay) for stay in STAY for tile in PERSISTENT)


def compile_one(job: tuple) -> None:
    kind, tile, width, heads, tokens = job
    use(**({"attention": tile} if kind == "attention" else {"linear": tile}))
    call = attention_call(width, heads, 2, tokens) if kind == "attention" else linear_call(width, kind, 2, tokens)
    try:
        call[0]()
    except Exception:  # a tile that does not fit the chip is not a choice
        return


def microseconds(call: Callable[[], Any], calls: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = []
    for _ in range(4):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / calls * 1e3)
    return min(spent[1:])


def fastest(call: Callable[[], Any], tiles: list[tuple], kind: str) -> list[tuple[float, tuple]]:
    found = []
    for tile in tiles:
        use(**{kind: tile})
        try:
            found.append((round(microseconds(call), 1), tile))
        except Exception:  # as above
            torch.cuda.synchronize()
    return sorted(found)[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 384), ("heads", 6), ("tokens", 197)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", default="1,8,32,128,512")
    parser.add_argument("--live", default="1.0,0.4")
    given = parser.parse_args()
    shape = (given.width, given.heads, given.tokens)
    kernels = [tile for tile in choices() if tile[-1] in (0, STAY[0])]
    jobs = [(name, tile, *shape) for name in layers(given.width) for tile in kernels]
    jobs += [("attention", tile, *shape) for tile in ATTENTION]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=4)
    for images, share in product(map(int, given.batch.split(",")), map(float, given.live.split(","))):
        for name in layers(given.width):
            ours, theirs = linear_call(given.width, name, images, given.tokens, share)
            best = fastest(ours, list(choices()), "linear")
            say(layer=name, batch=images, live=share, best=best, cublas=round(microseconds(theirs), 1))
        ours, theirs = attention_call(*shape[:2], images, given.tokens, share)
        say(
            layer="attention",
            batch=images,
            live=share,
            best=fastest(ours, ATTENTION, "attention"),
            sdpa=microseconds(theirs),
        )


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
