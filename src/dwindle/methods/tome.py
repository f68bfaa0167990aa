"""ToMe: Token Merging, Your ViT But Faster (Bolya et al., 2023). Needs no training."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import bisected, block_macs, budget_share, fixed_macs, static_macs
from ..core.method import Method, Verdict, require, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import AtLeast0, Budget, Share, Within


class ToMe(Method):
    """After every block the most alike pairs of tokens become one, their mean by the number of patches each is made of.

    Merging follows the block; in the paper it stands between attention and MLP. The MLP of the tokens about to be
    merged is computed and counted.
    """

    needs_training = False
    variants = ("for_features",)
    keeps_prefix = True
    paper = "Token Merging: Your ViT But Faster, 2023"

    def __init__(
        self,
        r: Annotated[float, Within(0, 1e6)] | None = None,
        budget: Budget = None,
        alike: Literal["keys", "states"] = "keys",
        even: AtLeast0 = 0.0,
        until: Share = 1.0,
        proportion: Share = 1.0,
    ) -> None:
        """
        r: tokens merged after every block but the last; a fraction is spread over the blocks. None: as the budget says,
            or 8.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); in place of r.
        alike: by what tokens are compared. 'keys': of attention, as in the paper; 'states': after the backbone's last
            norm, which tells better what a token will be in the end.
        even: how much pairs of tokens that are large already count as less alike: times the logarithm of the smaller
            one's size. Groups then stay small, and what is given back is nearer to what each token was.
        until: merging ends after this share of the blocks, so that more is merged before.
        proportion: attention counts a token that is the mean of s as s to this power; 1: as the paper does.
        """
        super().__init__()
        self.alike, self.even, self.until, self.proportion = alike, even, until, proportion
        require(r is None or budget is None, f"r = {r}, budget = {budget!r}", "each sets the other; give one of them")
        self.r, self.budget = 8.0 if r is None else float(r), budget

    @classmethod
    def for_features(cls, r: float | None = None, budget: Budget = None) -> Self:
        """With settings for features that stay close to the static model's, found on an untrained DINOv2 ViT-S/14."""
        return cls(r, budget, alike="states", even=0.1, until=2 / 3, proportion=0.6)

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
        if depth + 1 >= self.shape.blocks or depth >= self.until * self.shape.blocks:
            return 0
        return int(self.r * (depth + 1) + 1e-6) - int(self.r * depth + 1e-6)

    def probe(self, depth: int) -> Probe:
        return Probe(keys=self.alike == "keys" and self._merged_at(depth) > 0)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        count = self._merged_at(depth)
        if not count:
            return Verdict(tokens.decide(depth, None))
        compared = tokens.normed() if self.alike == "states" else tokens.probed.keys
        assert compared is not None
        alike, partner = self._match(tokens, F.normalize(wide(compared), dim=-1))
        half = tokens.image_sum(wide((~tokens.is_prefix).to(alike.dtype))) // 2  # at most this many, as in the paper
        joins = tokens.rank(alike) < tokens.per_image(half.clamp_max(count))
        keep = tokens.decide(depth, ~joins)
        merge = Merge(torch.where(joins & ~keep, partner, tokens.place), proportion=self.proportion)
        return Verdict(keep, record={"score": alike.nan_to_num(neginf=-1.0)}, merge=merge)

    def _match(self, tokens: Tokens, keys: Tensor) -> tuple[Tensor, Tensor]:
        """On rows: for every second token of an image how alike the most alike of the others is, and which it is (its
        place in the image). -inf for the others, and where there is none."""
        longest = tokens.padding.shape[1]
        free = _even(tokens.padding & ~tokens.pad(tokens.is_prefix))
        keys, place = _even(tokens.pad(keys)), _even(tokens.pad(tokens.place))
        alike = keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)
        if self.even:
            size = _even(tokens.pad(tokens.size)).clamp_min(1).log()
            alike = alike - self.even * torch.minimum(size[:, ::2, None], size[:, None, 1::2])
        alike = alike.masked_fill(~(free[:, ::2, None] & free[:, None, 1::2]), -torch.inf)
        best, partner = alike.max(-1)  # (B, n / 2)
        partner = place[:, 1::2].gather(1, partner)
        best = _interleave(best, torch.full_like(best, -torch.inf))
        return tokens.unpad(best[:, :longest]), tokens.unpad(_interleave(partner, partner)[:, :longest])

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if not self._merged_at(depth):
            return torch.zeros_like(tokens)
        compared = self.shape.head_size if self.alike == "keys" else self.shape.width
        return (tokens / 2).ceil() * (tokens / 2).ceil() * compared


def _even(padded: Tensor) -> Tensor:
    """With an empty entry more where the second axis is odd."""
    missing = padded.shape[1] % 2
    return torch.cat([padded, torch.zeros_like(padded[:, :missing])], 1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], -1).flatten(1)
