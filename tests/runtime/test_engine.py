"""The live layout and the CUDA engine against the eager packed path, their definition."""

import copy
import threading

import pytest
import torch

import dwindle
from dwindle.runtime.cuda import graph
from dwindle.runtime.cuda.graph import Engine, folded_blocks, room
from dwindle.runtime.cuda.listed import Listed
from dwindle.runtime.cuda.recording import Recording, everyone
from shared.tiny import BACKBONES, METHODS, WHOLE, build, cover, images_for


def same(ours, theirs, tolerance):
    assert torch.equal(ours.trace.depth.cpu(), theirs.trace.depth.cpu())
    torch.testing.assert_close(ours.logits, theirs.logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.features, theirs.features, atol=tolerance, rtol=tolerance)
    for block, values in enumerate(theirs.trace.values):
        for name in values:
            mine = ours.trace.lives[block].dense_rows(ours.trace.values[block][name].float())
            its = theirs.trace.lives[block].dense_rows(values[name].float())
            torch.testing.assert_close(mine, its, atol=20 * tolerance, rtol=tolerance)


def live(model):
    ready = folded_blocks(model)
    return lambda x, prefix: Listed.begin(x, prefix, ready, *everyone(*x.shape[:2], x.device))


def recorded(engine, *given):
    """What the engine answers, and that a recording ran and not what stands in for one."""
    out = engine(*given)
    _, path = next(reversed(engine._paths.values()))
    assert isinstance(path, Recording)
    return out


@pytest.mark.parametrize("backbone, method", cover(turn=1))
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
        assert len(folded_blocks(model)) == (0 if name in WHOLE else len(model.backbone.blocks))


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", ["vit", "layerscale", "qk_norm", "swiglu", "clip", "hf_dinov2"])
@torch.no_grad()
def test_the_engine_is_the_packed_path(backbone, method):
    model = build(backbone, METHODS[method]()).eval().cuda()
    images, fast = images_for(model, 3).cuda(), model.prepare()
    for batch in (images, images.flip(0), images[:1]):
        assert fast.path(batch) == "graph"
        same(fast(batch), model(batch, layout="packed"), 2e-4)


@pytest.mark.cuda
@torch.no_grad()
def test_the_engine_follows_its_operating_point():
    model = build("vit", METHODS["AHT"]()).eval().cuda()
    images, fast = images_for(model, 3).cuda(), model.prepare()
    assert fast.path(images) == "graph"
    for method in (model.method, fast.method):
        method.threshold = 0.2
    same(fast(images), model(images), 2e-4)
    for method in (model.method, fast.method):
        method.bar.fill_(0.5)
    same(fast(images), model(images), 2e-4)


@pytest.mark.cuda
@torch.no_grad()
def test_results_outlive_the_next_call():
    model = build("vit", METHODS["AHT"]()).eval().cuda()
    images, fast = images_for(model, 3).cuda(), model.prepare()
    assert fast.path(images) == "graph"
    first = fast(images)
    kept = first.logits.clone(), first.trace.depth.clone(), first.features.clone()
    fast(images.flip(0))
    assert all(torch.equal(a, b) for a, b in zip((first.logits, first.trace.depth, first.features), kept))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_recording_takes_fewer_images_than_it_was_made_for(place, method):
    model = build("vit", METHODS[method]()).eval().to(place)
    images = images_for(model, 5).to(place)
    made = Recording(model, folded_blocks(model), images, None, None, None, threading.Lock())
    for count in (5, 2, 4, 5):
        same(made(images[:count]), model(images[:count], layout="packed"), 2e-4)
        assert made.finite()


