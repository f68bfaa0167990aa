"""bf16: autocast for training, and attention on a CPU that multiplies in it.

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

from ..errors import DwindleError

FEW = 48  # for fewer keys than this torch's fused attention is faster than two products
STEP = 16  # `_attend_filled` pads the numbers of queries and keys to multiples of this
CACHED = 4 << 20  # bytes of scores that stay in a core's cache from one product to the next
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"


@contextmanager
def autocast(device: torch.device, enabled: bool) -> Iterator[None]:
    """torch.autocast to bf16. On a CPU attention within it is `attend_products`, whose forward and backward passes
    together are five times as fast as torch's attention."""
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        if enabled and device.type == "cpu":
            with _ProductAttention():
                yield
        else:
            yield


def attend_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention by two products and a softmax, with all scores in memory. Inputs in bf16 have scores rounded to bf16,
    where a fused kernel keeps them in float32. attn_mask: bool, with at least one key for each row, or numbers added to
    the scores.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.softmax(-1).to(v.dtype)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ v


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention of (B, H, N, E) with a bias (1 or B, 1 or H, 1 or N, N) added to the scores, by torch's fused call.

    In bf16 on a CPU without gradients it is two products as in `attend_products`, which is twice as fast for an image
    of 197 tokens. They compute as many images at a time as have scores that fit into the cache.
    """
    plain = q.dtype != torch.bfloat16 or q.device.type != "cpu" or torch.is_grad_enabled()
    if plain or dropout_p or k.shape[-2] < FEW:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout_p, scale=scale)
    images = max(1, CACHED // (q.shape[1] * q.shape[2] * k.shape[2] * q.element_size()))
    if len(q) <= images:
        return _attend_filled(q, k, v, bias, scale)
    parts = [slice(at, at + images) for at in range(0, len(q), images)]
    bias = None if bias is None else bias.expand(len(q), *bias.shape[1:])
    return torch.cat([_attend_filled(q[at], k[at], v[at], None if bias is None else bias[at], scale) for at in parts])


def _attend_filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """`attend_products` with queries and keys padded to a multiple of STEP by entries that do not count. oneDNN
    compiles code for each shape, so there should be few shapes.
    """
    rows, keys = q.shape[-2], k.shape[-2]
    q, k, v = (F.pad(x, (0, 0, 0, -x.shape[-2] % STEP)) for x in (q, k, v))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    scores[..., keys:] = -torch.inf
    if bias is not None:
        scores[..., :rows, :keys] += bias
    return (scores.softmax(-1) @ v)[..., :rows, :]


class AttentionMode(TorchFunctionMode):
    """A context in which `attend` of a subclass computes `scaled_dot_product_attention`, with the same arguments."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        return func(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class _ProductAttention(AttentionMode):
    """Attention in bf16 by `attend_products`."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **more: Any,
    ) -> Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        refused = is_causal and attn_mask is not None  # torch raises an error for both
        # torch also computes grouped heads (`more`), and queries of another type, which no autocast layer made.
        if refused or any(more.values()) or query.dtype != torch.bfloat16:
            return F.scaled_dot_product_attention(*arguments, scale=scale, **more)
        return attend_products(*arguments, scale)


def halves(device: torch.device, amp: bool, cpu_amp: bool) -> bool:
    """Whether to train in bf16 on this device. amp: on a GPU; cpu_amp: on a CPU, which must be able to."""
    if device.type != "cpu":
        return amp and device.type == "cuda"
    if cpu_amp and (why := no_bf16()):
        raise DwindleError(f"cpu_amp = True: this CPU {why}; or train in float32, with --set cpu_amp=false.")
    return cpu_amp


def no_bf16() -> str | None:
    """Why this CPU should not multiply in bf16; None: it can."""
    if cpu_multiplies_bf16():
        return None
    if torch.cpu._is_avx512_bf16_supported():
        hint = "one of Intel's may be mended by ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        return f"reports instructions for bf16 that end a process here; {hint}"
    return "has no instructions to multiply in bf16"


@cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU's instructions for bf16 work. Another process tries them, because in a virtual machine that
    reports AMX but does not allow it the first product ends the process.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    try:
        return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        return False
