"""The methods that thin out an image's patches, against plain loops over one image; and learning from a teacher."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dwindle
from dwindle.core.masked import Masked
from dwindle.core.model import LAYOUTS
from dwindle.core.tokens import Probed
from dwindle.methods import Method
from dwindle.methods.confidence import Confidence
from dwindle.methods.dynamicvit import DynamicViT
from dwindle.methods.tome import ToMe
from dwindle.methods.topk import TopK
from shared.tiny import build, images_for

LAYOUT = pytest.mark.parametrize("layout", ["packed", "masked"])
BACKBONE = pytest.mark.parametrize("backbone", ["vit", "average", "distilled", "registers"])


def double(backbone: str, method: Method) -> tuple[dwindle.AdaptiveViT, Tensor]:
    model = build(backbone, method, torch.float64)
    return model, images_for(model, dtype=torch.float64)


def attention(block: nn.Module, x: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One image (n, D) in a timm block: what attention adds, its weights (n, n) and keys (n, E), means over heads."""
    attn, n = block.attn, len(x)
    q, k, v = attn.qkv(block.norm1(x)).view(n, 3, attn.num_heads, -1).permute(1, 2, 0, 3)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if size is not None:
        scores = scores + size.log()
    weights = scores.softmax(-1)
    return attn.proj((weights @ v).transpose(0, 1).flatten(1)), weights.mean(0), k.mean(0)


def compare(model: dwindle.AdaptiveViT, images: Tensor, layout: str, one_image) -> dwindle.Output:
    """`one_image(image)` gives features (N, D) and depths of every token, by a plain loop, and whom each has joined."""
    out = model(images, layout=layout)
    for i, image in enumerate(images):
        features, depths, joined = one_image(image)
        assert out.trace.depth[i].tolist() == depths
        for token in range(len(features)):
            last = token
            while last in joined:
                last = joined[last]
            features[token] = features[last]
        torch.testing.assert_close(out.features[i], features)
        torch.testing.assert_close(out.logits[i], model.backbone.readout(features[None])[0])
    return out


# TopK


def evit(model: dwindle.AdaptiveViT, image: Tensor) -> tuple[Tensor, list[int], dict[int, int]]:
    method, prefix = model.method, model.backbone.shape.prefix
    features = model.backbone.embed(image[None])[0]
    live, depths, joined = list(range(len(features))), [0] * len(features), {}
    for layer, block in enumerate(model.vit.blocks, 1):
        x = features[live]
        weights = attention(block, x)[1]
        exit_depths = weights[0] if prefix else weights.mean(0)
        features[live] = block(x[None])[0]
        for token in live:
            depths[token] = layer
        if layer not in method.stages:
            continue
        share = dict(zip(live, exit_depths.tolist()))
        patches = [token for token in live if token >= prefix]
        order = sorted(patches, key=lambda token: -share[token])
        kept = math.ceil(round(float(method.keep) * len(patches), 4))
        staying, leaving = order[:kept], order[kept:]
        if method.fuse and leaving:
            mean = sum(share[t] * features[t] for t in leaving) / sum(share[t] for t in leaving)
            features[leaving[0]] = mean
            joined |= dict.fromkeys(leaving[1:], leaving[0])
            staying.append(leaving[0])
        live = sorted([*live[:prefix], *staying])
    return features, depths, joined


@LAYOUT
@BACKBONE
@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_topk_is_evits_rule(fuse, backbone, layout):
    model, images = double(backbone, TopK(stages=(1, 3), keep=0.6, fuse=fuse))
    out = compare(model, images, layout, lambda image: evit(model, image))
    prefix, extra = model.backbone.shape.prefix, int(fuse)
    first = math.ceil(0.6 * 16) + extra
    second = math.ceil(0.6 * first) + extra
    counts = [16 + prefix, first + prefix, first + prefix, second + prefix]
    assert out.trace.counts.tolist() == [[n] * 5 for n in counts]


@LAYOUT
@torch.no_grad()
def test_topk_takes_the_first_of_equals(layout):
    """Without position a blank image's patches are all looked at alike."""
    model = build("vit", TopK(stages=(1,), keep=0.5))
    model.vit.pos_embed.zero_()
    depth = model(torch.zeros(2, 3, 32, 32), layout=layout).trace.depth
    assert depth.tolist() == [[4] * 9 + [1] * 8] * 2


