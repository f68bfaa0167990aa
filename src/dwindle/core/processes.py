"""Several processes as one: sums and means over all ranks. Without a process group each is what it is alone."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DwindleError


def together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world() -> int:
    return dist.get_world_size() if together() else 1


def rank() -> int:
    return dist.get_rank() if together() else 0


def started() -> int:
    """How many processes `torchrun` started, whether or not they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: str | None = None) -> str | None:
    """Meet the other processes of a `torchrun`, if there are any; the device this one shall use."""
    if started() == 1:
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if gpu and local >= torch.cuda.device_count():
        raise DwindleError(
            f"torchrun started process {local + 1} on a machine with {torch.cuda.device_count()} GPUs; "
            "start one process per GPU, or add --device cpu."
        )
    if gpu:
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        place = torch.device("cuda", local) if gpu else None
        dist.init_process_group("nccl" if gpu else "gloo", device_id=place)
    return f"cuda:{local}" if gpu else "cpu"


def apart(device: str) -> tuple[str, int]:
    """Of processes that torchrun started: this one works alone from here on. Its device, and its number among them."""
    rank, local = int(os.environ.get("RANK", "0")), os.environ.get("LOCAL_RANK", "0")
    if started() > 1:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        device = f"cuda:{local}" if device == "cuda" else device
    return device, rank


def leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    if together():
        dist.barrier()


class _Sum(torch.autograd.Function):
    """Sum over ranks. Every rank's loss uses the sum, so its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def total(value: Tensor) -> Tensor:
    """Sum over ranks, with its gradient."""
    return _Sum.apply(value) if together() else value


def mean(value: Tensor) -> Tensor:
    return total(value) / world()


def share(part: Tensor, count: Tensor) -> Tensor:
    """This rank's part of sum(part) / sum(count) over all ranks; the mean over ranks of it is that ratio.

    Ranks' losses are averaged, so a mean over live tokens, of which ranks have unequal numbers, is written like this.
    """
    return part / mean(count.detach().to(part.dtype)).clamp_min(1e-9)


def gathered(value: Any) -> list[Any]:
    """One object of every rank, in order."""
    if not together():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values
