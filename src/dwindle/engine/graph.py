"""The engine: the whole forward pass, halting decisions included, as one CUDA graph per size of batch.

The loop, the method and the read-out are the model's own; only the layout is `Live`. What cannot be recorded (a method
that asks the host) or does not pay (measured once for each size) runs as the eager packed path, the definition.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.rows import ACTIVATIONS, available
from ..tokens import Packed, Where
from ..trace import Trace
from .block import Ready
from .live import Live, everyone

if TYPE_CHECKING:
    from ..model import AdaptiveViT, Output

Path = Callable[[Tensor, "Tensor | None"], "Output"]
log = logging.getLogger("dwindle")
GRAPHS = 8  # kept at once, the latest used


class Engine:
    def __init__(self, model: AdaptiveViT) -> None:
        self._model = weakref.ref(model)  # the model owns its engine
        self._paths: OrderedDict[tuple, Path] = OrderedDict()  # by size and setting
        self._latest: dict[tuple, Path] = {}  # of each size, and the setting it is for
        self._set: dict[tuple, tuple] = {}
        self._ready: dict[nn.Module, Ready] = {}
        self._children: list[dict[str, Any]] = []  # tables of modules and of tensors, looked through at every call
        self._weights: list[dict[str, Any]] = []
        self._settings: list[dict[str, Any]] = []
        self._folded: tuple = ()
        self._pool: Any = None
        self._turn = threading.Lock()
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
        size = (images.shape, images.dtype, depths is None)
        path = self._latest.get(size)
        out = None if path is None else path(images, depths)
        # While the GPU is at work: were settings changed, weights written to, moved or exchanged since?
        if out is None or self._state() != self._folded or self._setting() != self._set[size]:
            self.model.check_images(images)
            path = self._renewed(size, images, depths)
            out = path(images, depths)
        if isinstance(path, Recording) and self.model.checks and not path.finite():
            self.model.check_logits(out.logits, images)
        return out

    def _renewed(self, size: tuple, images: Tensor, depths: Tensor | None) -> Path:
        state = self._state(afresh=True)
        if state != self._folded:
            self._paths.clear()
            self._latest.clear()
            self._folded, self._ready = state, prepared(self.model)
        setting = self._setting()
        path = self._paths.pop((size, setting), None) or self._best(images, depths)
        self._paths[size, setting] = self._latest[size] = path
        self._set[size] = setting
        while len(self._paths) > GRAPHS:
            (old, _), dropped = self._paths.popitem(last=False)
            if self._latest.get(old) is dropped:
                del self._latest[old]
        return path

    def _setting(self) -> tuple:
        """The method's plain settings, constants of a recording; its tensors are read where they lie."""
        return tuple([v for v in vars(self.model.method).values() if isinstance(v, (bool, int, float, str, tuple))])

    def _state(self, afresh: bool = False) -> tuple:
        """Which modules there are, where every weight lies and, of the backbone's, how often it was written to."""
        if afresh:
            modules, unfolded = list(self.model.modules()), set(self.model.method.modules())
            self._children = [m._modules for m in modules]
            self._weights = [t for m in modules for t in (m._parameters, m._buffers) if t and m not in unfolded]
            self._settings = [t for m in unfolded for t in (m._parameters, m._buffers) if t]
        return (
            [id(child) for table in self._children for child in table.values()],
            [
                (w.data_ptr(), 0 if w.is_inference() else w._version)
                for table in self._weights
                for w in table.values()
                if w is not None
            ],
            [w.data_ptr() for table in self._settings for w in table.values() if w is not None],
        )

    def _best(self, images: Tensor, depths: Tensor | None) -> Path:
        """The faster of the recording and the eager packed path, on these images."""
        from ..bench import milliseconds

        def eager(images: Tensor, depths: Tensor | None) -> Output:
            return self.model.run(images, Packed.start, depths)

        size = tuple(images.shape)
        if not available(images):
            log.info("engine: no Triton here; %s runs eager, packed", size)
            return eager
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            recorded = Recording(self.model, self._ready, images, depths, self._pool, self._turn)
        except RuntimeError as error:  # torch's errors of capturing derive from it
            method, reason = type(self.model.method).__name__, str(error).splitlines()[0]
            log.warning("engine: %s cannot be recorded (%s); %s runs eager, packed", method, reason, size)
            return eager
        calls = {"graph": partial(recorded, images, depths), "eager": partial(eager, images, depths)}
        times = milliseconds(list(calls.values()), 0.0, images.device)
        spent = {path: min(rounds) for path, rounds in zip(calls, times)}
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
        self,
        model: AdaptiveViT,
        ready: dict[nn.Module, Ready],
        images: Tensor,
        depths: Tensor | None,
        pool: Any,
        turn: threading.Lock,
    ) -> None:
        """pool, turn: memory that all recordings of a model work in, one at a time."""
        self.turn = turn
        self.images = images.clone()
        self.depths = None if depths is None else depths.to(images.device).clone()
        # The graph reads weights where they lie: they stay there until its last replay, also if the model was moved.
        self.held = [w.data for w in (*model.parameters(), *model.buffers())]
        start = partial(Live.begin, ready=ready)

        def forward() -> None:
            with cut_by_matmul(model.vit):
                out = model.run(self.images, start, self.depths)
            self.total = out.logits.sum(dtype=torch.float32)  # finite if they all are
            trace = out.trace
            # One tensor of each kind: what is copied out per call are these, not hundreds of sheets.
            self.out = out
            self.live = torch.stack([where.live_BN for where in trace.lives if where.live_BN is not None])
            self.names = [(depth, name) for depth, values in enumerate(trace.values) for name in values]
            sheets = [trace.values[depth][name].float() for depth, name in self.names]
            self.sheets = torch.stack(sheets) if sheets else None
            self.exits = torch.stack(trace.exits) if trace.exits else None

        self.graph = captured(forward, pool)
        self.begun = everyone(*self.out.trace.shape, images.device)

    def __call__(self, images: Tensor, depths: Tensor | None = None) -> Output:
        with self.turn:
            self.images.copy_(images, non_blocking=True)
            if self.depths is not None and depths is not None:
                self.depths.copy_(depths.view_as(self.depths), non_blocking=True)
            self.graph.replay()
            parts = [None if part is None else part.clone() for part in (self.live, self.sheets, self.exits)]
            trace = Recalled(self.out.trace, self.names, *parts)
            return type(self.out)(self.out.logits.clone(), trace, self.out.features.clone())

    def finite(self) -> bool:
        """Whether the answers just given are numbers. Waits for them."""
        return math.isfinite(self.total.item())


