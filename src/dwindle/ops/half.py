"""bf16 autocast for training, on a GPU and on a CPU that multiplies in bf16.

q, k, v (..., N, E). torch's `scaled_dot_product_attention` is the definition of the attention.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


@contextmanager
def autocast(device: torch.device, enabled: bool) -> Iterator[None]:
    """torch's, to bf16. On a CPU attention is `attend_products` within, which there and forth is five times as fast."""
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        if enabled and device.type == "cpu":
            with _Products():
                yield
        else:
            yield


def attend_products(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention by two products and a softmax, with all scores in memory. attn_mask: bool, or added to the scores."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1).to(v.dtype) @ v


class _Products(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **more: Any,
    ) -> Tensor:
        if dropout_p or is_causal or any(more.values()) or q.dtype != torch.bfloat16:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **more)
        return attend_products(q, k, v, attn_mask, scale)


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for it that run. Asked of another process: where a virtual machine tells of
    AMX and does not allow it, the first product ends the process.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode == 0