@pytest.mark.parametrize(("keep", "patches", "kept"), [(0.7, 10, 7), (0.7, 196, 138), (0.5, 15, 8), (0, 16, 0)])
@torch.no_grad()
def test_topk_keeps_the_ceiling_and_rounding_adds_nobody(keep, patches, kept):
    method = TopK(stages=(1,), keep=keep)
    for layout in LAYOUTS.values():
        tokens = layout.start(torch.zeros(2, patches + 1, 3), 1)
        tokens = tokens.changed(probed=Probed(attention=torch.rand(tokens.x.shape[:-1])))
        keep_rows = method.step(0, tokens).keep
        assert tokens.image_sum(keep_rows.float()).tolist() == [kept + 1] * 2


# ToMe


def bipartite_soft_matching(model: dwindle.AdaptiveViT, image: Tensor) -> tuple[Tensor, list[int], dict[int, int]]:
    prefix, blocks = model.backbone.shape.prefix, model.vit.blocks
    features = model.backbone.embed(image[None])[0]
    live, depths, size = list(range(len(features))), [0] * len(features), torch.ones(len(features)).double()
    merged_before, joined = 0, {}
    for layer, block in enumerate(blocks, 1):
        x = features[live]
        update, _, keys = attention(block, x, size[live])
        x = x + update
        features[live] = x + block.mlp(block.norm2(x))
        for token in live:
            depths[token] = layer
        if layer == len(blocks):
            break
        r = int(model.method.r * layer) - merged_before
        merged_before += r
        a, b = live[::2], live[1::2]
        key = dict(zip(live, keys))
        pairs = []
        for i in a:
            nearest = [(float(F.cosine_similarity(key[i], key[j], dim=0)), j) for j in b if j >= prefix]
            if i >= prefix and nearest:
                likeness, j = max(nearest)
                pairs.append((likeness, i, j))
        pairs = sorted(pairs, reverse=True)[: min(r, (len(live) - prefix) // 2)]
        for target in b:
            group = [target, *(i for _, i, j in pairs if j == target)]
            total = sum(size[t] for t in group)
            features[target] = sum(size[t] * features[t] for t in group) / total
            size[target] = total
        joined |= {i: j for _, i, j in pairs}
        live = [t for t in live if t not in joined]
    return features, depths, joined


@LAYOUT
@BACKBONE
@pytest.mark.parametrize("r", [1, 2.5, 3, 5.5, 100])
@torch.no_grad()
def test_tome_is_bipartite_soft_matching(r, backbone, layout):
    model, images = double(backbone, ToMe(r=r))
    out = compare(model, images, layout, lambda image: bipartite_soft_matching(model, image))
    assert (out.trace.depth[:, : model.backbone.shape.prefix] == 4).all()


@LAYOUT
@pytest.mark.parametrize(
    ("r", "counts"), [(0, [17] * 4), (0.5, [17, 17, 16, 16]), (2.5, [17, 15, 12, 10]), (100, [17, 9, 5, 3])]
)
@torch.no_grad()
def test_tome_spreads_a_fraction_over_the_blocks_and_loses_no_patch(r, counts, layout):
    model = build("vit", ToMe(r=r))
    step, sizes = model.method.step, []

    def watched(depth, tokens):
        verdict = step(depth, tokens)
        after = tokens.advance(verdict.keep, merge=verdict.merge)
        sizes.append(after.image_sum(after.size).tolist())
        return verdict

    model.method.step = watched
    assert model(images_for(model), layout=layout).trace.counts.tolist() == [[n] * 5 for n in counts]
    assert sizes == [[17.0] * 5] * 4


@pytest.mark.parametrize("budget", [0.8, 0.67, 0.5])
@pytest.mark.parametrize("method", ["TopK", "TopK fused", "ToMe", "DynamicViT"])
@torch.no_grad()
def test_a_budget_is_what_an_image_costs(method, budget):
    """Predictors and matching counted in."""
    kind, _, fused = method.partition(" ")
    made = Method.registry[kind](budget=budget, **{"fuse": True} if fused else {})
    model = dwindle.adapt(timm.create_model("deit_tiny_patch16_224"), made).eval()
    trace = model(torch.randn(1, 3, 224, 224)).trace
    assert float(model.cost(trace)) == pytest.approx(budget, rel=0.01)


# DynamicViT


@torch.no_grad()
def undecided(model: dwindle.AdaptiveViT) -> dwindle.AdaptiveViT:
    """Random predictors keep all or nothing: move their answers until half of the patches are likely to go on."""
    images = images_for(model, dtype=next(model.parameters()).dtype)
    everyone = torch.full((len(images), model.backbone.shape.tokens()), 4)
    record = model(images, layout="masked", depths=everyone).trace.scores
    for stage in model.method.stages:
        logit = -record[stage - 1, :, model.backbone.shape.prefix :].logit()
        last = model.method.predictors[str(stage)].out[-1]
        last.bias[1] -= logit.median()
    return model


def predicted(predictor: nn.Module, x: Tensor, patches: list[bool]) -> Tensor:
    """(n,) probability of keeping, of one image's live tokens (n, D)."""
    features = F.gelu(predictor.embed(predictor.norm(x)))
    half = features.shape[-1] // 2
    context = features[torch.tensor(patches), half:].mean(0)
    joint = torch.cat([features[:, :half], context.expand(len(x), half)], -1)
    return predictor.out(joint).softmax(-1)[:, 1]


def sparsified(model: dwindle.AdaptiveViT, image: Tensor) -> tuple[Tensor, list[int], dict[int, int]]:
    method, prefix = model.method, model.backbone.shape.prefix
    features = model.backbone.embed(image[None])[0]
    begun = len(features) - prefix
    live, depths = list(range(len(features))), [0] * len(features)
    for layer, block in enumerate(model.vit.blocks, 1):
        features[live] = block(features[None, live])[0]
        for token in live:
            depths[token] = layer
        if layer not in method.stages:
            continue
        chance = predicted(method.predictors[str(layer)], features[live], [t >= prefix for t in live])
        chance = dict(zip(live, chance.tolist()))
        order = sorted((t for t in live if t >= prefix), key=lambda token: -chance[token])
        count = int(round(float(method.keep) ** (method.stages.index(layer) + 1) * begun, 4))
        chosen = order[:count] if method.count == "fixed" else [t for t in order if chance[t] >= method.threshold]
        live = sorted([*live[:prefix], *chosen])
        if not live:
            break
    return features, depths, {}


@LAYOUT
@BACKBONE
@pytest.mark.parametrize("count", ["fixed", "image"])
@torch.no_grad()
def test_dynamicvit_keeps_what_its_predictors_say(count, backbone, layout):
    model, images = double(backbone, DynamicViT(stages=(1, 2, 3), keep=0.7, count=count, threshold=0.4))
    undecided(model)
    out = compare(model, images, layout, lambda image: sparsified(model, image))
    kept = out.trace.counts - model.backbone.shape.prefix
    if count == "fixed":
        assert kept.tolist() == [[n] * 5 for n in (16, 11, 7, 5)]  # int(0.7^s 16)
    else:
        assert len(kept[-1].unique()) > 1  # each image has a number of its own


def drawing(method: DynamicViT, backbone: str = "vit") -> tuple[dwindle.AdaptiveViT, dwindle.Output, dict[int, Tensor]]:
    """A training step's output, and the logits of each stage, which keep their gradients."""
    model, logits = undecided(build(backbone, method)).train(), {}

    def watch(stage: int):
        def hook(module, args, logit):
            logit.retain_grad()
            logits[stage] = logit

        return hook

    for stage in method.stages:
        method.predictors[str(stage)].register_forward_hook(watch(stage))
    torch.manual_seed(3)
    return model, model(images_for(model)), logits


def test_gumbel_decisions_are_hard_and_their_gradients_soft():
    method = DynamicViT(stages=(1,), keep=0.6)
    model, out, logits = drawing(method)
    torch.manual_seed(3)
    u = torch.rand(5, 17)
    soft = torch.sigmoid(logits[1] + (u / (1 - u)).log())[:, 1:]
    kept = out.trace.stack("kept")[0, :, 1:]
    assert torch.equal(kept, (soft > 0.5).float())
    assert torch.equal(out.trace.live[1][:, 1:], kept.bool()) and out.trace.live[:, :, 0].all()

    terms = model.loss(out, torch.arange(5))
    gap = kept.mean(1) - 0.6
    assert terms["ratio"].item() == pytest.approx(float((gap.detach() ** 2).mean()), rel=1e-5)
    (got,) = torch.autograd.grad(terms["ratio"], logits[1], retain_graph=True)
    expected = 2 * gap[:, None] / 5 / 16 * soft * (1 - soft)
    torch.testing.assert_close(got[:, 1:], expected)
    assert (got[:, 0] == 0).all()


def test_the_task_trains_the_predictors_also_through_dropped_tokens():
    model, out, logits = drawing(DynamicViT(stages=(1, 3), keep=0.6))
    model.loss(out, torch.arange(5))["task"].backward()
    for stage, logit in logits.items():
        decided = out.trace.live[stage - 1].clone()
        decided[:, 0] = False
        dropped = decided & ~out.trace.live[stage]
        assert dropped.any() and (logit.grad[dropped] != 0).all()
        assert (logit.grad[decided] != 0).all() and (logit.grad[:, 0] == 0).all()
    for parameter in model.method.parameters():
        assert parameter.grad.abs().max() > 0


def test_gumbel_draws_keep_with_the_predicted_probability():
    torch.manual_seed(0)
    tokens = Masked.start(torch.zeros(8, 4000, 1), 0)
    for logit in (-1.0, 0.0, 2.0):
        _, keep = DynamicViT()._gumbel_softmax(tokens, torch.full(tokens.shape, logit))
        assert float(keep.float().mean()) == pytest.approx(1 / (1 + math.exp(-logit)), abs=0.01)


@LAYOUT
@torch.no_grad()
def test_dynamicvits_losses_by_hand(layout):
    method = DynamicViT(stages=(1, 3), keep=0.7, lambda_ratio=3.0, lambda_features=0.25)
    model = undecided(build("vit", method)).train()
    images, labels = images_for(model), torch.arange(5)
    teacher = build("vit", dwindle.Static(), seed=1)(images)
    torch.manual_seed(3)
    out = model(images, layout=layout)
    terms = model.loss(out, labels, teacher)
    ratio, distance = 0.0, 0.0
    for image in range(5):
        for s, stage in enumerate((1, 3), 1):
            ratio += (float(out.trace.live[stage, image, 1:].float().mean()) - 0.7**s) ** 2 / 10
        mine, other = (F.layer_norm(o.features[image], (32,)) for o in (out, teacher))
        stayed = [t for t in range(1, 17) if out.trace.depth[image, t] == 4]
        distance += sum(float(((mine[t] - other[t]) ** 2).mean()) for t in stayed) / len(stayed) / 5
    assert float(terms["ratio"]) == pytest.approx(ratio, rel=1e-5)
    assert float(terms["features"]) == pytest.approx(distance, rel=1e-5)
    total = terms["task"] + terms["distill"] + 3 * terms["ratio"] + 0.25 * terms["features"]
    torch.testing.assert_close(terms["total"], total)
    assert "features" not in model.loss(out, labels)


# A teacher


def taught(backbone: str, method: Method) -> tuple[dwindle.AdaptiveViT, dwindle.Output, dwindle.Output, Tensor]:
    model = build(backbone, method)
    images = images_for(model)
    with torch.no_grad():
        teacher = build("vit", dwindle.Static(), seed=1)(images)
        return model, model(images, layout="masked"), teacher, torch.tensor([4, 0, 2, 1, 3])


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> float:
    """T^2 sum_c p_c log(p_c / q_c), mean over images."""
    total = 0.0
    for q, p in zip((student / temperature).softmax(-1).tolist(), (teacher / temperature).softmax(-1).tolist()):
        total += temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q)) / len(student)
    return total


