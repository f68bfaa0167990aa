"""Predictions on a cluster, as a stage of Ray Data (extra `ray`). Ray itself is the caller's: nothing imports it here.

images = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
answers = images.map_batches(Classify, fn_constructor_args=["my-aht"], batch_size=64, concurrency=8, num_gpus=1)
answers.drop_columns(["bytes"]).write_parquet("s3://bucket/answers")
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from ..errors import DwindleError
from ..io.classes import class_names
from ..io.images import load_image, preprocess_of
from ..tasks.classify import load_classifier
from .predict import classify


class Classify:
    """Loads a checkpoint once for each worker; adds to a batch of rows what the model says, or why it says nothing.

    column: encoded images ("bytes", as read_binary_files gives them) or arrays (height, width, 3) ("image", as
    read_images does). A broken image has `error` set and a prediction of -1; the others go on.
    """

    def __init__(self, checkpoint: str | os.PathLike, column: str = "bytes", device: str | None = None) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.column = load_classifier(checkpoint).to(self.device), column
        self.fast = self.model.prepare()
        self.transform, self.names = preprocess_of(self.model).eval_transform(), class_names(self.model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.column not in batch:
            raise DwindleError(f"The rows have no column '{self.column}'; set column to one of {', '.join(batch)}.")
        read = [self._read(value) for value in batch[self.column]]
        images = [image for image, _ in read if image is not None]
        told = classify(self.model, self.fast, torch.stack(images).to(self.device), self.names) if images else {}
        good = np.array([image is not None for image, _ in read])
        nothing = {"prediction": -1, "confidence": np.nan, "depth": np.nan, "gmacs": np.nan}
        added: dict[str, Any] = {}
        for name, empty in nothing.items():
            added[name] = np.full(len(read), empty, np.int64 if name == "prediction" else np.float32)
            added[name][good] = told.get(name, [])
        names = iter(told.get("name", []))
        added["name"] = np.array([next(names) if ok else None for ok in good], dtype=object)
        lists_of = ("top5", "top5_confidence", *(["top5_names"] if self.names else []))
        for name in lists_of:  # of one length: rows without an answer hold an empty one
            lists = iter(told.get(name, []))
            added[name] = np.array([*(next(lists) if ok else [] for ok in good), None], dtype=object)[:-1]
        added["error"] = np.array([why for _, why in read], dtype=object)
        return {**batch, **added}

    def _read(self, value: Any) -> tuple[Any, str | None]:
        try:
            return self.transform(load_image(value if isinstance(value, np.ndarray) else bytes(value))), None
        except (DwindleError, OSError, MemoryError, TypeError, ValueError) as error:
            return None, str(error) or type(error).__name__
