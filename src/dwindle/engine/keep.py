"""What keeping recordings of a model takes: memory they share, a look whether it changed, what capturing raises."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

GRAPHS = 8  # recordings kept at once, the latest used; each is a graph, with early exit several
Model = TypeVar("Model", bound=nn.Module)


class Keeper(Generic[Model]):
    """Recordings of a model, in one memory that they work in one at a time."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)  # the model owns its keeper
        self.turn = threading.Lock()
        self._memory: Any = None

    def __reduce__(self) -> tuple:
        """A copy of the model makes a keeper of its own."""
        return type(None), ()

    @property
    def model(self) -> Model:
        model = self._model()
        assert model is not None
        return model

    @property
    def pool(self) -> Any:
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        return self._memory


class Watch:
    """Notices that modules or tensors of a model were exchanged or moved, and that those of `folded` were written to:
    what was made from these is no longer right."""

    def __init__(self, model: nn.Module, folded: nn.Module | None = None) -> None:
        tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._modules, m._parameters, m._buffers)]
        self._filled, self._bare = [t for t in tables if t], [t for t in tables if not t]
        self._held = list(self._entries())
        self._tensors = [*model.parameters(), *model.buffers()]
        modules = [] if folded is None else folded.modules()
        weights = (w for m in modules for t in (m._parameters, m._buffers) for w in t.values())
        self._weights = [w for w in weights if w is not None and not w.is_inference()]
        self._seen = self._state()

    def changed(self) -> bool:
        """Asked at every call, and all loops are C's: one image on a slow host waits for this."""
        return (
            any(self._bare)
            or sum(map(len, self._filled)) != len(self._held)
            or not all(map(is_, self._entries(), self._held))
            or self._state() != self._seen
        )

    def _entries(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._filled))

    def _state(self) -> tuple[list[int], list[int]]:
        return list(map(Tensor.data_ptr, self._tensors)), list(map(attrgetter("_version"), self._weights))


def refusals() -> tuple[type[Exception], ...]:
    """torch's errors of capturing derive from the first; a kernel that does not fit the chip raises the second."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)
