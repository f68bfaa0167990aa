"""AHT-ViT and A-ViT against their equations, written out plainly."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import timm
import torch

import dwindle
from dwindle.core.masked import Masked
from dwindle.core.method import halting_distribution, halting_kl, log_gaussian
from dwindle.core.model import Output
from dwindle.core.tokens import Where
from dwindle.core.trace import Trace
from dwindle.methods import Method
from dwindle.methods.aht_settings import PRESETS
from shared.tiny import METHODS, build, images_for


def algorithm_1(model: dwindle.AdaptiveViT, images: torch.Tensor):
    """A-ViT's Algorithm 1, one image and one token at a time, on the timm model itself."""
    vit, method = model.vit, model.method
    outs, ponders, exits = [], [], []
    for image in images:
        t = model.backbone.embed(image[None])
        count = t.shape[1]
        cumulative, remainder = [0.0] * count, [1.0] * count
        rho, live, out = [0.0] * count, [True] * count, torch.zeros_like(t)
        depth = [0] * count
        for layer, block in enumerate(vit.blocks, 1):
            rows = [k for k in range(count) if live[k]]
            if rows:
                t[:, rows] = block(t[:, rows])
            for k in rows:
                h = 1.0 if layer == len(vit.blocks) else float(torch.sigmoid(method.gamma * t[0, k, 0] + method.beta))
                cumulative[k] += h
                rho[k] += 1
                depth[k] += 1
                if cumulative[k] < 1 - method.eps:
                    out[0, k] += h * t[0, k]
                    remainder[k] -= h
                else:
                    out[0, k] += remainder[k] * t[0, k]
                    rho[k] += remainder[k]
                    live[k] = False
        outs.append(vit.forward_head(vit.norm(out)))
        ponders.append(sum(rho) / count)
        exits.append(depth)
    return torch.cat(outs), sum(ponders) / len(ponders), torch.tensor(exits)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["packed", "masked"])
def test_avit_is_algorithm_1(layout):
    model = build("vit", dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2), torch.float64)
    images = images_for(model, 3, torch.float64)
    out = model(images, layout=layout)
    logits, ponder, exits = algorithm_1(model, images)
    assert torch.equal(out.trace.depth, exits)
    torch.testing.assert_close(out.logits, logits)
    assert float(model.method.losses(out)["ponder"]) == pytest.approx(ponder)


@torch.no_grad()
def test_avit_prior():
    """Eq. 11-12: the mean score of each layer, halted tokens counting 0, against a Gaussian; both sum to 1."""
    model = build("vit", dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=3), torch.float64)
    out = model(images_for(model, 3, torch.float64))
    halting = out.trace.scores.mean((1, 2))
    halting = halting / halting.sum()
    layers = torch.arange(1, 5, dtype=torch.float64)
    target = torch.exp(-((layers - 3) ** 2) / 2)
    target = target / target.sum()
    expected = (halting * (halting / target).log()).sum()
    assert float(model.method.losses(out)["prior"]) == pytest.approx(float(expected), rel=1e-4)
    assert model.method.loss_weights == {"ponder": 5e-4, "prior": 0.1}
    fresh = dwindle.AViT()
    assert (fresh.gamma.item(), fresh.beta.item(), fresh.eps, fresh.threshold) == (5, -10, 0.01, 0.99)


@torch.no_grad()
def test_aht_supervisor_is_section_3_3():
    """Listing 1.1 by hand: h from neuron 0 after the MLP's first linear layer, C += h, halt at C >= T."""
    model = build("vit", dwindle.AHT.as_printed(stages=(1,), gamma=2.0, beta=-1.0, neuron=3, halt_class=True))
    images = images_for(model, 1)
    out = model(images)
    t = model.backbone.embed(images)
    live, cumulative, depth = torch.ones(17, dtype=torch.bool), torch.zeros(17), torch.zeros(17, dtype=torch.long)
    for block in model.vit.blocks:
        caught = []
        handle = block.mlp.fc1.register_forward_hook(lambda m, i, o, caught=caught: caught.append(o))
        t[:, live] = block(t[:, live])
        handle.remove()
        cumulative[live] += torch.sigmoid(model.method.gamma * caught[0][0, :, 3] + model.method.beta)
        depth[live] += 1
        live = live & (cumulative < 1.0)
    assert torch.equal(out.trace.depth[0], depth)
    torch.testing.assert_close(out.logits, model.vit.forward_head(model.vit.norm(t)), atol=1e-5, rtol=1e-4)


