"""Predictions and embeddings on a cluster, as stages of Ray Data (extra `ray`). Nothing here imports Ray: callers do.

images = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
answers = images.map_batches(Classify, fn_constructor_args=["my-aht"], batch_size=64, concurrency=8, num_gpus=1)
answers.drop_columns(["bytes"]).write_parquet("s3://bucket/answers")
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..io.checkpoint import load_as
from ..io.classes import class_names
from ..io.images import load_image, preprocess_of
from ..tasks.classify import load_classifier
from .embed import features
from .predict import classify


class Stage:
    """Loads a checkpoint once for each worker; adds to a batch of rows what the model says, or why it says nothing.

    column: encoded images ("bytes", as read_binary_files gives them) or arrays (height, width, 3) ("image", as
    read_images does). A broken image has `error` set; the others go on.
    """

    def __init__(self, model: AdaptiveViT, column: str, device: str | None, details: bool = False) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.column = model.to(self.device), column
        self.fast = self.model.prepare(details=details)
        self.transform = preprocess_of(self.model).eval_transform()

    def images(self, batch: dict[str, Any]) -> tuple[Tensor | None, list[str | None]]:
        """Those that can be read, and what is wrong with each, if anything."""
        if self.column not in batch:
            raise DwindleError(f"The rows have no column '{self.column}'; set column to one of {', '.join(batch)}.")
        read = [self._read(value) for value in batch[self.column]]
        images = [image for image, _ in read if image is not None]
        return torch.stack(images).to(self.device) if images else None, [why for _, why in read]

    def _read(self, value: Any) -> tuple[Any, str | None]:
        try:
            return self.transform(load_image(value if isinstance(value, np.ndarray) else bytes(value))), None
        except (DwindleError, OSError, MemoryError, TypeError, ValueError) as error:
            return None, str(error) or type(error).__name__


class Embed(Stage):
    """Adds `embedding`, `depth` and `gmacs`; NaN where an image is broken. patches: `patches` too, float16 (P * D)."""

    def __init__(
        self, checkpoint: str | os.PathLike, column: str = "bytes", device: str | None = None, patches: bool = False
    ) -> None:
        super().__init__(load_as(AdaptiveViT, checkpoint), column, device, details=True)
        self.patches = patches

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images, errors = self.images(batch)
        good = np.array([why is None for why in errors])
        added: dict[str, Any] = {"error": np.array(errors, dtype=object)}
        told = {} if images is None else features(self.model, self.fast, images, self.patches)
        for name, values in told.items():
            rows = np.stack(values)
            added[name] = np.full((len(good), *rows.shape[1:]), np.nan, np.float16 if name == "patches" else np.float32)
            added[name][good] = rows
        return {**batch, **added}


class Classify(Stage):
    """Adds `prediction`, `name`, `confidence`, `top5`, `depth` and `gmacs`; a broken image's prediction is -1."""

    def __init__(self, checkpoint: str | os.PathLike, column: str = "bytes", device: str | None = None) -> None:
        super().__init__(load_classifier(checkpoint), column, device)
        self.names = class_names(self.model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images, errors = self.images(batch)
        told = {} if images is None else classify(self.model, self.fast, images, self.names)
        good = np.array([why is None for why in errors])
        nothing = {"prediction": -1, "confidence": np.nan, "depth": np.nan, "gmacs": np.nan}
        added: dict[str, Any] = {}
        for name, empty in nothing.items():
            added[name] = np.full(len(errors), empty, np.int64 if name == "prediction" else np.float32)
            added[name][good] = told.get(name, [])
        names = iter(told.get("name", []))
        added["name"] = np.array([next(names) if ok else None for ok in good], dtype=object)
        lists_of = ("top5", "top5_confidence", *(["top5_names"] if self.names else []))
        for name in lists_of:  # of one length: rows without an answer hold an empty one
            lists = iter(told.get(name, []))
            added[name] = np.array([*(next(lists) if ok else [] for ok in good), None], dtype=object)[:-1]
        added["error"] = np.array(errors, dtype=object)
        return {**batch, **added}
