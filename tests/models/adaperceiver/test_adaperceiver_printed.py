"""What section D of the paper prints of training: optimisers, schedules, averaging, batches, a teacher."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dwindle
from dwindle.models.adaperceiver.optimizers import nadamw, soap
from dwindle.recipes.vision import ada_tiny_test
from dwindle.train.loop import Run
from dwindle.train.recipe import changed
from dwindle.train.schedule import poly


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("printed"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 3)):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def run(data, out, *settings, **options) -> Run:
    return Run(changed(ada_tiny_test(), settings), str(data), out, device="cpu", **options)


def stepped(make, gradients, start=None, decay=0.0) -> list[torch.Tensor]:
    """A weight after each step with these gradients."""
    weight = torch.nn.Parameter(torch.ones(3, 2) if start is None else start.clone())
    optimizer, seen = make([{"params": [weight], "weight_decay": decay}]), []
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def test_soap_begins_as_adamw_and_preconditions_from_its_step_on():
    pytest.importorskip("pytorch_optimizer", reason="the extra soap is not installed")
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 2, generator=draw) for _ in range(12)]
    late = stepped(lambda groups: soap(groups, 0.01, start=7, every=3), gradients)
    adam = stepped(lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999)), gradients[1:])
    assert torch.equal(late[0], torch.ones(3, 2))  # in its first step it only looks at the gradient
    for i in range(7):
        torch.testing.assert_close(late[1 + i], adam[i], atol=1e-6, rtol=1e-6)
    assert (late[8] - adam[7]).abs().max() > 1e-4
    soon = stepped(lambda groups: soap(groups, 0.01, start=0, every=3), gradients)
    assert (soon[2] - adam[1]).abs().max() > 1e-4
    rare = stepped(lambda groups: soap(groups, 0.01, start=7, every=100), gradients)
    assert torch.equal(rare[8], late[8]) and not torch.equal(rare[-1], late[-1])  # renewed at steps 9 and 12


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_with_soap_goes_on(data, tmp_path, epoch):
    """Before its preconditioners begin, and after."""
    pytest.importorskip("pytorch_optimizer", reason="the extra soap is not installed")
    given = ("optimizer=soap", "precondition_from=5", "precondition_every=2", "batch=6", "stages=(0,0,1)", "ema=0.9")
    whole = run(data, tmp_path / "whole", *given)
    list(whole.epochs())
    parts = run(data, tmp_path / "parts", *given)
    for _ in zip(range(epoch), parts.epochs()):
        pass
    again = run(data, tmp_path / "parts", *given, resume=True)
    list(again.epochs())
    for one, two in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(one, two)


def test_nadamw_by_hand():
    gradient = torch.full((1, 1), 2.0)
    (seen,) = stepped(lambda groups: nadamw(groups, 0.1), [gradient], torch.ones(1, 1), 0.1)
    mu, after = (0.9 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (1, 2))
    momentum = after * 0.2 / (1 - mu * after) + (1 - mu) * 2.0 / (1 - mu)
    assert float(seen) == pytest.approx(1 - 0.1 * 0.1 - 0.1 * momentum / 2.0, rel=1e-5)


def test_poly_by_hand():
    assert [poly(at, 4, 1.0, 0.2) for at in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert poly(2, 4, 1.0, 0.2, power=2) == pytest.approx(0.2 + 0.8 / 4)


def rates(work: Run) -> list[float]:
    """The learning rate of each step."""
    found = []
    for epoch in range(work.task.epochs):
        work.learner.epoch = epoch
        steps = range(epoch * work.steps_per_epoch, min((epoch + 1) * work.steps_per_epoch, work.task.steps))
        found += [work.learner.rate(step, {"share": 1.0}) for step in steps]
    return found


def test_schedules_after_a_warm_up_in_steps(data, tmp_path):
    given = ("batch=4", "epochs=1", "stages=(1,0,0)", "lr=0.1", "warmup_steps=2", "min_lr=0.02")
    begins = [1e-6, (1e-6 + 0.1) / 2]
    found = rates(run(data, tmp_path / "poly", *given, "schedule=poly"))
    assert found == pytest.approx([*begins, 0.1, 0.08, 0.06, 0.04])
    found = rates(run(data, tmp_path / "constant", *given, "schedule=constant"))
    assert found == pytest.approx([*begins, 0.1, 0.1, 0.1, 0.1])
    found = rates(run(data, tmp_path / "square", *given, "schedule=poly", "poly_power=2"))
    assert found[4] == pytest.approx(0.02 + 0.08 / 4)
    # D.1: the third stage, at half the rate, keeps it.
    given = ("batch=4", "epochs=3", "lr=0.1", "warmup_steps=1", 'schedule=("cosine","cosine","constant")')
    found = rates(run(data, tmp_path / "three", *given))
    assert found[5] < 0.02 and found[11] < 0.02 and found[13:] == pytest.approx([0.05] * 5)
    assert found[0] == found[6] == found[12] == 1e-6


def test_steps_in_place_of_epochs(data, tmp_path):
    """The last epoch may be incomplete; a run that is resumed ends at the same step."""
    given = ("batch=4", "steps=8", "stages=(1,0,0)", "schedule=poly", "lr=0.01")
    whole = run(data, tmp_path / "whole", *given)
    rows = list(whole.epochs())
    assert (whole.step, len(rows), whole.task.epochs) == (8, 2, 2) and "top1" in rows[-1]
    assert {row["stage"] for row in rows} == {1.0} and whole.optimizer.param_groups[0]["lr"] < 0.0015
    parts = run(data, tmp_path / "parts", *given)
    next(parts.epochs())
    again = run(data, tmp_path / "parts", *given, resume=True)
    list(again.epochs())
    assert again.step == 8
    for one, two in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(one, two)


def test_averaging_by_stage(data, tmp_path):
    work = run(data, tmp_path / "run", "stage_ema=(0.5,0.6,0.7)", "batch=12")
    decays = [work.average.decay for _ in work.epochs()]
    assert decays == [0.5, 0.6, 0.7]
    # Averaging is warmed up, so that the first steps count: by the end the decay is what is asked for at most.
    assert work.average.get_decay(10_000) == 0.7


@pytest.mark.parametrize("mask", ["blocks", "open"])
def test_micro_batches_make_one_batch(data, tmp_path, mask):
    weights = []
    for parts in (1, 3):
        settings = ("batch=6", "stages=(0,0,1)", f"method.mask={mask}", f"accumulate={parts}", "epochs=1", "ema=0")
        work = run(data, tmp_path / f"{parts}", *settings)
        work.optimizer = torch.optim.SGD(work.model.parameters(), lr=0.1)  # Adam would make steps of rounding
        work.learner.rate = lambda *_: 0.1
        terms = None
        for x, y in work.task.batches(train=True):
            terms = work._step(x, y)
        weights.append((terms, work.model.state_dict()))
    (one, whole), (three, pieces) = weights
    for name, value in one.items():
        assert float(three[name]) == pytest.approx(float(value), rel=1e-4), name
    for name, value in whole.items():
        torch.testing.assert_close(pieces[name], value, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("timm")
    for task, options in (("classify", {"num_classes": 2}), ("features", {})):
        torch.save(timm.create_model("test_vit", **options).state_dict(), folder / f"{task}.pth")
    return folder


@pytest.mark.parametrize("task", ["classify", "features"])
def test_a_timm_model_teaches(data, weights, tmp_path, task):
    """D.1's teacher is one; features are learnt of mixed images too."""
    given = (
        "teacher=test_vit",
        f"teacher_weights={weights / task}.pth",
        f"task={task}",
        "mixup=1.0",
        "epochs=1",
        "label_weight=0",
    )
    given = given if task == "classify" else given[:-1]
    work = run(data, tmp_path / "run", *given)
    (row,) = work.epochs()
    assert np.isfinite(row["total"])
    x, y = next(iter(work.task.batches(train=True)))
    inputs = work.learner.inputs(x.clone(), y, 0, 0)
    assert not torch.equal(inputs["x"], x)
    assert work.task.preprocess.mean == tuple(timm.get_pretrained_cfg("test_vit").mean)
    torch.testing.assert_close(
        work.learner.teacher.ask(inputs["x"])["logits" if task == "classify" else "states"], inputs["teacher_answers"]
    )


def test_images_are_normalised_as_the_teachers(data, tmp_path):
    """And so are those of a network that goes on from there."""
    vit = timm.create_model("test_vit", num_classes=2, img_size=32)
    teacher = dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path / "vit")
    mean = tuple(vit.pretrained_cfg["mean"])
    assert mean != dwindle.io.images.Preprocess().mean
    work = run(data, tmp_path / "first", f"teacher={teacher}", "epochs=1")
    assert work.task.preprocess.mean == mean
    list(work.epochs())
    again = run(data, tmp_path / "again", f"weights={tmp_path / 'first'}", "freeze_backbone=true")
    assert again.task.preprocess.mean == mean and again.task.preprocess.size == 32
