"""The live layout and the CUDA engine against the eager packed path, their definition."""

import copy
import threading

import pytest
import torch

import dwindle
from conftest import BACKBONES, METHODS, build, images_for
from dwindle.engine import graph
from dwindle.engine.graph import Engine, prepared
from dwindle.engine.keep import Watch
from dwindle.engine.live import Live
from dwindle.engine.recording import Recording, everyone

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


def live(model):
    ready = prepared(model)
    return lambda x, prefix: Live.begin(x, prefix, ready, *everyone(*x.shape[:2], x.device))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_live_rows_are_the_packed_ones(backbone, method):
    model = build(backbone, METHODS[method]()).eval()
    images = images_for(model, 3)
    ours = model.run(images, live(model))
    same(ours, model(images, layout="packed"), 2e-4)


@torch.no_grad()
def test_forced_depths_in_live_rows():
    model = build("vit", dwindle.AHT(stages=(1, 2))).eval()
    images = images_for(model, 3)
    depths = torch.randint(1, 5, model(images).trace.depth.shape, generator=torch.Generator().manual_seed(0))
    ours = model.run(images, live(model), depths)
    assert torch.equal(ours.trace.depth, depths)
    same(ours, model(images, layout="packed", depths=depths), 2e-4)


def test_every_plain_block_has_kernels():
    for name in BACKBONES:
        model = build(name, dwindle.AHT(stages=(1, 2)))
        assert len(prepared(model)) == (0 if "swiglu" in name else len(model.backbone.blocks))


CHANGES = {
    "a module exchanged": lambda vit: setattr(vit.blocks[1].mlp, "fc1", copy.deepcopy(vit.blocks[1].mlp.fc1)),
    "a module added": lambda vit: vit.norm.add_module("extra", torch.nn.Identity()),
    "a module gone": lambda vit: vit.blocks.pop(3),
    "a weight exchanged": lambda vit: setattr(vit.norm, "weight", torch.nn.Parameter(vit.norm.weight.detach().clone())),
    "a weight moved": lambda vit: setattr(vit.norm.weight, "data", vit.norm.weight.data.clone()),
    "a weight written to": lambda vit: vit.norm.weight.add_(1),
    "a bias gone": lambda vit: setattr(vit.norm, "bias", None),
    "a buffer added": lambda vit: vit.head.register_buffer("extra", torch.zeros(1)),
    "another dtype": lambda vit: vit.double(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_watch_notices(change):
    model = build("vit", dwindle.AHT(stages=(1, 2)))
    watch = Watch(model, folded=model.vit)
    assert not watch.changed()
    model(images_for(model, 1))
    assert not watch.changed()
    CHANGES[change](model.vit)
    assert watch.changed()
    assert not Watch(model, folded=model.vit).changed()


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


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_recording_takes_fewer_images_than_it_was_made_for(place, method):
    model = build("vit", METHODS[method]()).eval().to(place)
    images = images_for(model, 5).to(place)
    made = Recording(model, prepared(model), images, None, None, None, threading.Lock())
    for count in (5, 2, 4, 5):
        same(made(images[:count]), model(images[:count], layout="packed"), 2e-4)
        assert made.finite()


@torch.no_grad()
def test_a_recalled_output_is_an_output(place):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images = images_for(model, 3).to(place)
    made = Recording(model, prepared(model), images, None, None, None, threading.Lock())
    recalled = copy.deepcopy(made(images))
    assert recalled.trace.exits == [] and torch.equal(recalled.trace.depth, model(images).trace.depth)
    assert torch.equal(recalled.logits, made(images).logits) and not hasattr(made(images), "nothing")


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name]().dial_per_image])
@torch.no_grad()
def test_a_dial_for_each_image_in_the_engine(place, method):
    model = build("vit", METHODS[method]()).eval().to(place)
    images = images_for(model, 4).to(place)
    _, cheap, dear = model.method.dial
    dial = torch.tensor([cheap, dear, (cheap + dear) / 2, dear], device=place)
    engine = Engine(model)
    same(engine(images, None, dial), model(images, layout="packed", dial=dial), 2e-4)
    same(engine(images, None, dial.flip(0)), model(images, layout="packed", dial=dial.flip(0)), 2e-4)
    same(engine(images), model(images, layout="packed"), 2e-4)
    with pytest.raises(dwindle.DwindleError, match="one number per image"):
        engine(images, None, dial[:1])


@torch.no_grad()
def test_the_engine_keeps_few_recordings_and_follows_the_model(place, monkeypatch):
    monkeypatch.setattr(graph, "GRAPHS", 3)
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 6).to(place), Engine(model)
    for count in (6, 1, 3, 2, 5, 4, 6, 1):  # the fourth and later find room in a larger one, or push out the oldest
        same(engine(images[:count]), model(images[:count], layout="packed"), 2e-4)
        assert len(engine._paths) <= 3
    assert set(engine._paths.values()) >= set(engine._latest.values())
    before = dict(engine._paths)
    same(engine(images[:2]), model(images[:2], layout="packed"), 2e-4)
    assert dict(engine._paths) == before
    for change in (
        lambda: model.vit.head.weight.mul_(2),
        lambda: model.vit.blocks[1].mlp.fc1.weight.mul_(1.5),
        lambda: setattr(model.method, "threshold", 0.2),
        lambda: model.method.bar.fill_(0.5),
        lambda: setattr(model.vit, "head", copy.deepcopy(model.vit.head)),
        lambda: model.double().float(),
    ):
        change()
        same(engine(images), model(images, layout="packed"), 2e-4)
    with pytest.raises(dwindle.DwindleError, match="NaN"):
        engine(images * torch.nan)
    with pytest.raises(dwindle.DwindleError, match="do not fit"):
        engine(images[:, :1])


@torch.no_grad()
def test_images_may_lie_where_the_recording_reads_them(place, monkeypatch):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 4).to(place), Engine(model)
    there, depths, dial = engine.inputs(images)
    assert torch.equal(there, images) and (depths, dial) == (None, None)
    there.copy_(images.flip(0))
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: copied.append(given))
    same(engine(there), model(images.flip(0), layout="packed"), 2e-4)
    assert not copied
    monkeypatch.undo()
    same(engine(images), model(images, layout="packed"), 2e-4)  # of whoever else gives some, as ever
    forced = torch.full_like(engine(images).trace.depth, 2)
    there, depths, _ = engine.inputs(images, forced)
    depths.fill_(1)
    assert int(engine(there, depths).trace.depth[:, 1:].amax()) == 1


def test_calls_with_and_without_inference_mode_share_a_recording(place):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 4).to(place), Engine(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            same(engine(images.clone()), model(images, layout="packed"), 2e-4)
    made = Recording(model, prepared(model), images, None, None, None, threading.Lock())
    for mode, count in ((torch.inference_mode, 2), (torch.no_grad, 3)):
        with mode():
            same(made(images[:count]), model(images[:count], layout="packed"), 2e-4)