def test_as_printed_is_listing_1_1():
    """The listing and Eq. 1-3 written down plainly: every token is treated alike, the class token too; the planners see
    a mean over all tokens; a halted token's plan is 0, and all means are over all K tokens."""
    model = build("vit", dwindle.AHT.as_printed(stages=(1, 3), gamma=2.0, beta=-1.0), torch.float64)
    method, vit, x = model.method, model.vit, images_for(model, 3, torch.float64)
    tokens = model.backbone.embed(x)
    active, cumulative = torch.ones(3, 17, dtype=torch.bool), torch.zeros(3, 17, dtype=torch.float64)
    scores, depth, plans = [], torch.zeros(3, 17, dtype=torch.long), {}
    for layer, block in enumerate(vit.blocks, 1):
        new, features = tokens.clone(), torch.zeros(3, 17, dtype=torch.float64)
        for b in range(3):  # what has halted is masked: no key, no query
            if active[b].any():
                rows = tokens[b : b + 1, active[b]]
                features[b, active[b]] = block.mlp.fc1(block.norm2(rows + block.attn(block.norm1(rows))))[0, :, 0]
                new[b, active[b]] = block(rows)[0]
        tokens = new
        h = torch.sigmoid(method.gamma * features + method.beta) * active
        cumulative, depth = cumulative + h, depth + active
        if layer in (1, 3):
            planner = method.planners[str(layer)]
            hidden = torch.relu(planner.token(tokens) + planner.context(tokens.mean(1, keepdim=True)))
            plans[layer] = (1 + 3 * torch.sigmoid(planner.out(hidden)[..., 0])) * active
        scores.append(h)
        active = active & (cumulative < 1.0)
    with torch.no_grad():
        out = model(x, "packed")
    assert torch.equal(out.trace.depth, depth) and len(depth.unique()) > 2
    torch.testing.assert_close(out.logits, vit.forward_head(vit.norm(tokens)))
    for layer, plan in plans.items():
        torch.testing.assert_close(out.trace.plans[layer].nan_to_num(0.0), plan)

    layers, total, divergence = torch.arange(1.0, 5.0, dtype=torch.float64), [], []
    for b, k in itertools.product(range(3), range(17)):
        n = int(depth[b, k])
        p = torch.zeros(4, dtype=torch.float64)
        p[: n - 1] = torch.stack(scores)[: n - 1, b, k]
        p[n - 1] = 1 - p.sum()  # the remainder
        total.append((layers * p).sum())
        for plan in plans.values():
            q = torch.softmax(-((layers - plan[b, k]) ** 2) / 2, 0)
            divergence.append(torch.special.xlogy(p, p / q).sum())
    terms = model.train()(x), torch.tensor([0, 1, 2])
    terms = model.loss(*terms)
    torch.testing.assert_close(terms["ponder"], torch.stack(total).mean())
    torch.testing.assert_close(terms["target_depth"], torch.stack(divergence).mean())
    torch.testing.assert_close(terms["total"], terms["task"] + 0.05 * terms["ponder"] + 0.5 * terms["target_depth"])
    assert set(terms) == {"task", "ponder", "target_depth", "total"}
    # Every gradient flows everywhere: the KL reaches planners, supervisor and backbone.
    terms["target_depth"].backward()
    reached = [vit.blocks[0].attn.qkv.weight, method.gamma, method.planners["1"].out.weight]
    assert all(weight.grad.abs().max() > 0 for weight in reached)


@torch.no_grad()
def test_planners_are_small_and_within_range_and_silent_for_the_halted():
    small = dwindle.adapt(timm.create_model("deit_small_patch16_224"), dwindle.AHT())
    assert sum(p.numel() for p in small.method.planners.parameters()) < 500_000
    for name in ("AHT", "AHT_printed"):
        model = build("vit", METHODS[name]())
        out = model(images_for(model))
        assert set(out.trace.plans) == set(model.method.stages)
        for stage, plan in out.trace.plans.items():
            assert torch.equal(plan.isnan(), out.trace.depth < stage)
            spoken = plan[~plan.isnan()]
            assert spoken.min() >= 1 and spoken.max() <= 4


