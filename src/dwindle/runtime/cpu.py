"""What a prepared model runs on a CPU: its forward pass as one graph in onnxruntime, recorded once per image size.

`Packed` is the definition. Before a graph answers it is compared with it on noise. What cannot be recorded, or is
watched by somebody, runs packed.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from ..core.model import AdaptiveViT, Output
from ..core.packed import Packed
from ..core.parts import as_written
from ..core.tokens import Where
from ..core.trace import Trace
from ..errors import DwindleError
from . import graph_cache, onnx_graph
from .padded import Padded, depth_of

WORTH = 1e12  # multiply-accumulates of the static model from which on a graph saves more time than recording it takes
KEPT = 4  # graphs, the latest used
SCORES = 1 << 26  # bytes of attention scores at once; so many images run together

log = logging.getLogger("dwindle")


def watched_everywhere() -> bool:
    """Whether torch calls somebody's hooks at every module there is."""
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


Grids = tuple[tuple[int, int], tuple[int, int] | None]


class CpuGraphs:
    """Of a model whose weights nobody writes to any more; only the method's settings may be turned."""

    def __init__(self, model: AdaptiveViT, images: int | None = None, details: bool = False) -> None:
        """images: how many it will answer in all, about; None: many. details: see `Recorded`."""
        self.model, self.details = model, details
        self.worthwhile = images is None or images * model.static_macs() >= WORTH
        self.refusal = refusal(model)
        self._setting = self._settings()
        self._graphs: OrderedDict[tuple, Graph | None] = OrderedDict()
        self._recording = threading.Lock()

    def __call__(self, images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Output | None:
        """As the model itself; None: this call is for the packed layout."""
        graph = self.graph(images, depths)
        if graph is None:
            return None
        if operating_point is not None:
            self.model.check_operating_point(operating_point, len(images))
        given = {"images": images, **self._points(len(images), operating_point)}
        if depths is not None:
            given["depths"] = depths.long()
        return graph(given, self._grids(images, depths is not None))

    def graph(self, images: Tensor, depths: Tensor | None = None) -> Graph | None:
        """What answers a call like this one."""
        if self.refusal is not None or not _unwatched(images) or self._settings() != self._setting:
            return None
        if depths is not None and tuple(depths.shape) != (len(images), self._tokens(images)):
            return None  # the loop says what is wrong with them
        key = (tuple(images.shape[1:]), depths is not None, torch.get_num_threads())
        with self._recording:
            if key not in self._graphs:
                with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                    self._graphs[key] = self._made(images[:1], depths is not None)
                if len(self._graphs) > KEPT:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            return self._graphs[key]

    def _grids(self, images: Tensor, forced: bool) -> Grids:
        """Of what is looked at, and of the images themselves if that is another."""
        shape, size = self.model.backbone.shape, (images.shape[-2], images.shape[-1])
        whole, seen = (shape.grid(each) for each in (size, size if forced else self.model.method.seen_size(size)))
        return seen, None if seen == whole else whole

    def _tokens(self, images: Tensor) -> int:
        return self.model.backbone.shape.tokens((images.shape[-2], images.shape[-1]))

    def _points(self, count: int, given: Tensor | None) -> dict[str, Tensor]:
        """The operating point as an input: one for each image, or the tensor in which the method holds it."""
        method = self.model.method
        if method.operating_point is None:
            return {}
        value = getattr(method, method.operating_point[0])
        if method.per_image_point:
            all_alike = torch.full((count,), float(value), dtype=torch.float32)
            return {"operating_point": all_alike if given is None else given.float()}
        return {"setting": value} if isinstance(value, Tensor) else {}

    def _settings(self) -> tuple:
        """The method's plain settings, constants of a recording: at others the packed layout answers."""
        method = self.model.method
        turned = method.operating_point[0] if method.operating_point and method.per_image_point else None
        apart = (turned, *graph_cache.PROGRESS)
        return tuple(
            (name, value)
            for name, value in vars(method).items()
            if isinstance(value, (bool, int, float, str, tuple)) and name not in apart
        )

    def _made(self, like: Tensor, forced: bool) -> Graph | None:
        """From the cache or recorded; None if that cannot be, or is not worth its time."""
        key = graph_cache.key_of(self.model, size=tuple(like.shape[1:]), forced=forced, details=self.details)
        if (kept := graph_cache.read(key)) is not None:
            try:
                return self._checked(Graph(kept, self.model, self._most(like)), like, forced)
            except Exception as error:
                log.warning("A kept graph of %s does not run (%s); it is recorded again.", self._name, _short(error))
        if not self.worthwhile:
            return None
        try:
            recorded = recording(self.model, like, self._points(2, None), forced, self.details)
            graph = self._checked(Graph(recorded, self.model, self._most(like)), like, forced)
        except Exception as error:
            log.warning("%s cannot be recorded as a graph (%s); it runs packed.", self._name, _short(error))
            return None
        graph_cache.write(key, recorded)
        return graph

    @property
    def _name(self) -> str:
        return f"{type(self.model.vit).__name__} with {type(self.model.method).__name__}"

    def _most(self, like: Tensor) -> int:
        """Images that run together, so that the scores of their attention stay small."""
        tokens, heads = self._tokens(like), self.model.backbone.shape.heads
        return max(1, SCORES // (4 * heads * tokens**2))

    def _checked(self, graph: Graph, like: Tensor, forced: bool) -> Graph:
        """The graph, if it decides and answers as the packed layout does, of two images of noise and of each alone."""
        drawn = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(2, *like.shape[1:], generator=drawn, dtype=torch.float32)
        depths = None
        if forced:
            blocks = self.model.backbone.shape.blocks
            depths = torch.randint(1, blocks + 1, (2, self._tokens(like)), generator=drawn)
        wanted = self.model.run(noise, Packed.start, depths)

        def call(rows: slice) -> tuple[Tensor, Tensor]:
            images = noise[rows]
            given = {"images": images, **self._points(len(images), None)}
            out = graph(
                given if depths is None else given | {"depths": depths[rows]}, self._grids(images, depths is not None)
            )
            return out.logits, out.trace.depth

        onnx_graph.compare(wanted, call, len(noise))
        return graph


def refusal(model: AdaptiveViT) -> str | None:
    """Why a model is not recorded, in a few words; None: it is. Only one all of which is known can be: as its library
    wrote it, in float32, with nobody watching.
    """
    if names := onnx_graph.missing():
        _tell_missing(names[0])
        return f"the package {names[0]} is not installed"
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors) or any(
        t.dtype == torch.int8 for t in tensors
    ):
        return "its weights are not float32"
    if any(type(t) not in (Tensor, nn.Parameter) or t.device.type != "cpu" for t in tensors):
        return "its weights are no plain tensors on the CPU"
    if any(part.training for part in model.modules()):
        return "part of it is in training mode"
    if not as_written(model.vit):
        return "something was added to its layers, or they are of an unknown make"
    watched = [part for part in model.method.modules() if part._forward_hooks or part._forward_pre_hooks]
    return "its method has hooks" if watched or model._forward_hooks or model._forward_pre_hooks else None


@cache
def _tell_missing(package: str) -> None:
    """Once in a process."""
    log.warning(
        "Prepared models run packed, as the package %s is not installed; pip install 'dwindle[onnx]' makes them faster "
        "on a CPU.",
        package,
    )


def _unwatched(images: Tensor) -> bool:
    """Autocast, torch.compile and hooks of every module want to see each call."""
    seen = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or watched_everywhere()
    return not seen and images.device.type == "cpu" and images.dtype == torch.float32


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__


def state(model: nn.Module) -> dict[str, Tensor]:
    """The weights by the names that a recording of `Recorded` gives them."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"model.{name}": value for name, value in named}


class Noted:
    """What a recording came to. Apart from the module, whose own attributes torch puts back as they were."""

    outputs: Sequence[str] = ()


class Recorded(nn.Module):
    """What is recorded: tensors by the order of `names` in; logits and depths (B, N) out, with `details` all of an
    `Output`.
    """

    def __init__(self, model: AdaptiveViT, names: Collection[str], details: bool) -> None:
        super().__init__()
        self.model, self.names, self.details = model, tuple(names), details
        last = model.backbone.shape.blocks  # after it nobody is computed any more, and nothing is worth moving
        front = None if details else model.backbone.front
        stays = model.method.keeps_prefix and "depths" not in self.names  # a forced depth may stop the class token
        self.start = partial(Padded.start, front=front, moves=range(1, last), prefix_stays=stays)
        self.noted = Noted()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, inputs))
        out = self.model.run(given["images"], self.start, given.get("depths"), given.get("operating_point"))
        made = {"logits": out.logits, "depth": depth_of(out.trace)}
        if self.details:
            made["features"] = out.features
            for block, (where, values) in enumerate(zip(out.trace.lives, out.trace.values)):
                for name, rows in values.items():
                    made[f"values.{block}.{name}"] = where.dense_rows(rows.float(), float("nan"))
            made |= {f"exits.{block}": read for block, read in enumerate(out.trace.exits)}
        self.noted.outputs = list(made)
        return tuple(made.values())


def recording(model: AdaptiveViT, like: Tensor, points: dict[str, Tensor], forced: bool, details: bool) -> bytes:
    """The graph of `Recorded` without its weights, after a line with their names. points: those of `CpuGraphs._points`
    for two images.
    """
    inputs = {"images": like.new_zeros(2, *like.shape[1:])}
    if "operating_point" in points:
        inputs["operating_point"] = points["operating_point"]
    if forced:
        shape = model.backbone.shape
        tokens = shape.tokens((like.shape[-2], like.shape[-1]))
        inputs["depths"] = torch.full((2, tokens), shape.blocks)
    graph, weights = Recorded(model, inputs, details).eval(), state(model)
    recorded = onnx_graph.program(graph, *inputs.values())
    made = onnx_graph.onnx_model(recorded, list(inputs), graph.noted.outputs, fixed=weights)
    if "setting" in points:
        assert model.method.operating_point is not None
        onnx_graph.make_input(made, f"model.method.{model.method.operating_point[0]}", "setting")
    read = [name for name in weights if name in made.graph.initializers]
    return json.dumps(read).encode() + b"\n" + onnx_graph.without_weights(made, read)


class Graph:
    """A recording, open in onnxruntime."""

    def __init__(self, recorded: bytes, model: AdaptiveViT, most: int) -> None:
        """most: images that run together, so that the scores of their attention stay in few bytes."""
        names, _, graph = recorded.partition(b"\n")
        weights = state(model)
        self.session = onnx_graph.opened(graph, weights={name: weights[name] for name in json.loads(names)})
        self.most = most
        self.blocks, self.prefix = model.backbone.shape.blocks, model.backbone.shape.prefix
        self.inputs = [given.name for given in self.session.get_inputs()]
        self.outputs = [made.name for made in self.session.get_outputs()]

    def __call__(self, given: dict[str, Tensor], grids: Grids) -> Output:
        given = {name: given[name] for name in self.inputs}
        total, parts = len(given["images"]), []
        for begin in range(0, total, self.most):
            part = {name: x[begin : begin + self.most] if x.dim() else x for name, x in given.items()}
            parts.append(onnx_graph.run(self.session, part))
        made = parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts)]
        return self._output(dict(zip(self.outputs, made)), grids)

    def _output(self, made: dict[str, Tensor], grids: Grids) -> Output:
        depth, blocks, prefix, (grid, whole) = made["depth"], self.blocks, self.prefix, grids
        shape = (depth.shape[0], depth.shape[1])
        lives = [Where(shape, live_BN=depth > block) for block in range(blocks)]
        if "features" not in made:
            return ShortOutput(made["logits"], ShortTrace(shape, prefix, grid, blocks, lives, whole))
        trace = Trace(shape, prefix, grid, blocks, lives, [{} for _ in lives], whole=whole)
        for name, value in made.items():
            kind, _, which = name.partition(".")
            if kind == "values":
                block, _, called = which.partition(".")
                trace.values[int(block)][called] = value
            elif kind == "exits":
                trace.exits.append(value)
        return Output(made["logits"], trace, made["features"])


class ShortTrace(Trace):
    """Who was live in which block, and nothing that the method wrote down."""

    def __init__(
        self, shape: Any, prefix: int, grid: tuple[int, int], blocks: int, lives: list[Where], whole: Any
    ) -> None:
        super().__init__(shape, prefix, grid, blocks, lives, whole=whole)
        del self.values, self.exits

    def __getattr__(self, name: str) -> Any:
        raise _left_out(self, name, ("values", "exits"))


class ShortOutput(Output):
    """Logits and the depths of tokens: what a graph without details gives."""

    def __init__(self, logits: Tensor, trace: Trace) -> None:
        self.logits, self.trace, self.loss = logits, trace, None

    def __getattr__(self, name: str) -> Any:
        raise _left_out(self, name, ("features",))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(logits={tuple(self.logits.shape)}, trace={self.trace})"


def _left_out(owner: Any, name: str, names: tuple[str, ...]) -> Exception:
    if name not in names:
        return AttributeError(f"'{type(owner).__name__}' object has no attribute '{name}'")
    return DwindleError(
        f"This answer has no {name}: it comes from a graph that gives logits and depths alone; prepare the model with "
        "model.prepare(details=True), or call the model itself."
    )
