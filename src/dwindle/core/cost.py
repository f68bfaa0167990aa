"""Multiply-accumulates (MACs) from a backbone's shape and a trace, including a method's planners and gates.

Bench, report and budget use this one closed form. It counts what the papers count: linear layers, patch embedding, head
and the two matrix products of attention, but no norms, activations or softmax. The papers' "FLOPs" are these MACs.
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
    """MACs of one block on images with this many live tokens: linear layers grow with n, q k^T and a v with n^2."""
    if isinstance(tokens, Tensor):
        tokens = tokens.to(torch.float64)
    return tokens * shape.block_macs + tokens**2 * shape.attention_macs


def fixed_macs(shape: Shape, image: tuple[int, int] | None = None) -> float:
    """MACs of the patch embedding and the head for one image. image: its height and width; None: the model's own."""
    return _grid_macs(shape, shape.grid(image))


def _grid_macs(shape: Shape, grid: tuple[int, int]) -> float:
    """`fixed_macs` of an image with this grid of patches."""
    return grid[0] * grid[1] * (shape.token_macs + shape.pool_macs) + shape.image_macs


def static_macs(shape: Shape, image: tuple[int, int] | None = None) -> float:
    """MACs of one image with nothing halted and no method. image: as in `fixed_macs`."""
    return fixed_macs(shape, image) + shape.blocks * block_macs(shape, float(shape.tokens(image)))


def trace_macs(shape: Shape, trace: Trace, method: Method | None = None) -> Tensor:
    """(B,) MACs of each image of the trace."""
    counts = trace.counts.to(torch.float64)  # (L, B)
    total = block_macs(shape, counts).sum(0)
    if method is not None:
        total = total + torch.stack([method.macs(n, depth) for depth, n in enumerate(counts)]).sum(0)
    return total + _grid_macs(shape, trace.grid)


def keep_for(
    budget: float | str, shape: Shape, stages: Sequence[int], macs: Callable[[Tensor, int], Tensor], extra: int = 0
) -> float:
    """The share of patches to keep after each of the blocks `stages` so that an image costs the budget.

    macs: what the method itself adds (`Method.macs`). extra: tokens added at each stage to replace those that left.
    """
    target = budget_share(budget, shape)

    def cost(keep: float) -> float:
        patches, total = float(shape.tokens() - shape.prefix), fixed_macs(shape)
        for depth in range(shape.blocks):
            tokens = torch.tensor(shape.prefix + patches, dtype=torch.float64, device="cpu")
            total += float(block_macs(shape, tokens) + macs(tokens, depth))
            if depth + 1 in stages:
                patches = min(patches, keep * patches + extra)
        return total / static_macs(shape)

    _check_reachable(budget, target, cost(0.0))
    return round(bisected(cost, target, 0.0, 1.0)[1], 6)


def bisected(
    cost: Callable[[float], float], goal: float, cheap: float, dear: float, steps: int = 30
) -> tuple[float, float]:
    """Two neighbouring settings between which the cost passes `goal`. The cost rises from `cheap` to `dear`."""
    for _ in range(steps):
        middle = (cheap + dear) / 2
        cheap, dear = (cheap, middle) if cost(middle) > goal else (middle, dear)
    return cheap, dear


def _check_reachable(budget: float | str, target: float, least: float) -> None:
    if target < least:
        raise DwindleError(
            f"budget = {budget!r} cannot be reached: with no patch kept after the first stage it is still {least:.3f} "
            "of the static cost; ask for more, or let tokens leave earlier (stages)."
        )


def budget_share(budget: float | str, shape: Shape) -> float:
    """The budget as a share of the static cost. A number such as 0.67 is a share; a string such as '3.1G' is GMACs."""
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
