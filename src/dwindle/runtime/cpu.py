"""The forward pass of a prepared model on a CPU: one graph in onnxruntime, recorded once per image size.

`Packed` is the definition. Before a graph is used it is compared with the packed layout on noise. A model that cannot
be recorded, or that has hooks, runs packed.
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

WORTH = 1e12  # multiply-accumulates of the static model above which a graph saves more time than recording it takes
KEPT = 4  # graphs that are kept, the latest used
SCORES = 1 << 26  # bytes of attention scores at once; this limits the images that run together

log = logging.getLogger("dwindle")


def has_global_hooks() -> bool:
    """Whether torch calls hooks at every module."""
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


Grids = tuple[tuple[int, int], tuple[int, int] | None]  # a trace's `grid` and `whole`


class CpuGraphs:
    """The graphs of a model whose weights are fixed; only the method's settings may change."""

    def __init__(self, model: AdaptiveViT, images: int | None = None, details: bool = False) -> None:
        """images: about how many it will be called with in all; None: many. details: see `Recorded`."""
        self.model, self.details = model, details
        self.worthwhile = images is None or images * model.static_macs() >= WORTH
        self.refusal = refusal(model)
        self._setting = self._settings()
        self._graphs: OrderedDict[tuple, Graph | None] = OrderedDict()
        self._recording = threading.Lock()

    def __call__(self, images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Output | None:
        """The model's output; None: no graph runs this call, so the packed layout must."""
        graph = self.graph(images, depths)
        if graph is None:
            return None
        if operating_point is not None:
            self.model.check_operating_point(operating_point, len(images))
        inputs = {"images": images, **self._point_inputs(len(images), operating_point)}
        if depths is not None:
            inputs["depths"] = depths.long()
        return graph(inputs, self._grids(images, depths is not None))

    def graph(self, images: Tensor, depths: Tensor | None = None) -> Graph | None:
        """The graph for a call with these inputs; None: the packed layout must run it."""
        if self.refusal is not None or not _is_plain_call(images) or self._settings() != self._setting:
            return None
        if depths is not None and tuple(depths.shape) != (len(images), self._tokens(images)):
            return None  # the packed layout raises the error for them
        key = (tuple(images.shape[1:]), depths is not None, torch.get_num_threads())
        with self._recording:
            if key not in self._graphs:
                with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                    self._graphs[key] = self._load_or_record(images[:1], depths is not None)
                if len(self._graphs) > KEPT:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            return self._graphs[key]

    def _grids(self, images: Tensor, forced: bool) -> Grids:
        """The grid of the images as the method resizes them, and that of the images themselves if it differs."""
        shape, size = self.model.backbone.shape, (images.shape[-2], images.shape[-1])
        whole, resized = (shape.grid(each) for each in (size, size if forced else self.model.method.resized_size(size)))
        return resized, None if resized == whole else whole

    def _tokens(self, images: Tensor) -> int:
        return self.model.backbone.shape.tokens((images.shape[-2], images.shape[-1]))

    def _point_inputs(self, count: int, operating_point: Tensor | None) -> dict[str, Tensor]:
        """The operating point as an input: a value for each of `count` images, or the method's own tensor.

        operating_point: (count,); None: the method's value for all images.
        """
        method = self.model.method
        if method.operating_point is None:
            return {}
        value = getattr(method, method.operating_point[0])
        if method.per_image_point:
            same_for_all = torch.full((count,), float(value), dtype=torch.float32)
            return {"operating_point": same_for_all if operating_point is None else operating_point.float()}
        return {"setting": value} if isinstance(value, Tensor) else {}

    def _settings(self) -> tuple:
        """The method's plain settings, constants of a recording: with other settings the model runs packed."""
        method = self.model.method
        point_name = method.operating_point[0] if method.operating_point and method.per_image_point else None
        ignored = (point_name, *graph_cache.PROGRESS)
        return tuple(
            (name, value)
            for name, value in vars(method).items()
            if isinstance(value, (bool, int, float, str, tuple)) and name not in ignored
        )

    def _load_or_record(self, like: Tensor, forced: bool) -> Graph | None:
        """The graph from the cache, or recorded; None if recording fails or would take longer than the graph saves.

        like: one image. forced: whether depths are an input.
        """
        key = graph_cache.key_of(self.model, size=tuple(like.shape[1:]), forced=forced, details=self.details)
        if (kept := graph_cache.read(key)) is not None:
            try:
                return self._checked(Graph(kept, self.model, self._batch_limit(like)), like, forced)
            except Exception as error:
                log.warning("A kept graph of %s does not run (%s); it is recorded again.", self._name, _one_line(error))
        if not self.worthwhile:
            return None
        try:
            recorded = recording(self.model, like, self._point_inputs(2, None), forced, self.details)
            graph = self._checked(Graph(recorded, self.model, self._batch_limit(like)), like, forced)
        except Exception as error:
            log.warning("%s cannot be recorded as a graph (%s); it runs packed.", self._name, _one_line(error))
            return None
        graph_cache.write(key, recorded)
        return graph

    @property
    def _name(self) -> str:
        return f"{type(self.model.vit).__name__} with {type(self.model.method).__name__}"

    def _batch_limit(self, like: Tensor) -> int:
        """How many images run together, so that their attention scores take at most `SCORES` bytes."""
        tokens, heads = self._tokens(like), self.model.backbone.shape.heads
        return max(1, SCORES // (4 * heads * tokens**2))

    def _checked(self, graph: Graph, like: Tensor, forced: bool) -> Graph:
        """The graph, if its decisions and logits on two images of noise are those of the packed layout; else an error.

        The images are compared as one batch and one by one.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(2, *like.shape[1:], generator=generator, dtype=torch.float32)
        depths = None
        if forced:
            blocks = self.model.backbone.shape.blocks
            depths = torch.randint(1, blocks + 1, (2, self._tokens(like)), generator=generator)
        expected = self.model.run(noise, Packed.start, depths)

        def call(rows: slice) -> tuple[Tensor, Tensor]:
            images = noise[rows]
            inputs = {"images": images, **self._point_inputs(len(images), None)}
            if depths is not None:
                inputs["depths"] = depths[rows]
            out = graph(inputs, self._grids(images, forced))
            return out.logits, out.trace.depth

        onnx_graph.compare(expected, call, len(noise))
        return graph


def refusal(model: AdaptiveViT) -> str | None:
    """Why a model cannot be recorded, in a few words; None: it can. All of its code must be known: it is as its library
    wrote it, in float32, without hooks.
    """
    if names := onnx_graph.missing():
        _warn_missing(names[0])
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
def _warn_missing(package: str) -> None:
    """Warn that a package is missing, once in a process."""
    log.warning(
        "Prepared models run packed, as the package %s is not installed; pip install 'dwindle[onnx]' makes them faster "
        "on a CPU.",
        package,
    )


def _is_plain_call(images: Tensor) -> bool:
    """Whether a graph can run these images: float32 on a CPU, without autocast, torch.compile and global hooks."""
    observed = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or has_global_hooks()
    return not observed and images.device.type == "cpu" and images.dtype == torch.float32


def _one_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights by the names that they have in a recording of `Recorded`."""
    weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"model.{name}": value for name, value in weights}


class OutputNames:
    """The names of a recording's outputs. They are kept in an object of their own, since torch.export resets the
    attributes that a module sets on itself in its forward."""

    names: Sequence[str] = ()


class Recorded(nn.Module):
    """The module that is recorded. It takes tensors in the order of `names`, and returns logits and depths (B, N), with
    `details` all of an `Output`.
    """

    def __init__(self, model: AdaptiveViT, names: Collection[str], details: bool) -> None:
        super().__init__()
        self.model, self.names, self.details = model, tuple(names), details
        last = model.backbone.shape.blocks  # after the last block moving rows saves nothing
        front = None if details else model.backbone.front
        stays = model.method.keeps_prefix and "depths" not in self.names  # a forced depth may stop the class token
        self.start = partial(Padded.start, front=front, moves=range(1, last), prefix_stays=stays)
        self.output_names = OutputNames()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.names, inputs))
        out = self.model.run(named["images"], self.start, named.get("depths"), named.get("operating_point"))
        outputs = {"logits": out.logits, "depth": depth_of(out.trace)}
        if self.details:
            outputs["features"] = out.features
            for block, (where, values) in enumerate(zip(out.trace.lives, out.trace.values)):
                for name, rows in values.items():
                    outputs[f"values.{block}.{name}"] = where.dense_rows(rows.float(), float("nan"))
            outputs |= {f"exits.{block}": logits for block, logits in enumerate(out.trace.exits)}
        self.output_names.names = list(outputs)
        return tuple(outputs.values())


