"""The cheapest operating point at which a wished fidelity is kept, by a bound that holds on images not looked at.

An image *keeps* the promise if its features are as close to the static model's as wished. What is promised: of images
drawn as the calibration images were, a share of at least `confidence` keeps it. The promise itself is true with
probability at least `certainty` over the draw of the calibration images.

Settings are tried from the dearest on, in an order fixed before any calibration image is seen. At each the hypothesis
"a share of more than 1 - confidence does not keep it" is tested by the binomial tail (Clopper and Pearson), and the
first setting at which it cannot be rejected ends the sequence. Testing in a fixed order needs no correction for how
many settings were tried (Angelopoulos et al., Learn then Test, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..runtime.export import check_images
from .analysis import spread_settings
from .evaluate import turn
from .fidelity import Features, asking, cosines, static_twin

CERTAINTY = 0.95
SETTINGS, PROBES = 20, 40  # settings tested, evenly spread in cost, and those tried on photographs to find them
LEAST = 16  # images of a batch


@dataclass(frozen=True)
class Wish:
    """The least cosines of an image to the static model, None where one does not matter, and how many have them."""

    patch_cosine: float | None = None
    class_cosine: float | None = None
    confidence: float = 0.95
    certainty: float = CERTAINTY

    def __post_init__(self) -> None:
        for name, given in (("patch-cosine", self.patch_cosine), ("class-cosine", self.class_cosine)):
            if given is not None and not 0 < given < 1:
                raise DwindleError(f"--{name} {given:g}: it is a cosine to the static features, between 0 and 1.")
        if self.patch_cosine is None and self.class_cosine is None:
            raise DwindleError("There is nothing to promise; give --patch-cosine, --class-cosine or both.")
        for name, given in (("confidence", self.confidence), ("certainty", self.certainty)):
            if not 0 < given < 1:
                raise DwindleError(f"--{name} {given:g}: it is a share, between 0 and 1.")

    @property
    def allowed(self) -> float:
        return 1 - self.confidence

    @property
    def least_images(self) -> int:
        """With fewer not even a calibration without a failure would tell."""
        return math.ceil(math.log(1 - self.certainty) / math.log(self.confidence))

    def kept(self, class_cosine: Tensor, patch_cosine: Tensor) -> Tensor:
        """(B,) bool: which images keep it."""
        kept = torch.ones_like(class_cosine, dtype=torch.bool)
        for found, least in ((class_cosine, self.class_cosine), (patch_cosine, self.patch_cosine)):
            kept &= torch.ones_like(kept) if least is None else found >= least
        return kept


def tail(failures: int, images: int, share: float) -> float:
    """P(at most so many of the images fail), where each fails with this probability."""
    sure = math.log(share), math.log1p(-share)
    whole = math.lgamma(images + 1)
    return min(
        1.0,
        sum(
            math.exp(whole - math.lgamma(k + 1) - math.lgamma(images - k + 1) + k * sure[0] + (images - k) * sure[1])
            for k in range(failures + 1)
        ),
    )


def most_failures(images: int, allowed: float, certainty: float = CERTAINTY) -> int:
    """So many of the images may fail, if the share of all that do shall be at most `allowed`; -1: too few to tell."""
    low, high = -1, images
    while low < high:  # the tail rises with the failures
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tail(middle, images, allowed) <= 1 - certainty else (low, middle - 1)
    return low


def last_kept(failures: Iterable[int], most: int) -> int:
    """How many settings, from the first, have at most so many failures: the next one ends the sequence. Settings after
    that are not looked at."""
    count = 0
    for failed in failures:
        if failed > most:
            break
        count += 1
    return count


@dataclass
class Point:
    """A setting that was tested."""

    setting: float
    cost: float  # of the static model's, on the calibration images
    below: int  # images that do not keep the promise; counted no further than tells
    reached: tuple[float, float]  # patch and class cosine that the wished share of the images looked at reaches


def settings_of(model: AdaptiveViT) -> list[float]:
    """Settings of the operating point from the dearest but one to the cheapest, evenly spread in cost. They depend on
    the model and on shipped photographs alone."""
    method = model.method
    if method.operating_point is None:
        raise DwindleError(
            f"{type(method).__name__} has no operating point to calibrate; take a method that has one, such as ToMe."
        )
    name, cheap, dear = method.operating_point
    own = float(getattr(method, name))
    place, number = next(model.parameters()).device, next(model.parameters()).dtype
    photos = check_images(model)[:2].to(place, number)

    def cost(value: float) -> float:
        turn(model, value)
        return float(model.macs(model(photos, "packed").trace).mean())

    try:
        return spread_settings(cost, cheap, dear, SETTINGS + 1, PROBES)[::-1][1:]
    finally:
        turn(model, own)


class Calibration:
    """The images' static features, computed once, and what is tested on them."""

    @torch.inference_mode()
    def __init__(self, model: AdaptiveViT, batches: Iterable[Tensor], wish: Wish, static: AdaptiveViT | None) -> None:
        """static: the model to agree with; None: the same weights with nothing halted."""
        self.model, self.wish = model.eval(), wish
        self.place = next(model.parameters()).device
        self.held: list[tuple[Tensor, Features]] = []
        wanted = asking(static_twin(model) if static is None else static.eval().to(self.place))
        for images in batches:
            for part in images.split(LEAST):
                features = wanted(part.to(self.place))
                features.patches = features.patches.half()
                self.held.append((part, features))
        self.images = sum(len(part) for part, _ in self.held)
        if self.images < wish.least_images:
            raise DwindleError(
                f"{self.images} images to calibrate on cannot show that {wish.confidence:g} of all images keep a "
                f"promise; give {2 * wish.least_images} or more, of which half calibrate, or a lower --confidence."
            )
        self.most = most_failures(self.images, wish.allowed, wish.certainty)

    @torch.inference_mode()
    def test(self, setting: float) -> Point:
        """Up to the image whose failure decides."""
        turn(self.model, setting)
        ask, below, macs, seen = asking(self.model), 0, 0.0, 0
        found: list[Tensor] = []
        for images, wanted in self.held:
            features = ask(images.to(self.place))
            whole, patches = cosines(features, wanted)
            found.append(torch.stack([patches.mean(1), whole]).cpu())
            below += int((~self.wish.kept(whole, patches.mean(1))).sum())
            macs += float(features.macs.sum())
            seen += len(images)
            if below > self.most:
                break
        low = torch.cat(found, 1).quantile(self.wish.allowed, 1)
        return Point(setting, macs / seen / self.model.static_macs(), below, (float(low[0]), float(low[1])))


