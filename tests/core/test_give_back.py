"""What tokens that stopped early get back: the state of the token they joined, of the nearest, or a learned update."""

from __future__ import annotations

import copy

import pytest
import torch

import dwindle
from dwindle.core.give_back import GiveBack
from dwindle.core.packed import Packed
from dwindle.errors import DwindleError
from dwindle.methods import ToMe, TopK
from dwindle.ops.merging import Merge, follow
from shared.tally import SLOW
from shared.tiny import BACKBONES, METHODS, OFF, build, images_for


def adapted(backbone: str, method, give_back: GiveBack | None = None) -> dwindle.AdaptiveViT:
    torch.manual_seed(0)
    model = dwindle.adapt(BACKBONES[backbone](), method, give_back=give_back).eval()
    if give_back is not None and give_back.hidden:
        torch.nn.init.normal_(give_back.fc2.weight, std=0.3)  # an update that has learnt nothing would show nothing
    return model


def test_chains_are_followed_to_their_end():
    leader = torch.tensor([[0, 3, 1, 4, 4], [0, 1, 2, 3, 3]])
    values = torch.arange(10.0).view(2, 5, 1)
    assert follow(values, leader).flatten().tolist() == [0, 4, 4, 4, 4, 5, 6, 7, 8, 8]


def test_a_merged_token_has_the_state_of_its_group():
    tokens = Packed.start(torch.randn(1, 5, 3), prefix=1)
    tokens = tokens.advance(torch.tensor([1, 1, 0, 1, 1]).bool(), merge=Merge(torch.tensor([0, 1, 3, 3, 4])))
    tokens = tokens.advance(torch.tensor([1, 1, 0, 1]).bool(), merge=Merge(torch.tensor([0, 1, 4, 4])))
    back = tokens.follow_leaders(tokens.stream())[0]
    assert torch.equal(back[2], back[4]) and torch.equal(back[3], back[4])
    assert len(back.unique(dim=0)) == 3


@torch.no_grad()
@pytest.mark.parametrize("method", ["ToMe", "ToMe_states", "AHT_merge", "AHT_rest", "TopK_fused"])
def test_merged_tokens_come_back_with_one_state(method):
    model = adapted("vit", METHODS[method]())
    features = model(images_for(model)).features
    assert all(len(image.unique(dim=0)) < len(image) for image in features)


@torch.no_grad()
@pytest.mark.parametrize("give_back", [{"halted": "nearest"}, {"hidden": 6}, {"halted": "nearest", "hidden": 6}])
@pytest.mark.parametrize(
    "backbone, method", [("vit", "TopK"), ("average", "ToMe"), ("hf_dinov2", "AHT"), ("vit", "ACT")]
)
def test_layouts_agree(backbone, method, give_back):
    model = adapted(backbone, METHODS[method](), GiveBack(**give_back))
    images = images_for(model)
    packed, masked = model(images, layout="packed"), model(images, layout="masked")
    assert torch.equal(packed.trace.depth, masked.trace.depth)
    torch.testing.assert_close(packed.features, masked.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed.logits, masked.logits, atol=1e-5, rtol=1e-4)
    alone = model(images[1:2])
    torch.testing.assert_close(alone.features[0], packed.features[1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.graphs
@pytest.mark.parametrize("method", ["ToMe_states", "TopK", "AHT_merge"] if SLOW else ["ToMe_states"])
def test_a_prepared_model_gives_back_the_same(method):
    model = adapted("average", METHODS[method](), GiveBack("nearest", hidden=6))
    images = images_for(model)
    fast = model.prepare(details=True)
    out, expected = fast(images), model(images)
    assert torch.equal(out.trace.depth, expected.trace.depth)
    torch.testing.assert_close(out.features, expected.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("method", ["AHT", "ToMe", "TopK"])
def test_nothing_stopped_is_the_wrapped_model(method):
    model = adapted("average", OFF[method](), GiveBack("nearest", hidden=6))
    images = images_for(model)
    torch.testing.assert_close(model(images).logits, copy.deepcopy(model).unwrap()(images), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_dropped_tokens_get_the_state_of_the_nearest():
    model, own = (adapted("vit", TopK(stages=(1, 2), keep=0.5), how) for how in (GiveBack("nearest"), None))
    images = images_for(model)
    nearest, kept = model(images), own(images)
    assert torch.equal(nearest.trace.depth, kept.trace.depth) and torch.equal(nearest.logits, kept.logits)
    ended = kept.trace.depth[0] == 4
    assert torch.equal(nearest.features[0][ended], kept.features[0][ended])
    assert len(nearest.features[0].unique(dim=0)) == ended.sum() < len(kept.features[0].unique(dim=0))


@torch.no_grad()
def test_it_is_counted():
    images = images_for(build("vit", TopK(stages=(1,), keep=0.5)))
    costs = []
    for give_back in (None, GiveBack("nearest"), GiveBack("nearest", hidden=6)):
        model = adapted("vit", TopK(stages=(1,), keep=0.5), give_back)
        costs.append(model.macs(model(images).trace)[0].item())
    shape = model.backbone.shape
    assert costs[1] - costs[0] == 8 * 9 * shape.head_size
    assert costs[2] - costs[1] == 17 * 6 * 3 * shape.width


def test_only_the_update_learns_on_a_frozen_backbone_and_a_checkpoint_has_it(tmp_path):
    model = adapted("vit", ToMe(r=2.5), GiveBack(hidden=6)).train()
    model.vit.requires_grad_(False)
    out = model(images_for(model))
    model.states(out).square().sum().backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {
        f"give_back.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")
    }
    dwindle.save(model.eval(), tmp_path / "saved")
    again = dwindle.load(tmp_path / "saved")
    images = images_for(model)
    assert torch.equal(again(images).features, model(images).features)
    assert again.give_back.config == {"halted": "own", "hidden": 6}


def test_what_it_takes():
    with pytest.raises(DwindleError, match="halted"):
        GiveBack("mean")
    with pytest.raises(DwindleError, match="hidden"):
        GiveBack(hidden=-1)
