"""Do hard characters run more blocks? What each one ran, against how hard the unskipped model finds the next one.

Difficulty is measured with every update computed, so that what was skipped cannot be the cause of it.
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
from .execute import AdaptiveLM

KINDS = ("newline", "space", "lower case", "upper case", "digit", "punctuation", "other")


@contextmanager
def unskipped(model: AdaptiveLM) -> Iterator[None]:
    """The operating point at its dearest for a while: of TSA, everything is computed and scaled."""
    if model.method.operating_point is None:
        raise DwindleError(
            f"{type(model.method).__name__} has no operating point, so it does not choose who runs a block; give a "
            "checkpoint of a router that does, such as TSA."
        )
    name, _, dear = model.method.operating_point
    held = getattr(model.method, name)
    setattr(model.method, name, dear)
    try:
        yield
    finally:
        setattr(model.method, name, held)


@torch.inference_mode()
def difficulty(
    model: AdaptiveLM,
    ids: Tensor,
    vocabulary: Vocabulary,
    *,
    batch: int = 64,
    limit: int | None = None,
    device: str | torch.device = "cpu",
    name: str = "the text",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Over windows of the model's context: Spearman's correlations, quartiles of difficulty, kinds of character."""
    place = torch.device(device)
    model = model.eval().to(place)
    read, ran, soft, loss, doubt = [], [], [], [], []
    for x, y in windows(ids, model.backbone.shape.context, batch, name, limit):
        x, y = x.to(place), y.to(place)
        ran.append(model(x).trace.live.sum(0).flatten().cpu())
        with unskipped(model):
            full = model(x, "masked")
        logits = wide(full.logits).log_softmax(-1)
        loss.append(F.nll_loss(logits.flatten(0, 1), y.flatten(), reduction="none").cpu())
        doubt.append(-(logits.exp() * logits).sum(-1).flatten().cpu())
        gates = [values["p"] for values in full.trace.values if "p" in values]
        soft.append(torch.stack(gates).sum(0).flatten().cpu() if gates else torch.zeros(x.numel()))
        read.append(x.flatten().cpu())
        if progress:
            progress(len(x))
    blocks, hard = torch.cat(ran).double(), {"loss": torch.cat(loss).double(), "entropy": torch.cat(doubt).double()}
    characters = torch.cat(read)
    return {
        "characters": len(blocks),
        "blocks": float(blocks.mean()),
        "spearman": {by: spearman(blocks, values) for by, values in hard.items()},
        "spearman_p": {by: spearman(torch.cat(soft).double(), values) for by, values in hard.items()},
        "quartiles": {by: _quartiles(blocks, values) for by, values in hard.items()},
        "kinds": _by_kind(blocks, hard, _kinds_of(characters, vocabulary)),
    }


def ranks(values: Tensor) -> Tensor:
    """(n,) places in order, equal values sharing the mean of theirs."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def spearman(one: Tensor, two: Tensor) -> float | None:
    """Of (n,) and (n,); None where one of them is all the same."""
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (one, two))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else None


def _quartiles(blocks: Tensor, hard: Tensor) -> list[dict[str, float]]:
    """From the easiest quarter of the characters to the hardest: what they ran, and how hard they are."""
    order = hard.argsort(stable=True)
    return [{"difficulty": float(hard[q].mean()), "blocks": float(blocks[q].mean())} for q in order.chunk(4)]


def kind_of(piece: str) -> str:
    """What kind of character a piece of text is; bytes beyond ASCII are of another."""
    tests = (piece == "\n", piece == " ", piece.islower(), piece.isupper(), piece.isdigit())
    plain = len(piece) == 1 and piece.isascii() and piece.isprintable()
    return next((kind for kind, holds in zip(KINDS, (*tests, plain)) if holds), KINDS[-1])


def _kinds_of(characters: Tensor, vocabulary: Vocabulary) -> Tensor:
    """(n,) the number of each character's kind."""
    of = torch.tensor([KINDS.index(kind_of(vocabulary.decode([i]))) for i in range(len(vocabulary))])
    return of[characters.long()]


def _by_kind(blocks: Tensor, hard: dict[str, Tensor], kinds: Tensor) -> list[dict[str, Any]]:
    rows = []
    for number in kinds.unique().tolist():
        mine = kinds == number
        row: dict[str, Any] = {"kind": KINDS[number], "share": float(mine.double().mean())}
        row |= {"blocks": float(blocks[mine].mean())} | {by: float(values[mine].mean()) for by, values in hard.items()}
        rows.append(row | {"spearman": spearman(blocks[mine], hard["loss"][mine])})
    return rows
