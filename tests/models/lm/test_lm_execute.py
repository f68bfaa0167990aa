"""The first law for language models: masked, packed and cached give the same decisions and logits, for every router."""

from __future__ import annotations

import copy

import pytest
import torch

from dwindle.errors import DwindleError
from dwindle.models.lm import TSA, CharLM, EarlyExit, LMSize, MoD, Static, adapt_lm
from dwindle.models.lm.bench import forced_keep
from dwindle.models.lm.execute import MANY_TOKENS, Cache, tlops_saved
from dwindle.models.lm.generate import generate
from dwindle.ops.causal import Queries, attend_causal, attend_causal_ref, attend_queries
from shared.flops import flop_counter
from shared.routers import ROUTERS, SIZE, build, ids_for


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_masked_is_packed(router, dtype, tolerance):
    model = build(ROUTERS[router](), dtype)
    masked, packed = model(ids_for(), "masked"), model(ids_for(), "packed")
    assert torch.equal(masked.trace.live, packed.trace.live)
    torch.testing.assert_close(masked.logits, packed.logits, atol=tolerance, rtol=10 * tolerance)
    saved = tlops_saved(packed.trace)
    assert (saved == 0).all() if router == "Static" else ((saved > 0.05) & (saved < 0.8)).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "Random"])
