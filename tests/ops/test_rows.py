"""The kernels over live rows against their plain twins: under Triton's interpreter, or on a GPU."""

import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dwindle.ops import merging, planner
from dwindle.ops import rows as ops
from dwindle.ops.launch import linear_tile
from shared.kernels import CUDA, DEVICE, kernels
from shared.tally import SLOW

SHAPES = int(os.environ.get("DWINDLE_SHAPES", "300" if CUDA else "30" if SLOW else "10"))  # 10000: the long run
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]
several_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def some_rows(live_BN: torch.Tensor) -> ops.Rows:
    live = live_BN.to(DEVICE)
    return ops.compact_ref(live, torch.ones_like(live))[0]


def random_live(images: int, tokens: int, share: float, seed: int) -> torch.Tensor:
    return torch.rand(images, tokens, generator=torch.Generator().manual_seed(seed)) < share


@torch.no_grad()
def twice(ours: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of plain PyTorch in the same dtype, both against float64 or float32."""
    if not exact.numel():
        return
    error, allowed = (ours.double() - exact.double()).abs().max(), (reference.double() - exact.double()).abs().max()
    assert error <= 2 * allowed + 1e-5 * max(1.0, float(exact.abs().max())), (float(error), float(allowed))


@kernels
@given(st.integers(1, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_compact(images, tokens, share, seed):
    live, keep = (random_live(images, tokens, share, seed + i).to(DEVICE) for i in range(2))
    (ours, mine), (theirs, its) = ops.compact(live, keep), ops.compact_ref(live, keep)
    assert ours.starts.tolist() == theirs.starts.tolist()
    assert ours.live().tolist() == theirs.live().tolist() == (live & keep).flatten().nonzero()[:, 0].tolist()
    assert mine.tolist() == its.tolist() == (live & keep).tolist()


@kernels
@several_dtypes
@pytest.mark.parametrize("act", [*ops.ACTIVATIONS, "gelu_rough"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("many", [False, True])
def test_normed_linear(dtype, act, normed, many):
    torch.manual_seed(0)
    images, tokens, width, out = (3 if many else 2, 50, 64, 70 if act == "silu" else 96)
    if CUDA:
        images, tokens, width, out = 40 if many else 2, 197, 192, 392
    tile = linear_tile(images * tokens, out, width, dtype)
    assert bool(tile.persistent) == (many and (CUDA or act != "silu"))
    rows = some_rows(random_live(images, tokens, 0.6, 1))
    x = (torch.randn(images * tokens, width, device=DEVICE) * 2 + 0.5).to(dtype)
    norm = nn.LayerNorm(width, eps=1e-6, device=DEVICE) if normed else None
    if norm is not None:
        nn.init.normal_(norm.weight, 1.0, 0.1)
        nn.init.normal_(norm.bias, 0.0, 0.1)
    linear = nn.Linear(width, out, device=DEVICE).to(dtype)
    layer = ops.Affine.of(linear.weight, linear.bias, norm)
    probe = torch.zeros(images * tokens, device=DEVICE)
    ours = ops.normed_linear(x, rows, layer, act, probe, 5)
    live = rows.live()

    def plain(kind: torch.dtype) -> torch.Tensor:
        h = x[live].to(kind)
        if norm is not None:
            h = nn.functional.layer_norm(h, (width,), norm.weight.to(kind), norm.bias.to(kind), norm.eps)
        return h @ linear.weight.to(kind).T + linear.bias.to(kind)

    exact, rough = plain(torch.float64), plain(dtype)
    wanted = "gelu" if act == "gelu_rough" else act
    twice(ours[: len(live)], ops.activate(rough, wanted), ops.activate(exact, wanted))
    twice(probe[live], rough[:, 5], exact[:, 5])
    assert (probe[[i for i in range(len(probe)) if i not in set(live.tolist())]] == 0).all()


def test_the_rough_gelu_is_as_good_as_exact():
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    torch.testing.assert_close(ops.activate(x, "gelu_rough"), torch.nn.functional.gelu(x), atol=2e-6, rtol=0)


@kernels
@several_dtypes
@pytest.mark.parametrize("inner", [96, 70])
@pytest.mark.parametrize("many", [False, True])
def test_add_linear_touches_only_live_rows(dtype, inner, many):
    torch.manual_seed(0)
    images, tokens, inner, width = (3 if many else 2, 40, inner, 64)
    if CUDA:
        images, tokens, inner, width = 40 if many else 7, 197, 8 * inner, 192
    rows = some_rows(random_live(images, tokens, 0.5, 2))
    x = torch.randn(images * tokens, width, device=DEVICE).to(dtype)
    h = torch.randn(images * tokens, inner, device=DEVICE).to(dtype)
    linear, scale = nn.Linear(inner, width, device=DEVICE).to(dtype), torch.rand(width, device=DEVICE)
    before, live = x.clone(), rows.live()
    ops.add_linear(x, rows, h, ops.Affine.of(linear.weight, linear.bias), scale)

    def plain(kind: torch.dtype) -> torch.Tensor:
        part = h[: len(live)].to(kind) @ linear.weight.to(kind).T + linear.bias.to(kind)
        return before[live].to(kind) + part * scale.to(kind)

    twice(x[live], plain(dtype), plain(torch.float64))
    halted = torch.ones(len(x), dtype=torch.bool, device=DEVICE)
    halted[live] = False
    assert torch.equal(x[halted], before[halted])


@kernels
@several_dtypes
@pytest.mark.parametrize("size", [16, 20, 32] if not CUDA else [32, 64, 80, 128])
@pytest.mark.parametrize("extras", ["none", "bias", "norm", "both"])
def test_attend_rows(dtype, size, extras):
    torch.manual_seed(0)
    images, tokens, heads = 4, 37 if not CUDA else 263, 2
    live = random_live(images, tokens, 0.6, 3)
    live[1] = False  # an image that is done
    live[2] = False
    live[2, 7] = True  # and one with a single token left
    rows = some_rows(live)
    qkv = torch.randn(images * tokens, 3 * heads * size, device=DEVICE).to(dtype)
    bias = torch.rand(images * tokens, device=DEVICE) * 3 if extras in ("bias", "both") else None
    norm = None
    if extras in ("norm", "both"):
        norm = ops.HeadNorm(*(torch.rand(size, device=DEVICE) + i % 2 for i in range(4)), 1e-6)
    ours = ops.attend_rows(qkv, rows, heads, tokens, size**-0.5, bias, norm)
    exact = ops.attend_rows_ref(qkv.float(), rows, heads, tokens, size**-0.5, bias, norm)
    rough = ops.attend_rows_ref(qkv, rows, heads, tokens, size**-0.5, bias, norm)
    many = len(rows.live())
    if dtype != torch.float32:  # what rounding the weights costs plain attention too
        rough = rough + exact.abs().max() * torch.finfo(dtype).eps
    twice(ours[:many], rough[:many], exact[:many])


@kernels
@several_dtypes
@given(st.integers(1, 4), st.integers(1, 30), st.floats(0, 1), st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_planner_and_supervisor(dtype, images, tokens, share, forcing, operating_value, seed):
    torch.manual_seed(seed)
    width, hidden, layer = 40, 12, 3
    live = random_live(images, tokens, share, seed).to(DEVICE)
    rows = some_rows(live)
    x = torch.randn(images, tokens, width, device=DEVICE).to(dtype)
    mean, wanted = planner.image_mean(x, rows), planner.image_mean_ref(x, rows)
    torch.testing.assert_close(mean, wanted, atol=1e-5, rtol=max(1e-4, torch.finfo(dtype).eps))
    sizes = ((hidden, width), (hidden, width), (hidden,), (hidden,), (1,))
    weights = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
    scalars = [torch.tensor(value, device=DEVICE) for value in (0.3, 2.0, -0.1)]
    threshold = 0.9
    if operating_value:
        scalars[-1], threshold = torch.randn(2, images, device=DEVICE)
    made_with = planner.Plan(*weights, *scalars, 0.1, layer, 12)
    ours, theirs = planner.plan(x, rows, wanted, made_with), planner.plan_ref(x, rows, wanted, made_with)
    for mine, its in zip(ours, theirs):
        torch.testing.assert_close(mine[live], its[live], atol=1e-3, rtol=1e-3)
    probe, before = torch.randn(images, tokens, device=DEVICE), torch.rand(images, tokens, device=DEVICE)
    forced = torch.randint(1, 6, (images, tokens), device=DEVICE) if forcing else None
    gamma, beta = torch.tensor(0.7, device=DEVICE), torch.tensor(0.2, device=DEVICE)
    given_to_both = (probe, theirs[1], before, live, planner.Halt(gamma, beta, 3.0, layer, threshold, 1), forced)
    (*ours, listed), (*theirs, wanted) = planner.halt(*given_to_both), planner.halt_ref(*given_to_both)
    for mine, its in zip(ours, theirs):
        torch.testing.assert_close(mine[live], its[live], atol=1e-5, rtol=1e-5)
    assert not ours[2][~live].any()
    assert listed.starts.tolist() == wanted.starts.tolist()
    assert listed.live().tolist() == wanted.live().tolist() == ours[2].flatten().nonzero()[:, 0].tolist()


@kernels
@several_dtypes
@given(
    st.integers(1, 4), st.integers(1, 45), st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_merge(dtype, images, tokens, share, stay, seed):
    torch.manual_seed(seed)
    heads, size, prefix = 3, 20, 1
    live = random_live(images, tokens, share, seed)
    rows, keep = some_rows(live), live & random_live(images, tokens, stay, seed + 1)
    new = some_rows(keep)
    x = torch.randn(images, tokens, heads * size, device=DEVICE).to(dtype)
    qkv = torch.full((images * tokens, 3 * heads * size), torch.nan, device=DEVICE, dtype=dtype)
    many = len(rows.live())
    qkv[:many] = torch.randn(many, 3 * heads * size, device=DEVICE).to(dtype)
    sizes = torch.randint(1, 5, (images, tokens), device=DEVICE).float()
    ours, theirs = ([x.clone(), sizes.clone(), sizes.log()] for _ in range(2))
    into = merging.merge_rows(ours[0], qkv, heads, rows, new, keep.to(DEVICE), ours[1], ours[2], prefix)
    into_ref = merging.merge_rows_ref(theirs[0], qkv, heads, rows, new, theirs[1], theirs[2], prefix)
    assert torch.equal(into, into_ref)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2])
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=2 * torch.finfo(dtype).eps + 1e-5)


@kernels
@pytest.mark.parametrize("seed", range(SHAPES))
def test_random_shapes(seed):
    """Every kernel of a block on random shapes and rows, by the 2x rule. Who is not live is NaN: to read it shows."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = draw.choice([32, 64, 80, 128] if CUDA else [16, 20])
    heads = draw.randint(1, max(1, (1280 if CUDA else 40) // size))
    width, hidden = heads * size, 8 * draw.randint(2, 640 if CUDA else 12)
    tokens = draw.randint(1, draw.choice([40, 40, 197, 197, 600, 4097]) if CUDA else 40)
    most = min(90, 20_000 // tokens, 4 * 10**8 // (heads * tokens**2)) if CUDA else 4
    images = draw.randint(1, max(1, most))
    dtype = draw.choice(DTYPES)
    live = random_live(images, tokens, draw.random(), seed).to(DEVICE)
    keep = random_live(images, tokens, draw.random(), seed + 1).to(DEVICE)
    rows, _ = ops.compact(torch.ones_like(live), live)
    assert torch.equal(rows.live(), live.flatten().nonzero()[:, 0])
    after, both = ops.compact(live, keep)
    assert torch.equal(both, live & keep) and torch.equal(after.live(), both.flatten().nonzero()[:, 0])
    where, many = rows.live(), len(rows.live())

    def only(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        bare = torch.full_like(x, torch.nan)
        bare[at] = x[at]
        return bare.to(dtype)

    def against(ours, call, *tensors):
        """The function in float32 and in the dtype at hand, on what was given to the kernel."""
        exact, rough = call(*(t.float() for t in tensors)), call(*tensors)
        slack = torch.finfo(dtype).eps * exact.abs().max() if many and dtype != torch.float32 else 0.0
        twice(ours, rough + slack, exact)

    compact_at = torch.arange(many, device=DEVICE)
    x = only(torch.randn(images * tokens, width, device=DEVICE), where)
    norm = nn.LayerNorm(width, eps=1e-6, device=DEVICE)
    fc1, fc2 = nn.Linear(width, hidden, device=DEVICE).to(dtype), nn.Linear(hidden, width, device=DEVICE).to(dtype)
    probe, neuron = torch.zeros(images * tokens, device=DEVICE), draw.randrange(hidden)
    up = ops.normed_linear(x, rows, ops.Affine.of(fc1.weight, fc1.bias, norm), "gelu", probe, neuron)

    def thought(x, weight, bias):
        return nn.functional.layer_norm(x, (width,), eps=1e-6) @ weight.T + bias

    against(up[:many], lambda *t: nn.functional.gelu(thought(*t)), x[where], fc1.weight, fc1.bias)
    against(probe[where], lambda *t: thought(*t)[:, neuron], x[where], fc1.weight, fc1.bias)
    h, before, scale = only(up.float(), compact_at), x.clone(), torch.rand(width, device=DEVICE)
    ops.add_linear(x, rows, h, ops.Affine.of(fc2.weight, fc2.bias), scale)
    against(
        x[where], lambda x, h, w, b: x + (h @ w.T + b) * scale.to(x.dtype),
        before[where], h[:many], fc2.weight, fc2.bias,
    )  # fmt: skip
    assert x.isnan().any(1).equal(~live.flatten())
    qkv = only(torch.randn(images * tokens, 3 * width, device=DEVICE), compact_at)
    bias = torch.rand(images * tokens, device=DEVICE) if draw.random() < 0.5 else None
    mixed = ops.attend_rows(qkv, rows, heads, tokens, size**-0.5, bias)

    def attended(qkv):
        """As `attend_rows_ref`, all images at once."""
        dense_rows = qkv.new_zeros(images * tokens, 3 * width).index_copy(0, where, qkv)
        q, k, v = dense_rows.view(images, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(images * tokens, device=DEVICE) if bias is None else bias
        mask = mask.view(images, tokens).masked_fill(~live, -torch.inf)[:, None, None, :]
        out = (q @ k.transpose(-2, -1) * size**-0.5 + mask.to(qkv.dtype)).softmax(-1) @ v
        return out.transpose(1, 2).reshape(images * tokens, width)[where]

    against(mixed[:many], attended, qkv[:many])
