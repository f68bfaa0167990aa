"""Patches dropped at random: what any way of choosing them has to beat."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.cost import keep_for
from ..core.method import Method, Verdict, check_stages, wide
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import Budget, Seed, Share, Stages

PRIME = 2147483629  # below 2^31, so that products of two remainders fit into 64 bits


class Random(Method):
    """After some blocks a random choice of the patches goes on, as many in every image.

    The choice follows from the image's own pixels: in another batch, or on another day, it is the same.
    """

    needs_training = False
    rival = True
    keeps_prefix = True
    paper = "random dropping of patches"

    def __init__(
        self,
        stages: Stages = (4, 7, 10),
        keep: Share = 0.7,
        budget: Budget = None,
        merge: Literal["none", "nearest"] = "none",
        seed: Seed = 0,
    ) -> None:
        """
        stages: patches leave after these blocks. keep: share of the patches that go on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        merge: what leaves is gone ('none'), or joins the most alike patch that goes on ('nearest', see `AHT`).
        seed: of the choice, together with the image.
        """
        super().__init__()
        self.stages = tuple(sorted(set(stages)))
        self.budget, self.merge, self.seed = budget, merge, seed
        self.keep: Tensor
        self.register_buffer("keep", torch.tensor(float(keep)))  # a tensor: turned without compiling anew
        self.operating_point = ("keep", 0.0, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        check_stages(self.stages, shape)
        if self.budget is not None:
            self.keep.fill_(keep_for(self.budget, shape, self.stages, self.macs))

    def start(self, tokens: Tokens) -> Tokens:
        assert tokens.images is not None
        lot = drawn(tokens.images, tokens.shape[1], self.seed)
        tokens.notes["lot"] = tokens.gather(lot).to(tokens.numbers(0.0).dtype)
        return tokens

    def probe(self, depth: int) -> Probe:
        return Probe(merging=self.merge == "nearest" and depth + 1 in self.stages)

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if depth + 1 not in self.stages:
            return Verdict(tokens.decide(depth, None))
        lot, patch = tokens.notes["lot"], ~tokens.is_prefix
        rank = tokens.rank(lot.masked_fill(~patch, -torch.inf))
        # Rounded against noise in the product: 0.7 * 10 is 7, not 8.
        wanted = tokens.per_image((self.keep * tokens.image_sum(wide(patch.to(lot.dtype))) - 1e-4).ceil())
        keep = tokens.decide(depth, (rank < wanted) | ~patch)
        return Verdict(keep, record={"score": lot}, merge=Merge() if self.merge == "nearest" else None)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        merges = self.merge == "nearest" and depth + 1 in self.stages
        return tokens**2 * self.shape.head_size if merges else torch.zeros_like(tokens)


def drawn(images: Tensor, count: int, seed: int) -> Tensor:
    """(B, count) numbers in [0, 1), as good as random, from each image's pixels and the seed.

    By whole numbers: sums of floats are rounded by the size of a batch, and the least difference would change the draw.
    """
    pixels = (images.float() * 64).round().long().flatten(1)
    place = torch.arange(1, pixels.shape[1] + 1, device=images.device) % 8191 + 1
    image = (pixels * place).sum(1) % PRIME  # (B,)
    token = torch.arange(1, count + 1, device=images.device) * 1103515245 % PRIME
    mixed = (image[:, None] + token + seed * 69069) % PRIME
    for _ in range(3):  # squares modulo a prime
        mixed = (mixed * mixed + token) % PRIME
    return mixed.double() / PRIME
