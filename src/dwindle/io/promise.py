"""What a checkpoint promises about its features: how close they are to the static model's, and for which images."""

from __future__ import annotations

import math
from typing import Any, TypedDict

from ..settings import Inside, Share, Whole1, Word

NEEDED = {"patch_cosine", "class_cosine", "confidence", "certainty", "images", "setting", "cost"}


class Promise(TypedDict, total=False):
    """`extra.promise` of a checkpoint, as `dwindle fidelity` calibrates it."""

    patch_cosine: Share | None  # an image keeps the promise if the mean cosine of its patches is at least this,
    class_cosine: Share | None  # and the cosine of its class token (or pooled embedding) is at least this
    confidence: Inside  # the share of all images that keep the promise
    certainty: Inside  # the probability, over draws of the calibration images, that the promise is true
    images: Whole1  # number of calibration images
    below: int  # number of calibration images that did not keep the promise
    setting: tuple[Word, float]  # name and value of the operating point at which the promise holds
    cost: float  # share of the static model's cost at that setting
    held_out: dict[str, Any]  # measurements on images that were not used for the calibration


def promise_of(model: Any) -> dict[str, Any] | None:
    """A model's promise; None if it has none, or if its operating point was changed since."""
    promise = _promise(getattr(model, "extra", {}))
    if promise is None:
        return None
    name, value = promise["setting"]
    return promise if hasattr(model.method, name) and _same(float(getattr(model.method, name)), value) else None


def promise_in(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same from a checkpoint's config alone; a setting that is stored among the weights is not checked."""
    promise = _promise(config.get("extra", {}))
    if promise is None:
        return None
    name, value = promise["setting"]
    current = config["method"]["options"].get(name, value)
    return promise if isinstance(current, int | float) and _same(float(current), value) else None


def sentence(promise: dict[str, Any]) -> str:
    """A promise in words, to complete a sentence."""
    kinds = {"patch_cosine": "mean patch cosine", "class_cosine": "class cosine"}
    wanted = " and ".join(f"{what} of at least {promise[name]:g}" for name, what in kinds.items() if promise[name])
    return (
        f"at least {promise['confidence']:.4g} of images like those it was calibrated on have a {wanted} to the static "
        f"model (certainty {promise['certainty']:g}, {promise['images']} images, cost {promise['cost']:.3f})"
    )


def _promise(extra: Any) -> dict[str, Any] | None:
    promise = extra.get("promise") if isinstance(extra, dict) else None
    return promise if isinstance(promise, dict) and promise.keys() >= NEEDED else None


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
