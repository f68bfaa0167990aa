"""What all recordings of a model share: their memory pool, a lock, and the errors that capturing raises."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import nn

GRAPHS = 8  # recordings that are kept, the latest used; each is one graph, with early exit several
Model = TypeVar("Model", bound=nn.Module)


class Keeper(Generic[Model]):
    """The base of what keeps a model's recordings. They share one memory pool, so they run one at a time (`lock`)."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)  # the owner of the keeper owns the model too
        self.lock = threading.Lock()
        self._pool: Any = None

    @property
    def model(self) -> Model:
        model = self._model()
        assert model is not None
        return model

    @property
    def pool(self) -> Any:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool


def capture_errors() -> tuple[type[Exception], ...]:
    """The errors by which capturing can fail: torch's, and Triton's for a kernel that does not fit the chip."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)
