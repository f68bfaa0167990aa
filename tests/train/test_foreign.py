"""A teacher that is no vision transformer of ours: any model of timm's, such as a CNN."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import dwindle
from dwindle.core.losses import distill_loss
from dwindle.io.checkpoint import read_weights
from dwindle.io.images import Preprocess
from dwindle.recipes.vision import tiny_test
from dwindle.train.foreign import Foreign
from dwindle.train.loop import Run
from dwindle.train.recipe import Recipe
from shared.classes import write_classes

CNN = "test_efficientnet"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_classes(tmp_path_factory.mktemp("data"), train=4, val=4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("cnn") / "cnn.safetensors"
    save_file(timm.create_model(CNN, num_classes=2).state_dict(), str(path))
    return str(path)


def recipe(**options) -> Recipe:
    given = {"model": "test_vit", "image_size": None, "batch": 4, "teacher": CNN, **options}
    return dataclasses.replace(tiny_test(), **{"method": "Static", "method_options": {}, **given})


def test_a_cnn_teaches_its_answers(data, weights, tmp_path):
    run = Run(recipe(method="Static", teacher_weights=weights), data, tmp_path / "run", device="cpu")
    x, y = next(iter(run.task.batches(train=True)))
    cnn = timm.create_model(CNN, num_classes=2).eval()
    cnn.load_state_dict(read_weights(Path(weights)))
    teacher = run.learner.teacher
    with torch.no_grad():
        wanted = cnn(x * teacher.model.scale + teacher.model.shift)
    torch.testing.assert_close(teacher(x, 0)["logits"], wanted)
    run.model.eval()
    with torch.no_grad():
        expected = distill_loss(run.model(x).logits, wanted, "soft", 1.0).mean()
    terms = run._step(x, y)
    torch.testing.assert_close(terms["distill"], expected, atol=1e-5, rtol=1e-3)
    assert terms["total"].isfinite()


def test_it_sees_images_as_it_wants_them():
    class Sees(torch.nn.Module):
        pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
        num_classes = 2

        def forward(self, x):
            return x

    prepared = Preprocess(mean=(0.4, 0.3, 0.2), std=(0.2, 0.1, 0.3))
    pixels = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(values)[:, None, None] for values in (prepared.mean, prepared.std))
    seen = Foreign(Sees(), prepared)((pixels - mean) / std).logits
    torch.testing.assert_close(seen, (pixels - 0.5) / 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "AHT", "method_options": {"budget": 0.7}}, "only answers can be learnt, and AHT"),
        ({"method": "DynamicViT"}, "asks for its features"),
        ({"teacher_weights": "nowhere.safetensors"}, "there is no such file"),
    ],
)
def test_what_a_cnn_cannot_teach(options, said, data, tmp_path):
    with pytest.raises(dwindle.DwindleError, match=said):
        Run(recipe(**options), data, tmp_path / "run", device="cpu")
