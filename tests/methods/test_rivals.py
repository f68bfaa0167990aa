"""What a skeptic would compare with: a smaller image, patches dropped at random, fewer blocks; and other methods with
what the grounded AHT has, merging and a teacher's attention."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F

import dwindle
from dwindle.core.cost import static_macs
from dwindle.methods.dynamicvit import DynamicViT
from dwindle.methods.random import Random, drawn
from dwindle.methods.resolution import Resolution
from dwindle.methods.shallow import Shallow
from dwindle.methods.topk import TopK
from dwindle.train.recipe import Recipe
from dwindle.train.teacher import Teacher
from shared.tiny import BACKBONES, build, images_for


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["vit", "distilled", "registers", "average", "attention_pool", "oblong"])
def test_a_smaller_image_is_the_model_built_for_that_size(backbone):
    """With its positions resampled, on the image resampled beforehand; at that model's cost."""
    model = build(backbone, Resolution(0.5), torch.float64)
    images, vit = images_for(model, 3, torch.float64), model.vit
    size = tuple(2 * side for side in model.backbone.shape.patch)
    small = BACKBONES[backbone]().double().eval()
    small.load_state_dict(vit.state_dict())
    small.set_input_size(img_size=size)
    out = model(images)
    smaller = F.interpolate(images, size=size, mode="bicubic", antialias=True)
    torch.testing.assert_close(out.logits, small(smaller), atol=1e-10, rtol=1e-10)
    assert out.trace.grid == (2, 2) and out.features.shape[1] == model.backbone.shape.tokens()  # all came back
    alone = dwindle.adapt(small, dwindle.Static())
    assert float(model.macs(out.trace)[0]) == pytest.approx(alone.static_macs())
    assert float(model.cost(out.trace)) == pytest.approx(alone.static_macs() / model.static_macs())


@torch.no_grad()
@pytest.mark.graphs
def test_a_prepared_model_looks_at_the_smaller_image():
    model = build("average", Resolution(0.5))
    images = images_for(model, 2)
    out, fast = model(images), model.prepare(details=True)(images)
    torch.testing.assert_close(fast.features, out.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast.logits, out.logits, atol=1e-5, rtol=1e-4)
    assert (fast.trace.grid, fast.trace.image_grid) == (out.trace.grid, out.trace.image_grid) == ((2, 2), (4, 4))
    assert float(model.cost(fast.trace)) == pytest.approx(float(model.cost(out.trace)))


@torch.no_grad()
def test_a_smaller_image_of_a_model_that_takes_any_size():
    model = build("hf_dinov2", Resolution(0.5))
    out = model(images_for(model, 2))
    assert out.trace.grid == (2, 2) and out.logits.shape == (2, 5)


@pytest.mark.parametrize("budget, side", [(1.0, 224), (0.85, 208), (0.71, 192), (0.59, 176), (0.48, 160)])
def test_a_budget_is_the_size_of_the_nearest_cost(budget, side):
    with torch.device("meta"):
        vit = timm.create_model("deit_tiny_patch16_224")
    method = dwindle.adapt(vit, Resolution(budget=budget)).method
    assert method.size((224, 224), method.scale) == (side, side)
    share = static_macs(method.shape, (side, side)) / static_macs(method.shape)
    assert share == pytest.approx(budget, abs=0.01)
    assert Resolution.from_config(method.config).scale == method.scale  # a checkpoint keeps what it came to


def test_a_budget_in_blocks():
    with torch.device("meta"):
        vit = timm.create_model("deit_tiny_patch16_224")
    depths = []
    for budget in (0.83, 0.67, 0.52):
        model = dwindle.adapt(vit, Shallow(budget=budget))
        depths.append(model.method.depth)
        model.unwrap()
    assert depths == [10, 8, 6]


