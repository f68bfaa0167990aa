"""Random generators seeded by several numbers, such as a seed, an epoch and an image's index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(*key: int) -> int:
    """One seed out of several numbers."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def generator_of(*key: int) -> torch.Generator:
    """A CPU generator seeded by several numbers."""
    return torch.Generator().manual_seed(mix(*key))


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """A context in which every global CPU generator is seeded by `key`; on leaving, their states are restored."""
    outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = mix(*key)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset the GPU's generator too
    try:
        yield
    finally:
        random.setstate(outer[0])
        np.random.set_state(outer[1])
        torch.set_rng_state(outer[2])
