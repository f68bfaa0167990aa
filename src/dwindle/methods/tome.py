"""ToMe: Token Merging, Your ViT But Faster (Bolya et al., 2023). Needs no training."""

from __future__ import annotations

from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import bisected, block_macs, budget_share, fixed_macs, static_macs
from ..core.method import Method, Verdict, require, wide
from ..core.tokens import Tokens
from ..settings import Budget, Within


class ToMe(Method):
    """After every block the most alike pairs of tokens become one, their mean by the patches each stands for.

    Merging follows the block; in the paper it stands between attention and MLP. The MLP of the tokens about to be
    merged is computed and counted.
    """

    needs_training = False
    paper = "Token Merging: Your ViT But Faster, 2023"

    def __init__(self, r: Annotated[float, Within(0, 1e6)] | None = None, budget: Budget = None) -> None:
        """
        r: tokens merged after every block but the last; a fraction is spread over the blocks. None: as the budget says,
            or 8.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); in place of r.
        """
        super().__init__()
        require(r is None or budget is None, f"r = {r}, budget = {budget!r}", "each sets the other; give one of them")
        self.r, self.budget = 8.0 if r is None else float(r), budget

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.operating_point = ("r", shape.tokens() / 2, 0.0)
        if self.budget is not None:
            self.r = self._r_for(budget_share(self.budget, shape))

    @property
    def config(self) -> dict[str, Any]:
        """r as it stands: what the budget came to, or what it was turned to since."""
        return super().config | ({"budget": None} if hasattr(self, "shape") else {"r": None} if self.budget else {})

    @classmethod
    def from_config(cls, options: dict[str, Any]) -> Self:
        return super().from_config(options | ({} if options.get("r") is None else {"budget": None}))

    def _r_for(self, goal: float) -> float:
        def cost(r: float) -> float:
            self.r = r
            left, macs = torch.tensor(self.shape.tokens(), dtype=torch.float64), fixed_macs(self.shape)
            for depth in range(self.shape.blocks):
                macs += float(block_macs(self.shape, left) + self.macs(left, depth))
                left = left - ((left - self.shape.prefix) // 2).clamp_max(self._merged_at(depth))
            return macs / static_macs(self.shape)

        return round(bisected(cost, goal, self.shape.tokens() / 2, 0.0)[1], 4)

    def _merged_at(self, depth: int) -> int:
        if depth + 1 >= self.shape.blocks:
            return 0
        return int(self.r * (depth + 1) + 1e-6) - int(self.r * depth + 1e-6)

    def start(self, tokens: Tokens) -> Tokens:
        tokens.keeping_keys = self._merged_at(0) > 0
        tokens.notes["size"] = torch.ones_like(wide(tokens.x[..., 0]))
        return tokens

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        keys, count = tokens.keys, self._merged_at(depth)
        tokens.keeping_keys = self._merged_at(depth + 1) > 0
        if not count:
            return Verdict(tokens.decide(depth, None))
        assert keys is not None
        likeness, partner = self._match(tokens, F.normalize(wide(keys), dim=-1))
        both = _interleave(likeness, torch.full_like(likeness, -torch.inf))
        alike = tokens.unpad(both[:, : tokens.padding.shape[1]])
        half = tokens.image_sum(wide((~tokens.is_prefix).to(alike.dtype))) // 2  # at most this many, as in the paper
        merged = tokens.rank(alike) < tokens.per_image(half.clamp_max(count))
        keep = tokens.decide(depth, ~merged)
        self._merge(tokens, merged & ~keep, partner)
        return Verdict(keep, record={"score": alike.nan_to_num(neginf=-1.0)})

    def _match(self, tokens: Tokens, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(B, pairs): for every second token of an image the most alike of the others, and how alike they are."""
        free = tokens.padding & ~tokens.pad(tokens.is_prefix)
        keys, free = _even(tokens.pad(keys)), _even(free)
        likeness = keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)
        allowed = free[:, ::2, None] & free[:, None, 1::2]
        best, partner = likeness.masked_fill(~allowed, -torch.inf).max(-1)
        return best, partner

    def _merge(self, tokens: Tokens, merged: Tensor, partner: Tensor) -> None:
        size = tokens.notes["size"]
        weight = _even(tokens.pad(size * merged))[:, ::2]  # of those who join their partner
        sums = _even(tokens.pad(wide(tokens.x) * size[..., None]))  # (B, n, D)
        joined = sums[:, ::2] * (weight > 0)[..., None]
        sums = _add_odd(sums, partner, joined)
        sizes = _add_odd(_even(tokens.pad(size))[..., None], partner, weight[..., None])
        longest = tokens.padding.shape[1]
        whole = tokens.unpad(sizes[:, :longest])[..., 0]
        tokens.x = (tokens.unpad(sums[:, :longest]) / whole.clamp_min(1)[..., None]).to(tokens.x.dtype)
        tokens.notes["size"] = whole
        tokens.notes["key_bias"] = whole.clamp_min(1).log()  # attention in proportion to the patches a token stands for

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if not self._merged_at(depth):
            return torch.zeros_like(tokens)
        return (tokens / 2).ceil() * (tokens / 2).ceil() * self.shape.head_size


def _even(padded: Tensor) -> Tensor:
    """One more, that is none, where the second axis is odd."""
    missing = padded.shape[1] % 2
    return torch.cat([padded, torch.zeros_like(padded[:, :missing])], 1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], -1).flatten(1)


def _add_odd(values: Tensor, partner: Tensor, parts: Tensor) -> Tensor:
    """Add what each joiner brings to its partner among the second of every two."""
    index = partner[..., None].expand_as(parts)
    odd = values[:, 1::2].scatter_add(1, index, parts)
    return torch.stack([values[:, ::2], odd], 2).flatten(1, 2)
