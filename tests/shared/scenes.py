"""Small scenes with a class and a depth for each pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from dwindle.io.scenes import IGNORED


def scene(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A red square (class 1, near) and a blue one (class 2, nearer) on noise (class 0, far)."""
    picture = draw.integers(0, 60, (32, 32, 3))
    mask, depth = np.zeros((32, 32), np.uint8), np.full((32, 32), 8000, np.uint16)
    for label, channel, far in ((1, 0, 4000), (2, 2, 1000)):
        top, left = draw.integers(0, 17, 2)
        place = slice(top, top + 16), slice(left, left + 16)
        picture[place] = 20
        picture[(*place, channel)] = 220
        mask[place], depth[place] = label, far
    mask[0, 0], depth[0, 0] = IGNORED, 0
    return picture.astype(np.uint8), mask, depth


def write_scenes(root: Path, train: int = 48, val: int = 12) -> Path:
    """Folders as `Scenes` reads them."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for part in ("images", "masks", "depths"):
            (root / split / part).mkdir(parents=True)
        for i in range(count):
            for part, values in zip(("images", "masks", "depths"), scene(draw)):
                Image.fromarray(values).save(root / split / part / f"{i}.png")
    return root