@torch.no_grad()
def test_planner_sees_the_token_and_the_mean_over_live_tokens():
    model = build("vit", METHODS["AHT_printed"](), torch.float64)
    out = model(images_for(model, 2, torch.float64), layout="packed")
    planner = model.method.planners["1"]
    x = model.vit.blocks[0](model.backbone.embed(images_for(model, 2, torch.float64)))
    joint = torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], -1)  # everyone is live in the first block
    weight = torch.cat([planner.token.weight, planner.context.weight], 1)
    hidden = torch.relu(joint @ weight.T + planner.token.bias)
    expected = 1 + 3 * torch.sigmoid(hidden @ planner.out.weight[0] + planner.out.bias)
    torch.testing.assert_close(out.trace.plans[1], expected)


def test_halting_distribution():
    h = torch.tensor([0.2, 0.3, 0.6, 0.0], dtype=torch.float64)[:, None, None]
    live = torch.tensor([True, True, True, False])[:, None, None]
    act = halting_distribution(h, live, "act")[:, 0, 0]
    torch.testing.assert_close(act, torch.tensor([0.2, 0.3, 0.5, 0.0], dtype=torch.float64))
    hazard = halting_distribution(h, live, "hazard")[:, 0, 0]
    torch.testing.assert_close(hazard, torch.tensor([0.2, 0.8 * 0.3, 0.8 * 0.7, 0.0], dtype=torch.float64))
    log_target = log_gaussian(torch.tensor(2.5, dtype=torch.float64), 4, 1.0)
    target = log_target.exp()
    torch.testing.assert_close(target.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert target[1] == target[2] > target[0]
    assert halting_kl(target, log_target) == pytest.approx(0, abs=1e-12)


def eq_2(h: list[float], plan: float, sigma: float) -> float:
    """KL(P_actual || P_target) of a token that ran len(h) of 12 blocks, written out; h are hazards."""
    exponents = [-((layer - plan) ** 2) / (2 * sigma**2) for layer in range(1, 13)]
    top = max(exponents)
    log_sum = top + math.log(sum(math.exp(e - top) for e in exponents))
    divergence, rest = 0.0, 1.0
    for n, hazard in enumerate(h):
        p = rest if n + 1 == len(h) else rest * hazard
        divergence += p * (math.log(p) - (exponents[n] - log_sum)) if p else 0.0
        rest *= 1 - hazard
    return divergence


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 3.0])
def test_eq_2_and_its_gradients_at_every_gap(sigma):
    """Plan and exit up to 11 blocks apart: there a probability is 1e-300 and below."""
    stages, blocks = (1,), 12
    method = dwindle.AHT.as_printed(stages=stages, sigma=sigma, p_actual="hazard", halt_class=False)
    method.bind(
        dwindle.adapt(timm.create_model("vit_tiny_patch16_224", num_classes=5), dwindle.Static()).backbone.shape
    )
    generator = torch.Generator().manual_seed(0)
    for exit in range(1, blocks + 1):
        for target in range(1, blocks + 1):
            h = torch.rand(exit, generator=generator, dtype=torch.float64).mul_(0.6).requires_grad_()
            plan = torch.tensor(float(target), dtype=torch.float64, requires_grad=True)
            trace = Trace((1, 2), 1, (1, 1), blocks)  # a class token, which the terms leave out, and a patch
            for layer in range(exit):
                row = torch.stack([torch.zeros_like(h[0]), h[layer]])[None]
                values = {"score": row} | ({"plan": torch.stack([plan, plan])[None]} if layer == 0 else {})
                trace.lives.append(Where((1, 2), live_BN=torch.ones(1, 2, dtype=torch.bool)))
                trace.values.append(values)
            term = method.losses(Output(torch.zeros(1, 5), trace, torch.zeros(0)))["target_depth"]
            term.backward()
            given = h.tolist()
            assert term.item() == pytest.approx(eq_2(given, target, sigma), rel=1e-9, abs=1e-12)

            def slope(at: int | None, given=given, target=target) -> float:
                moved = []
                for step in (1e-6, -1e-6):
                    other = [v + step * (n == at) for n, v in enumerate(given)]
                    moved.append(eq_2(other, target + step * (at is None), sigma))
                return (moved[0] - moved[1]) / 2e-6

            assert plan.grad.item() == pytest.approx(slope(None), rel=1e-5, abs=1e-6)
            for n in range(exit):  # the last score is not used: who is left stops there
                assert h.grad[n].item() == pytest.approx(slope(n), rel=1e-5, abs=1e-6), (exit, target, n)


