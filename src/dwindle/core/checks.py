"""Checks of images, options and answers; each refuses what is wrong with one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError


def check_tensor(images: Any) -> Tensor:
    """The images, if they are a tensor."""
    if isinstance(images, Tensor):
        return images
    shape = getattr(images, "shape", None)
    kind = f"{type(images).__module__.partition('.')[0]}.{type(images).__name__}".removeprefix("builtins.")
    found = "missing" if images is None else f"a {kind}" + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise DwindleError(
        f"The images are {found}; give a float tensor (batch, channels, height, width), such as "
        "torch.from_numpy(array), or what `eval_transform` of dwindle.io.images.Preprocess makes of a picture."
    )


LARGE = 1e4  # normalised pixels lie within a few units of 0


def check_finite(logits: Tensor, images: Tensor, model: nn.Module, training: bool = False) -> None:
    """Refuse NaN and infinity. An image's NaN reaches its logits, so only these few numbers are checked first."""
    if logits.isfinite().all():
        return
    if not images.isfinite().all():
        raise DwindleError("The images hold NaN or infinite values; check how they were loaded and normalised.")
    if training:  # in training the loss shows that the run diverged
        return
    damaged = next((name for name, value in model.named_parameters() if not value.isfinite().all()), None)
    if damaged is not None:
        raise DwindleError(
            f"The model gives NaN or infinite logits: its weight '{damaged}' holds NaN or infinite values; load it "
            "anew, or from another copy."
        )
    if (most := float(images.abs().max())) > LARGE:
        raise DwindleError(
            f"The images hold values up to {most:.2g}, too large to compute with; normalise them: pixels lie within a "
            "few units of 0."
        )
    raise DwindleError(
        f"The model gives NaN or infinite logits in {logits.dtype}, though its weights and the images are finite; run "
        "it in float32, or load its weights from another copy."
    )


def check_dtype(images: Tensor, weights: torch.dtype) -> None:
    """Refuse images of another type than the weights, except under autocast, which converts both."""
    if images.dtype != weights and not torch.is_autocast_enabled(images.device.type):
        raise DwindleError(f"The images are {images.dtype}, the weights {weights}; convert one: images.to({weights}).")


def check_options(vit: nn.Module, options: dict[str, Any]) -> None:
    """Refuse options of a call to a model that takes images alone."""
    if options:
        raise DwindleError(
            f"A {type(vit).__name__} is called with images alone, and {next(iter(options))!r} was given; leave it out."
        )
