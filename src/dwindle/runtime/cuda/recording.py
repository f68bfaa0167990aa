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
from .block import FoldedBlock
from .listed import Listed

if TYPE_CHECKING:
    from ...core.model import AdaptiveViT


class Recording:
    """One forward pass as a CUDA graph. A call copies its inputs to the graph's memory, and the outputs out of it."""

    def __init__(
        self,
        model: AdaptiveViT,
        folded: dict[nn.Module, FoldedBlock],
        images: Tensor,
        depths: Tensor | None,
        operating_point: Tensor | None,
        pool: Any,
        lock: threading.Lock,
    ) -> None:
        """pool, lock: the memory that all recordings of a model share, and the lock so that one of them runs at a time.

        images, depths, operating_point: of the largest batch that the recording can run.
        """
        self.lock = lock
        self.most = self.count = len(images)  # the images that it can run, and those of the latest call
        with torch.inference_mode(False):  # calls in inference mode and outside of it copy into these tensors
            self.inputs = [
                None if x is None else x.to(images.device).clone() for x in (images, depths, operating_point)
            ]
        self.held = held(model), folded
        self.present: tuple[Tensor, Rows] | None = None

        def start(x_BND: Tensor, prefix: int) -> Listed:
            self.present = self.present or everyone(x_BND.shape[0], x_BND.shape[1], x_BND.device)
            return Listed.begin(x_BND, prefix, folded, *self.present)

        def forward() -> None:
            images, depths, operating_point = self.inputs
            assert images is not None
            with cut_by_matmul(model.vit):
                out = model.run(images, start, depths, operating_point)
            self.total = out.logits.sum(dtype=torch.float32)  # finite if all logits are
            self.out, trace = out, out.trace
            self.names = [(depth, name) for depth, values in enumerate(trace.values) for name in values]
            values = [trace.values[depth][name].float() for depth, name in self.names]
            lives = [where.live_BN for where in trace.lives if where.live_BN is not None]
            # All small outputs are packed into one tensor, so that one copy suffices. The widest elements come first,
            # so that all parts are aligned.
            parts = [out.logits, *trace.exits, *values, *lives]
            self.order = sorted(range(len(parts)), key=lambda i: -parts[i].element_size())
            self.pieces = [parts[i].contiguous().flatten().view(torch.uint8) for i in self.order]
            self.kinds = [(parts[i].dtype, parts[i].shape) for i in self.order]
            self.flat = torch.cat(self.pieces)

        with torch.inference_mode(False), torch.no_grad():
            self.graph = captured(forward, pool)
        ends = list(accumulate(map(len, self.pieces)))
        self.spans = list(zip([0, *ends], ends))
        self.logits_at = self.order.index(0)  # the part that is the logits

    def __call__(self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None) -> Output:
        count = len(images)
        with self.lock:
            targets = [x if count == self.most else x[:count] for x in self.inputs if x is not None]
            sources = [x for x in (images, depths, operating_point) if x is not None]
            to_copy = [i for i, x in enumerate(sources) if not _same_memory(x, targets[i])]
            if to_copy:  # one call for all of them, as each call costs time on a slow host
                torch._foreach_copy_([targets[i] for i in to_copy], [sources[i] for i in to_copy])
            if count != self.count:
                self._admit(count)
            self.graph.replay()
            features = self.out.features if count == self.most else self.out.features[:count]
            return RecordedOutput(self, count, self.flat.clone(), features.clone())

    def _admit(self, count: int) -> None:
        """Make the first `count` images live. The others have no live row, so no kernel computes them."""
        assert self.present is not None
        live, rows = self.present
        live.zero_()[:count] = True
        every = torch.arange(self.most + 1, dtype=torch.int32, device=live.device) * live.shape[1]
        rows.starts.copy_(every.clamp_max_(count * live.shape[1]))
        self.count = count

    def part(self, flat: Tensor, i: int) -> Tensor:
        """The i-th part of a packed output, in its own dtype and shape."""
        (begin, end), (dtype, shape) = self.spans[i], self.kinds[i]
        return flat[begin:end].view(dtype).view(shape)

    def finite(self) -> bool:
        """Whether all logits of the latest call are finite. This waits for the GPU."""
        return math.isfinite(self.total.item())


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.stride() == y.stride())


def everyone(images: int, count: int, device: torch.device) -> tuple[Tensor, Rows]:
    """The live rows at the start of a forward pass, which are all rows: as dense (B, N) and as a list."""
    live = torch.ones(images, count, dtype=torch.bool, device=device)
    every = torch.arange(images * count, dtype=torch.int32, device=device)
    return live, Rows(every, torch.arange(0, images * count + 1, count, dtype=torch.int32, device=device))


class RecordedOutput(Output):
    """An output whose trace is unpacked on first access, since most callers read only the logits."""

    def __init__(self, recording: Recording, count: int, flat: Tensor, features: Tensor) -> None:
        self._recording, self._count, self._flat, self.features = recording, count, flat, features
        self.logits = recording.part(flat, recording.logits_at)[:count]

    def __getattr__(self, name: str) -> Any:
        if name != "trace":
            raise AttributeError(name)
        recording = self._recording
        parts: list[Any] = [None] * len(recording.order)
        for i, index in enumerate(recording.order):
            parts[index] = recording.part(self._flat, i)[: self._count]
        like, exits = recording.out.trace, len(recording.out.trace.exits)
        trace = self.trace = Trace(
            (self._count, like.shape[1]), like.prefix, like.grid, like.blocks, image_grid=like.image_grid
        )
        trace.exits = parts[1 : 1 + exits]
        trace.lives = [Where(trace.shape, live_BN=live) for live in parts[-len(like.lives) :]]
        trace.values = [{} for _ in trace.lives]
        for (depth, name), dense_rows in zip(recording.names, parts[1 + exits :]):
            trace.values[depth][name] = dense_rows
        return trace

    def __reduce__(self) -> tuple:
        return Output, (self.logits, self.trace, self.features)


def held(model: nn.Module) -> list[Tensor]:
    """The weights and buffers whose memory a graph reads. The owner of the graph must keep them, so that this memory is
    not freed when the model is moved."""
    return [w.data for w in (*model.parameters(), *model.buffers())]


def autocast_as_now() -> Callable[[], AbstractContextManager]:
    """The caller's autocast as a context for recording. It caches no weights: a cached bf16 copy is freed with the
    context, so each replay must convert the weights itself."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return partial(torch.autocast, "cuda", dtype, enabled, cache_enabled=False)


def captured(call: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The call recorded as a CUDA graph. pool: the memory it works in; None: its own."""
    # Gradients are accumulated on the stream where this happened first, so warm-up and recording share a stream.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # warm-up: kernels are compiled and workspaces allocated
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps a workspace per stream, which other code may clear: so the graph allocates one in its own memory.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        call()
    torch._C._cuda_clearCublasWorkspaces()
    return graph
