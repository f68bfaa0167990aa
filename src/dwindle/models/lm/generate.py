"""Text from a model, one token after the other, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.method import require, wide
from ...errors import DwindleError
from .execute import AdaptiveLM, Cache


@dataclass
class Generated:
    ids: Tensor  # (B, prompt and new tokens)
    live: Tensor  # (L, B, ...) bool: who ran which block; the last token was not run any more


@torch.no_grad()
def generate(
    model: AdaptiveLM,
    prompt: Tensor,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
    layout: str = "packed",
    each: Callable[[Tensor], None] | None = None,
) -> Generated:
    """`length` tokens after the prompt (B, n). temperature 0: always the likeliest. each: called with every (B,).

    Once the context is full, its older half is forgotten and the rest read again.
    """
    require(length >= 1, f"length = {length}", "it must be at least 1")
    require(temperature >= 0, f"temperature = {temperature}", "it must be at least 0")
    require(top_k is None or top_k >= 1, f"top_k = {top_k}", "it must be at least 1")
    require(seed is None or 0 <= seed < 2**63, f"seed = {seed}", "it must lie in [0, 2^63)")
    context = model.backbone.shape.context
    if not prompt.numel():
        raise DwindleError("The prompt is empty; give it at least one character.")
    if prompt.shape[1] > context:
        raise DwindleError(
            f"The prompt has {prompt.shape[1]} characters, the model's context holds {context}; shorten the prompt."
        )
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    model = model.eval()
    ids, cache = prompt, Cache()
    out = model(ids, layout, cache)
    lives = [out.trace.live]
    for i in range(length):
        new = _draw(out.logits[:, -1], temperature, top_k, generator)
        ids = torch.cat([ids, new[:, None]], 1)
        if each:
            each(new)
        if i + 1 == length:
            break
        if cache.length < context:
            out = model(new[:, None], layout, cache)
        else:
            cache = Cache()
            out = model(ids[:, -max(context // 2, 1) :], layout, cache)
        lives.append(out.trace.live[..., -1:])
    return Generated(ids, torch.cat(lives, -1))


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """(B,) drawn on the CPU, so that a seed means the same everywhere."""
    scores = wide(logits)
    if temperature == 0:
        return scores.argmax(-1)
    scores = (scores - scores.amax(-1, keepdim=True)) / max(temperature, torch.finfo(scores.dtype).tiny)
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
