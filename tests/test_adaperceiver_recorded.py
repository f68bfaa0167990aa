"""AdaPerceiver's recordings against `run`, their definition. Where there is no GPU, one is played (`place`)."""

from __future__ import annotations

import copy

import pytest
import torch

import dwindle
from dwindle.adaperceiver import recorded
from dwindle.adaperceiver.grid import latencies
from dwindle.adaperceiver.recorded import Recorded, Recorder
from dwindle.engine import recording
from test_adaperceiver import images, tiny

SETTINGS = [(16, 4, 32), (8, 4, 32), (13, 2, 16), (24, 3, 24)]


def same(ours, theirs):
    for name in ("logits", "features"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-10, rtol=1e-10)
    assert torch.equal(ours.trace.live, theirs.trace.live)
    for name in ("width", "read", "patches"):
        assert torch.equal(ours.trace.stack(name), theirs.trace.stack(name))


def made(recorder):
    return [path for path in recorder._paths.values() if isinstance(path, Recorded)]


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
def test_answers_outlive_the_next_call(place):
    model, x = tiny().to(place), images(3).to(place)
    recorder = Recorder(model)
    first = [recorder(x, 8, 4, 32) for _ in range(2)][-1]
    kept = first.logits.clone()
    first.trace.values[0]["mine"] = first.logits
    second = recorder(x.flip(0), 8, 4, 32)
    assert torch.equal(first.logits, kept) and "mine" not in second.trace.values[0]


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
def test_recordings_follow_the_weights(place):
    model, x = tiny().to(place), images(3).to(place)
    recorder = Recorder(model)

    def settled():
        return [recorder(x, 8, 3, 24) for _ in range(3)][-1]

    settled()
    for change, anew in (
        (lambda: model.readouts[-1].head.weight.mul_(2), False),  # read where it lies
        (lambda: model.blocks[1].ffn.fc1.weight.mul_(1.5), False),
        (lambda: setattr(model.readouts[-1], "head", copy.deepcopy(model.readouts[-1].head)), True),
        (lambda: setattr(model.latent, "data", 2 * model.latent.data), True),
        (lambda: model.float().double(), True),
        (lambda: setattr(model, "attention", "mask"), True),
    ):
        before = made(recorder)
        change()
        same(recorder(x, 8, 3, 24), model.run(x, 8, 3, 24))
        same(settled(), model.run(x, 8, 3, 24))
        assert (made(recorder)[-1] not in before) == anew


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
    """One setting for the whole batch, in eval, without gradients, on a GPU."""
    model, x = tiny().to(place), images(4).to(place)
    if place == "cpu":
        x = x.as_subclass(type("OnGPU", (torch.Tensor,), {"is_cuda": True}))
        monkeypatch.setattr(recorded, "records", lambda images: True)
    asked = []
    monkeypatch.setattr(Recorder, "__call__", lambda self, images, *setting: asked.append(setting))
    with torch.no_grad():
        model(x)
        model(x, tokens=8, width=16)
        for given in ({"exit": 0.5}, {"tokens": [8] * 4}, {"depth": torch.tensor([1, 2, 3, 4])}):
            model(x, **given)
        with pytest.raises(dwindle.DwindleError, match="from 1 to 64"):
            model(x, tokens=0)
        with pytest.raises(dwindle.DwindleError, match="whole number"):
            model(x, tokens=True)
        model.train()(x)
        model.eval()
    model(x)
    assert asked == [(16, 4, 32), (8, 4, 16)]


def test_a_copy_has_recordings_of_its_own(place):
    model = tiny().to(place)
    recorder = model.recorder
    assert model.recorder is recorder and copy.deepcopy(model).recorder is not recorder


def test_bad_images_are_named(place):
    model = tiny().to(place)
    with pytest.raises(dwindle.DwindleError, match="multiples of 8"), torch.no_grad():
        model.recorder(torch.zeros(2, 3, 33, 32, dtype=torch.float64, device=place), 8, 4, 32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_on_a_gpu():
    model, x = tiny(torch.float32).cuda(), images(5, torch.float32).cuda()
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            for _ in range(3):
                ours, theirs = model(x, tokens=8), model.run(x, tokens=8)
                torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert len(made(model.recorder)) == 2
    assert latencies(model, [(t, 4, 32) for t in range(1, 11)], 2, "cuda", torch.float32, 0.1)[0]["rounds"] >= 5
