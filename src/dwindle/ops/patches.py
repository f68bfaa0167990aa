"""Patch embedding as a matrix product, whose definition is the convolution; and resizing of images and patch grids."""

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
    """A context in which patches on a CPU are embedded by the faster `embed_patches`, if no gradient is needed."""
    excluded = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return nullcontext() if excluded or images.device.type != "cpu" else _Cutting()


def embed_patches(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride is its kernel size, as one copy and one matrix product.

    images (B, C, height, width), weight (D, C, patch height, patch width) -> (B, D, rows, columns), which is (B, N, D)
    in memory.
    """
    batch, channels, height, width = images.shape
    high, wide = weight.shape[2:]
    rows, columns = height // high, width // wide
    cut = images[..., : rows * high, : columns * wide].reshape(batch, channels, rows, high, columns, wide)
    patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch * rows * columns, -1)
    return F.linear(patches, weight.flatten(1), bias).view(batch, rows, columns, -1).permute(0, 3, 1, 2)


@contextmanager
def cut_by_matmul(vit: nn.Module) -> Iterator[None]:
    """A context in which patch embeddings of this model are `embed_patches`, also in compiled code and CUDA graphs.
    cuDNN's convolutions take many times as long."""
    convolutions = [m for m in vit.modules() if isinstance(m, nn.Conv2d) and "forward" not in m.__dict__]
    convolutions = [m for m in convolutions if _only_cuts(m.kernel_size, m.stride, m.padding, m.dilation, m.groups)]
    for convolution in convolutions:
        convolution.forward = MethodType(_cut, convolution)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for convolution in convolutions:
            del convolution.forward


def _cut(conv: nn.Conv2d, images: Tensor) -> Tensor:
    return embed_patches(images, conv.weight, conv.bias)


class _Cutting(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.conv2d and len(args) == 7:  # nn.Conv2d passes all arguments by position
            images, weight, bias, *options = args
            if images.dim() == 4 and _only_cuts(tuple(weight.shape[2:]), *options):
                return embed_patches(images, weight, bias)
        return func(*args, **(kwargs or {}))


def _only_cuts(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution's stride is its kernel size, without padding, dilation or groups."""
    return stride == kernel and (padding, dilation, groups) == ((0, 0), (1, 1), 1)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Images (B, C, height, width) in another size, resampled as photographs are in preprocessing."""
    wide = images if images.dtype == torch.float64 else images.float()  # torch cannot resample bf16 on a CPU
    return F.interpolate(wide, size=size, mode="bicubic", antialias=True).to(images.dtype)


def regridded(stream_BND: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The tokens of one grid of patches interpolated to another grid. Prefix tokens stay as they are."""
    square = stream_BND[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)  # (B, D, rows, columns)
    wide = square if square.dtype == torch.float64 else square.float()
    patches = F.interpolate(wide, size=new, mode="bilinear").to(square.dtype).flatten(2).transpose(1, 2)
    return torch.cat([stream_BND[:, :prefix], patches], 1)
