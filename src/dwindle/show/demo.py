"""What `dwindle demo` and `dwindle view` do: classify image files, and draw where the compute went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..files import photographs
from ..io.checkpoint import load
from ..io.classes import class_names
from ..io.images import load_image, preprocess_of
from ..ops.timing import milliseconds
from .view import draw

DEMO = "aht_deit_tiny_imagenet"


@torch.inference_mode()
def classify_and_draw(model: AdaptiveViT, paths: Sequence[Path], out: Path, device: str = "cpu") -> dict[str, Any]:
    """Classify image files, and draw how deep their patches were computed. Returns numbers and paths."""
    if out.is_file():
        raise DwindleError(f"{out} is a file; --out is a folder for the figures.")
    photos = [load_image(path) for path in paths]
    result = model.eval().to(device)(_batch(model, photos).to(device))
    confidence, best = result.logits.softmax(-1).max(-1)
    names = class_names(model)
    macs = model.macs(result.trace) / 1e9
    images = [
        {
            "image": path.name,
            "label": names[best[i]] if names else int(best[i]),
            "confidence": round(confidence[i].item(), 4),
            "depth": round(result.trace.mean_depth[i].item(), 2),
            "gmacs": round(macs[i].item(), 3),
        }
        for i, path in enumerate(paths)
    ]
    titles = [
        f"{i['label']} ({i['confidence']:.0%}), {i['gmacs']:.2f} of {model.static_macs() / 1e9:.2f} GMACs"
        for i in images
    ]
    crops = [preprocess_of(model).seen(photo) for photo in photos]
    figures = draw(crops, result.trace, out, [path.stem for path in paths], titles)
    return {
        "images": images,
        "gmacs": round(macs.mean().item(), 4),
        "gmacs_static": round(model.static_macs() / 1e9, 4),
        "figures": [str(figure) for figure in figures],
    }


@torch.inference_mode()
def demo(out: Path, device: str = "cpu") -> dict[str, Any]:
    """Classify the shipped photographs with the shipped model, and time it against itself with nothing halted."""
    model = load(DEMO)
    photos = photographs()
    result = classify_and_draw(model, photos, out, device)
    batch = _batch(model, [load_image(photo) for photo in photos]).to(device)
    fast = model.prepare(images=len(photos))
    static, adaptive = milliseconds([lambda: model.vit(batch), lambda: fast(batch)], 6.0, batch.device)
    return {
        "model": DEMO,
        **result,
        "static_ms": round(statistics.median(static), 2),
        "adaptive_ms": round(statistics.median(adaptive), 2),
        "speedup": round(statistics.median(s / a for s, a in zip(static, adaptive)), 2),
    }


def _batch(model: AdaptiveViT, photos: Sequence[Image.Image]) -> Tensor:
    """(B, 3, H, W): the photographs as the model takes them."""
    transform = preprocess_of(model).eval_transform()
    return torch.stack([transform(photo) for photo in photos])
