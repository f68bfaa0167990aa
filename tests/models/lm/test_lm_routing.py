"""What the routers say, and what they learn from."""

from __future__ import annotations

import pytest
import torch

from dwindle.errors import DwindleError
from dwindle.models.lm import TSA, EarlyExit, MoD, Random, Router
from dwindle.models.lm.difficulty import unskipped
from dwindle.models.lm.evaluate import calibrate, evaluate
from dwindle.models.lm.execute import tlops_saved
from dwindle.models.lm.routing import Control
from shared.routers import ROUTERS, SIZE, build, ids_for


def test_every_router_is_tested():
    ours = {n for n, kind in Router.registry.items() if kind.__module__.startswith("dwindle.")}
    assert ours == {type(make()).__name__ for make in ROUTERS.values()} | {"Control"}


@pytest.mark.parametrize("router", ROUTERS)
def test_training_reaches_every_parameter(router):
    model, ids = build(ROUTERS[router]()).train(), ids_for()
    terms = model.terms(model(ids[:, :-1]), ids[:, 1:])
    assert all(term.isfinite() for term in terms.values())
    terms["total"].backward()
    left_out = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert left_out == []


def test_tsa_learns_by_the_task_or_by_its_penalty():
    ids = ids_for()
    for penalty in (0.0, 0.3):
        model = build(TSA(penalty=penalty)).train()
        out = model(ids[:, :-1])
        terms = model.terms(out, ids[:, 1:])
        mean = torch.stack([values["p"] for values in out.trace.values[1:]]).mean()
        torch.testing.assert_close(terms["total"], terms["task"] + penalty * mean)
        assert out.trace.live.all()  # soft: nothing is left out while training
    assert build(TSA(open=2.0)).method.gates[0][-1].bias.item() == 2.0


@torch.no_grad()
def test_early_exit_never_comes_back():
    out = build(EarlyExit(threshold=0.3))(ids_for())
    live = out.trace.live.int()
    assert (live[1:] <= live[:-1]).all() and len(out.trace.depth.unique()) >= 3
    model = build(EarlyExit(threshold=1.0))
    assert tlops_saved(model(ids_for()).trace).max() == 0
    assert len(model.train()(ids_for()).exits) == 3


@torch.no_grad()
def test_mod_takes_the_best_in_training_and_asks_one_token_alone_after():
    model = build(MoD(capacity=0.3)).train()
    counts = model(ids_for()).trace.counts
    assert counts.tolist() == [[17] * 3, [6] * 3, [17] * 3, [6] * 3]
    torch.testing.assert_close(model.eval()(ids_for()[:, :5]).trace.live, model(ids_for()).trace.live[..., :5])


def test_random_skips_as_often_as_told():
    model = build(Random((0.0, 0.5, 0.25, 0.75))).train()
    rates = 1 - torch.stack([model(ids_for(40)).trace.live.float().mean((1, 2)) for _ in range(5)]).mean(0)
    torch.testing.assert_close(rates, torch.tensor([0.0, 0.5, 0.25, 0.75]), atol=0.05, rtol=0)
    with pytest.raises(DwindleError, match="one for each of 4"):
        build(Random((0.1, 0.2)))


@torch.no_grad()
def test_controls_keep_the_rates_and_lose_the_choice():
    model = build(TSA(tau=0.5, open=0.0))
    ids = torch.randint(0, 20, (2400,), generator=torch.Generator().manual_seed(0))
    own = evaluate(model, ids)
    with unskipped(model):
        soft = evaluate(model, ids, layout="masked")
    assert soft["tlops_saved"] == 0 and model.method.tau == 0.5
    router = model.method
    for kind in ("layer", "overall"):
        model.method = Control(router, kind, tuple(own["rates"]))
        found = evaluate(model, ids)
        assert found["tlops_saved"] == pytest.approx(own["tlops_saved"], abs=0.02)
        if kind == "layer":
            assert found["rates"] == pytest.approx(own["rates"], abs=0.05)
    model.method = Control(router, "mean", tuple(own["rates"]), tuple(soft["means"]))
    assert evaluate(model, ids)["tlops_saved"] == 0
    with pytest.raises(DwindleError, match=r"'none'.*layer, mean, overall"):
        Control(router, "none", ())


@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD"])
def test_dials_reach_what_is_asked(router):
    model = build(ROUTERS[router]())
    ids = torch.randint(0, 20, (1200,), generator=torch.Generator().manual_seed(0))
    assert calibrate(model, ids, 0.3) == pytest.approx(0.3, abs=0.03)
    assert evaluate(model, ids)["tlops_saved"] == pytest.approx(0.3, abs=0.03)


def test_static_has_nothing_to_turn():
    with pytest.raises(DwindleError, match="nothing to turn"):
        calibrate(build(ROUTERS["Static"]()), torch.zeros(100, dtype=torch.uint8), 0.3)


def test_a_model_that_gives_nan_is_said_to_be_damaged():
    model = build(TSA())
    model.lm.norm.weight.data.fill_(torch.nan)
    with pytest.raises(DwindleError, match="damaged"):
        evaluate(model, torch.zeros(SIZE.context + 1, dtype=torch.uint8))
