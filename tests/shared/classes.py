"""A folder of class folders with images of noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_classes(root: Path, train: int, val: int) -> str:
    """So many images of each of two classes, left and right, in each split. Returns the folder's name."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name in ("left", "right"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return str(root)
