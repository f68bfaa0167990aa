"""The live layout and the CUDA engine against the eager packed path, their definition."""

import copy
import threading
from functools import partial

import pytest
import torch

import dwindle
from conftest import BACKBONES, METHODS, build, images_for
from dwindle.engine.graph import prepared
from dwindle.engine.live import Live

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def same(ours, theirs, tolerance):
    assert torch.equal(ours.trace.depth.cpu(), theirs.trace.depth.cpu())
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.features, theirs.features, atol=tolerance, rtol=tolerance)
    for block, values in enumerate(theirs.trace.values):
        for name in values:
            mine = ours.trace.lives[block].sheet(ours.trace.values[block][name].float())
            its = theirs.trace.lives[block].sheet(values[name].float())
            torch.testing.assert_close(mine, its, atol=20 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_live_rows_are_the_packed_ones(backbone, method):
    model = build(backbone, METHODS[method]()).eval()
    images = images_for(model, 3)
    ours = model.run(images, partial(Live.begin, ready=prepared(model)))
    same(ours, model(images, layout="packed"), 2e-4)


@torch.no_grad()
def test_forced_depths_in_live_rows():
    model = build("vit", dwindle.AHT(stages=(1, 2))).eval()
    images = images_for(model, 3)
    depths = torch.randint(1, 5, model(images).trace.depth.shape, generator=torch.Generator().manual_seed(0))
    ours = model.run(images, partial(Live.begin, ready=prepared(model)), depths)
    assert torch.equal(ours.trace.depth, depths)
    same(ours, model(images, layout="packed", depths=depths), 2e-4)


def test_every_plain_block_has_kernels():
    for name in BACKBONES:
        model = build(name, dwindle.AHT(stages=(1, 2)))
        assert len(prepared(model)) == (0 if "swiglu" in name else len(model.backbone.blocks))


@cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", ["vit", "layerscale", "qk_norm", "swiglu", "clip", "hf_dinov2"])
@torch.no_grad()
def test_the_engine_is_the_packed_path(backbone, method):
    model = build(backbone, METHODS[method]()).eval().cuda()
    images = images_for(model, 3).cuda()
    for batch in (images, images.flip(0), images[:1]):
        same(model(batch), model(batch, layout="packed"), 2e-4)


@cuda
@torch.no_grad()
def test_the_engine_follows_its_weights_and_dials():
    model = build("vit", METHODS["AHT"]()).eval().cuda()
    images = images_for(model, 3).cuda()
    for change in (
        lambda: model.vit.head.weight.mul_(2),
        lambda: model.vit.blocks[1].mlp.fc1.weight.mul_(1.5),
        lambda: setattr(model.method, "threshold", 0.2),
        lambda: model.method.bar.fill_(0.5),
        lambda: model.double().float(),
    ):
        model(images)
        change()
        same(model(images), model(images, layout="packed"), 2e-4)
    twin = copy.deepcopy(model)
    twin.vit.head.weight.zero_()
    assert model(images).logits.abs().sum() > 0 and twin(images).logits.abs().sum() < 1e3


@cuda
@torch.no_grad()
def test_results_outlive_the_next_call():
    model = build("vit", METHODS["AHT"]()).eval().cuda()
    images = images_for(model, 3).cuda()
    first = model(images)
    kept = first.logits.clone(), first.trace.depth.clone(), first.features.clone()
    model(images.flip(0))
    assert all(torch.equal(a, b) for a, b in zip((first.logits, first.trace.depth, first.features), kept))


@torch.no_grad()
def test_a_recalled_trace_is_the_trace(monkeypatch):
    """What a recording hands out, without a GPU: the graph is left out, what it would have written is there."""
    from types import SimpleNamespace

    from dwindle.engine import graph

    monkeypatch.setattr(graph, "captured", lambda call, pool=None: (call(), SimpleNamespace(replay=lambda: None))[1])
    model = build("vit", METHODS["AHT"]()).eval()
    images = images_for(model, 3)
    recording = graph.Recording(model, prepared(model), images, None, None, threading.Lock())
    same(recording(images), model(images, layout="packed"), 2e-4)
    assert recording.finite()
    recalled = copy.deepcopy(recording(images))
    assert recalled.trace.exits == [] and torch.equal(recalled.trace.depth, model(images).trace.depth)
    assert torch.equal(recalled.logits, recording(images).logits) and not hasattr(recording(images), "nothing")
