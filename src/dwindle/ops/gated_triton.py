"""Triton kernels of attention with gated keys, forward and backward. Their definition: `attention.py: attend_ref`.

With e_ij = 2^s_ij, s = scale q k^T log2 e, and Z_i = sum_j g_j e_ij: out_i = sum_j g_j e_ij v_j / Z_i; `norm` is log2
Z. Let R_ij = e_ij / Z_i and W_ij = R_ij (do_i . v_j - do_i . out_i). Then dg_j = sum_i W_ij, also where g_j is 0, and
dv_j = g_j sum_i R_ij do_i, dk_j = scale g_j sum_i W_ij q_i, dq_i = scale sum_j g_j W_ij k_j.
"""

from .launch import tl, triton

# The score of a key with gate 0 may exceed those of all others by any amount, so its ratio R_ij in the gradient of the
# gate is bounded by 2^MAX_EXPONENT.
MAX_EXPONENT = tl.constexpr(64.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(ptr, image, head, n, e, stride_b, stride_h, stride_n, N, E):
    """The rows n of one image and head; 0 beyond the last row and beyond column E."""
    at = ptr + image.to(tl.int64) * stride_b + head * stride_h + n[:, None] * stride_n + e[None, :]
    return tl.load(at, mask=(n < N)[:, None] & (e < E)[None, :], other=0.0)


@triton.jit
def store_tile(ptr, values, image, head, n, e, H, N, E):
    """Store rows n of one image and head into (B, N, H, E)."""
    at = ptr + ((image.to(tl.int64) * N + n[:, None]) * H + head) * E + e[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=(n < N)[:, None] & (e < E)[None, :])


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    out_ptr,
    norm_ptr,
    scale,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    H,
    N,
    E,
    PRECISION: tl.constexpr,
    BQ: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
):
    head, image = tl.program_id(1), tl.program_id(2)
    e, i = tl.arange(0, BE), tl.program_id(0) * BQ + tl.arange(0, BQ)
    q = load_tile(q_ptr, image, head, i, e, qb, qh, qn, N, E)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BE), tl.float32)
    for begin in range(0, N, BJ):
        j = begin + tl.arange(0, BJ)
        gate = tl.load(gate_ptr + image * N + j, mask=j < N, other=0.0)
        k = load_tile(k_ptr, image, head, j, e, kb, kh, kn, N, E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        s = tl.where((gate != 0)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # without a key so far: exp2 of -inf and not of NaN
        weights = tl.exp2(s - level[:, None]) * gate[None, :]
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(v_ptr, image, head, j, e, vb, vh, vn, N, E)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    some = total > 0
    store_tile(out_ptr, acc / tl.where(some, total, 1.0)[:, None], image, head, i, e, H, N, E)
    norm = tl.where(some, top + tl.log2(total), float("inf"))
    tl.store(norm_ptr + (image * H + head) * N + i, norm, mask=i < N)


@triton.jit
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    out_ptr,
    norm_ptr,
    dout_ptr,
    dq_ptr,
    dot_ptr,
    scale,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    ob,
    oh,
    on,
    db,
    dh,
    dn,
    H,
    N,
    E,
    PRECISION: tl.constexpr,
    BQ: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
):
    """dq, and do . out of each row, which `keys_kernel` reads."""
    head, image = tl.program_id(1), tl.program_id(2)
    e, i = tl.arange(0, BE), tl.program_id(0) * BQ + tl.arange(0, BQ)
    q = load_tile(q_ptr, image, head, i, e, qb, qh, qn, N, E)
    dout = load_tile(dout_ptr, image, head, i, e, db, dh, dn, N, E)
    out = load_tile(out_ptr, image, head, i, e, ob, oh, on, N, E)
    dot = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = (image * H + head) * N + i
    tl.store(dot_ptr + at, dot, mask=i < N)
    norm = tl.load(norm_ptr + at, mask=i < N, other=float("inf"))
    acc = tl.zeros((BQ, BE), tl.float32)
    for begin in range(0, N, BJ):
        j = begin + tl.arange(0, BJ)
        gate = tl.load(gate_ptr + image * N + j, mask=j < N, other=0.0)
        k = load_tile(k_ptr, image, head, j, e, kb, kh, kn, N, E)
        v = load_tile(v_ptr, image, head, j, e, vb, vh, vn, N, E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        ratio = tl.exp2(tl.minimum(s - norm[:, None], MAX_EXPONENT))
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = ratio * (dp - dot[:, None]) * gate[None, :]
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    store_tile(dq_ptr, acc * scale, image, head, i, e, H, N, E)


@triton.jit
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    norm_ptr,
    dot_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    dgate_ptr,
    scale,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    db,
    dh,
    dn,
    H,
    N,
    E,
    PRECISION: tl.constexpr,
    BQ: tl.constexpr,
    BJ: tl.constexpr,
    BE: tl.constexpr,
):
    """dk, dv, and the gradient of the gate for each head."""
    head, image = tl.program_id(1), tl.program_id(2)
    e, j = tl.arange(0, BE), tl.program_id(0) * BJ + tl.arange(0, BJ)
    gate = tl.load(gate_ptr + image * N + j, mask=j < N, other=0.0)
    k = load_tile(k_ptr, image, head, j, e, kb, kh, kn, N, E)
    v = load_tile(v_ptr, image, head, j, e, vb, vh, vn, N, E)
    dk = tl.zeros((BJ, BE), tl.float32)
    dv = tl.zeros((BJ, BE), tl.float32)
    dgate = tl.zeros((BJ,), tl.float32)
    for begin in range(0, N, BQ):
        i = begin + tl.arange(0, BQ)
        at = (image * H + head) * N + i
        norm = tl.load(norm_ptr + at, mask=i < N, other=float("inf"))
        dot = tl.load(dot_ptr + at, mask=i < N, other=0.0)
        q = load_tile(q_ptr, image, head, i, e, qb, qh, qn, N, E)
        dout = load_tile(dout_ptr, image, head, i, e, db, dh, dn, N, E)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)  # (BJ, BQ)
        ratio = tl.exp2(tl.minimum(s - norm[None, :], MAX_EXPONENT))
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        w = ratio * (dp - dot[None, :])
        dgate += tl.sum(w, 1)
        dv = tl.dot(ratio.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dk = tl.dot(w.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr, dk * (gate * scale)[:, None], image, head, j, e, H, N, E)
    store_tile(dv_ptr, dv * gate[:, None], image, head, j, e, H, N, E)
    tl.store(dgate_ptr + (image * H + head) * N + j, dgate, mask=j < N)
