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
from itertools import accumulate, chain
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import Output
from ..ops.rows import ACTIVATIONS, available
from ..tokens import Packed, Where
from ..trace import Trace
from .block import Ready
from .live import Live, everyone

if TYPE_CHECKING:
    from ..model import AdaptiveViT

Path = Callable[[Tensor, "Tensor | None"], Output]
log = logging.getLogger("dwindle")
GRAPHS = 8  # kept at once, the latest used


class Engine:
    def __init__(self, model: AdaptiveViT) -> None:
        self._model = weakref.ref(model)  # the model owns its engine
        self._paths: OrderedDict[tuple, Path] = OrderedDict()  # by size and setting
        self._latest: dict[tuple, Path] = {}  # of each size, and the setting it is for
        self._set: dict[tuple, tuple] = {}
        self._ready: dict[nn.Module, Ready] = {}
        self._tables: list[dict[str, Any]] = []  # of modules, parameters and buffers
        self._tensors: list[Tensor] = []
        self._weights: list[Tensor] = []  # those that are folded into others
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
        """Which modules and tensors there are, where these lie and how often the backbone's were written to. Asked at
        every call, and all loops are C's."""
        if afresh:
            modules, folded = list(self.model.modules()), list(self.model.vit.modules())
            self._tables = [t for m in modules for t in (m._modules, m._parameters, m._buffers)]
            self._tensors = [*self.model.parameters(), *self.model.buffers()]
            weights = (w for m in folded for t in (m._parameters, m._buffers) for w in t.values())
            self._weights = [w for w in weights if w is not None and not w.is_inference()]
        return (
            list(map(id, chain.from_iterable(map(dict.values, self._tables)))),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(attrgetter("_version"), self._weights)),
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
        except refusals() as error:
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


def refusals() -> tuple[type[Exception], ...]:
    """torch's errors of capturing derive from the first; a kernel that does not fit the chip raises the second."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return (RuntimeError, TritonError)


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
            self.out, trace = out, out.trace
            self.names = [(depth, name) for depth, values in enumerate(trace.values) for name in values]
            sheets = [trace.values[depth][name].float() for depth, name in self.names]
            lives = [where.live_BN for where in trace.lives if where.live_BN is not None]
            # The small things lie in one piece, copied out by one copy; the widest first, so that all are aligned.
            parts = [out.logits, *trace.exits, *sheets, *lives]
            self.order = sorted(range(len(parts)), key=lambda i: -parts[i].element_size())
            self.pieces = [parts[i].contiguous().flatten().view(torch.uint8) for i in self.order]
            self.kinds = [(parts[i].dtype, parts[i].shape) for i in self.order]
            self.flat = torch.cat(self.pieces)

        self.graph = captured(forward, pool)
        self.begun = everyone(*self.out.trace.shape, images.device)
        ends = list(accumulate(map(len, self.pieces)))
        self.spans = list(zip([0, *ends], ends))
        self.place = self.order.index(0)  # of the logits

    def __call__(self, images: Tensor, depths: Tensor | None = None) -> Output:
        with self.turn:
            self.images.copy_(images, non_blocking=True)
            if depths is not None and self.depths is not None:
                self.depths.copy_(depths.view_as(self.depths), non_blocking=True)
            self.graph.replay()
            return Recalled(self, self.flat.clone(), self.out.features.clone())

    def part(self, flat: Tensor, i: int) -> Tensor:
        (begin, end), (dtype, shape) = self.spans[i], self.kinds[i]
        return flat[begin:end].view(dtype).view(shape)

    def finite(self) -> bool:
        """Whether the answers just given are numbers. Waits for them."""
        return math.isfinite(self.total.item())


class Recalled(Output):
    """An output that is taken apart when somebody asks: most callers want the answer only."""

    def __init__(self, recording: Recording, flat: Tensor, features: Tensor) -> None:
        self._recording, self._flat, self.features = recording, flat, features
        self.logits = recording.part(flat, recording.place)

    def __getattr__(self, name: str) -> Any:
        if name != "trace":
            raise AttributeError(name)
        made = self._recording
        parts: list[Any] = [None] * len(made.order)
        for i, whose in enumerate(made.order):
            parts[whose] = made.part(self._flat, i)
        like, answers = made.out.trace, len(made.out.trace.exits)
        trace = self.trace = Trace(like.shape, like.prefix, like.grid, like.blocks)
        trace.exits = parts[1 : 1 + answers]
        trace.lives = [Where(like.shape, live_BN=live) for live in parts[-len(like.lives) :]]
        trace.values = [{} for _ in trace.lives]
        for (depth, what), sheet in zip(made.names, parts[1 + answers :]):
            trace.values[depth][what] = sheet
        return trace

    def __reduce__(self) -> tuple:
        return Output, (self.logits, self.trace, self.features)


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
