"""Triton kernels of AHT-ViT's planner and supervisor. `planner.py` holds their definitions and explains arguments."""

from .launch import tl, triton
from .rows_triton import wait_for_previous


@triton.jit
def image_mean_kernel(x_ptr, rows_ptr, starts_ptr, mean_ptr, D, PDL: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    wait_for_previous(PDL)
    image = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    start = tl.load(starts_ptr + image)
    end = tl.load(starts_ptr + image + 1)
    acc = tl.zeros((BT, BD), tl.float32)
    for begin in range(start, end, BT):
        t = begin + tl.arange(0, BT)
        row = tl.load(rows_ptr + t, mask=t < end, other=0).to(tl.int64)
        inside = (t < end)[:, None] & (d < D)[None, :]
        acc += tl.load(x_ptr + row[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(acc, 0) / tl.maximum(end - start, 1)
    tl.store(mean_ptr + image * D + d, mean.to(mean_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def plan_kernel(
    x_ptr,
    rows_ptr,
    count_ptr,
    image_mean_ptr,
    token_ptr,
    context_ptr,
    bias_ptr,
    out_ptr,
    shift_ptr,
    mean_ptr,
    deviation_ptr,
    bar_ptr,
    standing_ptr,
    plan_ptr,
    softness,
    layer,
    blocks,
    N,
    K,
    H,
    PER_IMAGE: tl.constexpr,  # there is a bar for each image
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
):
    wait_for_previous(PDL)
    live = tl.load(count_ptr)
    begin = tl.program_id(0) * BM
    if begin >= live:
        return
    t = begin + tl.arange(0, BM)
    h = tl.arange(0, BH)
    k = tl.arange(0, BK)
    row = tl.load(rows_ptr + t, mask=t < live, other=0)
    x_at = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    mean_at = image_mean_ptr + (row // N)[:, None] * K + k[None, :]
    w_at = h[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BH), tl.float32)
    for begin_k in range(0, K, BK):
        left = k < K - begin_k
        inside = (t < live)[:, None] & left[None, :]
        weights = (h < H)[None, :] & left[:, None]
        x = tl.load(x_at + begin_k, mask=inside, other=0.0)
        acc = tl.dot(x, tl.load(token_ptr + w_at + begin_k, mask=weights, other=0.0), acc, input_precision=PRECISION)
        mean = tl.load(mean_at + begin_k, mask=inside, other=0.0)
        acc = tl.dot(
            mean, tl.load(context_ptr + w_at + begin_k, mask=weights, other=0.0), acc, input_precision=PRECISION
        )
    acc += tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    weight = tl.load(out_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    value = tl.sum(tl.maximum(acc, 0.0) * weight[None, :], 1) + tl.load(shift_ptr).to(tl.float32)
    standing = (value - tl.load(mean_ptr).to(tl.float32)) / tl.load(deviation_ptr).to(tl.float32)
    if PER_IMAGE:
        bar = tl.load(bar_ptr + row // N).to(tl.float32)
    else:
        bar = tl.load(bar_ptr).to(tl.float32)
    plan = layer + (blocks - layer) * tl.sigmoid((standing - bar) / softness)
    tl.store(standing_ptr + row, standing, mask=t < live)
    tl.store(plan_ptr + row, plan, mask=t < live)


@triton.jit
def supervise(
    probe_ptr,
    plan_ptr,
    sum_ptr,
    live_ptr,
    forced_ptr,
    gamma,
    beta,
    follow,
    layer,
    threshold,
    threshold_ptr,
    at,
    inside,
    N,
    prefix,
    FORCED: tl.constexpr,
    PER_IMAGE: tl.constexpr,
):
    """The scores, their sums, and 1 for each row that goes on, at the places `at`."""
    probe = tl.load(probe_ptr + at, mask=inside, other=0.0).to(tl.float32)
    plan = tl.load(plan_ptr + at, mask=inside, other=0.0)
    score = tl.sigmoid(gamma * (probe + follow * (layer - plan)) + beta)
    total = tl.load(sum_ptr + at, mask=inside, other=0.0) + score
    if FORCED:
        keep = tl.load(forced_ptr + at, mask=inside, other=0) > layer
    else:
        if PER_IMAGE:
            threshold = tl.load(threshold_ptr + at // N, mask=inside, other=0.0).to(tl.float32)
        keep = (total < threshold) | (at % N < prefix)
    live = tl.load(live_ptr + at, mask=inside, other=0) != 0
    return score, total, (keep & live & inside).to(tl.int32)


@triton.jit
def halt_kernel(
    probe_ptr,
    plan_ptr,
    sum_ptr,
    live_ptr,
    forced_ptr,
    score_ptr,
    new_sum_ptr,
    new_live_ptr,
    counts_ptr,
    rows_ptr,
    starts_ptr,
    gamma_ptr,
    beta_ptr,
    follow,
    layer,
    threshold,
    threshold_ptr,
    images,
    N,
    prefix,
    FORCED: tl.constexpr,
    PER_IMAGE: tl.constexpr,  # there is a threshold for each image
    LIST: tl.constexpr,  # few images: list the rows that go on here; each program counts those before its own
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    wait_for_previous(PDL)
    image = tl.program_id(0)
    gamma, beta = tl.load(gamma_ptr).to(tl.float32), tl.load(beta_ptr).to(tl.float32)
    n = tl.arange(0, BN)
    at = image * N + n
    inside = n < N
    score, total, keep = supervise(
        probe_ptr, plan_ptr, sum_ptr, live_ptr, forced_ptr,
        gamma, beta, follow, layer, threshold, threshold_ptr, at, inside, N, prefix, FORCED, PER_IMAGE,
    )  # fmt: skip
    tl.store(score_ptr + at, score, mask=inside)
    tl.store(new_sum_ptr + at, total, mask=inside)
    tl.store(new_live_ptr + at, keep.to(tl.uint8), mask=inside)
    if LIST:
        before = tl.zeros((BB,), tl.int32)
        for begin in range(0, image * N, BB):
            earlier = begin + tl.arange(0, BB)
            _, _, kept = supervise(
                probe_ptr, plan_ptr, sum_ptr, live_ptr, forced_ptr,
                gamma, beta, follow, layer, threshold, threshold_ptr,
                earlier, earlier < image * N, N, prefix, FORCED, PER_IMAGE,
            )  # fmt: skip
            before += kept
        start = tl.sum(before, 0)
        tl.store(rows_ptr + start + tl.cumsum(keep, 0) - 1, at, mask=keep != 0)
        tl.store(starts_ptr + image, start)
        if image == images - 1:
            tl.store(starts_ptr + images, start + tl.sum(keep, 0))
    else:
        tl.store(counts_ptr + image, tl.sum(keep, 0))
