"""`model.prepare()`: the fast copy, what it takes along, and that nothing done to the model reaches it."""

from __future__ import annotations

import copy
import pickle
from types import MethodType

import pytest
import torch
from torch import nn

import dwindle
from dwindle.evaluate.evaluate import calibrate, evaluate
from shared.tally import SLOW
from shared.tiny import BACKBONES, METHODS, build, images_for


@pytest.fixture(params=["vit", "layerscale", "hf_vit"] if SLOW else ["hf_vit"])
def model(request):
    return build(request.param, METHODS["AHT"]())


def same(ours, theirs, tolerance=1e-5):
    assert torch.equal(ours.trace.depth, theirs.trace.depth)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=1e-4)


def linears(model):
    block = model.backbone.blocks[1]
    return [layer for layer in block.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.graphs
@torch.no_grad()
def test_a_model_answers_by_its_weights_as_they_are(model):
    """However they were written to; and its prepared copy by those it was made of, until it is made again."""
    images, fast = images_for(model, 3), model.prepare()
    before = fast(images)
    same(before, model(images))
    weight = linears(model)[0].weight
    weight.data.mul_(1.5)
    linears(model)[1].weight.detach().numpy()[:] *= 0.5
    other = torch.empty(0)
    other.set_(linears(model)[-1].weight.untyped_storage(), 0, linears(model)[-1].weight.shape)
    other.add_(0.01)
    same(model(images), model(images, layout="masked"))
    assert not torch.allclose(model(images).logits, before.logits)
    assert torch.equal(fast(images).logits, before.logits)
    same(model.prepare()(images), model(images))


@pytest.mark.graphs
@torch.no_grad()
def test_what_is_added_to_a_block_runs_in_the_copy(model):
    seen = []
    block = model.backbone.blocks[1]
    layers = linears(model)
    normed = next(m for m in block.modules() if isinstance(m, nn.LayerNorm))
    images = images_for(model, 3)
    plain = model(images).logits
    for watched in (block, normed, layers[0], layers[-1]):
        handle = watched.register_forward_hook(lambda module, args, out: seen.append(module) or _doubled(out))
        changed = model(images)
        fast = model.prepare()
        seen.clear()
        same(fast(images), changed)
        assert len(seen) == 1 and not torch.allclose(changed.logits, plain)
        handle.remove()
    handle = layers[0].register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    same(model.prepare()(images), model(images))
    assert not torch.allclose(model(images).logits, plain)
    handle.remove()
    same(model.prepare()(images), model(images))


def _half_normed(block):
    block.attn.q_norm = nn.LayerNorm(block.attn.head_dim)


def _normed_by_two_rules(block):
    block.attn.q_norm, block.attn.k_norm = nn.LayerNorm(block.attn.head_dim), nn.LayerNorm(block.attn.head_dim, eps=0.5)


def _scaled(block):
    getattr(block.attention, "attention", block.attention).scaling = 2.0  # as versions of transformers name it


def _dropout_replaced(block):
    block.attention_dropout = block.drop_path = block.dropout = nn.Tanh()
    (block.mlp if hasattr(block, "mlp") else block.output).dropout = nn.Tanh()


@torch.no_grad()
@pytest.mark.parametrize(
    "backbone,change",
    [
        ("vit", _half_normed),
        ("vit", _normed_by_two_rules),
        ("hf_vit", _scaled),
        ("hf_vit", _dropout_replaced),
        ("hf_dinov2", _dropout_replaced),
    ],
)
def test_a_block_with_a_part_of_another_kind_runs_as_it_is(backbone, change):
    model = build(backbone, METHODS["AHT"]()).eval()
    images = images_for(model, 3)
    plain = model(images).logits
    for block in model.backbone.blocks:
        change(block)
    assert not torch.allclose(model(images).logits, plain)
    same(model.prepare()(images), model(images))


def _doubled(out):
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


@pytest.mark.graphs
@torch.no_grad()
def test_dropout_that_was_left_on_stays_on():
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 3)
    model.vit.blocks[0].attn.proj_drop = nn.Dropout(0.5)
    model.vit.blocks[0].attn.proj_drop.train()
    fast = model.prepare()
    assert not torch.equal(fast(images).logits, fast(images).logits)
    model.eval()
    same(model.prepare()(images), model(images))


