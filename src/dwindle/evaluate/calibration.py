"""The cheapest operating point that keeps a given fidelity, with a statistical bound that holds on unseen images.

An image *keeps* the promise if the cosines of its features to the static model's are at least those of the
`FidelityGoal`. The promise says: of images drawn as the calibration images were, a share of at least `confidence` keeps
it. This statement is true with probability at least `certainty` over the draw of the calibration images.

Settings are tested from the dearest to the cheapest, in an order fixed before any calibration image is seen. At each
setting the hypothesis "a share of more than 1 - confidence does not keep it" is tested by the binomial tail (Clopper
and Pearson). The first setting at which it cannot be rejected ends the sequence. Testing in a fixed order needs no
correction for the number of settings (Angelopoulos et al., Learn then Test, 2021).
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
from .evaluate import set_operating_point
from .fidelity import Features, check_cosines, cosines, feature_extractor, static_twin

CERTAINTY = 0.95
SETTINGS, PROBES = 20, 40  # settings tested, evenly spread in cost; settings tried on photographs to find these
BATCH = 16  # images per forward pass


@dataclass(frozen=True)
class FidelityGoal:
    """The fidelity to promise: the least cosines of an image's features to the static model's."""

    patch_cosine: float | None = None  # None: it does not matter
    class_cosine: float | None = None
    confidence: float = 0.95  # the share of the images that reach the cosines
    certainty: float = CERTAINTY  # the probability that the promise is true

    def __post_init__(self) -> None:
        check_cosines(self.patch_cosine, self.class_cosine)
        if self.patch_cosine is None and self.class_cosine is None:
            raise DwindleError("There is nothing to promise; give --patch-cosine, --class-cosine or both.")
        for name, share in (("confidence", self.confidence), ("certainty", self.certainty)):
            if not 0 < share < 1:
                raise DwindleError(f"--{name} {share:g}: it is a share, between 0 and 1.")

    @property
    def allowed(self) -> float:
        """The share of the images that may miss the cosines."""
        return 1 - self.confidence

    @property
    def least_images(self) -> int:
        """The least number of calibration images. With fewer even zero failures would not prove the promise."""
        return math.ceil(math.log(1 - self.certainty) / math.log(self.confidence))

    def kept(self, class_cosine: Tensor, patch_cosine: Tensor) -> Tensor:
        """(B,) bool: which images reach the cosines."""
        kept = torch.ones_like(class_cosine, dtype=torch.bool)
        for cosine, least in ((class_cosine, self.class_cosine), (patch_cosine, self.patch_cosine)):
            if least is not None:
                kept &= cosine >= least
        return kept


def tail(failures: int, images: int, share: float) -> float:
    """The binomial tail: P(at most `failures` of `images` fail), where each fails with probability `share`."""
    log_fail, log_pass = math.log(share), math.log1p(-share)
    log_factorial = math.lgamma(images + 1)

    def probability(k: int) -> float:
        log_choose = log_factorial - math.lgamma(k + 1) - math.lgamma(images - k + 1)
        return math.exp(log_choose + k * log_fail + (images - k) * log_pass)

    return min(1.0, sum(probability(k) for k in range(failures + 1)))


def most_failures(images: int, allowed: float, certainty: float = CERTAINTY) -> int:
    """How many of the images may fail to show, with `certainty`, that a share of at most `allowed` fails of all images.

    -1: even zero failures among so few images would not show it.
    """
    low, high = -1, images
    while low < high:  # bisection: the tail rises with the failures
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tail(middle, images, allowed) <= 1 - certainty else (low, middle - 1)
    return low


def last_kept(failures: Iterable[int], most: int) -> int:
    """How many settings, from the first, have at most `most` failures. The next one ends the sequence: those after it
    are never computed."""
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
    cost: float  # as a share of the static model's, on the calibration images
    below: int  # images that do not keep the promise; counting stops when the setting has failed
    reached: tuple[float, float]  # the patch and class cosine that a share `confidence` of the tested images reaches


def settings_of(model: AdaptiveViT) -> list[float]:
    """Settings of the operating point, evenly spread in cost, from the second dearest to the cheapest. They depend only
    on the model and on the shipped photographs."""
    method = model.method
    if method.operating_point is None:
        raise DwindleError(
            f"{type(method).__name__} has no operating point to calibrate; take a method that has one, such as ToMe."
        )
    name, cheap, dear = method.operating_point
    own = float(getattr(method, name))
    weight = next(model.parameters())
    photos = check_images(model)[:2].to(weight.device, weight.dtype)

    def cost(value: float) -> float:
        set_operating_point(model, value)
        return float(model.macs(model(photos, "packed").trace).mean())

    try:
        return spread_settings(cost, cheap, dear, SETTINGS + 1, PROBES)[::-1][1:]
    finally:
        set_operating_point(model, own)


class Calibration:
    """The static features of the calibration images, computed once, and the test of a setting on them."""

    @torch.inference_mode()
    def __init__(
        self, model: AdaptiveViT, batches: Iterable[Tensor], goal: FidelityGoal, static: AdaptiveViT | None
    ) -> None:
        """static: the reference model; None: the same weights with nothing halted."""
        self.model, self.goal = model.eval(), goal
        self.place = next(model.parameters()).device
        self.batches: list[tuple[Tensor, Features]] = []
        extract = feature_extractor(static_twin(model) if static is None else static.eval().to(self.place))
        for images in batches:
            for part in images.split(BATCH):
                features = extract(part.to(self.place))
                features.patches = features.patches.half()
                self.batches.append((part, features))
        self.images = sum(len(part) for part, _ in self.batches)
        if self.images < goal.least_images:
            raise DwindleError(
                f"{self.images} images to calibrate on cannot show that {goal.confidence:g} of all images keep a "
                f"promise; give {2 * goal.least_images} or more, of which half calibrate, or a lower --confidence."
            )
        self.most = most_failures(self.images, goal.allowed, goal.certainty)

    @torch.inference_mode()
    def test(self, setting: float) -> Point:
        """Test one setting. The test stops at the first batch after which too many images have failed."""
        set_operating_point(self.model, setting)
        extract, below, macs, seen = feature_extractor(self.model), 0, 0.0, 0
        reached: list[Tensor] = []  # of (2, B): patch and class cosine
        for images, reference in self.batches:
            features = extract(images.to(self.place))
            class_cosine, patch_cosines = cosines(features, reference)
            patch_cosine = patch_cosines.mean(1)
            reached.append(torch.stack([patch_cosine, class_cosine]).cpu())
            below += int((~self.goal.kept(class_cosine, patch_cosine)).sum())
            macs += float(features.macs.sum())
            seen += len(images)
            if below > self.most:
                break
        low = torch.cat(reached, 1).quantile(self.goal.allowed, 1)
        return Point(setting, macs / seen / self.model.static_macs(), below, (float(low[0]), float(low[1])))


def keep_promise(
    model: AdaptiveViT,
    batches: Iterable[Tensor],
    goal: FidelityGoal,
    *,
    static: AdaptiveViT | None = None,
    settings: Sequence[float] | None = None,
    progress: Callable[[Point], None] | None = None,
) -> tuple[dict[str, Any], list[Point]]:
    """Set the model's operating point to the cheapest setting that keeps the goal.

    Returns the promise as a checkpoint holds it (see `io.promise.Promise`), and the settings tested.
    static: see `Calibration`. settings: in the order of testing; None: those of `settings_of`.
    """
    settings = settings_of(model) if settings is None else settings
    own_name = model.method.operating_point[0] if model.method.operating_point else ""
    own = float(getattr(model.method, own_name))
    calibration, tested = Calibration(model, batches, goal, static), []
    try:

        def failures() -> Iterable[int]:
            for setting in settings:
                tested.append(calibration.test(setting))
                if progress:
                    progress(tested[-1])
                yield tested[-1].below

        count = last_kept(failures(), calibration.most)
    finally:
        set_operating_point(model, own)
    if not count:
        raise DwindleError(_out_of_reach(model, goal, tested[0]))
    best = tested[count - 1]
    set_operating_point(model, best.setting)
    return {
        "patch_cosine": goal.patch_cosine,
        "class_cosine": goal.class_cosine,
        "confidence": goal.confidence,
        "certainty": goal.certainty,
        "images": calibration.images,
        "below": best.below,
        "setting": [own_name, float(getattr(model.method, own_name))],
        "cost": round(best.cost, 4),
    }, tested


def _out_of_reach(model: AdaptiveViT, goal: FidelityGoal, first: Point) -> str:
    """The sentence for a goal that no setting keeps. first: the dearest setting tested."""
    wanted = {"--patch-cosine": goal.patch_cosine, "--class-cosine": goal.class_cosine}
    named = " ".join(f"{name} {value:g}" for name, value in wanted.items() if value is not None)
    reached = {"--patch-cosine": first.reached[0], "--class-cosine": first.reached[1]}
    could = " and ".join(f"{reached[name]:.3f} ({name})" for name, value in wanted.items() if value is not None)
    return (
        f"{named} for {goal.confidence:g} of the images is reached by no budget below the static cost with "
        f"{type(model.method).__name__}: at {first.cost:.2f} of it so many images reach {could}; ask for less."
    )
