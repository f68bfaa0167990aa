"""A forward pass as one ONNX graph, run by onnxruntime: for `dwindle export` and for prepared models on a CPU."""

from __future__ import annotations

import copy
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from .onnx_operations import translations

if TYPE_CHECKING:
    from ..core.model import AdaptiveViT, Output

OPSET = 20
TOLERANCE = 1e-4  # of the logits of images whose decisions are the same
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
WEIGHTS = "weights"  # the weights' file named in a graph without weights; it is never opened

Call = Callable[..., tuple[Tensor, ...]]


def missing() -> list[str]:
    """The packages of the extra `onnx` that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def check_installed() -> None:
    if names := missing():
        raise DwindleError(f"ONNX needs the package {names[0]}, which is not installed: pip install 'dwindle[onnx]'.")


def program(graph: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    """The module recorded by torch.export on these inputs, for any number of images."""
    sizes = tuple({0: torch.export.Dim("batch", min=1)} if x.dim() else {} for x in inputs)
    with quiet(), torch.inference_mode(False), torch.no_grad():
        try:
            return torch.export.export(
                graph, inputs, dynamic_shapes=(sizes,) if _has_variadic_forward(graph) else sizes
            )
        except DwindleError:
            raise
        except Exception as error:
            method = getattr(getattr(graph, "model", None), "method", graph)
            raise DwindleError(
                f"{type(method).__name__} cannot be recorded as one graph "
                f"({type(error).__name__}: {str(error).splitlines()[0]}); "
                "a method that shall be exported decides by tensors alone, without .item() or `if` on their values."
            ) from error


def _has_variadic_forward(graph: nn.Module) -> bool:
    """Whether the forward is written with *inputs, which torch.export counts as one argument."""
    return bool(type(graph).forward.__code__.co_flags & 0x04)


def onnx_model(recorded: Any, names: Sequence[str], outputs: Sequence[str], fixed: Collection[str] = ()) -> Any:
    """The program as a model of the package onnx_ir, with these names of its inputs and outputs.

    fixed: weights that no constant is computed from, so that the file can be used with other values of them.
    """
    import onnxscript.optimizer

    made, refusal = None, ""
    if _is_functional(recorded):
        original = copy.deepcopy(recorded.graph)
        try:
            made = _translated(_marked_decomposed(recorded), names, outputs)
        except torch.onnx.OnnxExporterError as error:
            refusal = str(error)
        del recorded.run_decompositions
        if made is None:
            recorded.graph_module.graph = original
    if made is None:
        made = _decomposed(recorded, names, outputs, refusal)

    def foldable(node: Any) -> bool | None:
        # onnx resizes by its reference in Python, which takes minutes for position embeddings; onnxruntime does it too.
        kept = node.op_type == "Resize" or any(value is not None and value.name in fixed for value in node.inputs)
        return False if kept else None

    # onnxruntime runs its own passes. The exporter's other passes take longer than they save, and one drops inputs.
    onnxscript.optimizer.fold_constants(made.model, onnx_shape_inference=False, should_fold=foldable)
    onnxscript.optimizer.remove_unused_nodes(made.model)
    return made.model


def _decomposed(recorded: Any, names: Sequence[str], outputs: Sequence[str], refusal: str = "") -> Any:
    """The program as ONNX, decomposed by the exporter: it then knows more operations, but takes about ten seconds.

    refusal: the error of the translation without decomposing.
    """
    try:
        return _translated(recorded, names, outputs)
    except torch.onnx.OnnxExporterError as error:
        unknown = re.search(r"OpOverload\(op='([\w.]+)'", f"{error} {refusal}")
        raise DwindleError(
            f"ONNX has no {unknown[1] if unknown else 'form of this graph'}, which the method uses; "
            "export to torch-export or aoti."
        ) from error


def _translated(recorded: Any, names: Sequence[str], outputs: Sequence[str]) -> Any:
    """The program as torch.onnx translates it, with our `translations`."""
    with quiet(), torch.inference_mode(False), torch.no_grad():
        return torch.onnx.export(
            recorded,
            input_names=list(names),
            output_names=list(outputs)[: len(recorded.graph_signature.user_outputs)],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table=translations(),
        )


CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.promote_types.default")


def _is_functional(recorded: Any) -> bool:
    """Whether no operation writes to its input, so that each can be translated by itself."""
    schemas = [getattr(node.target, "_schema", None) for node in recorded.graph.nodes if node.op == "call_function"]
    return not any(schema is not None and schema.is_mutable for schema in schemas)


def _marked_decomposed(recorded: Any) -> Any:
    """The program, changed so that the exporter takes it as decomposed already.

    ONNX has nearly all operations that a model calls. To decompose a program the exporter records it twice more, which
    is most of its time.
    """
    for node in reversed(list(recorded.graph.nodes)):
        if str(node.target) in CHECKS and not node.users:
            recorded.graph.erase_node(node)
    recorded.run_decompositions = lambda *_, **__: recorded
    return recorded


def make_input(model: Any, weight: str, name: str) -> None:
    """Turn a weight of an onnx_ir model into an input of this name. Nothing happens if the graph does not use it."""
    value = model.graph.initializers.pop(weight, None)
    if value is not None:
        value.const_value, value.name = None, name
        model.graph.inputs.append(value)


def without_weights(model: Any, weights: Collection[str]) -> bytes:
    """The model as a file in which these weights have a name and a shape and no values."""
    import onnx_ir

    for node in model.graph:
        node.metadata_props.clear()  # the lines of Python that made the node: most of the file's size
    for name in weights:
        value = model.graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            tensor = value.const_value
            value.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=name, base_dir=""
            )
    return serialized(model)


def serialized(model: Any) -> bytes:
    """An onnx_ir model as the bytes of an ONNX file."""
    import onnx_ir

    made: bytes = onnx_ir.to_proto(model).SerializeToString()
    return made


def opened(source: str | bytes, threads: int | None = None, weights: Mapping[str, Tensor] | None = None) -> Any:
    """An onnxruntime session of an ONNX file or its bytes. weights: for a file without them, by name.

    threads: None: as many as torch uses.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3  # errors only; warnings are for onnxruntime's developers
    # The attention to a masked key is a denormal number, with which CPUs compute slowly: it is set to 0.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # Threads that wait for work by spinning take a core from torch, and from other sessions, after every call.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(value.detach().numpy()) for value in weights.values()]
        options.add_external_initializers(list(weights), values)
    with flushing():
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The graph's outputs in their order. inputs: tensors by the graph's names."""
    with flushing():
        outputs = session.run(None, {name: value.detach().contiguous().numpy() for name, value in inputs.items()})
    return tuple(torch.from_numpy(value) for value in outputs)


class _Static(nn.Module):
    """A wrapped model that returns its logits alone."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        out = self.vit(images)
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits


