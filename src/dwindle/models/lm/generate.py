"""Generation of text, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.method import require, wide
from ...errors import DwindleError
from .execute import AdaptiveLM, Cache, padding


@dataclass
class Generated:
    ids: Tensor  # (B, prompt and new tokens)
    live: Tensor  # (L, B, tokens - 1) bool: which tokens ran which block; the model is not run on the last token


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
    attention_mask: Tensor | None = None,
    each: Callable[[Tensor], None] | None = None,
) -> Generated:
    """Writes `length` tokens after the prompt (B, n). temperature 0: always the likeliest token. each: called with the
    new tokens (B,) of every step.

    Once the context is full, its older half is dropped and the rest is read again. attention_mask (B, n): 0 for padding
    of shorter prompts; prompts of one length are one batch, and new tokens stand behind the longest prompt.
    """
    if attention_mask is not None:
        require(each is None, "each", "with attention_mask not all sequences are written at once, so leave it out")
        options = {"temperature": temperature, "top_k": top_k, "seed": seed, "layout": layout}
        return _by_length(model, prompt, padding(attention_mask, prompt), length, options)
    require(length >= 1, f"length = {length}", "it must be at least 1")
    require(temperature >= 0, f"temperature = {temperature}", "it must be at least 0")
    require(top_k is None or top_k >= 1, f"top_k = {top_k}", "it must be at least 1")
    require(seed is None or 0 <= seed < 2**63, f"seed = {seed}", "it must lie in [0, 2^63)")
    context = model.backbone.shape.context
    if not prompt.numel():
        raise DwindleError("The prompt is empty; give it at least one token.")
    if prompt.shape[1] > context:
        raise DwindleError(
            f"The prompt has {prompt.shape[1]} tokens, the model's context holds {context}; shorten the prompt."
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


def _by_length(model: AdaptiveLM, prompt: Tensor, real: Tensor, length: int, options: dict[str, Any]) -> Generated:
    """`generate` for padded prompts, a batch for each length. real: (B, n) bool, False for padding."""
    (count, most), lengths = prompt.shape, real.sum(1)
    new = prompt.new_zeros(count, length)
    live = torch.zeros(model.backbone.shape.blocks, count, most + length - 1, dtype=torch.bool, device=prompt.device)
    for n in lengths.unique().tolist():
        rows = (lengths == n).nonzero()[:, 0]
        out = generate(model, prompt[rows][real[rows]].view(-1, n), length, **options)
        new[rows] = out.ids[:, n:]
        positions = real[rows].nonzero()[:, 1].view(-1, n)  # of the prompt's tokens among the padded
        later = torch.arange(most, most + length - 1, device=prompt.device).expand(len(rows), -1)
        live[:, rows[:, None], torch.cat([positions, later], 1)] = out.live
    return Generated(torch.cat([prompt, new], 1), live)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """(B,) tokens drawn from logits (B, V); on the CPU, so that a seed gives the same text on every device."""
    scores = wide(logits)
    if temperature == 0:
        return scores.argmax(-1)
    scores = (scores - scores.amax(-1, keepdim=True)) / max(temperature, torch.finfo(scores.dtype).tiny)
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)
