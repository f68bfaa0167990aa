"""A forward pass as one ONNX graph, and onnxruntime to run it: what `dwindle export` writes and a CPU runs."""

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
TOLERANCE = 1e-4  # of logits, where the decisions are the same
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
WEIGHTS = "weights"  # where a file without weights says that they lie; nobody opens it

Call = Callable[..., tuple[Tensor, ...]]


def missing() -> list[str]:
    """The packages of the extra `onnx` that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def check_installed() -> None:
    if names := missing():
        raise DwindleError(f"ONNX needs the package {names[0]}, which is not installed: pip install 'dwindle[onnx]'.")


def program(graph: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    """The graph for any number of images."""
    sizes = tuple({0: torch.export.Dim("batch", min=1)} if x.dim() else {} for x in inputs)
    with quiet(), torch.inference_mode(False), torch.no_grad():
        try:
            return torch.export.export(graph, inputs, dynamic_shapes=(sizes,) if _takes_many(graph) else sizes)
        except DwindleError:
            raise
        except Exception as error:
            method = getattr(getattr(graph, "model", None), "method", graph)
            raise DwindleError(
                f"{type(method).__name__} cannot be recorded as one graph "
                f"({type(error).__name__}: {str(error).splitlines()[0]}); "
                "a method that shall be exported decides by tensors alone, without .item() or `if` on their values."
            ) from error


def _takes_many(graph: nn.Module) -> bool:
    """Whether its forward is written with *inputs, which torch counts as one argument."""
    return bool(type(graph).forward.__code__.co_flags & 0x04)


def onnx_model(recorded: Any, names: Sequence[str], outputs: Sequence[str], fixed: Collection[str] = ()) -> Any:
    """The program as a model of the package onnx_ir, its inputs and outputs by these names.

    fixed: weights of which nothing is computed beforehand, so that others can be put in their place.
    """
    import onnxscript.optimizer

    made, refused = None, ""
    if _without_writes(recorded):
        whole = copy.deepcopy(recorded.graph)
        try:
            made = _translated(_taken_as_it_is(recorded), names, outputs)
        except torch.onnx.OnnxExporterError as error:
            refused = str(error)
        del recorded.run_decompositions
        if made is None:
            recorded.graph_module.graph = whole
    if made is None:
        made = _taken_apart(recorded, names, outputs, refused)

    def foldable(node: Any) -> bool | None:
        return False if any(value is not None and value.name in fixed for value in node.inputs) else None

    # onnxruntime has passes of its own. The exporter's others take longer than they save, and one of them loses inputs.
    onnxscript.optimizer.fold_constants(made.model, onnx_shape_inference=False, should_fold=foldable)
    onnxscript.optimizer.remove_unused_nodes(made.model)
    return made.model


def _taken_apart(recorded: Any, names: Sequence[str], outputs: Sequence[str], refused: str = "") -> Any:
    """By the exporter's own way, which knows more operations and takes some ten seconds. refused: what our way met."""
    try:
        return _translated(recorded, names, outputs)
    except torch.onnx.OnnxExporterError as error:
        unknown_to_it = re.search(r"OpOverload\(op='([\w.]+)'", f"{error} {refused}")
        raise DwindleError(
            f"ONNX has no {unknown_to_it[1] if unknown_to_it else 'form of this graph'}, which the method uses; "
            "export to torch-export or aoti."
        ) from error


def _translated(recorded: Any, names: Sequence[str], outputs: Sequence[str]) -> Any:
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


def _without_writes(recorded: Any) -> bool:
    """Whether no operation writes into its input: then each can be translated by itself."""
    schemas = [getattr(node.target, "_schema", None) for node in recorded.graph.nodes if node.op == "call_function"]
    return not any(schema is not None and schema.is_mutable for schema in schemas)


def _taken_as_it_is(recorded: Any) -> Any:
    """The program, made to say that it is taken apart already. ONNX has nearly all operations that a model calls, and
    the exporter takes a program apart by recording it twice more, which is most of its time.
    """
    for node in reversed(list(recorded.graph.nodes)):
        if str(node.target) in CHECKS and not node.users:
            recorded.graph.erase_node(node)
    recorded.run_decompositions = lambda *_, **__: recorded
    return recorded


