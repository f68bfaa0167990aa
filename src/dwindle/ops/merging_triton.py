"""Triton kernels of `merging.py`, which holds their definitions and the meaning of every argument."""

from .launch import tl, triton
from .rows_triton import wait_for_previous


@triton.jit
def mean_keys(qkv_ptr, entry, inside, H, E, BE: tl.constexpr):
    """The keys of some entries, averaged over heads and rounded to the type of qkv."""
    e = tl.arange(0, BE)
    at = qkv_ptr + entry.to(tl.int64)[:, None] * (3 * H * E) + H * E + e[None, :]
    seen = inside[:, None] & (e < E)[None, :]
    total = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    for head in range(1, H):
        total += tl.load(at + head * E, mask=seen, other=0.0).to(tl.float32)
    return (total / H).to(qkv_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def nearest_key_kernel(
    qkv_ptr,
    rows_ptr,
    starts_ptr,
    new_starts_ptr,
    live_ptr,
    into_ptr,
    N,
    H,
    E,
    prefix,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
):
    """For some rows of an image the row into which each is merged; -1: it stays, or there is none."""
    wait_for_previous(PDL)
    image = tl.program_id(1)
    start = tl.load(starts_ptr + image)
    length = tl.load(starts_ptr + image + 1) - start
    staying = tl.load(new_starts_ptr + image + 1) - tl.load(new_starts_ptr + image)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    if (tl.program_id(0) * BM >= length) | (staying == length):
        return
    row = tl.load(rows_ptr + start + i, mask=i < length, other=0)
    leaves = (i < length) & (tl.load(live_ptr + row, mask=i < length, other=1) == 0) & (row % N >= prefix)
    best = tl.full((BM,), float("-inf"), tl.float32)
    into = tl.full((BM,), -1, tl.int32)
    if tl.max(leaves.to(tl.int32), 0) > 0:
        mine = mean_keys(qkv_ptr, start + i, leaves, H, E, BE)
        for begin in range(0, length, BJ):
            j = begin + tl.arange(0, BJ)
            other = tl.load(rows_ptr + start + j, mask=j < length, other=0)
            stays = (j < length) & (tl.load(live_ptr + other, mask=j < length, other=0) != 0) & (other % N >= prefix)
            keys = mean_keys(qkv_ptr, start + j, stays, H, E, BE)
            norm = tl.maximum(tl.sqrt(tl.sum(keys * keys, 1)), 1e-12)
            # The norm of a row's own key does not change which key is most similar.
            similarity = tl.dot(mine, tl.trans(keys), input_precision=PRECISION) / norm[None, :]
            similarity = tl.where(stays[None, :], similarity, float("-inf"))
            most, at = tl.max(similarity, 1), tl.argmax(similarity, 1)
            better = most > best
            into = tl.where(better, tl.load(rows_ptr + start + begin + at, mask=better, other=0), into)
            best = tl.where(better, most, best)
    tl.store(into_ptr + row, tl.where(leaves, into, -1), mask=i < length)


@triton.jit
def joining(rows_ptr, into_ptr, size_ptr, start, length, j, row):
    """Rows j of an image, whether each is merged into another, and its size as a weight if it is merged into `row`."""
    other = tl.load(rows_ptr + start + j, mask=j < length, other=0)
    into = tl.load(into_ptr + other, mask=j < length, other=-1)
    size = tl.load(size_ptr + other, mask=(j < length) & (into >= 0), other=0.0)
    return other, into >= 0, tl.where(into[None, :] == row[:, None], size[None, :], 0.0)


@triton.jit
def merge_kernel(
    x_ptr,
    rows_ptr,
    starts_ptr,
    new_rows_ptr,
    new_starts_ptr,
    into_ptr,
    size_ptr,
    bias_ptr,
    D,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    BD: tl.constexpr,
):
    """Replace some staying rows of an image by the mean with the rows that are merged into them. It works in place: a
    program writes only its own rows, and the other rows it reads are leaving ones, which no program writes."""
    wait_for_previous(PDL)
    image = tl.program_id(1)
    start = tl.load(starts_ptr + image)
    length = tl.load(starts_ptr + image + 1) - start
    new_start = tl.load(new_starts_ptr + image)
    staying = tl.load(new_starts_ptr + image + 1) - new_start
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    if (tl.program_id(0) * BM >= staying) | (staying == length):
        return
    row = tl.load(new_rows_ptr + new_start + i, mask=i < staying, other=-2)  # -2: no row is merged into it
    own = tl.load(size_ptr + row, mask=i < staying, other=1.0)
    total = own
    for begin in range(0, length, BJ):
        _, _, weight = joining(rows_ptr, into_ptr, size_ptr, start, length, begin + tl.arange(0, BJ), row)
        total += tl.sum(weight, 1)
    joined = (i < staying) & (total > own)
    if tl.max(joined.to(tl.int32), 0) == 0:
        return
    for begin_d in range(0, D, BD):
        d = begin_d + tl.arange(0, BD)
        x_at = x_ptr + row.to(tl.int64)[:, None] * D + d[None, :]
        seen = joined[:, None] & (d < D)[None, :]
        acc = tl.load(x_at, mask=seen, other=0.0).to(tl.float32) * own[:, None]
        for begin in range(0, length, BJ):
            j = begin + tl.arange(0, BJ)
            other, leaves, weight = joining(rows_ptr, into_ptr, size_ptr, start, length, j, row)
            other_x = tl.load(
                x_ptr + other.to(tl.int64)[:, None] * D + d[None, :],
                mask=leaves[:, None] & (d < D)[None, :],
                other=0.0,
            )
            # TF32 is exact here: sizes are integers, and values in half precision fit into it.
            acc = tl.dot(weight, other_x.to(tl.float32), acc, input_precision=PRECISION)
        tl.store(x_at, (acc / total[:, None]).to(x_ptr.dtype.element_ty), mask=seen)
    tl.store(size_ptr + row, total, mask=joined)
    tl.store(bias_ptr + row, tl.log(total), mask=joined)