@pytest.mark.parametrize("p_actual", ["act", "hazard"])
@pytest.mark.parametrize("ponder", ["expected", "remainder"])
@pytest.mark.parametrize("halted_plans", ["skip", "zero"])
@pytest.mark.parametrize("halt_class", [False, True])
def test_aht_losses_are_the_equations(p_actual, ponder, halted_plans, halt_class):
    options = {"p_actual": p_actual, "ponder": ponder, "halted_plans": halted_plans, "halt_class": halt_class}
    model = build("vit", dwindle.AHT.as_printed(stages=(1, 3), gamma=2.0, beta=-1.0, **options), torch.float64).train()
    out = model(images_for(model, 2, torch.float64))
    terms = model.loss(out, torch.tensor([0, 1]))
    trace, layers = out.trace, torch.arange(1.0, 5.0, dtype=torch.float64)
    total_ponder, total_kl = [], {1: [], 3: []}
    for b in range(2):
        for k in range(not halt_class, 17):  # a class token that does not halt is left out
            n, h = int(trace.depth[b, k]), trace.scores[:, b, k]
            p = torch.zeros(4, dtype=torch.float64)
            rest = 1.0
            for layer in range(n - 1):
                p[layer] = h[layer] if p_actual == "act" else rest * h[layer]
                rest = rest - h[layer] if p_actual == "act" else rest * (1 - h[layer])
            p[n - 1] = rest
            total_ponder.append((layers * p).sum() if ponder == "expected" else n + rest)
            for stage, plan in trace.plans.items():
                centre = plan[b, k]
                if centre.isnan():
                    if halted_plans == "skip":
                        continue
                    centre = torch.tensor(0.0)
                q = torch.exp(-((layers - centre) ** 2) / 2)
                q = q / q.sum()
                total_kl[stage].append(torch.xlogy(p, p / q).sum())
    assert terms["ponder"].item() == pytest.approx(
        torch.stack([torch.as_tensor(v).detach() for v in total_ponder]).mean().item()
    )
    per_stage = [torch.stack(values).mean() for values in total_kl.values()]
    assert terms["target_depth"].item() == pytest.approx(torch.stack(per_stage).mean().item(), rel=1e-5)
    assert float(terms["total"]) == pytest.approx(
        float(terms["task"] + 5e-2 * terms["ponder"] + 0.5 * terms["target_depth"])
    )
    terms["ponder"].backward()
    assert model.method.gamma.grad.abs() > 0 and model.method.beta.grad.abs() > 0


def test_presets_are_table_2():
    assert {name: (p["lambda_p"], p["lambda_t"]) for name, p in PRESETS.items()} == {
        "high_accuracy": (1e-3, 1.0), "balanced": (5e-2, 0.5), "high_efficiency": (1e-2, 0.2),
    }  # fmt: skip
    assert dwindle.AHT.preset("balanced", stages=(2,)).config["lambda_t"] == 0.5
    assert dwindle.AHT.as_printed().budget is None
    with pytest.raises(dwindle.DwindleError, match="did you mean 'balanced'"):
        dwindle.AHT.preset("balansed")


def test_the_task_reaches_the_planners_through_the_hard_decision():
    for straight, reached in ((True, True), (False, False)):
        model = build("vit", METHODS["AHT"]())
        model.method.straight_through = straight
        model.train()
        out = model(images_for(model))
        torch.nn.functional.cross_entropy(out.logits, torch.arange(5)).backward()
        gradients = [p.grad for p in model.method.planners["1"].parameters()]
        assert any(g is not None and g.abs().max() > 0 for g in gradients) == reached


