"""A model as the server runs it: the operating point for a budget, and the answer for an image."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..core.model import AdaptiveViT, Output, adapt
from ..evaluate.evaluate import set_operating_point
from ..io.classes import class_names
from ..io.images import preprocess_of
from ..io.promise import promise_of
from ..methods import Method
from ..runtime.dtypes import dtype_of
from ..runtime.export import check_images
from ..runtime.prepared import PreparedViT
from .limits import Refused

POINTS = 14  # settings of the operating point whose cost is measured at the start
ROUNDS = 3  # of timing an explained image
PASSES = 1 + 2 * ROUNDS  # forward passes for an explained image


class Served:
    """A model with its name, its classes and its table of budgets."""

    def __init__(self, name: str, model: AdaptiveViT, points: int = POINTS) -> None:
        """The model stays on its device. points: operating points whose cost is measured."""
        self.name, self.model = name, model.eval()
        self.fast = model.prepare()
        self.turning = threading.Lock()
        self.device, self.dtype = next(model.parameters()).device, dtype_of(model)
        self.preprocess = preprocess_of(model)
        self.classes = class_names(model)
        self.method = type(model.method).__name__
        self.photos = check_images(model).to(self.device, self.dtype)
        self.trained = _operating_value(model)
        with torch.inference_mode():
            self.table = _table(model, self.fast, torch.cat([self.photos, self.photos.flip(-1)]), points)
            self.own_share = float(model.cost(self.fast(self.photos).trace))

    @property
    def least(self) -> float | None:
        """The lowest budget; None: the model's cost cannot be set."""
        return round(self.table[0][0], 3) if self.table else None

    def operating_point(self, budget: float | None) -> float | None:
        """The operating point at which the photographs cost this share of static; as trained for a budget of None."""
        if budget is None:
            return self.trained
        if not self.table:
            raise Refused(
                422, f"budget = {budget:g}: {self.name} ({self.method}) has no operating point; leave the budget out."
            )
        if not self.table[0][0] - 5e-4 <= budget <= 1:
            raise Refused(
                422, f"budget = {budget:g}: {self.name} can be set from {self.least:g} to 1 of its static cost."
            )
        for (low, cheap), (high, dear) in zip(self.table, self.table[1:]):
            if budget <= high:
                share = (budget - low) / (high - low) if high > low else 1.0
                return cheap + min(max(share, 0.0), 1.0) * (dear - cheap)
        return self.table[-1][1]

    def group(self, operating_point: float | None) -> float | None:
        """The key of images that can share a batch: one for all, if each image can have its own operating point."""
        return None if self.model.method.per_image_point else operating_point

    @torch.inference_mode()
    def run(self, pixels: Tensor, operating_points: Sequence[float | None]) -> Output:
        """The model's output for pixels (B, height, width, 3), as `prepare` gives them."""
        images = self._images(pixels)
        if self.model.method.per_image_point and self.trained is not None:
            return self.fast(images, operating_point=torch.tensor(operating_points, dtype=torch.float32))
        if self.trained is None:
            return self.fast(images)
        assert operating_points[0] is not None
        with self.turning:  # the model has one operating point at a time
            set_operating_point(self.fast, operating_points[0])
            return self.fast(images)

    def _images(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W): the pixels, normalised and on the model's device."""
        return self.preprocess.normalised(pixels.to(self.device)).to(self.dtype)

    def prepare(self, photo: Image.Image) -> Tensor:
        """(height, width, 3): the part of a photograph that the model sees."""
        return self.pixels(self.preprocess.seen(photo))

    @staticmethod
    def pixels(seen: Image.Image) -> Tensor:
        """The image as a tensor. NumPy copies it, because torch's own threads would make those of the models wait."""
        return torch.from_numpy(np.array(seen))

    def answers(self, out: Output, top: int = 5) -> list[dict[str, Any]]:
        """The answer for each image of a batch."""
        static = self.model.static_macs(out.trace)
        macs, depth = self.model.macs(out.trace).tolist(), out.trace.mean_depth.tolist()
        confidence, best = out.logits.float().softmax(-1).topk(min(top, out.logits.shape[-1]))
        return [
            {
                "model": self.name,
                "top": [
                    {"index": i, "label": self.classes[i] if self.classes else str(i), "confidence": round(c, 4)}
                    for i, c in zip(best[n].tolist(), confidence[n].tolist())
                ],
                "depth": round(depth[n], 3),
                "gmacs": round(macs[n] / 1e9, 4),
                "gmacs_static": round(static / 1e9, 4),
                "cost": round(macs[n] / static, 4),
            }
            for n in range(len(out.logits))
        ]

    def explain(self, pixels: Tensor, operating_point: float | None, top: int = 5) -> dict[str, Any]:
        """The answer for one image, with the depth of each of its patches, and times beside the static model's."""
        out, image = self.run(pixels[None], [operating_point]), self._images(pixels[None])
        with torch.inference_mode():  # in turns, so that both meet the same load of the machine
            rounds = [
                (
                    self._timed(lambda: self.run(pixels[None], [operating_point])),
                    self._timed(lambda: self.model.vit(image)),
                )
                for _ in range(ROUNDS)
            ]
        trace, plan = out.trace, self._plan(image, operating_point)
        return self.answers(out, top)[0] | {
            "blocks": trace.blocks,
            "tokens": trace.shape[1],
            "live": trace.counts[:, 0].tolist(),
            "depths": trace.patches[0].tolist(),
            "plan": plan,
            "ms": round(min(adaptive for adaptive, _ in rounds), 2),
            "static_ms": round(min(static for _, static in rounds), 2),
        }

    @torch.inference_mode()
    def _plan(self, image: Tensor, operating_point: float | None) -> list[list[float | None]] | None:
        """The latest depth that was planned for each patch; None for a method without plans.

        The model itself runs here, because the prepared graph of a CPU returns no plans.
        """
        points = None
        if self.model.method.per_image_point and operating_point is not None:
            points = torch.tensor([operating_point], device=self.device)
        trace = self.model(image, "packed", operating_point=points).trace
        if not trace.plans:
            return None
        latest = torch.full(trace.shape, torch.nan, device=self.device)
        for stage in sorted(trace.plans):
            latest = torch.where(trace.plans[stage].isnan(), latest, trace.plans[stage])
        patches = latest[0, trace.prefix :].unflatten(0, trace.grid)
        return [[None if value != value else round(value, 2) for value in row] for row in patches.tolist()]

    def warm(self, most: int) -> None:
        """On a GPU, record graphs for batches of 1, 2, 4... images. Other sizes run in the next larger graph."""
        size = 1
        while size <= most and self.device.type == "cuda":
            pixels = torch.zeros(size, self.preprocess.size, self.preprocess.size, 3, dtype=torch.uint8)
            self.run(pixels, [self.trained] * size)
            size *= 2

    def _timed(self, call: Any) -> float:
        """Milliseconds that the call takes."""
        self._synchronize()
        begin = time.perf_counter()
        call()
        self._synchronize()
        return (time.perf_counter() - begin) * 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def about(self) -> dict[str, Any]:
        """The model in a list of models."""
        shape = self.model.backbone.shape
        return {
            "name": self.name,
            "method": self.method,
            "blocks": shape.blocks,
            "classes": shape.classes,
            "gmacs_static": round(self.model.static_macs() / 1e9, 4),
            "budget": round(self.own_share, 3),
            "least_budget": self.least,
            "promise": promise_of(self.model),  # it holds for the features at the trained operating point
        }