def test_a_choice_follows_from_the_image_alone():
    images = torch.randn(200, 3, 16, 16)
    lot = drawn(images, 64, 0)
    assert torch.equal(lot[3:5], drawn(images[3:5], 64, 0)) and not torch.equal(lot, drawn(images, 64, 1))
    assert lot.min() >= 0 and lot.max() < 1 and float(lot.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(lot.std()) == pytest.approx(12**-0.5, abs=0.02)
    kept = (lot.argsort(-1).argsort(-1) < 32).double().mean(0)  # every place is as likely to stay
    assert kept.min() > 0.3 and kept.max() < 0.7


@torch.no_grad()
def test_random_keeps_so_many_of_every_image():
    model = build("registers", Random(stages=(1, 2), keep=0.5))
    out = model(images_for(model, 4))
    assert (out.trace.counts == torch.tensor([[20], [12], [8], [8]])).all()
    assert (out.trace.depth[:, :4] == 4).all()
    assert len({tuple(row.tolist()) for row in out.trace.depth}) == 4  # but not the same
    budgeted = dwindle.adapt(BACKBONES["vit"](), Random(stages=(1, 2), budget=0.6)).eval()
    images = images_for(budgeted, 2)
    assert float(budgeted.cost(budgeted(images).trace)) == pytest.approx(0.6, abs=0.05)


def taught(model, images):
    """What a teacher with other weights says of the images, its attention too."""
    other = build("vit", dwindle.Static(attention=True), seed=3)
    teacher = Teacher(other, Recipe(), torch.device("cpu"), ("logits", "attention", "features"))
    return teacher.output(teacher.ask(images), images)


LEARNERS = {
    "TopK": (lambda w: TopK(stages=(1, 2), keep=0.5, lambda_attention=w), "vit.blocks.0.attn.qkv.weight"),
    "DynamicViT": (lambda w: DynamicViT(stages=(1, 2), lambda_attention=w), "method.predictors.1.embed.weight"),
    "AViT": (lambda w: dwindle.AViT(gamma=1.5, target_depth=2, lambda_attention=w), "method.gamma"),
    "AViT_network": (
        lambda w: dwindle.AViT(target_depth=2, network=8, lambda_attention=w),
        "method.networks.0.0.weight",
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_teachers_attention_reaches_what_judges(name):
    make, learns = LEARNERS[name]
    torch.manual_seed(0)
    model = build("vit", make(0.5)).train()
    images = images_for(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    assert model.method.needs_teacher_attention and model.method.loss_weights["attention"] == 0.5
    distances = []
    for _ in range(6):
        torch.manual_seed(1)  # Gumbel's noise
        distance = model.method.losses(model(images), taught(model, images))["attention"]
        optimizer.zero_grad()
        distance.backward()
        assert float(parameters[learns].grad.abs().sum()) > 0
        optimizer.step()
        distances.append(float(distance.detach()))
    assert min(distances[1:]) < distances[0]  # downhill
    plain = build("vit", make(0.0)).train()
    assert not plain.method.needs_teacher_attention
    assert "attention" not in plain.method.losses(plain(images), taught(plain, images))
    assert "attention" not in plain.method.loss_weights


@torch.no_grad()
@pytest.mark.parametrize("make", [TopK, DynamicViT, Random])
def test_what_leaves_is_merged_by_request(make):
    gone, merged = (build("vit", make(stages=(1, 2), keep=0.5, merge=merge)) for merge in ("none", "nearest"))
    images = images_for(gone)
    a, b = gone(images), merged(images)
    assert torch.equal(a.trace.counts[:2], b.trace.counts[:2])  # as many go on
    assert not torch.allclose(a.logits, b.logits)
    extra = sum(float((b.trace.counts[d].double() ** 2).sum()) * 16 for d in (0, 1))  # keys of 16 numbers are compared
    both = float(merged.macs(b.trace).sum()) - float(gone.macs(a.trace).sum())
    assert both == pytest.approx(extra)


def test_one_place_for_what_leaves():
    with pytest.raises(dwindle.DwindleError, match="each is a place for what leaves"):
        TopK(fuse=True, merge="nearest")
