"""AdaPerceiver's recordings against `run`, their definition. Where there is no GPU, one is played (`place`)."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import dwindle
from dwindle.models.adaperceiver.grid import latencies
from dwindle.models.adaperceiver.leaving import Leaving
from dwindle.models.adaperceiver.recorded import Recorded, Recorder
from dwindle.runtime.cuda import recording
from shared.perceiver import images, tiny

SETTINGS = [(16, 4, 32), (8, 4, 32), (13, 2, 16), (24, 3, 24)]


def same(ours, theirs):
    for name in ("logits", "features"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-10, rtol=1e-10)
    assert torch.equal(ours.trace.live, theirs.trace.live)
    for name in ("width", "read", "patches"):
        assert torch.equal(ours.trace.stack(name), theirs.trace.stack(name))


def made(recorder):
    return [path for path in recorder._paths.values() if isinstance(path, Recorded | Leaving)]


@pytest.mark.parametrize("readouts", ["shared", "own"])
@pytest.mark.parametrize("outputs", ["class", "dense"])
@torch.no_grad()
def test_a_recording_is_the_run(place, outputs, readouts):
    model = tiny(outputs=outputs, readouts=readouts).to(place)
    x, recorder = images(5).to(place), Recorder(model)
    for _ in range(3):
        for setting in SETTINGS:
            for batch in (x, x.flip(0), x[:2]):
                same(recorder(batch, *setting), model.run(batch, *setting))
    assert len(made(recorder)) == 2 * len(SETTINGS)
    ours = recorder(x, *SETTINGS[0])
    assert torch.equal(model.macs(ours.trace), model.macs(model.run(x, *SETTINGS[0]).trace))


@torch.no_grad()
def test_a_recording_is_of_its_mask(place):
    model = tiny().to(place)
    x, recorder = images(5).to(place), Recorder(model)
    for _ in range(3):
        for model.mask in ("blocks", "open"):
            for exit in (None, 1.0):
                same(recorder(x, 16, 4, 32, exit), model.run(x, 16, 4, 32, exit))
    assert len(made(recorder)) == 4


@pytest.mark.parametrize("readouts", ["shared", "own"])
@torch.no_grad()
def test_leaving_is_the_run(place, readouts):
    """Images that leave at every depth, all at once and not at all; in batches of any size."""
    model = tiny(readouts=readouts).to(place)
    for block, strength in zip(model.blocks, (0.5, 1.0, 2.0, 4.0)):  # answers that grow surer
        block.scale1.fill_(strength)
    for readout in model.readouts:
        readout.head.weight.mul_(4)
    x, recorder, seen = images(21).to(place), Recorder(model), set()
    recorder.most = 60
    for setting in SETTINGS:
        sure = model.run(x, *setting, exit=1.0).logits.softmax(-1).amax(-1).sort().values.tolist()
        for exit in (1e-6, sure[3], sure[10], sure[17], 1.0):
            for batch in (x, x[:5].flip(0), x[-1:]):
                for _ in range(2):
                    ours, theirs = recorder(batch, *setting, exit), model.run(batch, *setting, exit)
                    same(ours, theirs)
                    assert torch.equal(model.macs(ours.trace), model.macs(theirs.trace))
                seen |= set(theirs.trace.depth.amax(-1).tolist())
    for exit_depths in ([2], [3, 1], [1, 2, 3, 4], [4]):
        for depth in (4, 2):
            for _ in range(2):
                ours, theirs = (ask(x, 16, depth, 32, sure[3], exit_depths) for ask in (recorder, model.run))
                same(ours, theirs)
                assert torch.equal(model.macs(ours.trace), model.macs(theirs.trace))
    assert seen == {1, 2, 3, 4}
    paths = made(recorder)
    assert len(paths) == 3 * len(SETTINGS) + 8  # whatever the threshold
    assert len({size for path in paths for _, size in path.graphs}) > 5


@torch.no_grad()
def test_answers_outlive_the_next_call(place):
    model, x = tiny().to(place), images(3).to(place)
    recorder = Recorder(model)
    first = [recorder(x, 8, 4, 32) for _ in range(2)][-1]
    kept = first.logits.clone()
    first.trace.values[0]["mine"] = first.logits
    second = recorder(x.flip(0), 8, 4, 32)
    assert torch.equal(first.logits, kept) and "mine" not in second.trace.values[0]
    third = [recorder(x, 8, 4, 32, 0.9) for _ in range(2)][-1]
    kept = third.logits.clone()
    recorder(x.flip(0), 8, 4, 32, 0.9)
    assert torch.equal(third.logits, kept)


@torch.no_grad()
def test_few_are_kept_and_none_in_vain(place):
    model, x = tiny().to(place), images(2).to(place)
    recorder = Recorder(model)
    assert recorder.most == 8
    for _ in range(3):  # more settings than are kept, one after the other: none comes again in time
        for tokens in range(1, 12):
            recorder(x, tokens, 1, 32)
    assert not made(recorder) and len(recorder._paths) == 8
    for _ in range(2):
        for tokens in range(1, 9):
            recorder(x, tokens, 1, 32)
    before = made(recorder)
    assert len(before) == 8
    for tokens in range(1, 9):
        recorder(x, tokens, 1, 32)
    assert made(recorder) == before
    recorder(x, 9, 1, 32)
    assert made(recorder) == before[1:]


@torch.no_grad()
def test_a_block_that_cannot_be_recorded_runs(place, monkeypatch, caplog):
    model, x = tiny(readouts="own").to(place), images(3).to(place)
    recorder = Recorder(model)
    for _ in range(2):
        recorder(x, 8, 4, 32, 1e-6)

    def refuse(call, pool=None):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "captured", refuse)
    for _ in range(3):
        same(recorder(x, 8, 4, 32, 1.0), model.run(x, 8, 4, 32, 1.0))
    assert [r.getMessage().count("cannot be recorded") for r in caplog.records] == [1] * 3  # blocks 2, 3, 4: once each


@torch.no_grad()
def test_a_model_is_freed_with_its_recordings(place):
    model, x = tiny().to(place), images(3).to(place)
    fast = model.prepare()
    for _ in range(3):
        fast._recorder(x, 8, 4, 32, 0.9)
    seen = weakref.ref(fast._network)
    gc.disable()
    try:
        del fast
        assert seen() is None
    finally:
        gc.enable()


def test_either_mode_may_come_first(place):
    model, x = tiny().to(place), images(3).to(place)
    for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        recorder = Recorder(model)
        for mode in modes:
            for _ in range(2):
                with mode():
                    same(recorder(x.clone(), 8, 3, 24), model.run(x, 8, 3, 24))
        assert len(made(recorder)) == 1


@torch.no_grad()
def test_what_cannot_be_recorded_runs(place, monkeypatch, caplog):
    def refuse(call, pool=None):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recording, "captured", refuse)
    model, x = tiny().to(place), images(3).to(place)
    recorder = Recorder(model)
    for _ in range(4):
        same(recorder(x, 8, 4, 32), model.run(x, 8, 4, 32))
    assert not made(recorder) and [r.getMessage().count("cannot be recorded") for r in caplog.records] == [1]


def test_who_is_recorded(place, monkeypatch):
    """One setting for the whole batch, of a prepared network on a GPU."""
    network, x = tiny().to(place), images(4).to(place)
    model = network.prepare()
    if place == "cpu":
        x = x.as_subclass(type("OnGPU", (torch.Tensor,), {"is_cuda": True}))
        monkeypatch.setattr("dwindle.models.adaperceiver.prepared.records", lambda images: True)
    asked = []
    monkeypatch.setattr(Recorder, "__call__", lambda self, images, *setting: asked.append(setting))
    with torch.no_grad():
        model(x)
        model(x, tokens=8, width=16)
        model(x, tokens=8, exit=0.5)
        model(x, tokens=8, exit=0.5, exits=[2])
        for given in ({"exit": 0.5, "depth": [4] * 4}, {"tokens": [8] * 4}, {"depth": torch.tensor([1, 2, 3, 4])}):
            model(x, **given)
        with pytest.raises(dwindle.DwindleError, match="in \\(0, 1\\]"):
            model(x, exit=1.5)
        with pytest.raises(dwindle.DwindleError, match="give exit, the confidence"):
            model(x, exits=[2])
        with pytest.raises(dwindle.DwindleError, match="from 1 to 64"):
            model(x, tokens=0)
        with pytest.raises(dwindle.DwindleError, match="whole number"):
            model(x, tokens=True)
        network(x)
    assert asked == [(16, 4, 32, None, None), (8, 4, 16, None, None), (8, 4, 32, 0.5, None), (8, 4, 32, 0.5, [2])]


def test_a_copy_has_recordings_of_its_own(place):
    fast = tiny().to(place).prepare()
    assert copy.deepcopy(fast)._recorder is not fast._recorder


def test_bad_images_are_named(place):
    fast = tiny().to(place).prepare()
    with pytest.raises(dwindle.DwindleError, match="multiples of 8"), torch.no_grad():
        fast._recorder(torch.zeros(2, 3, 33, 32, dtype=torch.float64, device=place), 8, 4, 32)


@pytest.mark.cuda
@torch.no_grad()
def test_on_a_gpu():
    model, x = tiny(torch.float32).cuda(), images(5, torch.float32).cuda()
    fast = model.prepare()
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            for _ in range(3):
                ours, theirs = fast(x, tokens=8), model.run(x, tokens=8)
                torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
                ours, theirs = fast(x, tokens=8, exit=1.0), model.run(x, tokens=8, exit=1.0)
                torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert len(made(fast._recorder)) == 4
    assert latencies(model, [(t, 4, 32) for t in range(1, 11)], 2, "cuda", torch.float32, 0.1)[0]["rounds"] >= 5
