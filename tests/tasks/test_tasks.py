"""A task is one class: what it learns and how it is judged. The loop, the model and the checkpoint are there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import dwindle
from dwindle.recipes.vision import tiny_test
from dwindle.tasks.base import Task, answers_of
from dwindle.tasks.images import ImageTask
from dwindle.train.loop import Run
from dwindle.train.recipe import changed
from shared.tiny import METHODS, build


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    for split in ("train", "val"):
        for c in range(3):
            (root / split / "rgb"[c]).mkdir(parents=True)
            for i in range(4):
                pixels = draw.integers(0, 255, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / "rgb"[c] / f"{i}.png")
    return str(root)


def settings(*more: str):
    given = ("model=test_vit", "batch=6", "method.stages=(2,4)", "task=ordered", *more)
    return changed(tiny_test(), given)


@pytest.fixture
def ordered(monkeypatch):
    """Classes in an order: one number is learnt, and how far it is off is what counts."""
    monkeypatch.setattr(Task, "registry", dict(Task.registry))

    class Ordered(ImageTask, name="ordered"):
        answers = "numbers"

        def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
            return (answers.float().mean(-1) - targets) ** 2

        @staticmethod
        def measure(answers: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {"error": (answers.float().mean(-1) - targets).abs()}

    return Ordered


def test_another_task_is_learnt_by_the_same_loop(ordered, data, tmp_path):
    run = Run(settings("lr=0.003", "method_lr=0.003", "epochs=6"), data, tmp_path / "run", device="cpu")
    numbers = list(run.epochs())
    assert "top1" not in numbers[-1] and numbers[-1]["error"] < numbers[0]["error"]
    assert dwindle.load(tmp_path / "run").extra["results"]["error"] == numbers[-1]["error"]


def test_a_killed_run_of_it_goes_on(ordered, data, tmp_path):
    whole = Run(settings(), data, tmp_path / "whole", device="cpu")
    list(whole.epochs())
    next(Run(settings(), data, tmp_path / "parts", device="cpu").epochs())
    again = Run(settings(), data, tmp_path / "parts", device="cpu", resume=True)
    list(again.epochs())
    for one, other in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


def test_a_task_with_targets_of_its_own_is_no_task_for_eval(ordered):
    class Bright(ordered, name="bright"):
        def targets(self, x, y, draw):
            return x, x.mean((1, 2, 3))

    with pytest.raises(dwindle.DwindleError, match="The task 'bright' makes targets of its own"):
        Bright.evaluation_data(None, "photos")


def test_an_unknown_task_is_refused(data, tmp_path):
    with pytest.raises(dwindle.DwindleError, match="did you mean 'classify'"):
        Run(changed(tiny_test(), ["task=clasify"]), data, tmp_path / "run", device="cpu")


def test_a_checkpoint_whose_recipe_names_no_task():
    model = build("vit", METHODS["ToMe"]())
    for name in (["classify"], {"a": 1}, 3, None):
        model.extra = {"recipe": {"task": name}}
        with pytest.raises(dwindle.DwindleError, match="names no task"):
            answers_of(model)
