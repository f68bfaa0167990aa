"""Answers of the shipped checkpoints on the shipped photographs and text, as tests/test_golden.py holds them:

python tests/golden/make.py
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import dwindle

HERE = Path(__file__).parent
SETTINGS = ((96, 12, 192), (64, 9, 144), (32, 6, 96), (48, 12, 96))  # tokens, depth, width
TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"


def photographs(size: int) -> torch.Tensor:
    """The shipped ones, squashed and normalised by hand, so that no preprocessing of ours is in it."""
    folder = Path(str(files("dwindle"))) / "assets" / "photos"
    pixels = [
        np.asarray(Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC), np.float32)
        for path in sorted(folder.glob("*.jpg"))
    ]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((x - mean) / std).contiguous()


@torch.no_grad()
def answers(name: str, layout: str = "packed") -> dict[str, np.ndarray]:
    """layout: of those that have two; AdaPerceiver computes a setting's tokens in one way only."""
    model = dwindle.load(name)
    if name.startswith("aht"):
        out = model(photographs(224), layout=layout)
        return {"logits": out.logits.numpy(), "depth": out.trace.depth.numpy().astype(np.uint8)}
    if name.startswith("ada"):
        x = photographs(160)
        found = {}
        for tokens, depth, width in SETTINGS:
            out = model(x, tokens=tokens, depth=depth, width=width)
            found[f"logits_{tokens}_{depth}_{width}"] = out.logits.numpy()
        out = model(x, exit=0.5)
        return found | {"logits_exit": out.logits.numpy(), "depth_exit": out.trace.depth.numpy().astype(np.uint8)}
    ids = torch.tensor([[model.extra["vocabulary"].index(c) for c in TEXT]])
    out = model(ids, layout)
    return {"logits": out.logits[0].numpy(), "live": out.trace.live.numpy()}


NAMES = ("aht_deit_tiny_imagenet", "aht_deit_tiny_cifar100", "ada_small_cifar100", "tsa_shakespeare")

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in NAMES:
        np.savez_compressed(HERE / f"{name}.npz", **answers(name))
        print(name, (HERE / f"{name}.npz").stat().st_size)
