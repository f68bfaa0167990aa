"""Whether hard characters run more blocks: the blocks a character ran, against the difficulty of predicting the next.

Difficulty is measured with every update computed, so that skipping cannot cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.method import wide
from ...errors import DwindleError
from ...io.text import Vocabulary, windows
from ...io.tokenizer import Tokenizer
from .execute import AdaptiveLM

KINDS = ("newline", "space", "lower case", "upper case", "digit", "punctuation", "other")


@contextmanager
def unskipped(model: AdaptiveLM) -> Iterator[None]:
    """Within, the operating point is at its costliest value: with TSA (tau = 0) every update is computed and scaled."""
    if model.method.operating_point is None:
        raise DwindleError(
            f"{type(model.method).__name__} has no operating point, so it does not choose who runs a block; give a "
            "checkpoint of a router that does, such as TSA."
        )
    name, _, costliest = model.method.operating_point
    previous = getattr(model.method, name)
    setattr(model.method, name, costliest)
    try:
        yield
    finally:
        setattr(model.method, name, previous)


@torch.inference_mode()
def difficulty(
    model: AdaptiveLM,
    ids: Tensor,
    vocabulary: Vocabulary | Tokenizer,
    *,
    batch: int = 64,
    limit: int | None = None,
    device: str | torch.device = "cpu",
    name: str = "the text",
    context: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Spearman's correlations of blocks run with difficulty, quartiles of difficulty and kinds of character, over
    windows of `context` tokens (None: of the model's)."""
    place = torch.device(device)
    model = model.eval().to(place)
    read, ran, soft, loss, entropy = [], [], [], [], []
    for x, y in windows(ids, context or model.backbone.shape.context, batch, name, limit):
        x, y = x.to(place), y.to(place)
        ran.append(model(x).trace.live.sum(0).flatten().cpu())
        with unskipped(model):
            full = model(x, "masked")
        logits = wide(full.logits).log_softmax(-1)
        loss.append(F.nll_loss(logits.flatten(0, 1), y.flatten(), reduction="none").cpu())
        entropy.append(-(logits.exp() * logits).sum(-1).flatten().cpu())
        gates = [values["p"] for values in full.trace.values if "p" in values]
        soft.append(torch.stack(gates).sum(0).flatten().cpu() if gates else torch.zeros(x.numel()))
        read.append(x.flatten().cpu())
        if progress:
            progress(len(x))
    blocks, characters = torch.cat(ran).double(), torch.cat(read)
    hard = {"loss": torch.cat(loss).double(), "entropy": torch.cat(entropy).double()}
    return {
        "characters": len(blocks),
        "blocks": float(blocks.mean()),
        "spearman": {by: spearman(blocks, values) for by, values in hard.items()},
        "spearman_p": {by: spearman(torch.cat(soft).double(), values) for by, values in hard.items()},
        "quartiles": {by: _quartiles(blocks, values) for by, values in hard.items()},
        "kinds": _by_kind(blocks, hard, _kinds_of(characters, vocabulary)),
    }


def ranks(values: Tensor) -> Tensor:
    """(n,) ranks from 1; equal values share the mean of their ranks."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[index].double()


def spearman(one: Tensor, two: Tensor) -> float | None:
    """Spearman's rank correlation of (n,) and (n,); None where all values of one are equal."""
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (one, two))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else None


def _quartiles(blocks: Tensor, hard: Tensor) -> list[dict[str, float]]:
    """Mean blocks and mean difficulty of each quarter of the characters, from the easiest to the hardest."""
    order = hard.argsort(stable=True)
    return [{"difficulty": float(hard[q].mean()), "blocks": float(blocks[q].mean())} for q in order.chunk(4)]


def kind_of(piece: str) -> str:
    """The kind, one of KINDS, of a piece of text; characters beyond ASCII that are no letters or digits are 'other'."""
    tests = (piece == "\n", piece == " ", piece.islower(), piece.isupper(), piece.isdigit())
    plain = len(piece) == 1 and piece.isascii() and piece.isprintable()
    return next((kind for kind, holds in zip(KINDS, (*tests, plain)) if holds), KINDS[-1])


def _kinds_of(characters: Tensor, vocabulary: Vocabulary | Tokenizer) -> Tensor:
    """(n,) the index in KINDS of each character's kind."""
    kinds = torch.tensor([KINDS.index(kind_of(vocabulary.decode([i]))) for i in range(len(vocabulary))])
    return kinds[characters.long()]


def _by_kind(blocks: Tensor, hard: dict[str, Tensor], kinds: Tensor) -> list[dict[str, Any]]:
    """A row per kind that occurs, with its share, mean blocks, mean difficulties and correlation."""
    rows = []
    for number in kinds.unique().tolist():
        mine = kinds == number
        row: dict[str, Any] = {"kind": KINDS[number], "share": float(mine.double().mean())}
        row |= {"blocks": float(blocks[mine].mean())} | {by: float(values[mine].mean()) for by, values in hard.items()}
        rows.append(row | {"spearman": spearman(blocks[mine], hard["loss"][mine])})
    return rows