def make_input(model: Any, weight: str, name: str) -> None:
    """Let whoever runs the model give this weight, as an input of this name."""
    held = model.graph.initializers.pop(weight, None)
    if held is not None:
        held.const_value, held.name = None, name
        model.graph.inputs.append(held)


def without_weights(model: Any, weights: Collection[str]) -> bytes:
    """The model as a file in which these weights have a name and a shape and no values."""
    import onnx_ir

    for node in model.graph:  # which line of Python made it: most of the file
        node.metadata_props.clear()
    for name in weights:
        held = model.graph.initializers.get(name)
        if held is not None and held.const_value is not None:
            value = held.const_value
            held.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, 0, value.nbytes, value.dtype, shape=value.shape, name=name, base_dir=""
            )
    return serialized(model)


def serialized(model: Any) -> bytes:
    import onnx_ir

    made: bytes = onnx_ir.to_proto(model).SerializeToString()
    return made


def opened(source: str | bytes, threads: int | None = None, weights: Mapping[str, Tensor] | None = None) -> Any:
    """An ONNX file, or its bytes, in onnxruntime, on as many threads as torch uses. weights: of a file without them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3  # errors; its warnings are for its own developers
    # A masked key's share of attention is a number too small for the CPU's fast path, unless it may be 0.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    if weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(value.detach().numpy()) for value in weights.values()]
        options.add_external_initializers(list(weights), values)
    with flushing():
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What the graph makes of tensors by the names of its inputs, in the order of its outputs."""
    with flushing():
        made = session.run(None, {name: value.detach().contiguous().numpy() for name, value in given.items()})
    return tuple(torch.from_numpy(value) for value in made)


class _Static(nn.Module):
    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        out = self.vit(images)
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits


def static(vit: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """A model without us, in onnxruntime, for batches of images like these."""
    with torch.inference_mode(False):
        two = images.new_zeros(2, *images.shape[1:])
    graph = onnx_model(program(_Static(vit).eval(), two), ["images"], ["logits"])
    session = opened(serialized(graph))
    return lambda images: run(session, {"images": images})[0]


def open_onnx(path: str | os.PathLike, threads: int | None = None) -> Call:
    """What an ONNX file computes of images."""
    check_installed()
    session = opened(os.fspath(path), threads)
    return lambda images: run(session, {"images": images})


@torch.inference_mode()
def check(model: AdaptiveViT, call: Call, images: Tensor) -> dict[str, Any]:
    """`compare` of a call that takes images with the model's packed layout."""
    return compare(model(images, layout="packed"), lambda rows: call(images[rows]), len(images))


def compare(wanted: Output, call: Callable[[slice], tuple[Tensor, ...]], images: int) -> dict[str, Any]:
    """A batch and each of its images alone. A token on the edge of a decision may fall the other way elsewhere."""
    answers = [call(rows) for rows in (slice(None), *(slice(i, i + 1) for i in range(images)))]
    logits = torch.cat([answer[0] for answer in answers])
    depth = torch.cat([answer[1] for answer in answers])
    same = depth == torch.cat([wanted.trace.depth] * 2)
    gap = (logits - torch.cat([wanted.logits] * 2)).abs().amax(-1)[same.all(-1)]
    difference = float(gap.max()) if len(gap) else float("nan")
    agreed = same.float().mean().item()
    if not difference <= TOLERANCE or agreed < 0.999:
        raise DwindleError(
            f"The graph differs from the model: logits by {difference:.2g} (up to {TOLERANCE} is rounding), "
            f"{1 - agreed:.2%} of the tokens decided otherwise; this is a fault of the recording, please report it."
        )
    return {"difference": difference, "decisions": agreed, "checked": f"batch {images} and each image alone"}


@contextmanager
def flushing() -> Iterator[None]:
    """Numbers too small are 0 within, and after it as before: opening a session leaves the caller's thread so."""
    before = bool(torch.full((), 1e-39) * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters' notes are for their own developers."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loud, before):
            logger.setLevel(level)
