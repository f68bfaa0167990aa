"""How close an adapted model's features are to those of the same weights with nothing halted. This needs no labels.

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
from ..runtime.prepared import prepared_or_self

BINS = 20_000  # bins of the histogram of patch cosines from -1 to 1: its quantiles are exact to 1e-4
COMPARED = 10_000  # images at most among which nearest neighbours are searched
LOW = 0.05  # the quantile reported beside each mean


def embedding(model: AdaptiveViT, out: Output) -> Tensor:
    """(B, D): an image's embedding, for an index.

    A model without a head: its output. Else the state after the last norm: that of the class token, or the mean over
    patches where the model pools these.
    """
    if not model.classes:
        return out.logits
    states_BND = model.states(out)
    if model.backbone.read_first is None:
        return states_BND[:, model.backbone.shape.prefix :].mean(1)
    return states_BND[:, 0]


def static_twin(model: AdaptiveViT) -> AdaptiveViT:
    """The same weights with nothing halted, as a model in eval mode."""
    return model.with_method(Static()).eval()


@dataclass
class Agreement:
    """How well a model agrees with its static reference."""

    class_cosine: Tensor  # (n,) cosine of the embeddings
    patch_cosine: Tensor  # (n,) mean over the image's patches
    low: float  # the 5% quantile of the cosines of all patches of all images
    neighbours: float  # share of the images whose nearest neighbour is the same by both models
    same_class: Tensor | None  # (n,) bool; None: the model has no head
    cost: Tensor  # (n,) as a share of the static model's
    gmacs_static: float

    def summary(self) -> dict[str, Any]:
        """Metrics by name, for a table and JSON."""
        metrics = {
            "patch_cosine": float(self.patch_cosine.mean()),
            "patch_q05": self.low,
            "patch_least": float(self.patch_cosine.min()),
            "class_cosine": float(self.class_cosine.mean()),
            "class_q05": float(self.class_cosine.quantile(LOW)),
            "class_least": float(self.class_cosine.min()),
            "neighbours": 100 * self.neighbours,
        }
        if self.same_class is not None:
            metrics["same_class"] = 100 * float(self.same_class.float().mean())
        cost = float(self.cost.mean())
        metrics |= {"cost": cost, "gmacs": cost * self.gmacs_static, "gmacs_static": self.gmacs_static}
        return {name: round(value, 4) for name, value in metrics.items()} | {"images": len(self.cost)}


@dataclass
class Features:
    """A model's output for a batch, as far as fidelity is measured on it."""

    embedding: Tensor  # (B, D)
    patches: Tensor  # (B, P, D) after the last norm
    best: Tensor | None  # (B,) the likeliest class; None: the model has no classes
    macs: Tensor  # (B,)


def feature_extractor(model: AdaptiveViT, fast: Callable[..., Output] | None = None) -> Callable[[Tensor], Features]:
    """A function from images to the model's features. fast: the model prepared with details; None: the model itself."""
    call, prefix = fast or model, model.backbone.shape.prefix

    def extract(images: Tensor) -> Features:
        out = call(images.to(dtype_of(model)))
        best = out.logits.argmax(-1) if model.classes and model.dense_head is None else None
        patches = model.states(out)[:, prefix:].float()
        return Features(embedding(model, out).float(), patches, best, model.macs(out.trace))

    return extract


def check_cosines(patch_cosine: float | None, class_cosine: float | None) -> None:
    """Refuse a wanted cosine that is not between 0 and 1."""
    for name, cosine in (("patch-cosine", patch_cosine), ("class-cosine", class_cosine)):
        if cosine is not None and not 0 < cosine < 1:
            raise DwindleError(f"--{name} {cosine:g}: it is a cosine to the static features, between 0 and 1.")


def cosines(features: Features, reference: Features) -> tuple[Tensor, Tensor]:
    """The cosines of the embeddings (B,) and of the patches (B, P)."""
    if features.patches.shape != reference.patches.shape:
        raise DwindleError(
            f"The features compared are of shape {tuple(features.patches.shape[1:])} and "
            f"{tuple(reference.patches.shape[1:])}; compare models of the same width, patch and image size."
        )
    patches = F.cosine_similarity(features.patches, reference.patches.to(features.patches), dim=-1)
    return F.cosine_similarity(features.embedding, reference.embedding, dim=-1), patches


class Tally:
    """Adds up batches to an `Agreement`."""

    def __init__(self, gmacs_static: float) -> None:
        self.gmacs_static, self.bins = gmacs_static, torch.zeros(BINS)
        self.columns: dict[str, list[Tensor]] = {}
        self.embeddings: tuple[list[Tensor], list[Tensor]] = ([], [])  # the model's, the reference's
        self.kept = 0  # images whose embeddings are kept

    def add(self, features: Features, reference: Features) -> None:
        class_cosine, patches = (values.float().cpu() for values in cosines(features, reference))
        self.bins += patches.flatten().clamp(-1, 1).histc(BINS, -1, 1)  # by rounding a cosine may exceed 1
        columns = {"class": class_cosine, "patch": patches.mean(1), "macs": features.macs.cpu() / 1e9}
        if features.best is not None and reference.best is not None:
            columns["same"] = (features.best == reference.best).cpu()
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)
        if self.kept < COMPARED:
            for embeddings, each in zip(self.embeddings, (features, reference)):
                embeddings.append(each.embedding.cpu())
            self.kept += len(class_cosine)

    def agreement(self) -> Agreement:
        if not self.columns:
            raise DwindleError("There are no images to compare features of: the data is empty; give another.")
        column = {name: torch.cat(values) for name, values in self.columns.items()}
        cumulative = self.bins.cumsum(0) / self.bins.sum()
        own, reference = (torch.cat(embeddings) for embeddings in self.embeddings)
        return Agreement(
            class_cosine=column["class"],
            patch_cosine=column["patch"],
            low=min(2 * float(torch.searchsorted(cumulative, LOW) + 1) / BINS - 1, 1.0),
            neighbours=float((nearest(own) == nearest(reference)).float().mean()),
            same_class=column.get("same"),
            cost=(column["macs"] / self.gmacs_static).float(),
            gmacs_static=self.gmacs_static,
        )


def nearest(embeddings: Tensor) -> Tensor:
    """(n,) the index of each image's nearest neighbour: the other image whose embedding has the highest cosine."""
    rows = F.normalize(embeddings, dim=-1)
    neighbours = []
    for begin in range(0, len(rows), 1024):
        similarity = rows[begin : begin + 1024] @ rows.T
        similarity.diagonal(begin).fill_(-torch.inf)
        neighbours.append(similarity.argmax(1))
    return torch.cat(neighbours)


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
    """The agreement of the model with `static`. None: with its own weights and nothing halted.

    count: how many images `batches` holds in all, where that is known.
    """
    model = model.eval().to(device)
    static = static_twin(model) if static is None else static.eval().to(device)
    extract, reference = (
        feature_extractor(each, prepared_or_self(each, count, details=True)) for each in (model, static)
    )
    tally = Tally(model.static_macs() / 1e9)
    for images in batches:
        images = images.to(device)
        tally.add(extract(images), reference(images))
        if progress:
            progress(len(images))
    return tally.agreement()
