"""bf16 on a CPU: attention by products, who may ask for it, and memory that stays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from dwindle.errors import DwindleError
from dwindle.ops import half
from dwindle.ops.attention import attend_ref
from dwindle.recipes.vision import ada_tiny_test, tiny_test

CPU = torch.device("cpu")


def given(dtype, queries=9, keys=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, queries, 16), (2, 3, keys, 16), (2, 3, keys, 8))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def masks(queries=9, keys=7):
    seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[:, 0] = True
    added = torch.randn(2, 1, 1, keys, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return {"none": None, "bool": seen, "added": added}


@pytest.mark.parametrize("mask", ["none", "bool", "added", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("keys", [7, 9])
def test_attention_by_products_is_torchs_forward_and_backward(mask, scale, keys):
    found = []
    for attend in (F.scaled_dot_product_attention, half.attend_products):
        q, k, v = (x.requires_grad_() for x in given(torch.float64, keys=keys))
        out = attend(q, k, v, attn_mask=masks(keys=keys).get(mask), is_causal=mask == "causal", scale=scale)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("size", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("seed", range(3))
def test_in_bf16_it_errs_no_more_than_twice_as_far_as_plain_torch(seed, size):
    """size: of the scores. A fused kernel, which does not round them, errs less."""
    q, k, v = given(torch.bfloat16, 40, 40, seed)
    q = q * size
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    plain = attend_ref(q, k, v, torch.ones(2, 40))
    ours = half.attend_products(q, k, v)
    assert (ours.float() - exact).abs().max() <= 2 * (plain.float() - exact).abs().max()
    assert (ours.float() - exact).abs().mean() < 0.01 * max(1.0, size / 4)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [5, 48, 64, 97])
@torch.no_grad()
def test_attention_of_packs_errs_no_more_than_twice_as_far_as_plain_torch(rows, biased, monkeypatch):
    """Below some keys fused, then by products, several images at a time or each for itself: the same to the bit."""
    q, k, v = (torch.cat([x] * 3) for x in given(torch.bfloat16, rows, rows))
    bias = torch.randn(6, 1, 1, rows, generator=torch.Generator().manual_seed(1)).bfloat16() if biased else None
    exact = F.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), bias if bias is None else bias.float())
    plain = half.attend_products(q, k, v, bias)
    ours = half.attend(q, k, v, bias, scale=16**-0.5)
    assert (ours.float() - exact).abs().max() <= 2 * (plain.float() - exact).abs().max()
    monkeypatch.setattr(half, "CACHED", 2 * 3 * rows * rows * 2)
    assert torch.equal(half.attend(q, k, v, bias), ours)
    alone = [half.attend(q[i, None], k[i, None], v[i, None], bias if bias is None else bias[i, None]) for i in range(6)]
    assert torch.equal(torch.cat(alone), ours)


@torch.no_grad()
def test_products_of_packs_come_in_few_shapes(monkeypatch):
    """oneDNN writes code for each, which takes longer than the product."""
    made, real = set(), torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: made.add((a.shape, b.shape)) or real(a, b))
    for rows in range(half.FEW, 208):
        half.attend(*(torch.zeros(1, 2, rows, 8, dtype=torch.bfloat16) for _ in range(3)))
    assert len(made) == 2 * 11 and all(not shape[-1] % 8 for pair in made for shape in pair)
    made.clear()
    half.attend(*(torch.zeros(1, 2, 64, 8) for _ in range(3)))  # float32 is torch's
    with torch.enable_grad():
        half.attend(*(torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16) for _ in range(3)))
    assert not made


@pytest.mark.usefixtures("bf16_on_cpu")
def test_autocast_on_a_cpu_hands_over_what_products_can_do(monkeypatch):
    asked, real = [], half.attend_products
    monkeypatch.setattr(half, "attend_products", lambda *args: asked.append(1) or real(*args))
    q, k, v = given(torch.bfloat16, 7, 7)

    def attend(q=q, k=k, v=v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)

    with half.autocast(CPU, True):
        assert torch.is_autocast_enabled("cpu")
        attend()
        attend(attn_mask=masks(7)["bool"])
        torch.testing.assert_close(attend(is_causal=True)[..., :1, :], v[..., :1, :])  # the first row sees itself alone
        assert not attend(dropout_p=1.0).any()
        assert len(asked) == 4
        attend(*(x.float() for x in (q, k, v)))
        attend(k=k[:, :1], v=v[:, :1], enable_gqa=True)
        with pytest.raises(RuntimeError, match="attn_mask"):
            attend(attn_mask=masks(7)["bool"], is_causal=True)
        assert len(asked) == 4
        F.scaled_dot_product_attention(query=q, key=k, value=v)
        assert len(asked) == 5
    with half.autocast(CPU, False):
        assert not torch.is_autocast_enabled("cpu")
        attend()
    attend()
    assert len(asked) == 5


@pytest.mark.parametrize("make", [tiny_test, ada_tiny_test])
def test_a_cpu_trains_in_bf16_only_where_that_is_asked_for_and_runs(make, monkeypatch):
    recipe = make()
    assert recipe.amp and not recipe.halves(CPU)
    assert recipe.halves(torch.device("cuda"))
    assert not dataclasses.replace(recipe, amp=False).halves(torch.device("cuda"))
    assert not recipe.halves(torch.device("mps"))
    asks = dataclasses.replace(recipe, cpu_amp=True)
    monkeypatch.setattr(half, "cpu_multiplies_bf16", lambda: True)
    assert asks.halves(CPU)
    monkeypatch.setattr(half, "cpu_multiplies_bf16", lambda: False)
    for tells, why in ((False, "has no instructions"), (True, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda tells=tells: tells)
        with pytest.raises(DwindleError, match=rf"cpu_amp = True: this CPU .*{why}.*--set cpu_amp=false"):
            asks.halves(CPU)


def test_a_cpu_whose_product_ends_the_process_is_found_out(monkeypatch):
    """As AMX does in a virtual machine that tells of it and does not allow it."""
    half.cpu_multiplies_bf16.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(half, "PROBE", "import os; os.abort()")
    try:
        assert not half.cpu_multiplies_bf16()
    finally:
        half.cpu_multiplies_bf16.cache_clear()
