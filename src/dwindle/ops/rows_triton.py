"""Triton kernels over the live rows of a batch. `rows.py` holds their definitions and explains every argument.

Each kernel is launched for as many rows as there can be. A program whose rows lie beyond the live count, which it reads
from device memory, ends at once. So the host need not know the count, and the whole network is one CUDA graph.
"""

from .launch import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_rough":
        # Abramowitz and Stegun's 7.1.28, 1 - erf z = 1 / (1 + a1 z + ... + a6 z^6)^16, has an error of at most 3e-7,
        # which rounding to 16 bits hides. It needs one division instead of the many steps of erf.
        z = tl.abs(x) * 0.7071067811865476
        p = 1.0 + z * (
            0.0705230784
            + z * (0.0422820123 + z * (0.0092705272 + z * (0.0001520143 + z * (0.0002765672 + z * 0.0000430638))))
        )
        p2 = p * p
        p4 = p2 * p2
        p8 = p4 * p4
        tail = 0.5 / (p8 * p8)  # (1 - erf |z|) / 2
        return x * tl.where(x > 0, 1.0 - tail, tail)
    elif ACT == "gelu_tanh":
        # tanh(u) = 2 sigmoid(2u) - 1, so x (1 + tanh(u)) / 2 = x sigmoid(2u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    else:
        return x


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Programmatic dependent launch: programs are set up while the previous kernel still runs, and wait for it here,
    before they first read memory. From here on the next kernel may be set up."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def norm_rows_kernel(
    x_ptr,
    rows_ptr,
    count_ptr,
    y_ptr,
    w_ptr,
    b_ptr,
    probe_ptr,
    neuron,
    eps,
    K,
    PROBE: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Live rows with mean 0 and deviation 1, compact; and one neuron of the linear layer that reads them."""
    wait_for_previous(PDL)
    live = tl.load(count_ptr)
    begin = tl.program_id(0) * BM
    if begin >= live:
        return
    t = begin + tl.arange(0, BM)
    row = tl.load(rows_ptr + t, mask=t < live, other=0).to(tl.int64)
    k = tl.arange(0, BK)
    inside = (t < live)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / K
    away = tl.where((k < K)[None, :], x - mean[:, None], 0.0)
    y = (away * tl.rsqrt(tl.sum(away * away, 1) / K + eps)[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * K + k[None, :], y, mask=inside)
    if PROBE:
        w = tl.load(w_ptr + neuron * K + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(probe_ptr + row, tl.sum(y.to(tl.float32) * w[None, :], 1) + tl.load(b_ptr + neuron), mask=t < live)


@triton.jit
def linear_kernel(
    a_ptr,
    x_ptr,
    rows_ptr,
    count_ptr,
    w_ptr,
    b_ptr,
    c_ptr,
    s_ptr,
    y_ptr,
    probe_ptr,
    neuron,
    eps,
    N,
    K,
    ADD: tl.constexpr,  # x += s * (a W + b), a compact; else y = act(norm(x) W + b), y compact
    NORM: tl.constexpr,
    PROBE: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,  # BK divides K
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    wait_for_previous(PDL)
    live = tl.load(count_ptr)
    columns = tl.cdiv(N, BN)
    begin = (tl.program_id(0) // columns) * BM
    if begin >= live:
        return
    t = begin + tl.arange(0, BM)
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row = tl.load(rows_ptr + t, mask=t < live, other=0).to(tl.int64)
    # Loads need no mask: rows beyond the live ones read row 0, columns beyond the last read the last. Stores need one.
    a_at = (a_ptr + tl.where(t < live, t, 0).to(tl.int64)[:, None] * K) if ADD else (x_ptr + row[:, None] * K)
    a_at += k[None, :]
    w_at = w_ptr + tl.minimum(n, N - 1)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    first = tl.zeros((BM,), tl.float32)
    second = tl.zeros((BM,), tl.float32)
    for begin_k in range(0, K, BK):
        if EVEN:
            a = tl.load(a_at)
            w = tl.load(w_at)
        else:
            inside = k < K - begin_k
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            w = tl.load(w_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        if NORM:
            wide = a.to(tl.float32)
            first += tl.sum(wide, 1)
            second += tl.sum(wide * wide, 1)
            # `a` is read by the product and by the sums. For such a tile Triton (3.6) counts one buffer too few and
            # would refill it while the product may still read it. This use of `acc` waits until the product has ended.
            acc = tl.where(live > 0, acc, 0.0)
        a_at += BK
        w_at += BK
    if NORM:
        # W (x - mean) = W x - mean * (row sums of W)
        mean = first / K
        rstd = tl.rsqrt(tl.maximum(second / K - mean * mean, 0.0) + eps)
        c = tl.load(c_ptr + n, mask=n < N, other=0.0)
        acc = (acc - mean[:, None] * c[None, :]) * rstd[:, None]
    acc += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
    inside = (t < live)[:, None] & (n < N)[None, :]
    if ADD:
        acc *= tl.load(s_ptr + n, mask=n < N, other=0.0)[None, :]
        x_at = x_ptr + row[:, None] * N + n[None, :]
        acc += tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_at, acc.to(x_ptr.dtype.element_ty), mask=inside)
    else:
        if PROBE:  # noqa: SIM102 (a constant when compiled, which the next condition is not)
            if tl.program_id(0) % columns == neuron // BN:
                tl.store(probe_ptr + row, tl.sum(tl.where((n == neuron)[None, :], acc, 0.0), 1), mask=t < live)
        y_at = y_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(y_at, activate(acc, ACT).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def persistent_kernel(
    a,
    w,
    y,
    x_ptr,
    rows_ptr,
    count_ptr,
    b_ptr,
    s_ptr,
    N,
    K,
    ADD: tl.constexpr,  # as in `linear_kernel`
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A linear layer by as many programs as the chip runs at once, each of which computes tile after tile. a, w and y
    are tensor descriptors: Hopper's copy engine loads a tile, 0 beyond the ends, while the one before is computed."""
    wait_for_previous(PDL)
    live = tl.load(count_ptr)
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(live, BM) * columns, tl.num_programs(0), flatten=True):
        begin = (tile // columns) * BM
        begin_n = (tile % columns) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for begin_k in range(0, K, BK):
            acc = tl.dot(a.load([begin, begin_k]), w.load([begin_n, begin_k]).T, acc, input_precision=PRECISION)
        n = begin_n + tl.arange(0, BN)
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
        if ADD:
            acc *= tl.load(s_ptr + n, mask=n < N, other=0.0)[None, :]
            t = begin + tl.arange(0, BM)
            row = tl.load(rows_ptr + t, mask=t < live, other=0).to(tl.int64)
            inside = (t < live)[:, None] & (n < N)[None, :]
            x_at = x_ptr + row[:, None] * N + n[None, :]
            acc += tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(x_at, acc.to(x_ptr.dtype.element_ty), mask=inside)
        else:  # entries beyond the live ones may be written, as they are arbitrary
            y.store([begin, begin_n], activate(acc, ACT).to(y.dtype))


@triton.jit
def head_norm(x, w_ptr, b_ptr, eps, e, E, DTYPE: tl.constexpr):
    """LayerNorm over the last axis of a tile whose columns beyond E are 0."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide, 1) / E
    away = tl.where((e < E)[None, :], wide - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(away * away, 1) / E + eps)
    w = tl.load(w_ptr + e, mask=e < E, other=0.0)
    b = tl.load(b_ptr + e, mask=e < E, other=0.0)
    return (away * rstd[:, None] * w[None, :] + b[None, :]).to(DTYPE)


@triton.jit
def attend_kernel(
    qkv_ptr,
    starts_ptr,
    rows_ptr,
    bias_ptr,
    out_ptr,
    qw_ptr,
    qb_ptr,
    kw_ptr,
    kb_ptr,
    scale,
    eps,
    H,
    E,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    BQ: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
):
    wait_for_previous(PDL)
    head, image = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + image)
    length = tl.load(starts_ptr + image + 1) - start
    begin = tl.program_id(0) * BQ
    if begin >= length:
        return
    e, i, j = tl.arange(0, BE), begin + tl.arange(0, BQ), tl.arange(0, BJ)
    width = H * E
    base = qkv_ptr + start.to(tl.int64) * 3 * width + head * E
    dtype = qkv_ptr.dtype.element_ty
    q = tl.load(base + i[:, None] * (3 * width) + e[None, :], mask=(i < length)[:, None] & (e < E)[None, :], other=0.0)
    if QK_NORM:
        q = head_norm(q, qw_ptr, qb_ptr, eps, e, E, dtype)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BE), tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    for begin_j in range(0, length, BJ):
        at = begin_j + j
        seen = at < length
        inside = seen[:, None] & (e < E)[None, :]
        k = tl.load(base + width + at[:, None] * (3 * width) + e[None, :], mask=inside, other=0.0)
        if QK_NORM:
            k = head_norm(k, kw_ptr, kb_ptr, eps, e, E, dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * log2e)
        if BIAS:
            row = tl.load(rows_ptr + start + at, mask=seen, other=0)
            scores += (tl.load(bias_ptr + row, mask=seen, other=0.0) * log2e)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(base + 2 * width + at[:, None] * (3 * width) + e[None, :], mask=inside, other=0.0)
        acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    out = out_ptr + (start + i).to(tl.int64)[:, None] * width + head * E + e[None, :]
    tl.store(out, (acc / total[:, None]).to(dtype), mask=(i < length)[:, None] & (e < E)[None, :])


@triton.jit
def kept(live_ptr, keep_ptr, at, inside):
    """1 for rows that are live and kept, at the places `at`; 0 where not `inside`."""
    return tl.load(live_ptr + at, mask=inside, other=0) & tl.load(keep_ptr + at, mask=inside, other=0)


@triton.jit
def count_kernel(live_ptr, keep_ptr, counts_ptr, N, PDL: tl.constexpr, BN: tl.constexpr):
    wait_for_previous(PDL)
    image = tl.program_id(0)
    n = tl.arange(0, BN)
    live = kept(live_ptr, keep_ptr, image * N + n, n < N)
    tl.store(counts_ptr + image, tl.sum(live.to(tl.int32), 0))


@triton.jit
def compact_kernel(
    live_ptr,
    keep_ptr,
    counts_ptr,
    rows_ptr,
    starts_ptr,
    new_live_ptr,
    images,
    N,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """Write `starts`, where each image's rows begin and the last ends, and `rows`, the live rows that are kept, image
    after image in order."""
    wait_for_previous(PDL)
    image = tl.program_id(0)
    before = tl.zeros((BB,), tl.int32)
    if COUNTED:
        for begin in range(0, image, BB):
            b = begin + tl.arange(0, BB)
            before += tl.load(counts_ptr + b, mask=b < image, other=0)
    else:
        for begin in range(0, image * N, BB):
            at = begin + tl.arange(0, BB)
            before += kept(live_ptr, keep_ptr, at, at < image * N).to(tl.int32)
    start = tl.sum(before, 0)
    n = tl.arange(0, BN)
    inside = n < N
    live = kept(live_ptr, keep_ptr, image * N + n, inside)
    place = start + tl.cumsum(live.to(tl.int32), 0) - 1
    tl.store(rows_ptr + place, image * N + n, mask=live != 0)
    tl.store(new_live_ptr + image * N + n, live, mask=inside)
    tl.store(starts_ptr + image, start)
    if image == images - 1:
        tl.store(starts_ptr + images, start + tl.sum(live.to(tl.int32), 0))
