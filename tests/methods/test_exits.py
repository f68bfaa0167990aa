"""The mechanisms that stop whole images, against their equations written out image by image."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import dwindle
from dwindle.core.model import LAYOUTS
from dwindle.methods.act import ACT
from dwindle.methods.confidence import Confidence
from dwindle.methods.exits import image_state
from dwindle.methods.pondernet import PonderNet
from dwindle.methods.shallow import Shallow
from dwindle.methods.similarity import Similarity
from shared.tally import SLOW
from shared.tiny import METHODS, build, images_for

LAYOUT = pytest.mark.parametrize("layout", ["packed", "masked"])
BACKBONE = pytest.mark.parametrize("backbone", ["vit", "average"])
EXITS = {
    "PonderNet": PonderNet,
    "Confidence": Confidence,
    "Similarity": Similarity,
    "Similarity_cosine": lambda: Similarity(kind="cosine"),
}


def double(backbone: str, name: str) -> tuple[dwindle.AdaptiveViT, torch.Tensor]:
    model = build(backbone, METHODS[name](), torch.float64)
    return model, images_for(model, dtype=torch.float64)


def states(model: dwindle.AdaptiveViT, image: torch.Tensor) -> list[torch.Tensor]:
    """(1, N, D) after each block of the wrapped model itself."""
    x, out = model.backbone.embed(image[None]), []
    for block in model.vit.blocks:
        x = block(x)
        out.append(x)
    return out


def judged(model: dwindle.AdaptiveViT, x: torch.Tensor) -> torch.Tensor:
    """(D,): the class token, or the mean where there is none."""
    return x[0, 0] if model.backbone.shape.prefix else x[0].mean(0)


def compare(out: dwindle.Output, depths: list[int], logits: list[torch.Tensor]) -> None:
    assert torch.equal(out.trace.depth, torch.tensor(depths)[:, None].expand(out.trace.shape))
    assert len(set(depths)) > 1  # images that stop together would prove little
    torch.testing.assert_close(out.logits, torch.cat(logits))


@LAYOUT
@BACKBONE
@torch.no_grad()
def test_act_is_the_mean_over_states_of_halting_images(backbone, layout):
    model, images = double(backbone, "ACT")
    unit, depths, logits, ponders = model.method.unit, [], [], []
    for image in images:
        total, rest, mean = 0.0, 1.0, 0.0
        for n, x in enumerate(states(model, image), 1):
            h = 1.0 if n == 4 else float(torch.sigmoid(unit.weight[0] @ judged(model, x) + unit.bias[0]))
            total += h
            if n == 4 or total >= model.method.threshold:
                mean = mean + max(rest, 0.0) * x
                depths.append(n)
                ponders.append(n + max(rest, 0.0))
                break
            mean = mean + min(h, max(rest, 0.0)) * x
            rest -= h
        logits.append(model.backbone.readout(mean))
    out = model(images, layout=layout)
    compare(out, depths, logits)
    assert float(model.method.losses(out)["ponder"]) == pytest.approx(sum(ponders) / len(ponders))
    assert model.method.loss_weights == {"ponder": 1e-3}


def hazards(model: dwindle.AdaptiveViT, image: torch.Tensor) -> list[float]:
    """lambda after each block but the last."""
    method = model.method
    features = [float(judged(model, x)[method.neuron]) for x in states(model, image)[:-1]]
    return [1 / (1 + math.exp(-(method.gamma.item() * f + method.beta.item()))) for f in features]


@LAYOUT
@BACKBONE
@torch.no_grad()
def test_pondernet_stops_where_it_has_halted_with_the_threshold_probability(backbone, layout):
    model, images = double(backbone, "PonderNet")
    depths, logits = [], []
    for image in images:
        going, depth = 1.0, 4
        for n, chance in enumerate(hazards(model, image), 1):
            going *= 1 - chance
            if 1 - going >= model.method.threshold:
                depth = n
                break
        depths.append(depth)
        logits.append(model.backbone.readout(states(model, image)[depth - 1]))
    out = model(images, layout=layout)
    compare(out, depths, logits)
    assert not out.trace.exits and model.method.exit_weights(out.trace) is None  # answers cost, and nobody asks


@LAYOUT
@torch.no_grad()
def test_pondernet_trains_every_depth_by_its_probability(layout):
    model, images = double("vit", "PonderNet")
    labels, prior = torch.arange(5), [0.1 * 0.9**n for n in range(4)]
    prior = [p / sum(prior) for p in prior]
    task, divergence, table = 0.0, 0.0, []
    for image, label in zip(images, labels):
        going, p = 1.0, []
        for chance in hazards(model, image):
            p.append(chance * going)
            going *= 1 - chance
        p.append(going)
        table.append(p)
        answers = [model.backbone.readout(x) for x in states(model, image)]
        task += sum(a * float(F.cross_entropy(y, label[None])) for a, y in zip(p, answers)) / 5
        divergence += sum(a * math.log(a / b) for a, b in zip(p, prior)) / 5
    model.train()
    out = model(images, layout=layout)
    assert (out.trace.depth == 4).all() and len(out.trace.exits) == 4
    weights = model.method.exit_weights(out.trace)
    torch.testing.assert_close(weights, torch.tensor(table, dtype=torch.float64).T)
    torch.testing.assert_close(weights.sum(0), torch.ones(5, dtype=torch.float64))
    terms = model.loss(out, labels)
    assert float(terms["task"]) == pytest.approx(task, rel=1e-6)
    assert float(terms["prior"]) == pytest.approx(divergence, rel=1e-6)
    assert float(terms["total"]) == pytest.approx(task + 0.01 * divergence, rel=1e-6)


@LAYOUT
@BACKBONE
@torch.no_grad()
def test_confidence_stops_at_the_first_sure_answer(backbone, layout):
    model, images = double(backbone, "Confidence")
    depths, logits = [], []
    for image in images:
        answers = [model.backbone.readout(x) for x in states(model, image)]
        sure = [n for n, y in enumerate(answers[:-1], 1) if y.softmax(-1).max() > model.method.threshold]
        depths.append(sure[0] if sure else 4)
        logits.append(answers[depths[-1] - 1])
    out = model(images, layout=layout)
    compare(out, depths, logits)
    first = torch.cat([model.backbone.readout(states(model, image)[0]) for image in images])
    torch.testing.assert_close(out.trace.exits[0], first)
    torch.testing.assert_close(out.trace.scores[0, :, 0], first.softmax(-1).amax(-1))
    assert len(out.trace.exits) <= 3  # nobody decides after the last block


@LAYOUT
@BACKBONE
@pytest.mark.parametrize("kind", ["mse", "cosine"])
@torch.no_grad()
def test_similarity_stops_when_the_answer_stays(backbone, kind, layout):
    model, images = double(backbone, "Similarity" if kind == "mse" else "Similarity_cosine")
    depths, logits = [], []
    for image in images:
        answers = [model.backbone.readout(x)[0] for x in states(model, image)]
        depth = 4
        for n in (3, 2):
            a, b = answers[n - 1], answers[n - 2]
            distance = ((a - b) ** 2).sum() / 5 if kind == "mse" else 1 - a @ b / (a.norm() * b.norm())
            depth = n if distance < model.method.threshold else depth
        depths.append(depth)
        logits.append(answers[depth - 1][None])
    compare(model(images, layout=layout), depths, logits)


@LAYOUT
@pytest.mark.parametrize(
    ("supervision", "weights"), [("linear", [0.1, 0.2, 0.3, 0.4]), ("uniform", [0.25, 0.25, 0.25, 0.25])]
)
@pytest.mark.parametrize("kind", [Confidence, Similarity])
@torch.no_grad()
def test_deep_supervision(kind, supervision, weights, layout):
    model = build("vit", kind(supervision=supervision)).train()
    images, labels = images_for(model), torch.arange(5)
    out = model(images, layout=layout)
    assert (out.trace.depth == 4).all()
    answers = [[model.backbone.readout(x) for x in states(model, image)] for image in images]
    expected = [w * F.cross_entropy(torch.cat([a[n] for a in answers]), labels) for n, w in enumerate(weights)]
    assert float(model.loss(out, labels)["task"]) == pytest.approx(float(sum(expected)), rel=1e-5)


@torch.no_grad()
def test_depths_forced_while_training_leave_out_answers_that_were_not_given():
    for name in EXITS:
        model = build("vit", EXITS[name]()).train()
        images, depths = images_for(model, 3), torch.tensor([1, 2, 2])[:, None].expand(3, 17)
        outs = [model(images, layout=layout, depths=depths) for layout in ("packed", "masked")]
        losses = [model.loss(out, torch.arange(3)) for out in outs]
        for term in losses[0]:
            torch.testing.assert_close(losses[0][term], losses[1][term])
        weights = model.method.exit_weights(outs[0].trace)
        torch.testing.assert_close(weights.sum(0), torch.ones(3))
        assert weights[1:, 0].eq(0).all() and weights[2:].eq(0).all()


@torch.no_grad()
def test_cost_rises_along_the_dial_and_calibration_finds_a_budget():
    for name, make in (("ACT", lambda: ACT(bias=-1.0)), *EXITS.items()):
        model = build("vit", make())
        images = images_for(model, 16)
        attribute, cheap, dear = model.method.operating_point
        costs = []
        for t in range(17):
            setattr(model.method, attribute, cheap + (dear - cheap) * t / 16)
            costs.append(float(model.macs(model(images).trace).mean()))
        assert costs == sorted(costs) and costs[0] < costs[-1], name
        assert abs(dwindle.calibrate(model, images, 0.8) - 0.8) < 0.03, name


@torch.no_grad()
def test_act_holds_a_budget_while_it_trains():
    model = build("vit", ACT(budget=0.6, ramp=0.0)).train()
    costs = []
    for step in range(60):
        torch.manual_seed(step)
        out = model(torch.randn(16, 3, 32, 32), layout="masked")
        costs.append(float(model.cost(out.trace)))
        model.hold_budget(out)
    assert costs[0] > 0.95 and abs(sum(costs[-10:]) / 10 - 0.6) < 0.06
    assert abs(dwindle.calibrate(model, torch.randn(16, 3, 32, 32), 0.8) - 0.8) < 0.05


@torch.no_grad()
def test_act_with_a_budget_keeps_the_first_law():
    """Its threshold is a tensor there: the same in every layout, for an image alone, and after a save."""
    model = build("vit", ACT(bias=-1.0, budget=0.7, threshold=0.6))
    images = images_for(model, 6)
    wanted = model(images, layout="packed")
    assert 1 < wanted.trace.depth.float().mean() < model.backbone.shape.blocks
    alone = [model(image[None], layout="packed") for image in images]
    for out in (model(images, layout="masked"), model(images)):
        assert torch.equal(out.trace.depth, wanted.trace.depth)
        torch.testing.assert_close(out.logits, wanted.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([out.logits for out in alone]), wanted.logits, atol=1e-5, rtol=1e-5)
    again = ACT(**model.method.config)
    assert float(again.threshold) == pytest.approx(0.6) and again.budget == 0.7


@torch.no_grad()
def test_nobody_stops_or_is_read_before_min_depth():
    for kind in (Confidence, Similarity):
        model = build("vit", kind(threshold={Confidence: 0.0, Similarity: 1e9}[kind], min_depth=3))
        for layout in ("packed", "masked"):
            out = model(images_for(model), layout=layout)
            assert (out.trace.depth == 3).all() and len(out.trace.exits) == 1
        reads = 1 if kind is Confidence else 2
        shallow = build("vit", Shallow(3))
        extra = model.macs(out.trace) - shallow.macs(shallow(images_for(model)).trace)
        assert extra.tolist() == [reads * 32 * 5] * 5


@LAYOUT
@torch.no_grad()
def test_shallow_is_the_first_blocks(layout):
    model = build("vit", Shallow(3))
    images = images_for(model)
    out = model(images, layout=layout)
    assert (out.trace.depth == 3).all()
    expected = torch.cat([model.backbone.readout(states(model, image)[2]) for image in images])
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=1e-4)
    shape = model.backbone.shape
    block = 17 * shape.block_macs + 2 * 17**2 * 32
    assert model.static_macs() - float(model.macs(out.trace)[0]) == block
    dwindle.calibrate(model, images, 0.5)
    assert (model(images, layout=layout).trace.depth == 2).all()


@torch.no_grad()
def test_the_state_an_image_is_judged_by_when_its_class_token_has_stopped():
    x = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    keep = torch.tensor([[True, True, False, True], [False, True, True, False], [False] * 4])
    for layout in LAYOUTS.values():
        tokens = layout.start(x, 1)
        tokens = tokens.advance(keep.reshape(tokens.x.shape[:-1]))
        state = image_state(tokens, tokens.x)
        assert torch.equal(state, torch.stack([x[0, 0], torch.zeros(2), torch.zeros(2)]))
        tokens = layout.start(x, 0)
        tokens = tokens.advance(keep.reshape(tokens.x.shape[:-1]))
        means = torch.stack([x[0, [0, 1, 3]].mean(0), x[1, 1:3].mean(0), torch.zeros(2)])
        torch.testing.assert_close(image_state(tokens, tokens.x), means)


@pytest.mark.parametrize("name", ["ACT", "Shallow", *EXITS] if SLOW else ["ACT", "Similarity"])
def test_training_compiles_without_graph_breaks(name):
    model = build("vit", METHODS[name]()).train()
    images, labels = images_for(model), torch.arange(5)

    def terms(x):
        return model.loss(model(x, layout="masked"), labels)

    torch.testing.assert_close(torch.compile(terms, fullgraph=True, backend="eager")(images), terms(images))
    model.loss(model(images), labels)["total"].backward()
    for parameter in model.method.parameters():
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ACT(eps=0.0), "eps = 0.0: it must lie between 0 and 1"),
        (lambda: ACT(threshold=0.0), "above 0"),
        (lambda: ACT(tau=-1.0), "tau = -1.0"),
        (lambda: ACT(ramp=2.0), "ramp = 2.0"),
        (lambda: build("vit", ACT(budget=1.5)), "budget = 1.5"),
        (lambda: PonderNet(prior=1.0), "prior = 1.0"),
        (lambda: PonderNet(threshold=1.5), "threshold = 1.5"),
        (lambda: PonderNet(beta_kl=-0.1), "beta_kl = -0.1"),
        (lambda: build("vit", PonderNet(neuron=32)), "neuron = 32: the blocks' output has 0..31"),
        (lambda: Confidence(threshold=1.1), "threshold = 1.1"),
        (lambda: Confidence(supervision="uniforn"), "did you mean 'uniform'"),
        (lambda: build("vit", Confidence(min_depth=0)), r"min_depth = 0: this backbone has blocks 1..4"),
        (lambda: Similarity(threshold=-0.1), "threshold = -0.1"),
        (lambda: Similarity(kind="ssim"), "Unknown kind 'ssim'.*cosine, lpips, mse"),
        (lambda: Similarity(supervision="lin"), "supervision"),
        (lambda: build("vit", Similarity(min_depth=1)), "from block 2 on"),
        (lambda: Shallow(0), "depth = 0"),
        (lambda: build("vit", Shallow(5)), r"blocks 1..4"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(dwindle.DwindleError, match=message):
        make()


@torch.no_grad()
def test_tokens_are_drawn_from_their_halting_distribution():
    """PonderNet per token: with lambda the same everywhere depths are geometric; the class token goes on."""
    model = build("vit", PonderNet(gamma=0.0, beta=0.0, per="token", sample=True))  # lambda = 1/2
    images = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    out = model(images)
    assert (out.trace.depth[:, 0] == 4).all()
    counts = out.trace.depth[:, 1:].flatten().bincount(minlength=5)[1:].double()
    torch.testing.assert_close(
        counts / counts.sum(), torch.tensor([0.5, 0.25, 0.125, 0.125]).double(), atol=0.02, rtol=0
    )
    assert torch.equal(model(images[7:9]).trace.depth, out.trace.depth[7:9])  # the draw is the image's own
    median = build("vit", PonderNet(gamma=0.0, beta=0.0, per="token"))
    assert (median(images[:2]).trace.depth[:, 1:] == 1).all()  # by then half of the chance is spent


def test_what_trains_a_token_that_ponders():
    model = build("vit", PonderNet(per="token", sample=True)).train()
    out = model(images_for(model))
    weights = model.method.exit_weights(out.trace)
    torch.testing.assert_close(weights.sum(0), torch.ones(5))  # the class token's, which sees every depth
    terms = model.loss(out, torch.arange(5))
    terms["total"].backward()
    assert float(model.method.gamma.grad.abs()) > 0 and len(out.trace.exits) == 4
    assert len(out.trace.depth.unique()) > 1  # drawn in training too
    with pytest.raises(dwindle.DwindleError, match="tokens are drawn"):
        PonderNet(sample=True)