def keep_promise(
    model: AdaptiveViT,
    batches: Iterable[Tensor],
    wish: Wish,
    *,
    static: AdaptiveViT | None = None,
    settings: Sequence[float] | None = None,
    progress: Callable[[Point], None] | None = None,
) -> tuple[dict[str, Any], list[Point]]:
    """Turn the model to the cheapest setting that keeps the wish. The promise as a checkpoint holds it (see
    `io.promise.Promise`), and the settings tested. settings: in the order of testing; None: `settings_of` the model.
    """
    settings = settings_of(model) if settings is None else settings
    own_name = model.method.operating_point[0] if model.method.operating_point else ""
    own = float(getattr(model.method, own_name))
    calibration, tested = Calibration(model, batches, wish, static), []
    try:

        def failures() -> Iterable[int]:
            for setting in settings:
                tested.append(calibration.test(setting))
                if progress:
                    progress(tested[-1])
                yield tested[-1].below

        count = last_kept(failures(), calibration.most)
    finally:
        turn(model, own)
    if not count:
        raise DwindleError(_unreached(model, wish, tested[0]))
    best = tested[count - 1]
    turn(model, best.setting)
    return {
        "patch_cosine": wish.patch_cosine,
        "class_cosine": wish.class_cosine,
        "confidence": wish.confidence,
        "certainty": wish.certainty,
        "images": calibration.images,
        "below": best.below,
        "setting": [own_name, float(getattr(model.method, own_name))],
        "cost": round(best.cost, 4),
    }, tested


def _unreached(model: AdaptiveViT, wish: Wish, first: Point) -> str:
    wanted = {"--patch-cosine": wish.patch_cosine, "--class-cosine": wish.class_cosine}
    named = " ".join(f"{name} {value:g}" for name, value in wanted.items() if value is not None)
    reached = {"--patch-cosine": first.reached[0], "--class-cosine": first.reached[1]}
    could = " and ".join(f"{reached[name]:.3f} ({name})" for name, value in wanted.items() if value is not None)
    return (
        f"{named} for {wish.confidence:g} of the images is reached by no budget below the static cost with "
        f"{type(model.method).__name__}: at {first.cost:.2f} of it so many images reach {could}; ask for less."
    )
