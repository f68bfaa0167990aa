"""What keeping recordings of a model takes: memory they share, and what capturing raises."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import nn

GRAPHS = 8  # recordings kept at once, the latest used; each is a graph, with early exit several
Model = TypeVar("Model", bound=nn.Module)


class Keeper(Generic[Model]):
    """Recordings of a model, in one memory that they work in one at a time."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)  # whoever made the keeper owns both
        self.turn = threading.Lock()
        self._memory: Any = None

    @property
    def model(self) -> Model:
        model = self._model()
        assert model is not None
        return model

    @property
    def pool(self) -> Any:
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        return self._memory


def refusals() -> tuple[type[Exception], ...]:
    """torch's errors of capturing derive from the first; a kernel that does not fit the chip raises the second."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)