@torch.no_grad()
def test_masked_is_packed_where_only_those_that_run_ask(router, dtype, tolerance):
    model, ids = build(ROUTERS[router](), dtype), ids_for(MANY_TOKENS // 24 + 1, 24)
    masked, packed = model(ids, "masked"), model(ids, "packed")
    assert torch.equal(masked.trace.live, packed.trace.live)
    torch.testing.assert_close(masked.logits, packed.logits, atol=tolerance, rtol=10 * tolerance)
    torch.testing.assert_close(model(ids[:2]).logits, packed.logits[:2], atol=tolerance, rtol=10 * tolerance)


def test_those_that_run_ask_with_gradients_too():
    model, ids = build(TSA(tau=0.5), torch.float64).eval(), ids_for(MANY_TOKENS // 23 + 1, 23)
    logits = [model(ids, layout).logits for layout in ("masked", "packed")]
    grads = [torch.autograd.grad(x.square().mean(), model.lm.blocks[1].mlp_in.weight)[0] for x in logits]
    torch.testing.assert_close(*logits, atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_a_sequence_depends_on_itself_and_on_nothing_later(router):
    model, ids = build(ROUTERS[router]()), ids_for()
    whole = model(ids)
    for i in range(len(ids)):
        alone = model(ids[i : i + 1])
        assert torch.equal(alone.trace.live[:, 0], whole.trace.live[:, i])
        torch.testing.assert_close(alone.logits[0], whole.logits[i], atol=1e-5, rtol=1e-4)
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 7) % SIZE.vocabulary
    early = model(changed)
    assert torch.equal(early.trace.live[..., :10], whole.trace.live[..., :10])
    torch.testing.assert_close(early.logits[:, :10], whole.logits[:, :10], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout, worth", [("packed", 0), ("packed", 40_000), ("masked", 0)])
@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_a_cache_gives_the_full_forward(router, layout, worth, monkeypatch):
    """worth: where gathering rows pays; between the two, some blocks gather them and some do not."""
    monkeypatch.setattr("dwindle.models.lm.execute.WORTH_GATHERING", worth)
    model, ids = build(ROUTERS[router](), torch.float64), ids_for()
    whole, cache = model(ids), Cache()
    parts = [model(part, layout, cache) for part in ids.split([5, 1, 1, 4, 1, 1, 4], 1)]
    assert cache.length == ids.shape[1]
    assert torch.equal(torch.cat([p.trace.live for p in parts], 2), whole.trace.live)
    torch.testing.assert_close(torch.cat([p.logits for p in parts], 1), whole.logits, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_static_is_the_model_alone_and_open_gates_too():
    model = build(Static())
    torch.testing.assert_close(model(ids_for(), "packed").logits, model.lm(ids_for()), atol=0, rtol=0)
    opened = build(TSA(open=50.0))
    torch.testing.assert_close(opened(ids_for()).logits, opened.lm(ids_for()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", ["offered", "withheld"])
@torch.no_grad()
def test_tau_0_is_soft_and_tau_1_leaves_the_first_block(keys):
    model = build(TSA(open=0.0, keys=keys), torch.float64)
    model.method.tau = 0.0
    hard = model(ids_for(), "packed").logits
    soft = model.train()(ids_for()).logits
    torch.testing.assert_close(hard, soft, atol=1e-12, rtol=1e-12)
    model.eval().method.tau = 1.0
    out = model(ids_for())
    assert out.trace.depth.eq(1).all()
    block = model.lm.blocks[0]
    once = model.lm.readout(block(model.lm.embed(ids_for()), model.lm.rotary(17)))
    torch.testing.assert_close(out.logits, once, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_the_definition_token_by_token():
    """x + p f(x) where p >= tau, else x; keys of all tokens from the stream as it is."""
    model = build(TSA(tau=0.5, open=0.0), torch.float64)
    ids = ids_for(1)
    x, rotary = model.lm.embed(ids), model.lm.rotary(17)
    for depth, block in enumerate(model.lm.blocks):
        new = block(x, rotary)
        if depth:
            normed = torch.nn.functional.layer_norm(x, (32,))
            p = model.method.gates[depth - 1](normed)[..., 0].sigmoid()
            new = torch.stack(
                [x[0, i] + p[0, i] * (new[0, i] - x[0, i]) if p[0, i] >= 0.5 else x[0, i] for i in range(17)]
            )
            new = new[None]
        x = new
    torch.testing.assert_close(model(ids).logits, model.lm.readout(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("keys", ["offered", "withheld"])
@torch.no_grad()
def test_forced_decisions_and_blocks_nobody_runs(keys, monkeypatch):
    monkeypatch.setattr("dwindle.models.lm.execute.WORTH_GATHERING", 0)
    model, ids = build(TSA(keys=keys)), ids_for()
    keep = forced_keep(4, (3, 17), 0.6)
    assert keep.float().mean().item() == pytest.approx(0.6, abs=0.005) and keep[0].all()
    keep[2], keep[3, 1] = False, False
    masked, packed = model(ids, "masked", keep=keep), model(ids, "packed", keep=keep)
    assert torch.equal(packed.trace.live, keep) and torch.equal(masked.trace.live, keep)
    torch.testing.assert_close(masked.logits, packed.logits, atol=1e-5, rtol=1e-4)
    cache = Cache()
    parts = [model(ids[:, i : i + 1], "packed", cache, keep[..., i : i + 1]).logits for i in range(17)]
    torch.testing.assert_close(torch.cat(parts, 1), packed.logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(DwindleError, match="every token runs the first"):
        forced_keep(4, (3, 17), 0.1)


@pytest.mark.parametrize("keys", ["offered", "withheld"])
def test_gradients_of_masked_and_packed_agree(keys):
    model, ids = build(TSA(tau=0.5, open=0.0, keys=keys), torch.float64), ids_for()
    gradients = []
    for layout in ("masked", "packed"):
        twin = copy.deepcopy(model)
        twin.terms(twin(ids[:, :-1], layout), ids[:, 1:])["total"].backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)
    assert all(gate[0].weight.grad is not None for gate in twin.method.gates)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("new", [9, 4, 1])
def test_attention_is_its_definition(heads, weighted, new):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 8, generator=generator).double() for n, h in ((new, 4), (9, heads), (9, heads)))
    weight = torch.rand(2, 9, generator=generator).double() if weighted else None
    if weighted:
        weight[:, 3], weight[:, -1] = 0.0, 0.5
    out = attend_causal(q, k, v, weight)
    torch.testing.assert_close(out, attend_causal_ref(q, k, v, weight), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("heads, length", [(4, 9), (2, 4), (4, 24), (2, 3), (4, 2)])
def test_attention_of_some_is_that_of_all(heads, length, share):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, h, 8, generator=generator).double() for h in (4, heads, heads))
    keep = torch.rand(3, length, generator=generator) < share
    keep[0, -1], keep[1] = True, False  # one sequence where nobody asks
    out = attend_queries(q[keep], keep.nonzero()[:, 1], k, v, Queries.of(keep))
    torch.testing.assert_close(out, attend_causal_ref(q, k, v)[keep], atol=1e-12, rtol=1e-12)


def test_cost_against_torch_and_by_hand():
    model, ids = build(Static()), ids_for(2, 24)
    counter = flop_counter()
    with torch.no_grad(), counter:
        trace = model(ids, "masked").trace
    shape = model.backbone.shape
    triangle = 2 * (24 * 25 / 2) * 32 * 4  # torch counts the whole square of attention
    square = 2 * 24 * 24 * 32 * 4
    from dwindle.models.lm.cost import static_lm_macs

    counted = counter.get_total_flops() / 2 / 2 - square + triangle
    assert static_lm_macs(shape, trace) == pytest.approx(counted, rel=1e-9)
    assert model.macs_saved(trace).abs().max() == 0
    for keys, skipped in (("offered", 2 * 32 * 32), ("withheld", 0)):
        model = build(TSA(keys=keys))
        keep = forced_keep(4, (1, 24), 0.7)
        trace = model(ids[:1], keep=keep).trace
        total = 24 * 32 * 20 + 3 * 24 * (32 * 8 + 8)
        for block in keep[:, 0]:
            for i in range(24):
                total += 12 * 32 * 32 if block[i] else skipped
                seen = i + 1 if keys == "offered" else int(block[: i + 1].sum())
                total += 2 * 32 * seen * int(block[i])
        assert 1 - total / static_lm_macs(shape, trace) == pytest.approx(model.macs_saved(trace).item(), rel=1e-9)


def test_gates_are_1_7_percent_at_the_papers_scale():
    model = adapt_lm(CharLM(LMSize(65)), TSA())
    share = sum(p.numel() for p in model.method.parameters()) / sum(p.numel() for p in model.lm.parameters())
    assert share == pytest.approx(0.017, abs=0.0005)
    assert len(model.method.gates) == 5
    assert sum(p.numel() for p in model.lm.parameters()) == 10_651_776


@pytest.mark.parametrize("router", ROUTERS)
def test_generation(router, monkeypatch):
    model = build(ROUTERS[router](), torch.float64)
    prompt = ids_for(2, 5)
    made = generate(model, prompt, 12, temperature=0)
    assert made.ids.shape == (2, 17) and torch.equal(made.ids[:, :5], prompt)
    whole = model(made.ids[:, :-1])
    assert torch.equal(whole.logits[:, 4:].argmax(-1), made.ids[:, 5:])
    assert torch.equal(whole.trace.live, made.live)
    monkeypatch.setattr("dwindle.models.lm.execute.WORTH_GATHERING", 0)
    assert torch.equal(generate(model, prompt, 12, temperature=0).ids, made.ids)
    again = [generate(model, prompt, 40, seed=3, top_k=5).ids for _ in range(2)]  # past the context
    assert torch.equal(*again) and again[0].shape == (2, 45)
    masked = generate(model, prompt, 12, temperature=0, layout="masked")
    assert torch.equal(masked.ids, made.ids)


def test_inputs_that_cannot_work():
    model = build(TSA())
    known = model.backbone.shape.vocabulary
    unknown, floats = torch.tensor([[0, known]]), torch.zeros(1, 3)
    too_long, empty = (ids_for(1, 25), "context of 24"), (ids_for(1, 0), "at least one")
    text = ("some text", "type str")
    for wrong, said in (too_long, empty, (unknown, f"the model knows {known}"), (floats, "whole numbers"), text):
        with pytest.raises(DwindleError, match=said):
            model(wrong)
    with pytest.raises(DwindleError, match="prompt has 25 tokens"):
        generate(model, ids_for(1, 25), 3)
    with pytest.raises(DwindleError, match="prompt is empty"):
        generate(model, ids_for(1, 0), 3)
    for options in ({"temperature": -1.0}, {"top_k": 0}, {"length": 0}):
        with pytest.raises(DwindleError, match="at least"):
            generate(model, ids_for(1, 3), **({"length": 3} | options))
    with pytest.raises(DwindleError, match="Unknown layout"):
        model(ids_for(), "pack")
    for bad in (lambda: TSA(tau=1.5), lambda: TSA(tau=-0.1), lambda: EarlyExit(2.0), lambda: MoD(-0.5)):
        with pytest.raises(DwindleError, match=r"\[0, 1\]"):
            bad()
    with pytest.raises(DwindleError, match="did you mean 'offered'"):
        TSA(keys="offer")
    with pytest.raises(DwindleError, match="even size"):
        LMSize(10, width=30, heads=6)
    with pytest.raises(DwindleError, match="no router"):
        adapt_lm(CharLM(SIZE), "TSA")


@torch.no_grad()
def test_a_step_for_several_sequences_asks_who_runs_only_where_that_can_pay(monkeypatch):
    """A small model's step of three tokens computes all rows; of one token, and of a larger model, it does not."""
    model, gathered = build(TSA(tau=1.0)), []  # nobody runs but the first block
    monkeypatch.setattr("dwindle.models.lm.execute._packed", lambda *inputs: gathered.append(1) or inputs[1])

    def gathers(rows):
        gathered.clear()
        model(ids_for(rows, 1), "packed", Cache())
        return len(gathered) == model.backbone.shape.blocks - 1

    assert gathers(1) and not gathers(3) and not gathered
    monkeypatch.setattr("dwindle.models.lm.execute.WORTH_GATHERING", 2 * model.backbone.shape.row_macs)
    assert gathers(3)
