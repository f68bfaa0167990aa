"""What a checkpoint promises of its features: how close to the static model's they are, and on how many images."""

from __future__ import annotations

import math
from typing import Any, TypedDict

from ..settings import Inside, Share, Whole1, Word

NEEDED = {"patch_cosine", "class_cosine", "confidence", "certainty", "images", "setting", "cost"}


class Promise(TypedDict, total=False):
    """`extra.promise` of a checkpoint, as `dwindle fidelity` calibrates it."""

    patch_cosine: Share | None  # an image keeps the promise if the mean cosine of its patches is at least this,
    class_cosine: Share | None  # and that of its class token (or pooled embedding) at least this
    confidence: Inside  # share of all images that keep it
    certainty: Inside  # of the calibration: in so many draws of its images the share is as said
    images: Whole1  # it was calibrated on
    below: int  # of them that did not keep it
    setting: tuple[Word, float]  # the operating point, by name, at which it holds
    cost: float  # of the static model's, at that setting
    held_out: dict[str, Any]  # what was measured on images not calibrated on


def promise_of(model: Any) -> dict[str, Any] | None:
    """What a model promises as it is set now; None: nothing, or its operating point was turned since."""
    promise = _said(getattr(model, "extra", {}))
    if promise is None:
        return None
    name, value = promise["setting"]
    return promise if hasattr(model.method, name) and _same(float(getattr(model.method, name)), value) else None


def promise_in(config: dict[str, Any]) -> dict[str, Any] | None:
    """The same, from a checkpoint's config alone; a setting that lies among the weights is not looked at."""
    promise = _said(config.get("extra", {}))
    if promise is None:
        return None
    name, value = promise["setting"]
    now = config["method"]["options"].get(name, value)
    return promise if isinstance(now, int | float) and _same(float(now), value) else None


def told(promise: dict[str, Any]) -> str:
    """In a sentence."""
    kinds = {"patch_cosine": "mean patch cosine", "class_cosine": "class cosine"}
    wanted = " and ".join(f"{what} of at least {promise[name]:g}" for name, what in kinds.items() if promise[name])
    return (
        f"at least {promise['confidence']:.4g} of images like those it was calibrated on have a {wanted} to the static "
        f"model (certainty {promise['certainty']:g}, {promise['images']} images, cost {promise['cost']:.3f})"
    )


def _said(extra: Any) -> dict[str, Any] | None:
    said = extra.get("promise") if isinstance(extra, dict) else None
    return said if isinstance(said, dict) and said.keys() >= NEEDED else None


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