def test_detach_keeps_halting_gradients_out_of_the_backbone():
    for detach in (True, False):
        model = build("vit", METHODS["AHT"]())
        model.method.detach = detach
        model.train()
        terms = model.loss(model(images_for(model)), torch.arange(5))
        (terms["ponder"] + terms["target_depth"]).backward()
        touched = {n for n, p in model.vit.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        if detach:  # the borrowed neuron alone: one row of each MLP's first layer
            # Nobody decides after the last block, so its neuron is not asked.
            assert touched == {f"blocks.{i}.mlp.fc1.{w}" for i in range(3) for w in ("weight", "bias")}
            assert all((model.vit.blocks[i].mlp.fc1.weight.grad[1:] == 0).all() for i in range(3))
        else:
            assert "patch_embed.proj.weight" in touched


def planned(**options) -> dwindle.AdaptiveViT:
    """An AHT whose supervisors add nothing of their own to the plan."""
    model = build("vit", dwindle.AHT(stages=(1, 2), **options))
    model.method.bar.fill_(-2.0)
    for block in model.vit.blocks:
        torch.nn.init.zeros_(block.mlp.fc1.weight[0])
        torch.nn.init.zeros_(block.mlp.fc1.bias[0:1])
    return model


def test_training_moves_the_bar_towards_the_budget():
    model = planned(budget=0.8, ramp=0.0)
    model.train()
    images, costs = images_for(model, 8), []
    for _ in range(120):
        out = model(images)
        model.hold_budget(out)
        costs.append(float(model.macs(out.trace).mean() / model.static_macs()))
    assert costs[0] > 0.85 and abs(sum(costs[-10:]) / 10 - 0.8) < 0.02


def test_the_loss_changes_nothing():
    model = planned(budget=0.5, ramp=0.0).train()
    out, labels = model(images_for(model, 8)), torch.zeros(8, dtype=torch.long)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model.loss(out, labels), model.loss(out, labels)
    assert first["total"].equal(second["total"])
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    model.hold_budget(out)
    assert model.method.bar > before["method.bar"]


@torch.no_grad()
def test_who_has_learnt_nothing_says_so_once():
    for make, tells in ((METHODS["AHT"], True), (METHODS["AViT"], True), (METHODS["ToMe"], False)):
        model = build("vit", make())
        images = images_for(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(images, depths=torch.full((5, 17), 2))  # decides nothing
            assert not said
            model(images)
            model.prepare()(images)
        assert [str(w.message).partition(":")[0] for w in said] == [
            f"{type(model.method).__name__} has not been trained"
        ] * tells
        assert not tells or "ToMe, TopK" in str(said[0].message)


@torch.no_grad()
def test_a_budget_that_nobody_held_is_told(tmp_path):
    model = build("vit", dwindle.AHT(stages=(1, 2), budget=0.6))
    model.train()(images_for(model))
    images = images_for(model.eval())
    with pytest.warns(UserWarning, match="never held.*hold_budget"):
        model(images)
    trained = copy.deepcopy(model).train()
    trained.hold_budget(trained(images))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.eval()(images)
        dwindle.save(trained, tmp_path / "it")
        dwindle.load(tmp_path / "it", vit=build("vit", dwindle.Static()).unwrap())(images)


def test_a_budget_can_be_set_after_training_and_the_threshold_trades_cost():
    for name in ("AHT", "AHT_printed", "AViT"):
        model = planned() if name == "AHT" else build("vit", METHODS[name]())
        images = images_for(model, 16)
        model.train()
        with torch.no_grad():
            for _ in range(100):  # the planners' running moments settle
                model(images)
        model.eval()
        for budget in (0.8, 0.85, 0.9):
            reached = dwindle.calibrate(model, images, budget)
            assert abs(reached - budget) < 0.03, (name, budget)
        costs = []
        for threshold in (0.3, 0.7, 1.0, 1.5, 2.5):
            model.method.threshold = threshold
            costs.append(float(model.macs(model(images).trace).mean()))
        assert costs == sorted(costs) and costs[0] < costs[-1]
    share = dwindle.calibrate(model, images, f"{0.8 * model.static_macs() / 1e9}G")
    assert abs(share - 0.8) < 0.02


def test_teacher_grounds_the_planners():
    model = build("vit", METHODS["AHT"]())
    teacher = dwindle.adapt(copy.deepcopy(model).unwrap(), dwindle.Static(attention=True)).eval()
    images = images_for(model)
    model.train()
    with torch.no_grad():
        taught = teacher(images)
    torch.testing.assert_close(taught.trace.stack("attention").sum(-1), torch.ones(4, 5))
    terms = model.loss(model(images), torch.arange(5), taught, label_weight=0.0)
    assert {"task", "distill", "ponder", "target_depth", "importance", "total"} == set(terms)
    assert terms["distill"] >= 0
    terms["importance"].backward()
    assert model.method.planners["1"].token.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dwindle.AHT(threshold=0), "threshold = 0"),
        (lambda: dwindle.AHT(threshold=-1.0), "above 0"),
        (lambda: dwindle.AViT(threshold=0.0), "above 0"),
        (lambda: dwindle.AViT(eps=1.5), "between 0 and 1"),
        (lambda: dwindle.AHT(sigma=0), "sigma = 0"),
        (lambda: dwindle.AHT(p_actual="acts"), "did you mean 'act'"),
        (lambda: build("vit", dwindle.AHT(stages=(0, 2))), r"blocks 1..3"),
        (lambda: build("vit", dwindle.AHT(stages=(4,))), r"blocks 1..3"),
        (lambda: build("vit", dwindle.AHT(stages=())), "stages"),
        (lambda: build("vit", dwindle.AHT(stages=(1,), budget=1.5)), "budget = 1.5"),
        (lambda: build("vit", dwindle.AHT(stages=(1,), budget=0)), "budget = 0"),
        (lambda: build("vit", dwindle.AHT(stages=(1,), budget=[0.5])), "budget"),
        (lambda: build("vit", dwindle.AHT(stages=(1,), budget="many")), "budget"),
        (lambda: build("vit", dwindle.AViT(target_depth=9)), "1..4"),
        (lambda: build("vit", dwindle.AViT(target_depth=2, neuron=99)), "neuron"),
        (lambda: dwindle.calibrate(build("vit", dwindle.Static()), torch.zeros(1, 3, 32, 32), 0.5), "nothing to turn"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(dwindle.DwindleError, match=message):
        make()


@torch.no_grad()
@pytest.mark.parametrize("options", [{"halt_class": False}, {"threshold": 3.0}])
def test_avit_weights_sum_to_one_also_past_a_sum_of_one(options):
    model = build("vit", dwindle.AViT(gamma=1.0, beta=1.0, target_depth=2, **options))
    sums = torch.zeros(3, 17)
    step = model.method.step

    def watched(depth, tokens):
        verdict = step(depth, tokens)
        sums.add_(torch.where(tokens.live, verdict.weight, 0.0))
        return verdict

    model.method.step = watched
    model(images_for(model, 3), layout="masked")
    torch.testing.assert_close(sums, torch.ones_like(sums))
    scores, live = torch.full((4, 1, 1), 0.8), torch.ones(4, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(halting_distribution(scores, live, "act").sum(), torch.tensor(1.0))


def test_losses_when_nobody_is_left_at_the_first_stage():
    for halted_plans in ("skip", "zero"):
        options = {"halt_class": True, "threshold": 1e-9, "beta": 0.0, "halted_plans": halted_plans}
        model = build("vit", dwindle.AHT.as_printed(stages=(2, 3), **options))
        outs = [model(images_for(model), layout=layout) for layout in ("packed", "masked")]
        assert not outs[0].trace.plans
        packed, masked = (model.method.losses(out)["target_depth"] for out in outs)
        torch.testing.assert_close(packed, masked)
        assert (packed == 0) == (halted_plans == "skip")


def test_merged_tokens_become_the_mean_of_those_who_join_them(monkeypatch):
    """At a stage, every halted patch joins the most alike one that goes on; against a loop over one image."""
    model = build("vit", dwindle.AHT(stages=(1,), budget=0.6, merge="nearest"), torch.float64)
    images = images_for(model, 2, torch.float64)
    seen = {}
    merged = Masked.merged

    def spy(tokens, keep, how):
        after = merged(tokens, keep, how)
        first = {"x": tokens.x, "keys": tokens.probed.keys, "keep": keep, "after": after.x, "size": after.size}
        seen.update(seen or first)
        return after

    monkeypatch.setattr(Masked, "merged", spy)
    with torch.no_grad():
        model(images, layout="masked")
    for b in range(2):
        x, keys, keep = seen["x"][b], seen["keys"][b], seen["keep"][b]
        staying = [i for i in range(1, len(x)) if keep[i]]
        halted = [i for i in range(1, len(x)) if not keep[i]]
        assert staying and halted
        groups = {i: [i] for i in staying}
        for i in halted:
            groups[max(staying, key=lambda j: float(torch.cosine_similarity(keys[i], keys[j], dim=0)))].append(i)
        for i, members in groups.items():
            torch.testing.assert_close(seen["after"][b, i], x[members].mean(0))
            assert seen["size"][b, i] == len(members)
        torch.testing.assert_close(seen["after"][b, 0], x[0])  # nothing joins the class token


def test_one_rest_token_stands_for_all_who_halted():
    model = build("vit", dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6, merge="rest"), torch.float64)
    images = images_for(model, 3, torch.float64)
    sizes, states = [], []
    step = model.method.step

    def spy(depth, tokens):
        verdict = step(depth, tokens)
        after = tokens.advance(verdict.keep, merge=verdict.merge)
        sizes.append(after.size * tokens.notes["rest"])
        states.append((tokens.live & verdict.keep).clone())
        return verdict

    model.method.step = spy
    with torch.no_grad():
        model(images, layout="masked")
    for size, going in zip(sizes[:-1], states[:-1]):
        rest = size > 0
        assert (rest.sum(-1) <= 1).all() and (going | ~rest).all()  # one at most, and it never halts
        gone = (~going[:, 1:]).sum(-1) + rest.sum(-1)  # the rest token's own row is one of those it stands for
        assert torch.equal(size.sum(-1).long(), torch.where(rest.any(-1), gone, 0))


def test_ways_to_merge_are_named():
    with pytest.raises(dwindle.DwindleError, match="did you mean 'nearest'"):
        dwindle.AHT(merge="neares")


def test_a_gate_carries_the_gradient_of_coming_this_far():
    """AHT: after every block d gate / d beta is that of prod (1 - h), also for those who halted long ago."""
    model = build("vit", dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6), torch.float64).train()
    gates, scores = [], []
    step = model.method.step

    def spy(depth, tokens):
        verdict = step(depth, tokens)
        gates.append(tokens.advance(verdict.keep, verdict.gate).gate)
        scores.append(verdict.record["score"])
        return verdict

    model.method.step = spy
    out = model(images_for(model, 2, torch.float64))
    assert (out.trace.depth == 1).any()
    for block in range(model.backbone.shape.blocks):
        survival = torch.stack([1 - score for score in scores[: block + 1]]).prod(0)
        expected, gradient = (
            torch.autograd.grad(value[:, 1:].sum(), model.method.beta, retain_graph=True)[0]
            for value in (survival, gates[block])
        )
        torch.testing.assert_close(gradient, expected)
        assert set(gates[block].detach().unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: dwindle.AHT(softness=0), "softness = 0"),
        (lambda: dwindle.AHT(ramp=-0.1), "ramp = -0.1"),
        (lambda: dwindle.AHT(hidden=0), "hidden = 0"),
        (lambda: Method.registry["DynamicViT"](threshold=1.5), "threshold = 1.5"),
        (lambda: Method.registry["ToMe"](r=float("inf")), "r = inf"),
        (lambda: build("vit", Method.registry["TopK"](stages=(3,), budget=0.2)), "cannot be reached"),
    ],
)
def test_settings_that_cannot_work(make, said):
    with pytest.raises(dwindle.DwindleError, match=said):
        make()
