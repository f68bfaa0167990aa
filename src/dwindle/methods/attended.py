"""What methods share that learn from a teacher's attention which tokens matter: the loss term and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..core import processes as ranks
from ..core.tokens import Where
from ..core.trace import Trace

if TYPE_CHECKING:
    from ..core.model import Output

Merging = Literal["none", "nearest"]


def attention_terms(
    out: Output, teacher: Output | None, worth: Callable[[dict[str, Tensor]], Tensor | None]
) -> dict[str, Tensor]:
    """{"attention": ...}: squared distance between the method's score of each patch and the attention that the
    teacher's class token pays the patch over all blocks; {} where the teacher recorded no attention.

    worth: takes the values recorded at a block and returns the scores on rows, or None where the block has none. Both
    sides are standardised over all patches of all images, so that their scale does not matter.
    """
    if teacher is None or not any("attention" in values for values in teacher.trace.values):
        return {}
    trace = out.trace
    wanted = standardised_attention(teacher.trace, trace.prefix)
    scored = [(where, worth(values)) for where, values in zip(trace.lives, trace.values)]
    distances = [_distance(trace, where, scores, wanted) for where, scores in scored if scores is not None]
    return {"attention": torch.stack(distances).mean()} if distances else {}


def standardised_attention(teacher: Trace, prefix: int) -> Tensor:
    """(B, P): the logarithm of the attention that the class token pays each patch, mean over blocks, standardised."""
    paid_BP = teacher.stack("attention").mean(0)[:, prefix:].clamp_min(1e-6).log()
    return _standardised(paid_BP, torch.ones_like(paid_BP, dtype=torch.bool))


def _distance(trace: Trace, where: Where, scores: Tensor, wanted_BP: Tensor) -> Tensor:
    live = where.dense_rows()[:, trace.prefix :]
    scores_BP = _standardised(where.dense_rows(scores)[:, trace.prefix :], live)
    return ranks.ratio_over_ranks(((scores_BP - wanted_BP) ** 2 * live).sum(), live.sum())


def _standardised(values: Tensor, counted: Tensor) -> Tensor:
    mean, deviation = moments(values, counted)
    return (values - mean) / deviation


def moments(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the counted values of all processes."""
    weight = counted.to(values.dtype)
    count = ranks.total(weight.sum()).clamp_min(1)
    mean = ranks.total((weight * values).sum()) / count
    return mean, (ranks.total((weight * (values - mean) ** 2).sum()) / count + 1e-6).sqrt()
