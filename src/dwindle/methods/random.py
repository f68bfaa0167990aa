"""Patches dropped at random, as a baseline for methods that choose them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.backbone import Shape
from ..core.method import Method, Verdict
from ..core.tokens import Probe, Tokens
from ..ops.merging import Merge
from ..settings import Budget, Seed, Share, Stages
from .attended import Merging
from .keeping import KeepsShare

PRIME = 2147483629  # below 2^31, so that products of two remainders fit into 64 bits


class Random(KeepsShare, Method):
    """After some blocks a random choice of the patches goes on, the same number in every image.

    The choice is computed from the image's own pixels, so it is the same in every batch and every run.
    """

    needs_training = False
    baseline = True
    keeps_prefix = True
    paper = "random dropping of patches"

    def __init__(
        self,
        stages: Stages = (4, 7, 10),
        keep: Share = 0.7,
        budget: Budget = None,
        merge: Merging = "none",
        seed: Seed = 0,
    ) -> None:
        """
        stages: patches leave after these blocks. keep: share of the patches that go on at each.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'); sets `keep` in place of the value given.
        merge: patches that leave are dropped ('none'), or merged with the most similar patch that goes on ('nearest',
            see `AHT`).
        seed: the seed of the choice, beside the image.
        """
        super().__init__()
        self.set_share(stages, keep, budget, merge)
        self.seed = seed
        self.operating_point = ("keep", 0.0, 1.0)

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        self.bind_share(shape, self.macs)

    def start(self, tokens: Tokens) -> Tokens:
        assert tokens.images is not None
        draws = drawn(tokens.images, tokens.shape[1], self.seed)
        tokens.notes["draws"] = tokens.gather(draws).to(tokens.full(0.0).dtype)
        return tokens

    def probe(self, depth: int) -> Probe:
        return Probe(merging=self.merges(depth))

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        if depth + 1 not in self.stages:
            return Verdict(tokens.decide(depth, None))
        draws, patch = tokens.notes["draws"], ~tokens.is_prefix
        rank = tokens.rank(draws.masked_fill(~patch, -torch.inf))
        keep = tokens.decide(depth, (rank < self.kept_patches(tokens, patch.to(draws.dtype))) | ~patch)
        return Verdict(keep, record={"score": draws}, merge=Merge() if self.merges(depth) else None)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        return tokens**2 * self.shape.head_size if self.merges(depth) else torch.zeros_like(tokens)


def drawn(images: Tensor, count: int, seed: int) -> Tensor:
    """(B, count) pseudo-random numbers in [0, 1), computed from each image's pixels and the seed.

    The arithmetic is in integers: the rounding of float sums depends on the batch size, and the smallest difference
    would change the draw.
    """
    pixels = (images.float() * 64).round().long().flatten(1)
    place = torch.arange(1, pixels.shape[1] + 1, device=images.device) % 8191 + 1
    image = (pixels * place).sum(1) % PRIME  # (B,)
    token = torch.arange(1, count + 1, device=images.device) * 1103515245 % PRIME
    mixed = (image[:, None] + token + seed * 69069) % PRIME
    for _ in range(3):  # squares modulo a prime
        mixed = (mixed * mixed + token) % PRIME
    return mixed.double() / PRIME