@pytest.mark.graphs
@torch.no_grad()
def test_layers_that_make_their_weights_make_them_in_the_copy():
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 3)
    nn.utils.parametrizations.weight_norm(model.vit.blocks[0].mlp.fc1)
    nn.utils.weight_norm(model.vit.blocks[1].attn.qkv)
    model.vit.blocks[0].mlp.fc1.parametrizations.weight.original0.mul_(1.5)
    model.vit.blocks[1].attn.qkv.weight_g.mul_(1.5)
    same(model.prepare()(images), model(images))


@pytest.mark.graphs
def test_a_forward_of_its_own_is_not_copied(model):
    images, block = images_for(model, 3), model.backbone.blocks[1]
    original = block.forward
    block.forward = MethodType(lambda self, *args, **kwargs: _doubled(original(*args, **kwargs)), block)
    with pytest.raises(dwindle.DwindleError, match="forward of its own"):
        model.prepare()
    with torch.no_grad():
        wanted = model(images).logits.argmax(-1)
    found = evaluate(model, [(images, wanted)])
    assert found["top1"] == 100.0


@pytest.mark.parametrize("method", ["AHT", "ToMe", "DynamicViT"])
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_a_prepared_copy_travels(backbone, method):
    model = build(backbone, METHODS[method]())
    images, fast = images_for(model, 2), model.prepare()
    before = fast(images)
    assert torch.equal(copy.deepcopy(fast)(images).logits, before.logits)


@pytest.mark.graphs
def test_a_prepared_copy_travels_with_its_graph(model):
    images, fast = images_for(model, 2), model.prepare(details=True)
    before = fast(images)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert other.path(images) == "graph" and torch.equal(other(images).features, before.features)


@pytest.mark.graphs
def test_a_prepared_copy_only_answers(model):
    fast = model.prepare()
    assert fast.eval() is fast and not fast.training
    for name in ("train", "parameters", "load_state_dict", "to", "vit", "state_dict"):
        with pytest.raises(AttributeError, match="weights are fixed"):
            getattr(fast, name)
    images = images_for(model, 2).requires_grad_()
    assert not fast(images).logits.requires_grad
    with pytest.raises(dwindle.DwindleError, match="do not fit"):
        fast(images[:, :1])
    with pytest.raises(dwindle.DwindleError, match="prepared on cpu"):
        fast(images.to("meta"))


@pytest.mark.graphs
def test_training_goes_on_beside_a_prepared_copy():
    """Fused optimisers tell nobody that they wrote."""
    model = build("vit", METHODS["AHT"]())
    images, labels = images_for(model, 4), torch.tensor([0, 1, 2, 3])
    fast = model.prepare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with torch.no_grad():
        before = fast(images).logits
    for _ in range(2):
        model.loss(model.train()(images), labels)["total"].backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        same(model(images), model(images, layout="masked"))
        same(model.prepare()(images), model(images))
        assert torch.equal(fast(images).logits, before) and not torch.allclose(model(images).logits, before)


@pytest.mark.graphs
def test_a_budget_is_set_by_a_prepared_copy_and_kept_by_the_model(monkeypatch):
    """Also by a method whose operating point is one for the whole batch, and of a copy alone."""
    for name in ("AHT", "ToMe"):
        model = build("vit", METHODS[name]())
        if model.method.operating_point is None:
            continue
        images = images_for(model, 8)
        reached = calibrate(model, images, 0.7)
        with torch.no_grad():
            assert float(model.cost(model(images).trace)) == pytest.approx(reached, abs=1e-6)