def beside(first: Served, method: Method, name: str) -> Served:
    """The same weights under another method that needs no training."""
    model = adapt(copy.deepcopy(first.model).unwrap(), method)
    model.extra = getattr(first.model, "extra", {})  # type: ignore[assignment]
    return Served(name, model)


def _operating_value(model: AdaptiveViT) -> float | None:
    """The operating point that the model is set to; None: its method has none."""
    return (
        None if model.method.operating_point is None else float(getattr(model.method, model.method.operating_point[0]))
    )


def _table(model: AdaptiveViT, fast: PreparedViT, images: Tensor, points: int) -> list[tuple[float, float]]:
    """Pairs (share of the static cost, operating point), rising in cost, and denser where the cost changes fast.

    The model's own operating point is set again at the end.
    """
    if model.method.operating_point is None:
        return []
    _, cheap, dear = model.method.operating_point
    own = _operating_value(model)
    assert own is not None

    def cost(value: float) -> float:
        set_operating_point(fast, value)
        return float(model.cost(fast(images).trace))

    measured = [(cost(value), value) for value in (cheap, own, dear)]
    for _ in range(points - 3):
        i = max(range(len(measured) - 1), key=lambda i: measured[i + 1][0] - measured[i][0])
        middle = (measured[i][1] + measured[i + 1][1]) / 2
        measured.insert(i + 1, (cost(middle), middle))
    set_operating_point(fast, own)
    rising = [measured[0]]
    for share, value in measured[1:]:
        if share > rising[-1][0]:
            rising.append((share, value))
    return rising