class Recalled(Trace):
    """A trace that is taken apart into blocks when somebody asks: most callers want the answer only."""

    def __init__(
        self,
        like: Trace,
        names: list[tuple[int, str]],
        live: Tensor | None,
        sheets: Tensor | None,
        exits: Tensor | None,
    ) -> None:
        self.shape, self.prefix, self.grid, self.blocks = like.shape, like.prefix, like.grid, like.blocks
        self._parts = (names, live, sheets, exits)

    def __getattr__(self, name: str) -> Any:
        if name not in ("lives", "values", "exits"):
            raise AttributeError(name)
        names, live, sheets, exits = self._parts
        assert live is not None
        self.lives = [Where(self.shape, live_BN=sheet) for sheet in live.unbind()]
        self.values = [{} for _ in self.lives]
        for (depth, what), sheet in zip(names, () if sheets is None else sheets.unbind()):
            self.values[depth][what] = sheet
        self.exits = [] if exits is None else list(exits.unbind())
        return getattr(self, name)


@contextmanager
def cut_by_matmul(vit: nn.Module) -> Iterator[None]:
    """Within, patches are cut by one copy and embedded by one matrix product: a convolution that steps by its own size
    is that, and cuDNN's takes many times as long."""
    cutters = [m for m in vit.modules() if isinstance(m, nn.Conv2d) and _only_cuts(m)]
    for cutter in cutters:
        cutter.forward = MethodType(_cut, cutter)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cutter in cutters:
            del cutter.forward


def _only_cuts(conv: nn.Conv2d) -> bool:
    plain = conv.groups == 1 and tuple(conv.dilation) == (1, 1) and tuple(conv.padding) == (0, 0)
    return plain and tuple(conv.kernel_size) == tuple(conv.stride) and "forward" not in conv.__dict__


def _cut(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, D, h, w), its memory in the order of tokens."""
    (high, wide), (batch, channels) = conv.kernel_size, images.shape[:2]
    rows, columns = images.shape[2] // high, images.shape[3] // wide
    pieces = images[..., : rows * high, : columns * wide].reshape(batch, channels, rows, high, columns, wide)
    pieces = pieces.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, columns, -1)
    return F.linear(pieces, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def captured(call: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # kernels are compiled, workspaces made
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace per stream, which others clear: this graph shall have its own, in its own memory.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool):
        call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph
