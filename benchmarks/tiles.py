"""Which tiles are fastest for the linear layers and the attention of a width, on the GPU at hand.

python benchmarks/tiles.py --width 384 --heads 6 --tokens 197 --batch 1,8,32,128,512

One JSON line per layer and batch: the three fastest tiles (microseconds in a CUDA graph) beside cuBLAS or SDPA on the
same numbers. What `linear_tile` and `attention_tile` in src/dwindle/ops/rows.py return comes from here. Kernels are
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

LINEAR = [
    *product((128, 256), (128,), (32, 64), (8,), (3, 4)),
    *product((64, 128), (64, 128), (64,), (4,), (3, 4)),
    (128, 256, 64, 8, 3),
    (32, 64, 64, 4, 4),
    (64, 32, 64, 4, 4),
    (32, 128, 64, 4, 4),
    (32, 32, 128, 4, 4),
    (16, 64, 128, 4, 3),
]
ATTENTION = [*product((64, 128), (32, 64, 128), (0,), (4, 8), (2, 3))]


def layers(width: int) -> dict[str, tuple[int, int, str | None]]:
    """Rows of the weight, columns, and the activation; None: added to the stream."""
    return {
        "qkv": (3 * width, width, "none"),
        "proj": (width, width, None),
        "rise": (4 * width, width, "gelu"),
        "fall": (width, 4 * width, None),
    }


def whole(images: int, tokens: int) -> ops.Rows:
    rows = torch.arange(images * tokens, dtype=torch.int32, device="cuda")
    return ops.Rows(rows, torch.arange(0, len(rows) + 1, tokens, dtype=torch.int32, device="cuda"))


def linear_call(width: int, name: str, images: int, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and cuBLAS's."""
    out, inner, act = layers(width)[name]
    rows, dtype = whole(images, tokens), torch.bfloat16
    h, weight = (torch.randn(n, inner, device="cuda").to(dtype) for n in (images * tokens, out))
    bias = torch.zeros(out, device="cuda")
    theirs = partial(torch.addmm, bias.to(dtype), h, weight.T)
    if act is not None:
        layer = ops.Affine.of(weight, bias, nn.LayerNorm(inner, device="cuda"))
        tap = torch.empty(images * tokens, device="cuda") if name == "rise" else None
        return partial(ops.normed_linear, h, rows, layer, act, tap, 0), theirs
    x = torch.zeros(images * tokens, out, device="cuda", dtype=dtype)
    return partial(ops.add_linear, x, rows, h, ops.Affine.of(weight, bias), torch.ones_like(bias)), theirs


def attention_call(width: int, heads: int, images: int, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    qkv = torch.randn(images * tokens, 3 * width, device="cuda").to(torch.bfloat16)
    q, k, v = qkv.view(images, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scale = (width // heads) ** -0.5
    ours = partial(ops.attend_rows, qkv, whole(images, tokens), heads, tokens, scale, None)
    return ours, partial(F.scaled_dot_product_attention, q, k, v)


def use(linear: tuple | None = None, attention: tuple | None = None) -> None:
    if linear is not None:
        ops.linear_tile = lambda *_: ops.Tile(*linear)  # type: ignore[assignment]
    if attention is not None:
        ops.attention_tile = lambda *_: ops.Tile(*attention)  # type: ignore[assignment]


def choices(normed: bool) -> Iterator[tuple]:
    for tile in dict.fromkeys(LINEAR):
        yield from ((*tile, moments) for moments in ((False, True) if normed else (False,)))


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
    return sorted(found)[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 384), ("heads", 6), ("tokens", 197)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", default="1,8,32,128,512")
    given = parser.parse_args()
    shape = (given.width, given.heads, given.tokens)
    jobs = [
        (name, tile, *shape) for name, (_, _, act) in layers(given.width).items() for tile in choices(act is not None)
    ]
    jobs += [("attention", tile, *shape) for tile in ATTENTION]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=4)
    for images in map(int, given.batch.split(",")):
        for name, (_, _, act) in layers(given.width).items():
            ours, theirs = linear_call(given.width, name, images, given.tokens)
            best = fastest(ours, list(choices(act is not None)), "linear")
            print(json.dumps({"layer": name, "batch": images, "best": best, "cublas": round(microseconds(theirs), 1)}))
        ours, theirs = attention_call(given.width, given.heads, images, given.tokens)
        best = fastest(ours, ATTENTION, "attention")
        print(json.dumps({"layer": "attention", "batch": images, "best": best, "sdpa": round(microseconds(theirs), 1)}))


if __name__ == "__main__":
    main()
