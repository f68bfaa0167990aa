"""How close an adapted model's features are to those of the same weights with nothing halted. No labels are asked for.

B images, N tokens per image, P patches, D width, n images in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.model import AdaptiveViT, Output
from ..errors import DwindleError
from ..methods.static import Static
from ..runtime.dtypes import dtype_of
from ..runtime.prepared import quickest

BINS = 20_000  # of the cosines of all patches, from -1 to 1: their quantile is exact to 1e-4
COMPARED = 10_000  # images among which nearest neighbours are looked for
LOW = 0.05  # the quantile told beside a mean


def embedding(model: AdaptiveViT, out: Output) -> Tensor:
    """(B, D): what an index keeps of an image. The answer of a model without a head; else the class token's state after
    the last norm, or the mean of its patches' where the model reads those.
    """
    if not model.classes:
        return out.logits
    states_BND = model.states(out)
    if model.backbone.read_first is None:
        return states_BND[:, model.backbone.shape.prefix :].mean(1)
    return states_BND[:, 0]


def static_twin(model: AdaptiveViT) -> AdaptiveViT:
    """The same weights with nothing halted."""
    return model.with_method(Static()).eval()


@dataclass
class Agreement:
    """Of each image, and of all patches."""

    class_cosine: Tensor  # (n,)
    patch_cosine: Tensor  # (n,) mean over the image's patches
    low: float  # the 5% quantile of the cosines of all patches of all images
    neighbours: float  # share of the images whose nearest other image is the same one
    same_class: Tensor | None  # (n,) bool; None: the model has no head
    cost: Tensor  # (n,) as a share of the static model's
    gmacs_static: float

    def summary(self) -> dict[str, Any]:
        """Numbers by name, for a table and JSON."""
        told = {
            "patch_cosine": float(self.patch_cosine.mean()),
            "patch_q05": self.low,
            "patch_least": float(self.patch_cosine.min()),
            "class_cosine": float(self.class_cosine.mean()),
            "class_q05": float(self.class_cosine.quantile(LOW)),
            "class_least": float(self.class_cosine.min()),
            "neighbours": 100 * self.neighbours,
        }
        if self.same_class is not None:
            told["same_class"] = 100 * float(self.same_class.float().mean())
        cost = float(self.cost.mean())
        told |= {"cost": cost, "gmacs": cost * self.gmacs_static, "gmacs_static": self.gmacs_static}
        return {name: round(value, 4) for name, value in told.items()} | {"images": len(self.cost)}


@dataclass
class Features:
    """What a model says of a batch."""

    embedding: Tensor  # (B, D)
    patches: Tensor  # (B, P, D) after the last norm
    best: Tensor | None  # (B,) the likeliest class
    macs: Tensor  # (B,)


Asked = Callable[[Tensor], Features]


def asking(model: AdaptiveViT, fast: Callable[..., Output] | None = None) -> Asked:
    """The model's features of images. fast: a copy that answers with its details."""
    call, prefix = fast or model, model.backbone.shape.prefix

    def ask(images: Tensor) -> Features:
        out = call(images.to(dtype_of(model)))
        best = out.logits.argmax(-1) if model.classes and model.dense_head is None else None
        patches = model.states(out)[:, prefix:].float()
        return Features(embedding(model, out).float(), patches, best, model.macs(out.trace))

    return ask


def cosines(found: Features, wanted: Features) -> tuple[Tensor, Tensor]:
    """Of embeddings (B,) and of patches (B, P)."""
    if found.patches.shape != wanted.patches.shape:
        raise DwindleError(
            f"The features compared are of shape {tuple(found.patches.shape[1:])} and "
            f"{tuple(wanted.patches.shape[1:])}; compare models of the same width, patch and image size."
        )
    patches = F.cosine_similarity(found.patches, wanted.patches.to(found.patches), dim=-1)
    return F.cosine_similarity(found.embedding, wanted.embedding, dim=-1), patches


class Tally:
    """Adds batches up to an `Agreement`."""

    def __init__(self, gmacs_static: float) -> None:
        self.gmacs_static, self.bins = gmacs_static, torch.zeros(BINS)
        self.columns: dict[str, list[Tensor]] = {}
        self.embeddings: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.held = 0

    def add(self, found: Features, wanted: Features) -> None:
        whole, patches = (values.float().cpu() for values in cosines(found, wanted))
        self.bins += patches.flatten().clamp(-1, 1).histc(BINS, -1, 1)  # rounding leaves cosines beyond 1
        columns = {"class": whole, "patch": patches.mean(1), "macs": found.macs.cpu() / 1e9}
        if found.best is not None and wanted.best is not None:
            columns["same"] = (found.best == wanted.best).cpu()
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)
        if self.held < COMPARED:
            for kept, features in zip(self.embeddings, (found, wanted)):
                kept.append(features.embedding.cpu())
            self.held += len(whole)

    def agreement(self) -> Agreement:
        if not self.columns:
            raise DwindleError("There are no images to compare features of: the data is empty; give another.")
        column = {name: torch.cat(values) for name, values in self.columns.items()}
        upto = self.bins.cumsum(0) / self.bins.sum()
        found, wanted = (torch.cat(kept) for kept in self.embeddings)
        return Agreement(
            class_cosine=column["class"],
            patch_cosine=column["patch"],
            low=min(2 * float(torch.searchsorted(upto, LOW) + 1) / BINS - 1, 1.0),
            neighbours=float((nearest(found) == nearest(wanted)).float().mean()),
            same_class=column.get("same"),
            cost=(column["macs"] / self.gmacs_static).float(),
            gmacs_static=self.gmacs_static,
        )


def nearest(embeddings: Tensor) -> Tensor:
    """(n,) which other image's embedding has the highest cosine."""
    rows = F.normalize(embeddings, dim=-1)
    found = []
    for begin in range(0, len(rows), 1024):
        alike = rows[begin : begin + 1024] @ rows.T
        alike.diagonal(begin).fill_(-torch.inf)
        found.append(alike.argmax(1))
    return torch.cat(found)


@torch.inference_mode()
def agreement(
    model: AdaptiveViT,
    batches: Iterable[Tensor],
    static: AdaptiveViT | None = None,
    *,
    count: int | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Agreement:
    """Of the model with `static`, by itself its own weights with nothing halted. count: how many images there are."""
    model = model.eval().to(device)
    static = static_twin(model) if static is None else static.eval().to(device)
    asked, wanted = (asking(each, quickest(each, count, details=True)) for each in (model, static))
    tally = Tally(model.static_macs() / 1e9)
    for images in batches:
        images = images.to(device)
        tally.add(asked(images), wanted(images))
        if progress:
            progress(len(images))
    return tally.agreement()
