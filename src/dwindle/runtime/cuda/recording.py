"""A forward pass as a CUDA graph."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.model import Output
from ...core.tokens import Where
from ...core.trace import Trace
from ...ops.patches import cut_by_matmul
from ...ops.rows import Rows
from .block import Ready
from .listed import Listed

if TYPE_CHECKING:
    from ...core.model import AdaptiveViT


class Recording:
    """One forward pass as a CUDA graph: inputs that do not lie there yet are copied in, results copied out."""

    def __init__(
        self,
        model: AdaptiveViT,
        ready: dict[nn.Module, Ready],
        images: Tensor,
        depths: Tensor | None,
        operating_point: Tensor | None,
        pool: Any,
        turn: threading.Lock,
    ) -> None:
        """pool, turn: memory that all recordings of a model work in, one at a time."""
        self.turn = turn
        self.most = self.count = len(images)  # images there can be, and are
        with torch.inference_mode(False):  # calls in either mode will copy into them
            self.inputs = [
                None if x is None else x.to(images.device).clone() for x in (images, depths, operating_point)
            ]
        self.held = held(model), ready
        self.present: tuple[Tensor, Rows] | None = None

        def start(x_BND: Tensor, prefix: int) -> Listed:
            self.present = self.present or everyone(x_BND.shape[0], x_BND.shape[1], x_BND.device)
            return Listed.begin(x_BND, prefix, ready, *self.present)

        def forward() -> None:
            images, depths, operating_point = self.inputs
            assert images is not None
            with cut_by_matmul(model.vit):
                out = model.run(images, start, depths, operating_point)
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

        with torch.inference_mode(False), torch.no_grad():
            self.graph = captured(forward, pool)
        ends = list(accumulate(map(len, self.pieces)))
        self.spans = list(zip([0, *ends], ends))
        self.place = self.order.index(0)  # of the logits

    def __call__(self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None) -> Output:
        count = len(images)
        with self.turn:
            held = [place if count == self.most else place[:count] for place in self.inputs if place is not None]
            given = [x for x in (images, depths, operating_point) if x is not None]
            foreign = [i for i, x in enumerate(given) if not _same_place(x, held[i])]
            if foreign:  # one call for all: on a slow host each is felt
                torch._foreach_copy_([held[i] for i in foreign], [given[i] for i in foreign])
            if count != self.count:
                self._admit(count)
            self.graph.replay()
            features = self.out.features if count == self.most else self.out.features[:count]
            return Recalled(self, count, self.flat.clone(), features.clone())

    def _admit(self, count: int) -> None:
        """Only the first images are there; the others have no live row, and no kernel computes them."""
        assert self.present is not None
        live, rows = self.present
        live.zero_()[:count] = True
        every = torch.arange(self.most + 1, dtype=torch.int32, device=live.device) * live.shape[1]
        rows.starts.copy_(every.clamp_max_(count * live.shape[1]))
        self.count = count

    def part(self, flat: Tensor, i: int) -> Tensor:
        (begin, end), (dtype, shape) = self.spans[i], self.kinds[i]
        return flat[begin:end].view(dtype).view(shape)

    def finite(self) -> bool:
        """Whether the answers just given are numbers. Waits for them."""
        return math.isfinite(self.total.item())


def _same_place(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.stride() == y.stride())


def everyone(images: int, count: int, device: torch.device) -> tuple[Tensor, Rows]:
    """How a forward pass begins: all rows live, dense (B, N) and as a list."""
    live = torch.ones(images, count, dtype=torch.bool, device=device)
    every = torch.arange(images * count, dtype=torch.int32, device=device)
    return live, Rows(every, torch.arange(0, images * count + 1, count, dtype=torch.int32, device=device))


class Recalled(Output):
    """An output that is taken apart when somebody asks: most callers want the answer only."""

    def __init__(self, recording: Recording, count: int, flat: Tensor, features: Tensor) -> None:
        self._made, self._count, self._flat, self.features = recording, count, flat, features
        self.logits = recording.part(flat, recording.place)[:count]

    def __getattr__(self, name: str) -> Any:
        if name != "trace":
            raise AttributeError(name)
        made = self._made
        parts: list[Any] = [None] * len(made.order)
        for i, whose in enumerate(made.order):
            parts[whose] = made.part(self._flat, i)[: self._count]
        like, answers = made.out.trace, len(made.out.trace.exits)
        trace = self.trace = Trace((self._count, like.shape[1]), like.prefix, like.grid, like.blocks, whole=like.whole)
        trace.exits = parts[1 : 1 + answers]
        trace.lives = [Where(trace.shape, live_BN=live) for live in parts[-len(like.lives) :]]
        trace.values = [{} for _ in trace.lives]
        for (depth, what), dense_rows in zip(made.names, parts[1 + answers :]):
            trace.values[depth][what] = dense_rows
        return trace

    def __reduce__(self) -> tuple:
        return Output, (self.logits, self.trace, self.features)


def held(model: nn.Module) -> list[Tensor]:
    """What a graph reads lies where it was recorded, until the last replay, also if the model was moved: for who keeps
    the graph to keep."""
    return [w.data for w in (*model.parameters(), *model.buffers())]


def autocast_as_now() -> Callable[[], AbstractContextManager]:
    """The caller's autocast, for what is recorded. Weights it keeps in bf16 are gone with its context: each replay
    makes its own."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return partial(torch.autocast, "cuda", dtype, enabled, cache_enabled=False)


def captured(call: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph."""
    aside = torch.cuda.Stream()  # where gradients are first accumulated they are later: try out and record on one
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # kernels are compiled, workspaces made
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace per stream, which others clear: this graph shall have its own, in its own memory.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool, stream=aside):
        call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph
