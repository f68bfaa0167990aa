"""The engine: the whole forward pass, halting decisions included, as one CUDA graph per size of batch.

The loop, the method and the read-out are the model's own; only the layout is `Live`. What cannot be recorded (a method
that asks the host) or does not pay (measured once for each size) runs as the eager packed path, the definition.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.rows import ACTIVATIONS, available
from ..tokens import Packed, Where
from ..trace import Trace
from .block import Ready
from .live import Live

if TYPE_CHECKING:
    from ..model import AdaptiveViT, Output

log = logging.getLogger("dwindle")
GRAPHS = 8  # kept at once, the latest used; each holds the buffers of its batch


class Engine:
    def __init__(self, model: AdaptiveViT) -> None:
        self._model = weakref.ref(model)  # the model owns its engine
        self._paths: OrderedDict[tuple, Callable[[Tensor, Tensor | None], Output]] = OrderedDict()
        self._ready: dict[nn.Module, Ready] | None = None
        self._weights: list[Tensor] = []
        self._version = -1
        self.chosen: dict[tuple, str] = {}  # what was measured, for those who ask

    def __reduce__(self) -> tuple:
        """A copy of the model makes an engine of its own."""
        return type(None), ()

    @property
    def model(self) -> AdaptiveViT:
        model = self._model()
        assert model is not None
        return model

    def __call__(self, images: Tensor, depths: Tensor | None = None) -> Output:
        self._refresh()
        method = self.model.method
        # Plain settings are constants of a recording; tensors are read where they lie.
        settings = tuple(v for v in vars(method).values() if isinstance(v, (bool, int, float, str, tuple)))
        key = (tuple(images.shape), images.dtype, images.device, depths is not None, settings)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._best(images, depths)
            while len(self._paths) > GRAPHS:
                self._paths.popitem(last=False)
        self._paths.move_to_end(key)
        return path(images, depths)

    def _refresh(self) -> None:
        """Weights that were moved or written to since are folded, and recorded, anew."""
        version = _version(self._weights)
        same = self._ready is not None and version == self._version
        if same and all(w is p for w, p in zip(self._weights, self.model.parameters())):
            return
        self._weights = list(self.model.parameters())
        self._version = _version(self._weights)
        self._paths.clear()
        self._ready = prepared(self.model)

    def _best(self, images: Tensor, depths: Tensor | None) -> Callable[[Tensor, Tensor | None], Output]:
        """The faster of the recording and the eager packed path, on these images."""
        assert self._ready is not None

        def eager(images: Tensor, depths: Tensor | None) -> Output:
            return self.model.run(images, Packed.start, depths)

        size = tuple(images.shape)
        if not available(images):
            log.info("engine: no Triton here; %s runs eager, packed", size)
            return eager
        try:
            recorded = Recording(self.model, self._ready, images, depths)
        except RuntimeError as error:  # torch's errors of capturing derive from it
            method, reason = type(self.model.method).__name__, str(error).splitlines()[0]
            log.warning("engine: %s cannot be recorded (%s); %s runs eager, packed", method, reason, size)
            return eager
        spent = {"graph": _milliseconds(partial(recorded, images, depths)), "eager": 0.0}
        spent["eager"] = _milliseconds(partial(eager, images, depths))
        name = min(spent, key=lambda path: spent[path])
        self.chosen[size] = name
        log.info("engine: %s runs as %s (graph %.3f ms, eager %.3f ms)", size, name, spent["graph"], spent["eager"])
        return recorded if name == "graph" else eager


def prepared(model: AdaptiveViT) -> dict[nn.Module, Ready]:
    """The blocks that kernels can run, with their weights folded."""
    ready: dict[nn.Module, Ready] = {}
    foreign = 0
    for block in model.backbone.blocks:
        parts = model.backbone.parts(block)
        if parts is None or parts.act not in ACTIVATIONS or not parts.proj.weight.is_floating_point():
            foreign += 1
            continue
        ready[block] = Ready.of(parts)
    if foreign:
        log.info("engine: %d blocks of %s have no kernels and run whole", foreign, type(model.vit).__name__)
    return ready


class Recording:
    """One forward pass as a CUDA graph: inputs are copied in, results copied out."""

    def __init__(
        self, model: AdaptiveViT, ready: dict[nn.Module, Ready], images: Tensor, depths: Tensor | None
    ) -> None:
        self.images = images.clone()
        self.depths = None if depths is None else depths.to(images.device).clone()
        start = partial(Live.begin, ready=ready)

        def forward() -> None:
            out = model.run(self.images, start, self.depths)
            trace = out.trace
            # One tensor of each kind: what is copied out per call are these, not hundreds of sheets.
            self.out = out
            self.live = torch.stack([where.live_BN for where in trace.lives if where.live_BN is not None])
            self.values = [(depth, name) for depth, values in enumerate(trace.values) for name in values]
            sheets = [trace.values[depth][name].float() for depth, name in self.values]
            self.sheets = torch.stack(sheets) if sheets else None
            self.exits = torch.stack(trace.exits) if trace.exits else None

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled, workspaces made
                forward()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            forward()

    def __call__(self, images: Tensor, depths: Tensor | None = None) -> Output:
        self.images.copy_(images)
        if self.depths is not None and depths is not None:
            self.depths.copy_(depths.view_as(self.depths))
        self.graph.replay()
        old, live = self.out.trace, self.live.clone()
        trace = Trace(old.shape, old.prefix, old.grid, old.blocks)
        trace.lives = [Where(old.shape, live_BN=sheet) for sheet in live]
        trace.values = [{} for _ in live]
        if self.sheets is not None:
            for (depth, name), sheet in zip(self.values, self.sheets.clone()):
                trace.values[depth][name] = sheet
        if self.exits is not None:
            trace.exits = list(self.exits.clone())
        return type(self.out)(self.out.logits.clone(), trace, self.out.features.clone())


def _version(weights: list[Tensor]) -> int:
    """Grows when one is written to; those made in inference mode do not say."""
    return sum(w._version for w in weights if not w.is_inference())


def _milliseconds(call: Callable[[], Any], rounds: int = 5) -> float:
    """The least of a few runs, after one to warm up."""
    spent = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - begin) * 1e3)
    return min(spent[1:])
