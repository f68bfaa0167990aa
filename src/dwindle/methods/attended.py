"""What methods share that learn from a teacher's attention which tokens matter, or merge tokens that leave."""

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
    """{"attention": ...}: how far what each patch is worth to the method lies from the attention that the teacher's
    class token pays it over all blocks; {} where no teacher says that.

    worth: of the values recorded at a block, on rows; None where nothing was judged. Both are compared by how many
    deviations they lie from their mean over all patches of all images, so that their scale does not matter.
    """
    if teacher is None or not any("attention" in values for values in teacher.trace.values):
        return {}
    trace = out.trace
    paid_BN = teacher.trace.stack("attention").mean(0)[:, trace.prefix :].clamp_min(1e-6).log()
    wanted = standing(paid_BN, torch.ones_like(paid_BN, dtype=torch.bool))
    judged = [(where, worth(values)) for where, values in zip(trace.lives, trace.values)]
    distances = [_distance(trace, where, found, wanted) for where, found in judged if found is not None]
    return {"attention": torch.stack(distances).mean()} if distances else {}


def _distance(trace: Trace, where: Where, worth: Tensor, wanted_BP: Tensor) -> Tensor:
    live = where.dense_rows()[:, trace.prefix :]
    given = standing(where.dense_rows(worth)[:, trace.prefix :], live)
    return ranks.share(((given - wanted_BP) ** 2 * live).sum(), live.sum())


def standing(values: Tensor, counted: Tensor) -> Tensor:
    """How many deviations each value lies above the mean of those that count, of all processes."""
    weight = counted.to(values.dtype)
    count = ranks.total(weight.sum()).clamp_min(1)
    mean = ranks.total((weight * values).sum()) / count
    deviation = (ranks.total((weight * (values - mean) ** 2).sum()) / count + 1e-6).sqrt()
    return (values - mean) / deviation
