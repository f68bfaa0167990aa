"""The settings of an AdaPerceiver's call: their checks, and the trace of a call.

B images, N latents, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...core.checks import check_dtype, check_tensor
from ...core.tokens import Where
from ...core.trace import Trace
from ...errors import DwindleError

if TYPE_CHECKING:
    from .model import AdaPerceiver

Choice = int | Sequence[int] | Tensor | None
Setting = tuple[int, int, int]  # tokens, depth, width
Exits = Sequence[int] | None  # depths after which images may leave; None: all


def settings(model: AdaPerceiver, tokens: Choice, depth: Choice, width: Choice, count: int) -> tuple[list[int], ...]:
    """Tokens, depths and widths of `count` images, a list each. None: the largest that the network was trained with."""
    return (
        _chosen(model, "tokens", tokens, count, model.tokens[-1]),
        _chosen(model, "depth", depth, count, model.depth),
        _chosen(model, "width", width, count, model.width),
    )


def _chosen(model: AdaPerceiver, name: str, choice: Choice, count: int, default: int) -> list[int]:
    """The setting `name` of each image, checked."""
    if choice is None:
        return [default] * count
    if isinstance(choice, Tensor | np.ndarray | np.generic):
        choice = choice.tolist()
    values: list[Any] = list(choice) if isinstance(choice, Sequence) else [choice] * count
    if len(values) != count:
        raise DwindleError(f"{name} has {len(values)} values for {count} images; give one, or one per image.")
    most = {"tokens": 4 * model.tokens[-1], "depth": model.depth, "width": model.width}[name]
    least = math.ceil(1 / model.ffn_ratio) if name == "width" else 1  # so that the FFN has a neuron
    for value in set(values):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and least <= value <= most):
            raise DwindleError(f"{name} = {value}: this network takes a whole number from {least} to {most}.")
    return values


def check(model: AdaPerceiver, images: Tensor, exit: float | None = None, exits: Exits = None) -> None:
    """Raises for images or exits that the network does not take."""
    check_tensor(images)
    sized = images.dim() == 4 and len(images) > 0 and images.shape[1] == model.channels
    if not sized or any(not side or side % model.patch for side in images.shape[-2:]):
        raise DwindleError(
            f"Images of shape {tuple(images.shape)} do not fit this network; it takes (batch, {model.channels}, "
            f"height, width) with sides that are multiples of {model.patch}, trained at {model.image}; resize them."
        )
    check_dtype(images, model.patch_embed.weight.dtype)
    if exit is not None and not (isinstance(exit, Real) and 0 < exit <= 1):
        raise DwindleError(f"exit = {exit}: it is the confidence at which an image leaves, in (0, 1].")
    if exits is not None:
        if exit is None:
            raise DwindleError("exits says after which blocks images may leave; give exit, the confidence, as well.")
        check_exits(model, exits)
    if exit is not None and model.outputs == "dense":
        raise DwindleError(
            "exit asks for the confidence of one answer; a dense network has one per patch, so leave it out."
        )


def check_exits(model: AdaPerceiver, exits: Sequence[int]) -> None:
    """Raises for depths that this network does not have."""
    if not exits or not all(isinstance(at, int) and 1 <= at <= model.depth for at in exits):
        shown = ", ".join(map(str, exits)) or "none"
        raise DwindleError(
            f"exits = {shown}: name one or more blocks after which images may leave, from 1 to {model.depth}."
        )


def trace_of(
    model: AdaPerceiver, images: Tensor, t_B: list[int], d_B: list[int], w_B: list[int], reads: Tensor
) -> Trace:
    """The trace of a call with these tokens, depths and widths. reads (L, B) bool: which images were read out after
    which blocks. The trace's grid is one row of latents, as they have no position in the image."""
    count, largest = len(t_B), max(t_B)
    trace = Trace((count, largest), 0, (1, largest), model.depth)
    exists = torch.arange(largest) < torch.tensor(t_B)[:, None]  # (B, N)
    widths = torch.tensor(w_B, dtype=torch.float32)[:, None].expand(count, largest)
    patches = torch.full((count, largest), float(model.patches((images.shape[-2], images.shape[-1]))))
    counts = sorted(set(t_B))
    seen_by_count = torch.stack([_seen(model.ends(t), largest) for t in counts])
    seen = seen_by_count[torch.searchsorted(torch.tensor(counts), torch.tensor(t_B))]  # (B, N)
    depths = torch.tensor(d_B)[:, None]
    for at in range(1, max(d_B) + 1):
        live, read = exists & (depths >= at), reads[at - 1, :, None].float().expand(count, largest)
        trace.lives.append(Where((count, largest), live_BN=live))
        trace.values.append({"width": widths, "read": read, "patches": patches, "seen": seen})
    return trace


@lru_cache(64)
def _seen(ends: tuple[int, ...], largest: int) -> Tensor:
    """(N,) the number of latents that each of `largest` sees under a mask with these steps; 0 beyond the last step."""
    sizes = [end - start for start, end in zip((0, *ends), ends)]
    seen = [float(end) for end, size in zip(ends, sizes) for _ in range(size)]
    with torch.inference_mode(False):
        return torch.tensor(seen + [0.0] * (largest - len(seen)))