def surprise(answers: Tensor, classes: Tensor) -> float:
    return -sum(math.log(p[c]) for p, c in zip(answers.softmax(-1).tolist(), classes.tolist())) / len(answers)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_distillation(temperature):
    model, out, teacher, labels = taught("vit", TopK(stages=(2,)))
    terms = model.loss(out, labels, teacher, temperature=temperature, label_weight=0.5, teacher_weight=2.0)
    assert float(terms["task"]) == pytest.approx(surprise(out.logits, labels), rel=1e-5)
    expected = divergence(out.logits, teacher.logits, temperature)
    assert float(terms["distill"]) == pytest.approx(expected, rel=1e-4)
    assert float(terms["total"]) == pytest.approx(0.5 * float(terms["task"]) + 2 * expected, rel=1e-4)
    assert set(model.loss(out, labels)) == {"task", "total"}


def test_hard_distillation():
    model, out, teacher, labels = taught("vit", TopK(stages=(2,)))
    terms = model.loss(out, labels, teacher, distill="hard", label_weight=0.0, teacher_weight=0.5)
    expected = surprise(out.logits, teacher.logits.argmax(-1))
    assert float(terms["distill"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["total"]) == pytest.approx(0.5 * expected, rel=1e-5)


@pytest.mark.parametrize("backbone", ["distilled", "hf_deit_teacher"])
def test_the_distillation_token_learns_from_the_teacher_and_the_class_token_from_the_labels(backbone):
    model, out, teacher, labels = taught(backbone, TopK(stages=(2,)))
    vit = model.vit
    if backbone == "distilled":
        x = vit.norm(out.features)
        heads = vit.head(x[:, 0]), vit.head_dist(x[:, 1])
    else:
        x = vit.deit.layernorm(out.features)
        heads = vit.cls_classifier(x[:, 0]), vit.distillation_classifier(x[:, 1])
    torch.testing.assert_close(out.logits, (heads[0] + heads[1]) / 2)
    terms = model.loss(out, labels, teacher, distill="token", label_weight=0.5, teacher_weight=0.5)
    task, distill = surprise(heads[0], labels), surprise(heads[1], teacher.logits.argmax(-1))
    assert float(terms["task"]) == pytest.approx(task, rel=1e-5)
    assert float(terms["distill"]) == pytest.approx(distill, rel=1e-5)
    assert float(terms["total"]) == pytest.approx(0.5 * task + 0.5 * distill, rel=1e-5)
    alone = model.loss(out, labels, distill="token")  # nobody teaches: the answer it will give is what learns
    assert float(alone["task"]) == pytest.approx(surprise(out.logits, labels), rel=1e-5)


@pytest.mark.parametrize("backbone", ["vit", "hf_vit"])
def test_no_distillation_token(backbone):
    model, out, teacher, labels = taught(backbone, TopK(stages=(2,)))
    with pytest.raises(dwindle.DwindleError, match=r"distillation token.*distilled model"):
        model.loss(out, labels, teacher, distill="token")
    with pytest.raises(dwindle.DwindleError, match="did you mean 'token'"):
        model.loss(out, labels, teacher, distill="tokn")


@pytest.mark.parametrize("distill", ["soft", "hard"])
@torch.no_grad()
def test_every_depth_answers_the_labels_and_the_teacher(distill):
    model = build("vit", Confidence(supervision="linear")).train()
    images, labels = images_for(model), torch.tensor([4, 0, 2, 1, 3])
    teacher = build("vit", dwindle.Static(), seed=1)(images)
    out = model(images)
    terms = model.loss(out, labels, teacher, distill=distill)
    assert len(out.trace.exits) == 4
    task = heard = 0.0
    for weight, answer in zip((0.1, 0.2, 0.3, 0.4), out.trace.exits):
        task += weight * surprise(answer, labels)
        soft = distill == "soft"
        wanted = teacher.logits.argmax(-1)
        heard += weight * (divergence(answer, teacher.logits, 1.0) if soft else surprise(answer, wanted))
    assert float(terms["task"]) == pytest.approx(task, rel=1e-5)
    assert float(terms["distill"]) == pytest.approx(heard, rel=1e-4)


@torch.no_grad()
def test_the_distillation_token_answers_once():
    model = build("distilled", Confidence()).train()
    images, labels = images_for(model), torch.arange(5)
    out, teacher = model(images), build("vit", dwindle.Static(), seed=1)(images)
    with pytest.raises(dwindle.DwindleError, match=r"Confidence.*every depth"):
        model.loss(out, labels, teacher, distill="token")


@torch.no_grad()
def test_labels_that_are_shares():
    """As mixup makes them."""
    model, out, teacher, labels = taught("vit", TopK(stages=(2,)))
    shares = 0.7 * F.one_hot(labels, 5) + 0.3 * F.one_hot(labels.flip(0), 5)
    expected = 0.7 * surprise(out.logits, labels) + 0.3 * surprise(out.logits, labels.flip(0))
    assert float(model.loss(out, shares)["task"]) == pytest.approx(expected, rel=1e-5)
    uniform = sum(surprise(out.logits, torch.full((5,), c)) for c in range(5)) / 5
    smoothed = model.loss(out, shares, teacher, label_smoothing=0.1)
    assert float(smoothed["task"]) == pytest.approx(0.9 * expected + 0.1 * uniform, rel=1e-5)
    assert float(smoothed["distill"]) == pytest.approx(divergence(out.logits, teacher.logits, 1.0), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(keep=1.1), r"keep = 1.1: it must lie in \[0, 1\]"),
        (lambda: build("vit", TopK(stages=(4,))), r"stages = \(4,\): tokens leave after blocks 1..3"),
        (lambda: build("vit", TopK(stages=(1,), budget=1.5)), "budget = 1.5"),
        (lambda: ToMe(r=-1), r"r = -1: it must lie in \[0, 1000000\]"),
        (lambda: ToMe(r=8, budget=0.5), r"r = 8, budget = 0\.5: each sets the other"),
        (lambda: build("vit", ToMe(budget="9G")), "budget = '9G'"),
        (lambda: DynamicViT(keep=-0.1), "keep = -0.1"),
        (lambda: DynamicViT(count="images"), "did you mean 'image'"),
        (lambda: build("vit", DynamicViT(stages=())), r"stages = \(\)"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(dwindle.DwindleError, match=message):
        make()