def recording(model: AdaptiveViT, like: Tensor, points: dict[str, Tensor], forced: bool, details: bool) -> bytes:
    """The graph of `Recorded` without its weights, after a line with the weights' names.

    points: `CpuGraphs._point_inputs` for two images. forced: whether depths are an input. details: see `Recorded`.
    """
    inputs = {"images": like.new_zeros(2, *like.shape[1:])}
    if "operating_point" in points:
        inputs["operating_point"] = points["operating_point"]
    if forced:
        shape = model.backbone.shape
        tokens = shape.tokens((like.shape[-2], like.shape[-1]))
        inputs["depths"] = torch.full((2, tokens), shape.blocks)
    module, weights = Recorded(model, inputs, details).eval(), weights_of(model)
    program = onnx_graph.program(module, *inputs.values())
    onnx_model = onnx_graph.onnx_model(program, list(inputs), module.output_names.names, fixed=weights)
    if "setting" in points:
        assert model.method.operating_point is not None
        onnx_graph.make_input(onnx_model, f"model.method.{model.method.operating_point[0]}", "setting")
    used = [name for name in weights if name in onnx_model.graph.initializers]
    return json.dumps(used).encode() + b"\n" + onnx_graph.without_weights(onnx_model, used)


class Graph:
    """A recording, open in onnxruntime."""

    def __init__(self, recorded: bytes, model: AdaptiveViT, most: int) -> None:
        """most: images that run together, see `SCORES`."""
        names, _, graph = recorded.partition(b"\n")
        weights = weights_of(model)
        self.session = onnx_graph.opened(graph, weights={name: weights[name] for name in json.loads(names)})
        self.most = most
        self.blocks, self.prefix = model.backbone.shape.blocks, model.backbone.shape.prefix
        self.inputs = [node.name for node in self.session.get_inputs()]
        self.outputs = [node.name for node in self.session.get_outputs()]

    def __call__(self, inputs: dict[str, Tensor], grids: Grids) -> Output:
        inputs = {name: inputs[name] for name in self.inputs}
        total, parts = len(inputs["images"]), []
        for begin in range(0, total, self.most):
            part = {name: x[begin : begin + self.most] if x.dim() else x for name, x in inputs.items()}
            parts.append(onnx_graph.run(self.session, part))
        outputs = parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts)]
        return self._output(dict(zip(self.outputs, outputs)), grids)

    def _output(self, outputs: dict[str, Tensor], grids: Grids) -> Output:
        depth, blocks, prefix, (grid, whole) = outputs["depth"], self.blocks, self.prefix, grids
        shape = (depth.shape[0], depth.shape[1])
        lives = [Where(shape, live_BN=depth > block) for block in range(blocks)]
        if "features" not in outputs:
            return ShortOutput(outputs["logits"], ShortTrace(shape, prefix, grid, blocks, lives, whole))
        trace = Trace(shape, prefix, grid, blocks, lives, [{} for _ in lives], image_grid=whole)
        for name, value in outputs.items():
            kind, _, rest = name.partition(".")
            if kind == "values":
                block, _, value_name = rest.partition(".")
                trace.values[int(block)][value_name] = value
            elif kind == "exits":
                trace.exits.append(value)
        return Output(outputs["logits"], trace, outputs["features"])


class ShortTrace(Trace):
    """A trace with the live tokens of each block, without the method's values and the exits' logits."""

    def __init__(
        self, shape: Any, prefix: int, grid: tuple[int, int], blocks: int, lives: list[Where], whole: Any
    ) -> None:
        super().__init__(shape, prefix, grid, blocks, lives, image_grid=whole)
        del self.values, self.exits

    def __getattr__(self, name: str) -> Any:
        raise _left_out(self, name, ("values", "exits"))


class ShortOutput(Output):
    """The output of a graph without details: logits, and a trace with the depths of tokens."""

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
