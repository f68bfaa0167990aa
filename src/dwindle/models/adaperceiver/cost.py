"""Multiply-accumulates of an AdaPerceiver by the rules of core/cost.py: linear layers and the products of attention.

Attention is counted for the pairs that the mask allows. The queries of learned tokens and the read-outs' tables are not
counted, as they are computed at most once per call, not per image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.trace import Trace

if TYPE_CHECKING:
    from .model import AdaPerceiver


def visible_pairs(ends: tuple[int, ...]) -> int:
    """The number of (query, key) pairs of latents that a mask with these steps allows."""
    return sum((end - start) * end for start, end in zip((0, *ends), ends))


def block_macs(model: AdaPerceiver, tokens: int, width: int, pairs: int | None = None) -> int:
    """Multiply-accumulates of a block. pairs: the number of `visible_pairs`; None: those of the network's mask."""
    d, pairs = model.width, visible_pairs(model.ends(tokens)) if pairs is None else pairs
    return tokens * (4 * d * d + 2 * d * model.hidden(width)) + 2 * d * pairs


def embed_macs(model: AdaPerceiver, patches: int) -> int:
    """Multiply-accumulates from patches to input tokens, with the embedding FFN."""
    d = model.width
    return patches * (model.channels * model.patch**2 * d + 2 * d * model.hidden(d))


def read_macs(model: AdaPerceiver, patches: int, tokens: int) -> int:
    """Multiply-accumulates from input tokens to latents: the patches' keys and values, the two products of attention,
    the projection of the latents."""
    d = model.width
    return 2 * patches * d * d + 2 * tokens * patches * d + tokens * d * d


def write_macs(model: AdaPerceiver, patches: int, tokens: int) -> int:
    """Multiply-accumulates from latents to answers: by a table for learned output tokens (`Write`), by cross-attention
    for patches."""
    d, kind = model.width, model.config["head"]
    image = dense = 0
    if model.outputs != "dense":
        image = 2 * model.heads * d * tokens + 2 * d * d + _head_macs(model, kind, model.classes)
    if model.outputs != "class":
        head = _head_macs(model, kind, model.classes)
        if model.outputs == "both":
            head = _head_macs(model, "ffn", model.config["features"])
        dense = 2 * tokens * d * d + patches * (3 * d * d + 2 * tokens * d + head)
    return image + dense


def _head_macs(model: AdaPerceiver, kind: str, answers: int) -> int:
    """Multiply-accumulates of the head for one output token. kind: the network's `head`; answers: its outputs."""
    d = model.width
    neurons = {"linear": 0, "mlp": d, "ffn": model.hidden(d)}[kind]
    return neurons * (d + answers) if neurons else d * answers


def setting_macs(
    model: AdaPerceiver,
    tokens: int,
    depth: int,
    width: int,
    reads: int = 1,
    patches: int | None = None,
    pairs: int | None = None,
) -> int:
    """Multiply-accumulates of one image at one setting, read out `reads` times. patches: of the image; None: of a
    training image. pairs: as for `block_macs`."""
    p = patches or model.patches()
    blocks = depth * block_macs(model, tokens, width, pairs)
    return embed_macs(model, p) + read_macs(model, p, tokens) + blocks + reads * write_macs(model, p, tokens)


def trace_macs(model: AdaPerceiver, trace: Trace) -> Tensor:
    """(B,) multiply-accumulates of each image of a trace, with the mask that it ran with."""
    depth, tokens = (trace.counts > 0).sum(0), trace.counts[0]
    width, reads = trace.stack("width")[0, :, 0], trace.stack("read").amax(-1).sum(0)
    p, pairs = int(trace.values[0]["patches"][0, 0]), trace.values[0]["seen"].double().sum(-1)
    rows = zip(*(values.long().tolist() for values in (tokens, depth, width, reads, pairs)))
    macs = [setting_macs(model, t, d, w, r, p, n) for t, d, w, r, n in rows]
    return torch.tensor(macs, dtype=torch.float64)


def nested_macs(model: AdaPerceiver, tokens: int) -> int:
    """Table 5's "GFLOPs": without the products of attention, and with each layer counted once per module that holds it.

    The counts that reproduce the paper's numbers (docs/benchmarks/adaperceiver.md): self-attention's q and k twice, its
    v and projection, the FFN and cross-attention three times, the embedding four times.
    """
    d, p = model.width, model.patches()
    block = d * d * (2 + 2 + 3 + 3) + 3 * 2 * d * model.hidden(d)
    cross = 3 * d * d * (2 * tokens + 2 * p) + 3 * d * d * (2 * tokens + 2)
    return 4 * embed_macs(model, p) + cross + model.depth * tokens * block + 3 * d * model.classes