@torch.no_grad()
def test_a_recalled_output_is_an_output(place):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images = images_for(model, 3).to(place)
    made = Recording(model, folded_blocks(model), images, None, None, None, threading.Lock())
    recalled = copy.deepcopy(made(images))
    assert recalled.trace.exits == [] and torch.equal(recalled.trace.depth, model(images).trace.depth)
    assert torch.equal(recalled.logits, made(images).logits) and not hasattr(made(images), "nothing")


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name]().per_image_point])
@torch.no_grad()
def test_a_dial_for_each_image_in_the_engine(place, method):
    model = build("vit", METHODS[method]()).eval().to(place)
    images = images_for(model, 4).to(place)
    _, cheap, dear = model.method.operating_point
    operating_point = torch.tensor([cheap, dear, (cheap + dear) / 2, dear], device=place)
    engine = Engine(model)
    same(
        recorded(engine, images, None, operating_point),
        model(images, layout="packed", operating_point=operating_point),
        2e-4,
    )
    same(
        recorded(engine, images, None, operating_point.flip(0)),
        model(images, layout="packed", operating_point=operating_point.flip(0)),
        2e-4,
    )
    same(recorded(engine, images), model(images, layout="packed"), 2e-4)
    with pytest.raises(dwindle.DwindleError, match="one number per image"):
        engine(images, None, operating_point[:1])


@torch.no_grad()
def test_the_engine_keeps_few_recordings_and_follows_the_method(place, monkeypatch):
    monkeypatch.setattr(graph, "GRAPHS", 3)
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 6).to(place), Engine(model)
    for count in (6, 1, 3, 2, 5, 4, 6, 1):
        same(recorded(engine, images[:count]), model(images[:count], layout="packed"), 2e-4)
        assert len(engine._paths) <= 3
    for change in (
        lambda: setattr(model.method, "threshold", 0.2),
        lambda: model.method.bar.fill_(0.5),
    ):
        change()
        same(recorded(engine, images), model(images, layout="packed"), 2e-4)
    with pytest.raises(dwindle.DwindleError, match="NaN"):
        engine(images * torch.nan)
    with pytest.raises(dwindle.DwindleError, match="do not fit"):
        engine(images[:, :1])


def test_which_recording_a_batch_runs_in_is_a_rule():
    """Not of what came before, nor of how long anything took: the same batch always meets the same kernels."""
    assert [room(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 100, 128, 129, 500)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 128, 128, 192, 512)
    ]
    assert all(n <= room(n) <= max(n + 1, 1.5 * n) for n in range(1, 2000))


@torch.no_grad()
def test_a_batch_is_recorded_once(place):
    """Also by a method that has not been trained, and says so at its first call."""
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 3).to(place), Engine(model)
    paths = []
    for _ in range(3):
        recorded(engine, images)
        paths.append(engine._paths[engine._size(images, None, None)][1])
    assert len(set(paths)) == 1


@torch.no_grad()
def test_a_recording_is_taken_however_slow(place, monkeypatch):
    def timed(*_):
        raise AssertionError("somebody looked at a clock to choose a path")

    monkeypatch.setattr("dwindle.evaluate.bench.milliseconds", timed)
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 4).to(place), Engine(model)
    assert engine.path(images) == engine.path(images[:3]) == "graph"


@torch.no_grad()
def test_images_may_lie_where_the_recording_reads_them(place, monkeypatch):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 4).to(place), Engine(model)
    there, depths, operating_point = engine.inputs(images)
    assert torch.equal(there, images) and (depths, operating_point) == (None, None)
    there.copy_(images.flip(0))
    copied = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda *given: copied.append(given))
        same(recorded(engine, there), model(images.flip(0), layout="packed"), 2e-4)
    assert not copied
    same(recorded(engine, images), model(images, layout="packed"), 2e-4)  # of whoever else gives some, as ever
    forced = torch.full_like(engine(images).trace.depth, 2)
    there, depths, _ = engine.inputs(images, forced)
    depths.fill_(1)
    assert int(engine(there, depths).trace.depth[:, 1:].amax()) == 1


def test_calls_with_and_without_inference_mode_share_a_recording(place):
    model = build("vit", METHODS["AHT"]()).eval().to(place)
    images, engine = images_for(model, 4).to(place), Engine(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            same(recorded(engine, images.clone()), model(images, layout="packed"), 2e-4)
    made = Recording(model, folded_blocks(model), images, None, None, None, threading.Lock())
    for mode, count in ((torch.inference_mode, 2), (torch.no_grad, 3)):
        with mode():
            same(made(images[:count]), model(images[:count], layout="packed"), 2e-4)
