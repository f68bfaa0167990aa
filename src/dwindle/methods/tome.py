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
    """After every block the most similar pairs of tokens are merged into their mean, weighted by how many patches each
    is made of.

    Merging follows the block; in the paper it is between attention and MLP. The MLP of the tokens about to be merged is
    computed and counted.
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
        r: tokens merged after every block but the last; a fraction is spread over the blocks. None: set by the budget,
            or 8.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); in place of r.
        alike: what tokens are compared by. 'keys': their keys in attention, as in the paper; 'states': their states
            after the backbone's last norm, which predict a token's final state better.
        even: this times the logarithm of the smaller token's size is subtracted from a pair's similarity. Groups of
            merged tokens then stay small, and the states given back are nearer to those of each token.
        until: tokens are merged only in this first share of the blocks; with a budget, more are merged in each of them.
        proportion: attention counts a token that is the mean of s tokens as s to this power; 1 is the paper.
        """
        super().__init__()
        self.alike, self.even, self.until, self.proportion = alike, even, until, proportion
        require(r is None or budget is None, f"r = {r}, budget = {budget!r}", "each sets the other; give one of them")
        self.r, self.budget = 8.0 if r is None else float(r), budget

    @classmethod
    def for_features(cls, r: float | None = None, budget: Budget = None) -> Self:
        """ToMe with settings that keep features close to the static model's; found on DINOv2 ViT-S/14, untrained."""
        return cls(r, budget, alike="states", even=0.1, until=2 / 3, proportion=0.6)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.operating_point = ("r", shape.tokens() / 2, 0.0)
        if self.budget is not None:
            self.r = self._r_for(budget_share(self.budget, shape))

    @property
    def config(self) -> dict[str, Any]:
        """The settings, with the r in use (chosen by the budget, or set later) in place of the budget."""
        return super().config | ({"budget": None} if hasattr(self, "shape") else {"r": None} if self.budget else {})

    @classmethod
    def from_config(cls, options: dict[str, Any]) -> Self:
        return super().from_config(options | ({} if options.get("r") is None else {"budget": None}))

    def _r_for(self, goal: float) -> float:
        """The r at which an image costs this share of the static cost."""

        def cost(r: float) -> float:
            self.r = r
            left, macs = torch.tensor(self.shape.tokens(), dtype=torch.float64), fixed_macs(self.shape)
            for depth in range(self.shape.blocks):
                macs += float(block_macs(self.shape, left) + self.macs(left, depth))
                left = left - ((left - self.shape.prefix) // 2).clamp_max(self._merged_at(depth))
            return macs / static_macs(self.shape)

        return round(bisected(cost, goal, self.shape.tokens() / 2, 0.0)[1], 4)

    def _merged_at(self, depth: int) -> int:
        """How many tokens are merged after block `depth` (from 0)."""
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
        similarity, partner = self._match(tokens, F.normalize(wide(compared), dim=-1))
        half = tokens.image_sum(wide((~tokens.is_prefix).to(similarity.dtype))) // 2  # the paper's upper bound
        merged = tokens.rank(similarity) < tokens.per_image(half.clamp_max(count))
        keep = tokens.decide(depth, ~merged)
        merge = Merge(torch.where(merged & ~keep, partner, tokens.place), proportion=self.proportion)
        return Verdict(keep, record={"score": similarity.nan_to_num(neginf=-1.0)}, merge=merge)

    def _match(self, tokens: Tokens, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Bipartite matching on rows: for every second token of an image the highest similarity to one of the other
        half, and the place in the image of that partner. The similarity is -inf for the other half, and where there is
        no partner."""
        longest = tokens.padding.shape[1]
        free = _even_length(tokens.padding & ~tokens.pad(tokens.is_prefix))
        keys, place = _even_length(tokens.pad(keys)), _even_length(tokens.pad(tokens.place))
        similarity = keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)  # (B, n / 2, n / 2)
        if self.even:
            size = _even_length(tokens.pad(tokens.size)).clamp_min(1).log()
            similarity = similarity - self.even * torch.minimum(size[:, ::2, None], size[:, None, 1::2])
        similarity = similarity.masked_fill(~(free[:, ::2, None] & free[:, None, 1::2]), -torch.inf)
        best, partner = similarity.max(-1)  # (B, n / 2)
        partner = place[:, 1::2].gather(1, partner)
        best = _interleave(best, torch.full_like(best, -torch.inf))
        return tokens.unpad(best[:, :longest]), tokens.unpad(_interleave(partner, partner)[:, :longest])

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        if not self._merged_at(depth):
            return torch.zeros_like(tokens)
        compared = self.shape.head_size if self.alike == "keys" else self.shape.width
        return (tokens / 2).ceil() * (tokens / 2).ceil() * compared


def _even_length(padded: Tensor) -> Tensor:
    """The tensor, with one more empty entry where its second axis is odd."""
    missing = padded.shape[1] % 2
    return torch.cat([padded, torch.zeros_like(padded[:, :missing])], 1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], -1).flatten(1)
