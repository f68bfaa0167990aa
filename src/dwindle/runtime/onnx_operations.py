"""ONNX translations of the torch operations that its exporter does not know, or translates to too many nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def translations() -> dict[Any, Callable]:
    """The translations, by the operation of torch."""
    aten = torch.ops.aten
    return {
        aten.scaled_dot_product_attention.default: _attention,
        aten.sort.stable: _stable_sort,
        aten.argsort.stable: _stable_argsort,
        aten.argsort.default: _argsort,
        aten.index_copy.default: _index_copy,
        aten.item.default: _same,
        aten.contiguous.default: _same,
        aten.to.dtype: _cast,
        aten.to.dtype_layout: _cast_and_laid_out,
        aten.to.device: _cast_and_moved,
        aten.square.default: _square,
        aten.rms_norm.default: _rms_norm,
        aten.cosine_similarity.default: _cosine_similarity,
        aten.rsub.Scalar: _subtracted_from,
        aten.__and__.Scalar: _and_constant,
        aten.__and__.Tensor: _and,
        aten.__or__.Tensor: _or,
        aten.nan_to_num.default: _nan_to_num,
        aten._upsample_bicubic2d_aa.vec: _resampled,
        aten.meshgrid.default: _grid,
        aten.meshgrid.indexing: _grid,
        aten.batch_norm.default: _batch_norm,
    }


def _same(x: Any, **_: Any) -> Any:
    from onnxscript import opset20 as op

    return op.Identity(x)


def _cast(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None) -> Any:
    from onnxscript import opset20 as op

    return op.Cast(x, to=dtype)


def _cast_and_laid_out(x: Any, *, dtype: int | None = None, **_: Any) -> Any:
    return _same(x) if dtype is None else _cast(x, dtype)


def _cast_and_moved(x: Any, device: Any, dtype: int, **_: Any) -> Any:
    """A cast. The device is ignored, as a graph runs on one device."""
    return _cast(x, dtype)


def _square(x: Any) -> Any:
    from onnxscript import opset20 as op

    return op.Mul(x, x)


def _rms_norm(x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    from onnxscript import opset20 as op

    axes: Any = op.Constant(value_ints=list(range(-len(normalized_shape), 0)))
    least: Any = op.Constant(value_float=torch.finfo(torch.float32).eps if eps is None else eps)
    mean: Any = op.ReduceMean(op.Mul(x, x), axes)
    normed: Any = op.Div(x, op.Sqrt(op.Add(mean, op.CastLike(least, x))))
    return normed if weight is None else op.Mul(normed, weight)


def _cosine_similarity(one: Any, other: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    from onnxscript import opset20 as op

    axis: Any = op.Constant(value_ints=[dim])
    least: Any = op.Constant(value_float=eps)

    def direction(x: Any) -> Any:
        return op.Div(x, op.Max(op.ReduceL2(x, axis), op.CastLike(least, x)))

    return op.ReduceSum(op.Mul(direction(one), direction(other)), axis, keepdims=0)


def _subtracted_from(x: Any, other: float, alpha: float = 1) -> Any:
    from onnxscript import opset20 as op

    def constant(value: float) -> Any:
        made: Any = op.Constant(value_float=float(value))
        return op.CastLike(made, x)

    return op.Sub(constant(other), x if alpha == 1 else op.Mul(x, constant(alpha)))


def _and_constant(x: Any, other: bool) -> Any:
    from onnxscript import opset20 as op

    if x.dtype.name != "BOOL" or not isinstance(other, bool):
        raise NotImplementedError("bits of whole numbers")
    return op.Identity(x) if other else op.And(x, op.Not(x))


def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    from onnxscript import opset20 as op

    if dim != 0:
        raise NotImplementedError(f"index_copy along axis {dim}")
    last: Any = op.Constant(value_ints=[-1])
    return op.ScatterND(x, op.Unsqueeze(index, last), source)


def _and(x: Any, other: Any) -> Any:
    from onnxscript import opset20 as op

    return op.And(x, other) if x.dtype.name == "BOOL" else op.BitwiseAnd(x, other)


def _or(x: Any, other: Any) -> Any:
    from onnxscript import opset20 as op

    return op.Or(x, other) if x.dtype.name == "BOOL" else op.BitwiseOr(x, other)


def _nan_to_num(x: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    from onnxscript import opset20 as op

    most = torch.finfo(torch.float32).max
    wanted = [0.0 if nan is None else nan, most if posinf is None else posinf, -most if neginf is None else neginf]
    found = [op.IsNaN(x), op.IsInf(x, detect_negative=0), op.IsInf(x, detect_positive=0)]
    for where, value in zip(found, wanted):
        x = op.Where(where, op.Constant(value_float=value), x)
    return x


def _grid(tensors: Sequence[Any], indexing: str = "ij") -> list[Any]:
    """The coordinates of every point of a grid, from those along each axis; rotary positions use them."""
    from onnxscript import opset20 as op

    if indexing != "ij":
        raise NotImplementedError(f"meshgrid with indexing {indexing}")
    sizes: Any = op.Concat(*(op.Shape(x) for x in tensors), axis=0)
    sides = []
    for axis, x in enumerate(tensors):
        others: Any = op.Constant(value_ints=[other for other in range(len(tensors)) if other != axis])
        sides.append(op.Expand(op.Unsqueeze(x, others), sizes))
    return sides


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """Batch norm in eval mode, with its running moments."""
    from onnxscript import opset20 as op

    if training or weight is None or bias is None or mean is None:
        raise NotImplementedError("batch norm by the batch's own moments")
    return op.BatchNormalization(x, weight, bias, mean, var, epsilon=eps)


def _resampled(
    x: Any, output_size: Sequence[int] | None, align_corners: bool = False, scale_factors: Any = None
) -> Any:
    """Bicubic resampling with antialiasing, as timm resamples position embeddings to another image size."""
    from onnxscript import opset20 as op

    if output_size is None or align_corners:
        raise NotImplementedError("resampling by a factor, or of corners")
    side: Any = op.Constant(value_ints=list(output_size))
    sizes: Any = op.Concat(op.Shape(x, start=0, end=2), side, axis=0)
    return op.Resize(x, None, None, sizes, mode="cubic", antialias=1, cubic_coeff_a=-0.5)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention in few nodes, which runtimes fuse. The exporter's own translation computes every tensor's shape too."""
    from onnxscript import opset20 as op

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = op.MatMul(op.Mul(query, op.Constant(value_float=scale)), op.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _stable_sort(values: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort by TopK, as ONNX has no sort: of equal values TopK takes the first one first."""
    from onnxscript import opset20 as op

    count = op.Shape(values, start=dim, end=(dim + 1) or None)
    return op.TopK(values, count, axis=dim, largest=int(descending), sorted=1)


def _stable_argsort(values: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    return _stable_sort(values, dim=dim, descending=descending)[1]


def _argsort(values: Any, dim: int = -1, descending: bool = False) -> Any:
    return _stable_sort(values, dim=dim, descending=descending)[1]
