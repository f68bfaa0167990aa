"""Multiply-accumulates from a backbone's shape and a trace, planners and gates counted in.

One closed form for bench, report and budget. As the papers count: linear layers, patch embedding, head, and the two
products of attention; norms, activations and softmax are left out. The papers' "FLOPs" are these MACs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..errors import DwindleError
from .backbone import Shape
from .trace import Trace

if TYPE_CHECKING:
    from .method import Method

Count = TypeVar("Count", Tensor, float)


def block_macs(shape: Shape, tokens: Count) -> Count:
    """One block on images with that many live tokens: linear in the tokens, and q k^T and a v quadratic."""
    if isinstance(tokens, Tensor):
        tokens = tokens.to(torch.float64)
    return tokens * shape.block_macs + tokens**2 * shape.attention_macs


def fixed_macs(shape: Shape, image: tuple[int, int] | None = None) -> float:
    """Patch embedding and head of one image."""
    rows, columns = shape.grid(image)
    return rows * columns * (shape.token_macs + shape.pool_macs) + shape.image_macs


def static_macs(shape: Shape, image: tuple[int, int] | None = None) -> float:
    """One image with nothing halted and no method."""
    return fixed_macs(shape, image) + shape.blocks * block_macs(shape, float(shape.tokens(image)))


def trace_macs(shape: Shape, trace: Trace, method: Method | None = None) -> Tensor:
    """(B,) what each image of the trace cost."""
    counts = trace.counts.to(torch.float64)  # (L, B)
    total = block_macs(shape, counts).sum(0)
    if method is not None:
        total = total + torch.stack([method.macs(n, depth) for depth, n in enumerate(counts)]).sum(0)
    rows, columns = trace.grid
    return total + rows * columns * (shape.token_macs + shape.pool_macs) + shape.image_macs


def keep_for(
    budget: float | str, shape: Shape, stages: Sequence[int], macs: Callable[[Tensor, int], Tensor], extra: int = 0
) -> float:
    """The share of patches to keep after each of these blocks, for an image to cost the budget.

    macs: what the method itself adds (`Method.macs`). extra: tokens that go on for those left behind.
    """
    goal = budget_share(budget, shape)

    def cost(keep: float) -> float:
        patches, total = float(shape.tokens() - shape.prefix), fixed_macs(shape)
        for depth in range(shape.blocks):
            tokens = torch.tensor(shape.prefix + patches, dtype=torch.float64, device="cpu")
            total += float(block_macs(shape, tokens) + macs(tokens, depth))
            if depth + 1 in stages:
                patches = min(patches, keep * patches + extra)
        return total / static_macs(shape)

    _reachable(budget, goal, cost(0.0))
    return round(bisected(cost, goal, 0.0, 1.0)[1], 6)


def bisected(
    cost: Callable[[float], float], goal: float, cheap: float, dear: float, steps: int = 30
) -> tuple[float, float]:
    """Two neighbouring settings between which the cost passes the goal; it rises from `cheap` to `dear`."""
    for _ in range(steps):
        middle = (cheap + dear) / 2
        cheap, dear = (cheap, middle) if cost(middle) > goal else (middle, dear)
    return cheap, dear


def _reachable(budget: float | str, goal: float, least: float) -> None:
    if goal < least:
        raise DwindleError(
            f"budget = {budget!r} cannot be reached: with no patch kept after the first stage it is still {least:.3f} "
            "of the static cost; ask for more, or let tokens leave earlier (stages)."
        )


def budget_share(budget: float | str, shape: Shape) -> float:
    """A budget as a share of the static cost. 0.67 is a share; '3.1G' are GMACs."""
    try:
        if isinstance(budget, str):
            share = float(budget.upper().removesuffix("GMACS").removesuffix("G")) * 1e9 / static_macs(shape)
        else:
            share = float("nan") if isinstance(budget, bool) else float(budget)
    except (TypeError, ValueError):
        share = float("nan")
    if not 0 < share <= 1:
        raise DwindleError(
            f"budget = {budget!r} is neither a share of the static cost in (0, 1], such as 0.67, nor GMACs up to "
            f"{static_macs(shape) / 1e9:.3g}, such as '{static_macs(shape) / 2e9:.3g}G'."
        )
    return share
