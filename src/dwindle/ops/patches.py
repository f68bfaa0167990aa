"""Cutting an image into patches and embedding them; the convolution is the definition. Images and grids of patches in
other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def cutting(images: Tensor) -> AbstractContextManager:
    """Within, on a CPU and without a gradient, patches are embedded by `embed_patches`, which is faster."""
    seen = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return nullcontext() if seen or images.device.type != "cpu" else _Cutting()


def embed_patches(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution that steps by its own size, as one copy and one matrix product.

    images (B, C, height, width), weight (D, C, patch height, patch width) -> (B, D, rows, columns), laid as (B, N, D).
    """
    batch, channels, height, width = images.shape
    high, wide = weight.shape[2:]
    rows, columns = height // high, width // wide
    cut = images[..., : rows * high, : columns * wide].reshape(batch, channels, rows, high, columns, wide)
    patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, -1)
    return F.linear(patches, weight.flatten(1), bias).view(batch, rows, columns, -1).permute(0, 3, 1, 2)


@contextmanager
def cut_by_matmul(vit: nn.Module) -> Iterator[None]:
    """Within, convolutions of this model that only cut are `embed_patches`, compiled and recorded too: cuDNN's take
    many times as long."""
    cutters = [m for m in vit.modules() if isinstance(m, nn.Conv2d) and "forward" not in m.__dict__]
    cutters = [m for m in cutters if _only_cuts(m.kernel_size, m.stride, m.padding, m.dilation, m.groups)]
    for cutter in cutters:
        cutter.forward = MethodType(_cut, cutter)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cutter in cutters:
            del cutter.forward


def _cut(conv: nn.Conv2d, images: Tensor) -> Tensor:
    return embed_patches(images, conv.weight, conv.bias)


class _Cutting(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.conv2d and len(args) == 7:  # as nn.Conv2d gives them
            images, weight, bias, *how = args
            if images.dim() == 4 and _only_cuts(tuple(weight.shape[2:]), *how):
                return embed_patches(images, weight, bias)
        return func(*args, **(kwargs or {}))


def _only_cuts(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Of a convolution: it steps by its own size and does nothing else."""
    return stride == kernel and (padding, dilation, groups) == ((0, 0), (1, 1), 1)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, C, height, width) in another size, as a photograph is made smaller before it is prepared."""
    wide = images if images.dtype == torch.float64 else images.float()  # on a CPU torch resamples no bf16
    return F.interpolate(wide, size=size, mode="bicubic", antialias=True).to(images.dtype)


def regridded(stream_BND: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The tokens of one grid of patches on another: a patch's state between those that lie around it."""
    square = stream_BND[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)  # (B, D, rows, columns)
    wide = square if square.dtype == torch.float64 else square.float()
    patches = F.interpolate(wide, size=new, mode="bilinear").to(square.dtype).flatten(2).transpose(1, 2)
    return torch.cat([stream_BND[:, :prefix], patches], 1)
