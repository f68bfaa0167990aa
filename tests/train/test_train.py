"""The training loop: it learns, holds a budget, and a killed run resumes to the same weights."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dwindle
from dwindle.recipes import find_recipe
from dwindle.recipes.vision import tiny_test
from dwindle.train.build import build_vit, parameter_groups
from dwindle.train.loop import Run
from dwindle.train.recipe import Recipe, changed
from dwindle.train.teacher import CacheBudget, TeacherCache
from shared.tally import SLOW


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two classes a small model tells apart at once: bright on the left, bright on the right."""
    root, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 6)):
        for side, name in enumerate(("left", "right")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 60, (40, 40, 3))
                pixels[:, side * 20 : side * 20 + 20] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return str(root)


def small(**options) -> Recipe:
    settings = {"model": "test_vit", "image_size": None, "method_options": {"stages": (2, 3), "budget": 0.8}}
    return dataclasses.replace(tiny_test(), **{**settings, **options})


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    """A model small enough for tests, by timm's own registry."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    create, known = timm.create_model, timm.is_model

    def create_model(name, pretrained=False, num_classes=1000, **options):
        if name != "test_vit":
            return create(name, pretrained=pretrained, num_classes=num_classes, **options)
        return VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=5, num_heads=2, num_classes=num_classes)

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(timm, "is_model", lambda name: name == "test_vit" or known(name))


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def train(recipe, data, out, **options) -> Run:
    run = Run(recipe, data, out, device="cpu", **options)
    for _ in run.epochs():
        pass
    return run


@pytest.mark.parametrize("resident", [False, True] if SLOW else [True])
def test_a_killed_run_resumes_to_the_same_weights(data, tmp_path, resident):
    recipe = small(epochs=3, ema=0.9, resident=resident, teacher="static")
    whole = train(recipe, data, tmp_path / "whole")
    killed = Run(recipe, data, tmp_path / "killed", device="cpu")
    epochs = killed.epochs()
    next(epochs)
    del epochs, killed  # as a kill between two epochs
    torch.manual_seed(123)
    resumed = train(recipe, data, tmp_path / "killed", resume=True)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "killed")[name]), name
    assert [row["total"] for row in whole.history] == [row["total"] for row in resumed.history]


def test_a_kill_in_the_middle_of_an_epoch_loses_only_that_epoch(data, tmp_path):
    recipe = small(epochs=2)
    train(recipe, data, tmp_path / "whole")
    run = Run(recipe, data, tmp_path / "killed", device="cpu")

    def tick(step, *_):
        if step == run.steps_per_epoch + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run.epochs(tick))
    train(recipe, data, tmp_path / "killed", resume=True)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "killed")[name]), name


@pytest.mark.parametrize("resident", [False, True])
def test_a_recipes_augmentation_holds_wherever_the_data_lies(data, tmp_path, resident):
    """Each setting changes what it says, in workers and in memory; the order, crops and flips stay."""

    def batch(**options):
        plain = {"augment": None, "erase": 0.0, "jitter": 0.0, "min_scale": 0.5}
        recipe = small(resident=resident, batch=32, **{**plain, **options})
        run = Run(recipe, data, tmp_path / "run", device="cpu")
        return next(iter(run.task.batches(train=True)))

    plain, labels = batch()
    assert torch.equal(plain, batch()[0])
    for options, least in (({"erase": 1.0}, 32), ({"jitter": 0.5}, 32), ({"augment": "rand-m9-p1-inc1"}, 24)):
        made, same = batch(**options)
        changed = (made - plain).abs().amax(1) > 0.05  # (B, height, width)
        assert torch.equal(labels, same) and int(changed.any((1, 2)).sum()) >= least, options
        if "erase" in options:
            assert float(changed.float().mean((1, 2)).min()) > 0.01 and float(changed.float().mean()) < 0.36
    for options, message in (
        ({"augment": "rand-z3"}, "augment = rand-z3: timm knows no such RandAugment"),
        ({"erase": 1.5}, "erase = 1.5"),
        ({"holdout": 1.0}, "holdout = 1.0"),
    ):
        with pytest.raises(dwindle.DwindleError, match=message):
            small(**options).check()


@pytest.mark.parametrize("method", ["AHT", "AViT", "Static"])
def test_every_method_learns_in_the_one_loop(method, data, tmp_path):
    options = {"AHT": {"stages": (2, 3), "budget": 0.8}, "AViT": {"target_depth": 4}, "Static": {}}[method]
    recipe = small(method=method, method_options=options, epochs=8, lr=3e-3, augment=None, min_scale=0.9, eval_every=8)
    recipe = dataclasses.replace(recipe, smoothing=0.0, model="test_vit")
    run = train(recipe, data, tmp_path / "run")
    assert run.history[-1]["task"] < run.history[0]["task"]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and float(rows[-1]["total"]) == pytest.approx(run.history[-1]["total"])
    model = dwindle.load(tmp_path / "run")
    assert model.extra["classes"] == ["left", "right"] and model.extra["preprocess"]["size"] == 32
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_learning_rates_and_decay():
    recipe = small(lr=1e-4, method_lr=1e-2)
    model = dwindle.adapt(build_vit(recipe, 2), recipe.make_method())
    groups = parameter_groups(model, recipe)
    kinds = {(g["lr"], g["weight_decay"]) for g in groups}
    assert kinds == {(1e-4, 0.05), (1e-4, 0.0), (1e-2, 0.05), (1e-2, 0.0)}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    model.vit.requires_grad_(False)
    assert all(g["lr"] == 1e-2 for g in parameter_groups(model, recipe))


def test_weights_from_a_file_with_another_head_and_size(tmp_path):
    dwindle_vit = build_vit(small(), 1000)
    torch.save(dwindle_vit.state_dict(), tmp_path / "w.pth")
    vit = build_vit(small(weights=str(tmp_path / "w.pth"), image_size=64), 3)
    assert vit.head.out_features == 3 and vit.patch_embed.img_size == (64, 64)
    assert torch.equal(vit.blocks[0].mlp.fc1.weight, dwindle_vit.blocks[0].mlp.fc1.weight)


def test_settings_from_the_command_line():
    recipe = changed(Recipe(), ["epochs=7", "method.budget=0.5", "method.stages=(2, 4)", "amp=false", "weights=none"])
    assert (recipe.epochs, recipe.amp, recipe.weights) == (7, False, None)
    assert recipe.method_options == {"budget": 0.5, "stages": (2, 4)}
    assert isinstance(recipe.make_method(), dwindle.AHT)
    for settings, message in (
        (["epoch=7"], "did you mean 'epochs'"),
        (["epochs=many"], "epochs = 'many': it must be a whole number"),
        (["amp=3"], "amp = 3: it must be true or false"),
        (["epochs"], "key=value"),
    ):
        with pytest.raises(dwindle.DwindleError, match=message):
            changed(Recipe(), settings)
    with pytest.raises(dwindle.DwindleError, match="did you mean 'budget'"):
        changed(Recipe(), ["method.budgett=1"]).make_method()
    with pytest.raises(dwindle.DwindleError, match="did you mean 'AViT'"):
        changed(Recipe(), ["method=avitt"]).make_method()
    with pytest.raises(dwindle.DwindleError, match="did you mean 'aht_cifar100'"):
        find_recipe("aht_cifar10")


def test_defaults_are_the_papers():
    recipe = Recipe()
    assert (recipe.model, recipe.epochs, recipe.lr, recipe.weight_decay) == ("deit_small_patch16_224", 50, 1e-4, 0.05)
    assert recipe.augment.startswith("rand")


def test_bad_runs(data, tmp_path, monkeypatch):
    with pytest.raises(dwindle.DwindleError, match="did you mean 'vit_tiny_patch16_224'"):
        Run(small(model="vit_tiny_patch16_244"), data, tmp_path / "a")
    with pytest.raises(dwindle.DwindleError, match="teacher = me: Unknown checkpoint"):
        Run(small(teacher="me"), data, tmp_path / "b")
    train(small(epochs=1), data, tmp_path / "c")
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch, pytest.raises(dwindle.DwindleError, match="cannot be written to"):
        patch.setattr("dwindle.files.os.access", lambda *_: False)
        Run(small(epochs=1), data, tmp_path / "d")
    for out, resume in (("file", False), ("file", True), ("file/run", False)):
        with pytest.raises(dwindle.DwindleError, match="is a file; choose another"):
            Run(small(epochs=1), data, tmp_path / out, resume=resume)
    with pytest.raises(dwindle.DwindleError, match="--resume"):
        Run(small(epochs=1), data, tmp_path / "c")
    with pytest.raises(dwindle.DwindleError, match=r"epochs=1 \(now 2\)"):
        Run(small(epochs=2), data, tmp_path / "c", resume=True)
    with pytest.raises(dwindle.DwindleError, match="no run to resume"):
        Run(small(), data, tmp_path / "d", resume=True)
    state = tmp_path / "c" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(dwindle.DwindleError, match="damaged"):
        Run(small(epochs=1), data, tmp_path / "c", resume=True)
    with pytest.raises(dwindle.DwindleError, match="loss became"):
        train(small(epochs=1, lr=1e30, method_lr=1e30, clip=0.0), data, tmp_path / "e")


def test_a_run_begins_from_a_checkpoint_with_it_as_teacher(data, tmp_path):
    first = train(small(method="Static", method_options={}, epochs=1), data, tmp_path / "static")
    folder = str(tmp_path / "static")
    run = Run(small(weights=folder, teacher=folder), data, tmp_path / "adapted", device="cpu")
    for name, value in first.model.vit.state_dict().items():
        assert torch.equal(run.model.vit.state_dict()[name], value), name
        assert torch.equal(run.learner.teacher.model.vit.state_dict()[name], value), name
    assert run.model.vit.training and not run.learner.teacher.model.training
    assert (tmp_path / "static" / "README.md").read_text().startswith("---")


@pytest.mark.parametrize("method", ["AHT", "DynamicViT"])
def test_a_teacher_is_asked_once_for_runs_on_the_same_batches(method, data, tmp_path):
    train(small(method="Static", method_options={}, epochs=1), data, tmp_path / "static")
    settings = {"teacher": str(tmp_path / "static"), "resident": True, "mixup": 0.2, "accumulate": 2}
    options = {"AHT": {"stages": (2, 3), "budget": 0.7}, "DynamicViT": {"stages": (2, 3)}}[method]
    recipe = small(method=method, method_options=options, **settings)
    answers, asked, losses = TeacherCache(), [], []
    for name, kept in (("alone", None), ("first", answers), ("second", answers)):
        run = Run(recipe, data, tmp_path / name, device="cpu", answers=kept)
        losses.append([numbers["total"] for numbers in run.epochs()])
        asked.append(run.learner.teacher.computed)
    assert losses[0] == losses[1] == losses[2]
    again = run.steps_per_epoch if method == "DynamicViT" else 0  # it reads features, too large to keep
    assert asked == [run.steps_per_epoch, run.steps_per_epoch, again]  # in the last epoch
    assert answers.get(0, ("logits",)) is not None


@pytest.mark.parametrize("resident", [False, True] if SLOW else [False])
def test_batches_come_again_and_the_teacher_is_asked_once(resident, data, tmp_path, monkeypatch):
    recipe = small(teacher="static", mixup=0.2, epochs=5, views=2, resident=resident)
    asked = {}
    for name in ("kept", "asked"):
        if name == "asked":
            monkeypatch.setattr(TeacherCache, "keep", lambda *_: None)
        run = Run(recipe, data, tmp_path / name, device="cpu")
        asked[name] = [run.learner.teacher.computed for _ in run.epochs()]
    always = run.steps_per_epoch
    assert asked == {"kept": [always, always, 0, 0, 0], "asked": [always] * 5}
    ours, theirs = weights(tmp_path / "kept"), weights(tmp_path / "asked")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    epochs = []
    for epoch in range(3):
        epochs.append(torch.cat([x for x, _ in run.task.batches(train=True, epoch=run.seen(epoch))]))
    assert torch.equal(epochs[0], epochs[2]) and not torch.equal(epochs[0], epochs[1])
    # What a budget is set on was not trained on.
    assert not torch.equal(torch.cat([x for x, _ in run.task.batches(train=True, epoch=6)]), epochs[0])
    with pytest.raises(dwindle.DwindleError, match="views = -1: it must be at least 0"):
        small(views=-1).check()


def test_answers_beyond_the_room_are_asked_again():
    room = CacheBudget(1000)
    answers, others = TeacherCache(room), TeacherCache(room)
    for step in range(2):
        answers.keep(step, {"logits": torch.zeros(100), "features": torch.zeros(1)})
        others.keep(step, {"logits": torch.zeros(100)})
    kept = [a.get(step, ("logits",)) is not None for step in range(2) for a in (answers, others)]
    assert kept == [True, True, False, False] and answers.get(0, ("features",)) is None


@pytest.mark.parametrize("resident", [False, True])
def test_typical_images_are_as_in_evaluation(data, tmp_path, resident, monkeypatch):
    run = Run(small(resident=resident), data, tmp_path / "run", device="cpu")
    assert run.task.typical(40).shape == (40, 3, 32, 32)  # a small set: half as in evaluation, half augmented
    monkeypatch.setattr("dwindle.tasks.images.LARGE", 1)
    clean = run.task.typical(32)
    run.task.train_images.transform = run.task.preprocess.eval_transform()
    known = torch.stack([run.task.train_images[i][0] for i in range(len(run.task.train_images))])
    nearest = torch.cdist(clean.flatten(1), known.flatten(1)).min(-1).values
    assert nearest.max() < 0.02 * clean.flatten(1).norm(dim=-1).mean()


def test_saving_less_often_loses_no_more_than_asked(data, tmp_path):
    run = Run(small(epochs=3, save_every=2), data, tmp_path / "run", device="cpu")
    saved = []
    for _ in run.epochs():
        saved.append((tmp_path / "run" / "state.pt").exists())
    assert saved == [False, True, True]


def test_epochs_that_take_long_are_all_saved(data, tmp_path, monkeypatch):
    monkeypatch.setattr("dwindle.train.loop.PATIENCE", 0.0)
    run = Run(small(epochs=3, save_every=100), data, tmp_path / "run", device="cpu")
    for numbers in run.epochs():
        assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["epoch"] == numbers["epoch"]


def test_packed_training_is_masked_training(data, tmp_path):
    losses = []
    for layout in ("masked", "packed"):
        recipe = small(method="TopK", method_options={"stages": (2, 3), "budget": 0.7}, layout=layout)
        losses.append([numbers["total"] for numbers in Run(recipe, data, tmp_path / layout, device="cpu").epochs()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    with pytest.raises(dwindle.DwindleError, match="layout='masked'"):
        list(Run(small(layout="packed"), data, tmp_path / "gates", device="cpu").epochs())
    with pytest.raises(dwindle.DwindleError, match="layout"):
        small(layout="loose").check()
    with pytest.raises(dwindle.DwindleError, match="layout=masked"):
        small(layout="packed", compile=True).check()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "method", ["AHT", "AViT", "Static", "DynamicViT", "TopK", "ACT", "PonderNet", "Confidence", "Similarity"]
)
def test_a_recorded_step_is_the_eager_one(method, data, tmp_path):
    """Compiled and as a CUDA graph, the same losses step by step; noise aside, which a graph draws anew."""
    options = {"AHT": {"stages": (2, 3), "budget": 0.8}, "AViT": {"target_depth": 4}, "Static": {}}
    options |= {"DynamicViT": {"stages": (2, 3), "gumbel": False}, "TopK": {"stages": (2, 3)}}
    losses = []
    for compiled in (False, True):
        recipe = small(
            method=method, method_options=options.get(method, {}), epochs=3, resident=True, teacher="static", amp=False
        )
        run = Run(dataclasses.replace(recipe, compile=compiled), data, tmp_path / str(compiled), device="cuda")
        losses.append([numbers["total"] for numbers in run.epochs()])
        assert (run.learn.recorded is not None) == compiled
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


@pytest.mark.usefixtures("bf16_on_cpu")
@pytest.mark.parametrize(
    "options",
    [{"teacher": "static"}, *([{}, {"method": "AViT", "method_options": {"target_depth": 3.0}}] if SLOW else [])],
)
def test_bf16_on_a_cpu_learns_as_float32_does_and_resumes_to_the_same_weights(data, tmp_path, options):
    first = {}
    for cpu_amp in (False, True):
        run = Run(small(epochs=1, cpu_amp=cpu_amp, **options), data, tmp_path / str(cpu_amp))
        first[cpu_amp] = next(run.epochs())["total"]
        assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert first[True] != first[False]
    assert first[True] == pytest.approx(first[False], rel=0.03)

    whole, parts = (small(epochs=3, cpu_amp=True, resident=True, **options) for _ in range(2))
    list(Run(whole, data, tmp_path / "whole").epochs())
    begun = Run(parts, data, tmp_path / "parts").epochs()
    next(begun)
    begun.close()
    list(Run(parts, data, tmp_path / "parts", resume=True).epochs())
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "parts")[name]), name
