"""Predictions and embeddings on a cluster, as stages of Ray Data (extra `ray`). This module does not import Ray.

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
    """A stage that loads a checkpoint once per worker and adds columns with the model's output to batches of rows.

    column: its values are encoded images ("bytes", as read_binary_files gives them) or arrays (height, width, 3)
    ("image", as read_images does). The row of a broken image has the reason in `error`; the other rows are computed.
    """

    def __init__(self, model: AdaptiveViT, column: str, device: str | None, details: bool = False) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.column = model.to(self.device), column
        self.fast = self.model.prepare(details=details)
        self.transform = preprocess_of(self.model).eval_transform()

    def images(self, batch: dict[str, Any]) -> tuple[Tensor | None, list[str | None]]:
        """The images that can be read, None if there is none; and for each row its error, or None."""
        if self.column not in batch:
            raise DwindleError(f"The rows have no column '{self.column}'; set column to one of {', '.join(batch)}.")
        read = [self._read(value) for value in batch[self.column]]
        images = [image for image, _ in read if image is not None]
        return torch.stack(images).to(self.device) if images else None, [error for _, error in read]

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
        good = np.array([error is None for error in errors])
        added: dict[str, Any] = {"error": np.array(errors, dtype=object)}
        columns = {} if images is None else features(self.model, self.fast, images, self.patches)
        for name, values in columns.items():
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
        columns = {} if images is None else classify(self.model, self.fast, images, self.names)
        good = np.array([error is None for error in errors])
        broken = {"prediction": -1, "confidence": np.nan, "depth": np.nan, "gmacs": np.nan}
        added: dict[str, Any] = {}
        for name, empty in broken.items():
            added[name] = np.full(len(errors), empty, np.int64 if name == "prediction" else np.float32)
            added[name][good] = columns.get(name, [])
        names = iter(columns.get("name", []))
        added["name"] = np.array([next(names) if ok else None for ok in good], dtype=object)
        for name in ("top5", "top5_confidence", *(["top5_names"] if self.names else [])):
            lists = iter(columns.get(name, []))
            # The None keeps numpy from making a 2-D array of lists of equal length. A broken image's list is empty.
            added[name] = np.array([*(next(lists) if ok else [] for ok in good), None], dtype=object)[:-1]
        added["error"] = np.array(errors, dtype=object)
        return {**batch, **added}