def _static_graph(vit: nn.Module, images: Tensor) -> bytes:
    with torch.inference_mode(False):
        two = images.new_zeros(2, *images.shape[1:])
    return serialized(onnx_model(program(_Static(vit).eval(), two), ["images"], ["logits"]))


def static(vit: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """The wrapped model in onnxruntime, as a function from images of this size to logits."""
    session = opened(_static_graph(vit, images))
    return lambda images: run(session, {"images": images})[0]


def static_in_openvino(vit: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """The wrapped model in OpenVINO, as a function from images of this shape to logits; only timed, as a rival."""
    if find_spec("openvino") is None:
        raise DwindleError(
            "The static variant openvino needs the package openvino, which is not installed: "
            "pip install 'dwindle[openvino]'."
        )
    import openvino

    core = openvino.Core()
    model = core.read_model(_static_graph(vit, images))
    model.reshape(list(images.shape))  # for one shape it is faster than for any
    # f32: by itself OpenVINO may compute in bf16. It binds threads to cores, which two runtimes would then share.
    how = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
    }
    compiled = core.compile_model(model, "CPU", how)
    return lambda images: torch.from_numpy(compiled([images.numpy()])[0])


def open_onnx(path: str | os.PathLike, threads: int | None = None) -> Call:
    """An ONNX file as a function of images."""
    check_installed()
    session = opened(os.fspath(path), threads)
    return lambda images: run(session, {"images": images})


@torch.inference_mode()
def check(model: AdaptiveViT, call: Call, images: Tensor) -> dict[str, Any]:
    """`compare` a function of images with the model's packed layout."""
    return compare(model(images, layout="packed"), lambda rows: call(images[rows]), len(images))


def compare(expected: Output, call: Callable[[slice], tuple[Tensor, ...]], images: int) -> dict[str, Any]:
    """Compare logits and depths of a batch, and of each of its images alone, with the expected output.

    Returns the largest difference of logits and the share of equal decisions; a graph that differs is an error. A share
    of 0.1% of the decisions may differ: by rounding a score may fall on the other side of its threshold.
    call: gives logits and depths of these rows of the batch.
    """
    outputs = [call(rows) for rows in (slice(None), *(slice(i, i + 1) for i in range(images)))]
    logits = torch.cat([output[0] for output in outputs])
    depth = torch.cat([output[1] for output in outputs])
    same = depth == torch.cat([expected.trace.depth] * 2)
    gap = (logits - torch.cat([expected.logits] * 2)).abs().amax(-1)[same.all(-1)]
    difference = float(gap.max()) if len(gap) else float("nan")
    share_same = same.float().mean().item()
    if not difference <= TOLERANCE or share_same < 0.999:
        raise DwindleError(
            f"The graph differs from the model: logits by {difference:.2g} (up to {TOLERANCE} is rounding), "
            f"{1 - share_same:.2%} of the tokens decided otherwise; this is a fault of the recording, please report it."
        )
    return {"difference": difference, "decisions": share_same, "checked": f"batch {images} and each image alone"}


@contextmanager
def flushing() -> Iterator[None]:
    """Within, denormal numbers are flushed to 0; afterwards the caller's setting is restored.

    Opening a session of onnxruntime changes this setting of the caller's thread.
    """
    before = bool(torch.full((), 1e-39) * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Within, the exporters log errors only, and warnings are ignored: these are for the exporters' developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)
