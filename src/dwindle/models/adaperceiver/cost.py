"""What AdaPerceiver costs, by the rules of dwindle.core.cost: linear layers and products of attention, read-outs too.

Counted as computed: attention as far as latents see, queries of learned tokens and tables of read-outs not at all (they
are made once a call at most, not per image).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.trace import Trace

if TYPE_CHECKING:
    from .model import AdaPerceiver


def exit_depths(ends: tuple[int, ...]) -> int:
    """Pairs of latents that a mask of these steps lets meet."""
    return sum((end - start) * end for start, end in zip((0, *ends), ends))


def block_macs(model: AdaPerceiver, tokens: int, width: int, pairs: int | None = None) -> int:
    """pairs: of latents that meet; not given, those of the network's mask."""
    d, pairs = model.width, exit_depths(model.ends(tokens)) if pairs is None else pairs
    return tokens * (4 * d * d + 2 * d * model.hidden(width)) + 2 * d * pairs


def embed_macs(model: AdaPerceiver, patches: int) -> int:
    """Patches to input tokens, with the embedding FFN."""
    d = model.width
    return patches * (model.channels * model.patch**2 * d + 2 * d * model.hidden(d))


def read_macs(model: AdaPerceiver, patches: int, tokens: int) -> int:
    """Input tokens to latents: keys and values of the patches, the two products, the projection of the latents."""
    d = model.width
    return 2 * patches * d * d + 2 * tokens * patches * d + tokens * d * d


def write_macs(model: AdaPerceiver, patches: int, tokens: int) -> int:
    """Latents to answers. Learned output tokens read by a table (`Write`), dense ones by plain cross-attention."""
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
    """What makes an answer of one output token."""
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
    """One image at one setting, read out `reads` times."""
    p = patches or model.patches()
    blocks = depth * block_macs(model, tokens, width, pairs)
    return embed_macs(model, p) + read_macs(model, p, tokens) + blocks + reads * write_macs(model, p, tokens)


def trace_macs(model: AdaPerceiver, trace: Trace) -> Tensor:
    """(B,) from what the trace says was computed, by the mask that it ran with."""
    depth, tokens = (trace.counts > 0).sum(0), trace.counts[0]
    width, reads = trace.stack("width")[0, :, 0], trace.stack("read").amax(-1).sum(0)
    p, pairs = int(trace.values[0]["patches"][0, 0]), trace.values[0]["seen"].double().sum(-1)
    rows = zip(*(of.long().tolist() for of in (tokens, depth, width, reads, pairs)))
    macs = [setting_macs(model, t, d, w, r, p, met) for t, d, w, r, met in rows]
    return torch.tensor(macs, dtype=torch.float64)


def nested_macs(model: AdaPerceiver, tokens: int) -> int:
    """Table 5's "GFLOPs": products of attention left out, and every layer counted once for each module it lies in.

    So far as the paper's own numbers tell (docs/adaperceiver.md): self-attention's q and k twice, its v and projection,
    the FFN and cross-attention three times, the embedding four times.
    """
    d, p = model.width, model.patches()
    block = d * d * (2 + 2 + 3 + 3) + 3 * 2 * d * model.hidden(d)
    cross = 3 * d * d * (2 * tokens + 2 * p) + 3 * d * d * (2 * tokens + 2)
    return 4 * embed_macs(model, p) + cross + model.depth * tokens * block + 3 * d * model.classes
