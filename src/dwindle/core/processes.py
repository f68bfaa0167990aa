"""Sums and means over all ranks of a process group. Without a group the process is the only rank."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DwindleError


def is_distributed() -> bool:
    """Whether this process is in a group of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """The rank of this process."""
    return dist.get_rank() if is_distributed() else 0


def started() -> int:
    """How many processes `torchrun` started, whether or not they are in a group yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device: str | None = None) -> str | None:
    """Form a group with the other processes of a `torchrun`, if there are any. Returns the device for this process."""
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
        device_id = torch.device("cuda", local) if gpu else None
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device_id)
    return f"cuda:{local}" if gpu else "cpu"


def detach_from_torchrun(device: str) -> tuple[str, int]:
    """Leave the processes that `torchrun` started, so that this one works alone. Returns its device and its rank."""
    rank, local = int(os.environ.get("RANK", "0")), os.environ.get("LOCAL_RANK", "0")
    if started() > 1:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        device = f"cuda:{local}" if device == "cuda" else device
    return device, rank


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    """Wait until all ranks are here."""
    if is_distributed():
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
    return _Sum.apply(value) if is_distributed() else value


def mean(value: Tensor) -> Tensor:
    """Mean over ranks, with its gradient."""
    return total(value) / world()


def ratio_over_ranks(part: Tensor, count: Tensor) -> Tensor:
    """A number whose mean over ranks is sum(part) / sum(count) over all ranks.

    Losses are averaged over ranks. Ranks have unequal numbers of live tokens, so a mean over tokens needs this form.
    """
    return part / mean(count.detach().to(part.dtype)).clamp_min(1e-9)


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in order. value: any object that can be pickled."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values
