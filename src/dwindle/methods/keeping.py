"""What methods share that keep a set share of the patches after some blocks, the same number in every image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.cost import keep_for
from ..core.method import check_stages, wide
from ..core.tokens import Tokens
from ..settings import Budget


class KeepsShare(nn.Module):
    """The settings `stages`, `keep`, `budget` and `merge` of such a method, to derive from beside `Method`.

    It is not a `Method` itself, because each of those registers under its name.
    """

    stages: tuple[int, ...]
    budget: Budget
    merge: str
    keep: Tensor

    def set_share(self, stages: tuple[int, ...], keep: float, budget: Budget, merge: str) -> None:
        """Keep these constructor arguments under their names."""
        self.stages = tuple(sorted(set(stages)))
        self.budget, self.merge = budget, merge
        self.register_buffer("keep", torch.tensor(float(keep)))  # a tensor: nothing is compiled anew when it changes

    def bind_share(self, shape: Shape, macs: Callable[[Tensor, int], Tensor], fused: int = 0) -> None:
        """Check the stages against the backbone, and set `keep` from the budget if there is one.

        macs: the method's own. fused: tokens that go on at each stage beside the share.
        """
        check_stages(self.stages, shape)
        if self.budget is not None:
            self.keep.fill_(keep_for(self.budget, shape, self.stages, macs, fused))

    def merges(self, depth: int) -> bool:
        """Whether patches that stop after block `depth` (from 0) are merged with others."""
        return self.merge == "nearest" and depth + 1 in self.stages

    def kept_patches(self, tokens: Tokens, patch: Tensor) -> Tensor:
        """For each row the number of patches of its image that go on. patch: 1 for rows that are patches, else 0."""
        # Rounded against noise in the product: 0.7 * 10 is 7, not 8.
        return tokens.per_image((self.keep * tokens.image_sum(wide(patch)) - 1e-4).ceil())
