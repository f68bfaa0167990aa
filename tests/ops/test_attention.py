"""Every way to attend against `attend_ref`, the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dwindle.ops.attention import (
    Pairs,
    _attend_padded,
    attend_gated,
    attend_masked,
    attend_packed,
    attend_ref,
    class_attention,
    class_attention_packed,
)


def problem(lengths: list[int], heads: int, size: int, seed: int):
    """q, k, v (B, H, N, E) in double, and who is live: the first `length` tokens of each image."""
    torch.manual_seed(seed)
    count = max([*lengths, 1])
    qkv = torch.randn(3, len(lengths), heads, count, size, dtype=torch.float64)
    live = torch.arange(count) < torch.tensor(lengths)[:, None]
    return *qkv, live


def pack(x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)[live].transpose(0, 1)[None]  # (1, H, T, E)


cases = given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 3), st.sampled_from([4, 8]), st.integers(0, 99)
)


@settings(max_examples=60, deadline=None)
@cases
def test_all_layouts_are_the_definition(lengths, heads, size, seed):
    q, k, v, live = problem(lengths, heads, size, seed)
    for scale in (None, 0.3):
        expected = attend_ref(q, k, v, live, scale)
        some = live.any(-1)
        torch.testing.assert_close(attend_masked(q, k, v, live, scale=scale)[some], expected[some])
        gate = live.to(torch.float64)
        torch.testing.assert_close(attend_gated(q, k, v, gate, scale=scale)[some], expected[some])
        rows = [pack(x, live) for x in (q, k, v)]
        packed = attend_packed(*rows, lengths, scale=scale)
        torch.testing.assert_close(packed, pack(expected, live))
        if any(lengths):
            padded = _attend_padded(*rows, [n for n in lengths if n], dropout_p=0.0, scale=scale)
            torch.testing.assert_close(padded, pack(expected, live))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_bias_for_pairs_of_tokens_wherever_the_live_rows_lie(images, heads, of_each, weighted, seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, images, heads, 7, 8, dtype=torch.float64)
    bias = torch.randn(images if of_each else 1, heads, 7, 7, dtype=torch.float64)
    live = torch.rand(images, 7) < torch.rand(images, 1)  # some images keep few tokens, some none
    live[0] = True
    live[:, 0] = live.any(-1)  # the class token is the last to leave
    some, lengths = live.any(-1), live.sum(1).tolist()
    weight = torch.rand(images, 7, dtype=torch.float64) + 0.5 if weighted else torch.ones(images, 7).double()
    key_bias = weight.log() if weighted else None
    expected = attend_ref(q, k, v, live * weight, pair_bias=bias)
    masked = attend_masked(q, k, v, live, key_bias, bias)
    torch.testing.assert_close(masked[some], expected[some])
    torch.testing.assert_close(attend_gated(q, k, v, live * weight, bias)[some], expected[some])
    pairs = Pairs(bias, live.nonzero()[:, 1])
    rows = [pack(x, live) for x in (q, k, v)]
    of_rows = None if key_bias is None else key_bias[live]
    torch.testing.assert_close(attend_packed(*rows, lengths, of_rows, pairs), pack(expected, live))
    padded = _attend_padded(*rows, lengths, of_rows, pairs, dropout_p=0.0, scale=None)
    torch.testing.assert_close(padded, pack(expected, live))
    for prefix in (0, 1):
        got = class_attention(q, k, live, prefix, None, bias)
        packed = class_attention_packed(*rows[:2], lengths, prefix, None, pairs)
        torch.testing.assert_close(packed, got[live])


@settings(max_examples=20, deadline=None)
@cases
def test_attention_received(lengths, heads, size, seed):
    q, k, _, live = problem(lengths, heads, size, seed)
    for prefix in (0, 1):
        got = class_attention(q, k, live, prefix)
        some = live.any(-1)
        torch.testing.assert_close(got[some].sum(-1), torch.ones_like(got[some].sum(-1)))
        assert (got[~live] == 0).all()
        if live.any():
            packed = class_attention_packed(pack(q, live), pack(k, live), lengths, prefix)
            torch.testing.assert_close(packed, got[live])


def test_the_gradient_of_the_gates():
    q, k, v, _ = problem([4, 4], 2, 8, 0)
    gate = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(v)
    (got,) = torch.autograd.grad((attend_gated(q, k, v, gate) * weight).sum(), gate)

    def slope(i: int, j: int) -> float:
        step = torch.zeros_like(gate)
        step[i, j] = 1e-6
        high, low = (attend_gated(q, k, v, gate.detach() + s) for s in (step, -step))
        return float(((high - low) * weight).sum() / 2e-6)

    expected = torch.tensor([[slope(i, j) for j in range(4)] for i in range(2)], dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert (got[gate == 0] != 0).all()  # a token that was put out can learn to come back


def test_nobody_left_gives_no_nan():
    q, k, v, live = problem([0, 3], 2, 8, 0)
    for x in (q, k, v):
        x.requires_grad_()
    out = attend_masked(q, k, v, live)
    out.sum().backward()
    assert out.isfinite().all() and q.grad.isfinite().all()
    assert (attend_ref(q, k, v, live)[0] == 0).all()


def test_gates_when_those_who_left_held_nearly_all_attention():
    q, k, v = torch.ones(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 2, 8)
    k[:, :, 1] = 6.0  # the key that is gone is an attention sink
    gate = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(attend_gated(q, k, v, gate), attend_ref(q, k, v, gate))
