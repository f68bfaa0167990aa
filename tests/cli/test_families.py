"""A family of models is one folder: saved, loaded and asked by the commands, with nothing else edited."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dwindle
import dwindle.models
from dwindle.core.registry import Family, discover, families, family_named, family_of
from shared import command
from shared.command import refused, run

FOLDER = Path(command.__file__).parent / "families"


@pytest.fixture
def toy(monkeypatch):
    """That folder, as if it lay in `dwindle/models/`."""
    monkeypatch.setattr(Family, "known", list(families()))
    monkeypatch.setattr(dwindle.models, "__path__", [*dwindle.models.__path__, str(FOLDER)])
    discover.cache_clear()
    families()
    yield sys.modules["dwindle.models.toy"]
    for name in [name for name in sys.modules if name.startswith("dwindle.models.toy")]:
        del sys.modules[name]
    discover.cache_clear()


@pytest.fixture
def places(toy, tmp_path) -> dict[str, Path]:
    """A checkpoint of the family, one of another, and images that are told apart by their colour."""
    model = toy.Mean()
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(3))
        model.head.bias.zero_()
    for split in ("train", "val"):
        for channel, word in enumerate("bgr"[::-1]):
            (tmp_path / "data" / split / word).mkdir(parents=True)
            pixels = np.zeros((32, 32, 3), dtype=np.uint8)
            pixels[..., channel] = 255
            Image.fromarray(pixels).save(tmp_path / "data" / split / word / "0.png")
    model.extra = {"classes": ["r", "g", "b"]}
    return {"mean": dwindle.save(model, tmp_path / "mean"), "data": tmp_path / "data"}


def test_saved_and_loaded(toy, places):
    again = dwindle.load(places["mean"])
    assert type(again) is toy.Mean and again.extra["classes"] == ["r", "g", "b"]
    assert family_of(again) is family_named("mean") and family_of(again).one == "a mean"
    with pytest.raises(dwindle.DwindleError, match="no faster copy of a mean"):
        family_of(again).prepare(again)


def test_the_commands_take_it(places):
    assert run("eval {mean} --data {data}", **places).json == {"top1": 100.0, "images": 3, "brighter": 0.0}
    assert run("eval {mean} --data {data} --brighter 2 --batch 1", **places).json["brighter"] == 2.0
    assert run("average {mean}", **places).json["logits"] == [0.0, 0.0, 0.0]
    listed = run("--help", **places).out
    assert "average" in listed and "What a mean makes of grey." in listed
    help = " ".join(run("eval --help", **places).out.split())
    assert "--brighter" in help and "Of a mean its accuracy" in help and "For means" in help


@pytest.mark.parametrize(
    "line, said",
    [
        ("eval {mean}", "needs --data for a mean"),
        ("eval {mean} --data {data} --tau 0.5", "--tau 0.5 is for language models; leave it out for a mean"),
        ("eval aht_deit_tiny_imagenet --data {data} --brighter 1", "--brighter 1.0 is for means"),
        ("average aht_deit_tiny_imagenet", "dwindle average takes means"),
        (
            "report {mean}",
            "takes vision transformers; with it use dwindle eval or average",
        ),
        ("bench {mean}", "takes vision transformers"),
        ("serve {mean}", "is a mean"),
        ("bench mean_gray", "unknown model or checkpoint 'mean_gray'"),
    ],
)
def test_what_it_does_not_take_is_refused(line, said, places):
    refused(run(line, **places), said)


def test_other_models_are_told_what_is_wrong():
    with pytest.raises(dwindle.DwindleError, match="A Linear is no model of Dwindle's"):
        dwindle.save(torch.nn.Linear(2, 2), "nowhere")
