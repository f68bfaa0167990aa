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
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    place = torch.device("cuda", _own_gpu()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo", device_id=place if gpu else None)
    return str(place)


def _own_gpu() -> int:
    """The GPU of this process: as many processes as torchrun started on this machine have one each."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise DwindleError(
            f"torchrun started process {local + 1} on a machine with {torch.cuda.device_count()} GPUs; "
            "start one process per GPU, or add --device cpu."
        )
    return local


def detach_from_torchrun(device: str) -> tuple[str, int]:
    """Leave the processes that `torchrun` started, so that this one works alone. Returns its device and its rank."""
    rank = int(os.environ.get("RANK", "0"))
    if started() > 1:
        device = f"cuda:{_own_gpu()}" if device == "cuda" else device
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
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
