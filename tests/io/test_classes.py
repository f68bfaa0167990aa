"""A data set's classes and a model's are one by their names, or nothing is said about accuracy."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.errors import DwindleError
from dwindle.evaluate.evaluate import evaluate
from dwindle.evaluate.predict import predict
from dwindle.io.batches import loader
from dwindle.io.classes import by_name, class_names, known_classes, match
from dwindle.io.datasets import Images, hold_out, in_order, matched
from dwindle.io.opening import open_data
from dwindle.io.sets import evaluation_images, splits_for, training_and_evaluation
from dwindle.recipes.vision import tiny_test
from dwindle.show.terminal import show_table
from dwindle.train.loop import Run
from shared.checkpoint import edit
from shared.tiny import METHODS, build

INFO = ImageNetInfo()
IDS, FULL = INFO.label_names(), INFO.label_descriptions()
FIRST = [name.split(",")[0] for name in FULL]


# Names


@pytest.mark.parametrize(
    "data,model,numbers",
    [
        (["bear", "orchid"], ["bear", "bicycle", "orchid"], [0, 2]),
        (["Great_White-shark", " SEA lion"], ["sea-lion", "great white shark"], [1, 0]),
        (["ant", "wasp"], ["bee", "ant"], [1, -1]),
        (["/b/bow_window/indoor"], ["bow window-indoor"], [-1]),
        (["bow_window/indoor"], ["bow window-indoor"], [0]),
        (["n01440764", "n02012849"], FULL, [0, 134]),
        (["n01440764_tench", "n02085620-Chihuahua"], FIRST, [0, 151]),
        (["tench", "Tinca tinca, tench"], IDS, [0, -1]),  # taken already
        (["Tinca tinca"], IDS, [0]),
        (["tench, Tinca tinca", "goldfish"], ["goldfish", "tench"], [1, 0]),
        (["n01440764"], ["carp", "tench"], [1]),
        (["harp", "missile"], FULL, [594, 657]),  # not the mouth harp
        (["N01440764", "N02085620_chihuahua"], FULL, [0, 151]),
        (["Cafe\u0301", "\uff22ear", "STRASSE"], ["bear", "caf\u00e9", "Straße"], [1, 0, 2]),  # as macOS writes folders
    ],
)
def test_names_are_matched(data, model, numbers):
    assert by_name(data, model).numbers.tolist() == numbers


@pytest.mark.parametrize("data", [["crane", "tench"], ["maillot", "tench"], ["cardigan", "tench"], ["panda", "tench"]])
@pytest.mark.parametrize("model", [FULL, FIRST])
def test_a_name_of_two_classes_is_left_out_and_said(data, model):
    found = by_name(data, model)
    assert found.numbers.tolist() == [-1, 0] and found.unsure == (data[0],)
    assert f"'{data[0]}': which of its classes these are is not certain" in found.summary()
    assert found.about()["unsure"] == [data[0]] and found.about()["classes"] == 1


def test_what_tells_two_of_a_name_apart():
    assert by_name(["n02012849", "n03126707"], FIRST).numbers.tolist() == [134, 517]  # both cranes
    assert by_name(["maillot", "maillot, tank suit"], FIRST).numbers.tolist() == [638, 639]
    assert by_name(["Cardigan", "cardigan"], FIRST).numbers.tolist() == [264, 474]
    assert by_name(["Cat", "cat"], ["cat", "dog"]).unsure == ("Cat", "cat")
    assert by_name(["Cat", "cat"], ["dog", "cat", "Cat"]).numbers.tolist() == [2, 1]


@pytest.mark.parametrize("data", [IDS, FULL, FIRST])
@pytest.mark.parametrize("model", [IDS, FULL, FIRST])
def test_all_of_imagenet_is_found_however_it_is_named(data, model):
    assert by_name(data, model).same
    assert by_name(IDS[::-1], model).numbers.tolist() == list(range(999, -1, -1))


def test_what_does_not_match_is_refused():
    with pytest.raises(DwindleError, match=r"classes.*'ant', 'bee'.*'tench'"):
        match(["ant", "bee"], 2, ["tench", "goldfish"], 2, named="d")
    with pytest.raises(DwindleError, match="for 'crane' it is not certain"):
        match(["crane"], 1, FULL, 1000, named="d")
    with pytest.raises(DwindleError, match=r"'d'.*classes.*3 of 'd'.* 2"):
        match(None, 3, ["a", "b"], 2, named="d")
    with pytest.raises(DwindleError, match=r"model.*classes.*number 3 of"):
        match(["a", "b", "c"], 3, None, 4, named="d")
    for data, model in ((None, ["a", "b"]), (["a", "b"], None), (None, None)):
        found = match(data, 2, model, 2, named="d")
        assert found.how == "by number" and found.same and "by number" in found.summary()
    assert match(["tench", "x"], 2, None, 1000, named="d").numbers.tolist() == [0, -1]  # a head of ImageNet's size
    assert match([f"class {i}" for i in range(1000)], 1000, None, 1000, named="d").how == "by number"


# Data


def images_of(labels, classes=None, name="made"):
    arrays = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    return Images(name, lambda i: Image.fromarray(arrays[i]), np.array(labels), classes)


def test_names_that_would_steer_a_terminal_are_told_by_their_numbers(capsys):
    """Names are anyone's: a checkpoint's of the Hub, a folder's of an archive."""
    with pytest.raises(DwindleError) as told:
        match(["ant", "b\x1b[2J\n"], 2, ["\u202eeb", "x" * 100_000], 2, named="d")
    assert str(told.value).isprintable() and len(str(told.value)) < 1000
    show_table("\x1b[31m", ["label"], [["\x1b]0;title\x07"]])
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out and "\x1b]0" not in out and r"\x1b]0;title\x07" in out


def test_images_of_other_classes_are_left_out_and_counted():
    images = images_of([0, 1, 2, 0, 2], ["orchid", "wasp", "Bear"])
    part = matched(images, ["bear", "bicycle", "orchid"], 3)
    assert part.labels.tolist() == [2, 0, 2, 0] and part.rows.tolist() == [0, 2, 3, 4]
    assert part.classes == ["bear", "bicycle", "orchid"] and part.num_classes == 3
    told = {"matched": "by name", "classes": 2, "classes_data": 3, "classes_model": 3, "images_left_out": 1}
    assert part.about() == {"on": "all of made: 4 images"} | told
    assert "2 of the data's 3 classes are among the model's 3" in part.summary() and "no 'wasp'" in part.summary()
    assert "1 images are left out" in part.summary()
    with pytest.raises(DwindleError, match="no image of a class that the model has too"):
        matched(images_of([1, 1], ["orchid", "wasp"]), ["orchid"], 1)
    with pytest.raises(DwindleError, match="holds label 2, but names 2 classes"):
        matched(images_of([0, 2], ["a", "b"]), ["a", "b"], 2)
    with pytest.raises(DwindleError, match="label -1"):
        matched(images_of([0, -1]), None, 2)


def test_a_head_in_another_order():
    images = in_order(images_of([0, 1, 2, 1], ["ant", "bee", "cat"]), ["CAT", "ant", "bee"])
    assert images.classes == ["cat", "ant", "bee"] and images.labels.tolist() == [1, 2, 0, 2]


# Models


def small(classes, extra=None, seed=0):
    torch.manual_seed(seed)
    vit = VisionTransformer(32, 8, embed_dim=16, depth=3, num_heads=2, num_classes=classes)
    model = dwindle.adapt(vit, dwindle.Static()).eval()
    if extra is not None:
        model.extra = extra
    return model


def folders(root, words, each=3, split=None, seed=0):
    """Each class its own colour."""
    rng = np.random.default_rng(seed)
    for word in words:
        folder = root / split / word if split else root / word
        folder.mkdir(parents=True)
        colour = np.frombuffer((word * 3)[:3].lower().encode(), np.uint8)
        for i in range(each):
            noise = rng.integers(0, 40, (40, 40, 3))
            Image.fromarray((colour * 0.8 + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return str(root)


def test_evaluation_asks_about_the_classes_both_have(tmp_path):
    """A folder with some of a model's classes measures what the same images measure in the whole."""
    classes = ["bear", "bicycle", "orchid"]
    model = small(3, {"classes": classes})
    folders(tmp_path / "all", classes, each=8)
    folders(tmp_path / "some", ["Orchid", "bear", "zebra"], each=8)
    for word in ("bear", "Orchid"):  # the same files
        for path in (tmp_path / "some" / word).iterdir():
            path.write_bytes((tmp_path / "all" / word.lower() / path.name).read_bytes())
    whole = evaluation_images(model, str(tmp_path / "all"))
    keep = whole.select(np.flatnonzero(whole.labels != 1))
    some = evaluation_images(model, str(tmp_path / "some"))
    assert sorted(some.labels.tolist()) == sorted(keep.labels.tolist()) and len(some) == 16
    assert some.match.left_out == 8 and some.match.both == 2
    results = [evaluate(model, loader(images, 8))["top1"] for images in (keep, some)]
    assert results[0] == results[1]
    with pytest.raises(DwindleError, match="none of the classes"):
        evaluation_images(model, folders(tmp_path / "foreign", ["ant", "bee"]))


def test_every_checkpoint_keeps_its_names(tmp_path):
    model = small(3, {"classes": ["a", "b", "c"]})
    loaded = dwindle.load(dwindle.save(model, tmp_path / "one"))
    assert known_classes(loaded) == class_names(loaded) == ["a", "b", "c"]
    assert known_classes(dwindle.load(dwindle.save(loaded, tmp_path / "two", extra={"note": "n"}))) == ["a", "b", "c"]
    assert known_classes(small(3)) is None and class_names(small(3)) is None
    assert known_classes(small(1000)) is None and class_names(small(1000))[0] == "tench"
    assert known_classes(small(3, {"classes": ["a"]})) is None  # of another head
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config |= {"image_size": 32, "patch_size": 8}
    named = transformers.ViTConfig(**config, id2label={0: "ant", 1: "bee"})
    vit = transformers.ViTForImageClassification(named)
    assert known_classes(dwindle.load(dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path / "hf"))) == [
        "ant",
        "bee",
    ]
    plain = transformers.ViTForImageClassification(transformers.ViTConfig(**config, num_labels=4))
    assert known_classes(dwindle.adapt(plain, dwindle.Static())) is None


@pytest.fixture
def tiny_vit(monkeypatch):
    import timm

    create, known = timm.create_model, timm.is_model

    def create_model(name, pretrained=False, num_classes=1000, **options):
        if name != "test_vit":
            return create(name, pretrained=pretrained, num_classes=num_classes, **options)
        return VisionTransformer(32, 8, embed_dim=16, depth=3, num_heads=2, num_classes=num_classes)

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(timm, "is_model", lambda name: name == "test_vit" or known(name))


def recipe(**options):
    settings = {
        "model": "test_vit",
        "image_size": None,
        "method": "Static",
        "method_options": {},
        "epochs": 1,
        "lr": 0.0,
    }
    return dataclasses.replace(tiny_test(), **{**settings, "augment": None, "erase": 0.0, **options})


def trained(run):
    list(run.epochs())
    return run


@pytest.mark.usefixtures("tiny_vit")
def test_training_from_a_checkpoint_keeps_what_its_head_means(tmp_path):
    model, source = small(3, {"classes": ["cat", "ant", "bee"]}), str(tmp_path / "from")
    dwindle.save(model, source)
    data = folders(tmp_path / "d", ["Ant", "Bee", "Cat"], split="train")
    folders(tmp_path / "d", ["Bee", "Cat"], split="val")
    run = trained(Run(recipe(weights=source), data, tmp_path / "same", device="cpu"))
    assert run.task.head_fits and run.task.train_images.classes == ["Cat", "Ant", "Bee"]
    assert run.task.train_images.labels.tolist() == [1] * 3 + [2] * 3 + [0] * 3
    assert run.task.eval_images.labels.tolist() == [2] * 3 + [0] * 3
    assert torch.equal(run.model.vit.head.weight, model.vit.head.weight)  # lr = 0: nothing else moved it
    assert known_classes(dwindle.load(tmp_path / "same")) == ["Cat", "Ant", "Bee"]
    other = folders(tmp_path / "e", ["ant", "bee", "dog"], split="train")
    run = Run(recipe(weights=source), other, tmp_path / "other", device="cpu")
    assert not run.task.head_fits and not torch.equal(run.model.vit.head.weight, model.vit.head.weight)
    with pytest.raises(DwindleError, match=r"teacher = static: the head of .*from has other classes than the data"):
        Run(recipe(weights=source, teacher="static"), other, tmp_path / "third", device="cpu")


@pytest.mark.parametrize("teacher", [False, True])
def test_an_adaperceiver_from_a_checkpoint_keeps_them_too(tmp_path, teacher):
    from dwindle.recipes.vision import ada_tiny_test

    data = folders(tmp_path / "d", ["ant", "bee", "cat"], each=8, split="train")
    folders(tmp_path / "d", ["bee"], split="val")
    settings = {"epochs": 1, "lr": 0.0, "augment": None, "erase": 0.0, "stages": (0, 0, 1)}
    first = dataclasses.replace(ada_tiny_test(), **settings)
    made = trained(Run(first, data, tmp_path / "first", device="cpu"))
    # As if it had learnt them in this order.
    edit(tmp_path / "first", lambda told: told["extra"].update(classes=["cat", "ant", "bee"]))
    name = {"teacher" if teacher else "weights": str(tmp_path / "first")}
    recipe_ = dataclasses.replace(first, **name)
    run = Run(recipe_, data, tmp_path / "second", device="cpu")
    if teacher:
        assert run.learner.teacher.classes.tolist() == [1, 2, 0]
        x = torch.randn(2, 3, run.model.image, run.model.image)
        torch.testing.assert_close(run.learner.teacher(x, 0)["logits"], made.model.eval()(x).logits[:, [1, 2, 0]])
    else:
        assert run.task.train_images.classes == ["cat", "ant", "bee"] and set(run.task.eval_images.labels.tolist()) == {
            2
        }
        own, theirs = (r.model.readouts[0].head.weight for r in (run, made))
        assert torch.equal(own, theirs)
        other = folders(tmp_path / "e", ["ant", "bee", "dog"], each=8)
        recipe_ = dataclasses.replace(recipe_, seed=1)  # else what begins anew begins as the first did
        run = Run(recipe_, other, tmp_path / "third", device="cpu")
        assert not run.task.head_fits and not torch.equal(run.model.readouts[0].head.weight, theirs)


@pytest.mark.usefixtures("tiny_vit")
def test_a_teacher_speaks_of_the_datas_classes(tmp_path):
    teacher = small(4, {"classes": ["cat", "ant", "wasp", "bee"]}, seed=3)
    dwindle.save(teacher, tmp_path / "teacher")
    data = folders(tmp_path / "d", ["ant", "bee", "cat"], split="train")
    folders(tmp_path / "d", ["ant"], split="val")
    run = Run(recipe(teacher=str(tmp_path / "teacher")), data, tmp_path / "run", device="cpu")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        said, whole = run.learner.teacher(x, 0)["logits"], teacher(x).logits
    torch.testing.assert_close(said, whole[:, [1, 3, 0]])
    for classes, message in (
        (["cat", "ant", "wasp", "fly"], r"does not know the data: 2 of the data's 3 .*no 'bee'"),
        (["a", "b", "c", "d"], "none of the classes of the teacher"),
    ):
        dwindle.save(small(4, {"classes": classes}), tmp_path / "teacher")
        with pytest.raises(DwindleError, match=message):
            Run(recipe(teacher=str(tmp_path / "teacher")), data, tmp_path / "no", device="cpu")


@pytest.mark.usefixtures("tiny_vit")
def test_evaluation_data_in_another_order(tmp_path):
    data = folders(tmp_path / "d", ["ant", "bee", "cat"], split="train")
    elsewhere = folders(tmp_path / "e", ["Bee", "Cat", "zebra"])
    run = trained(Run(recipe(), data, tmp_path / "run", eval_data=elsewhere, device="cpu"))
    assert run.task.eval_images.labels.tolist() == [1] * 3 + [2] * 3 and run.task.eval_images.match.left_out == 3
    results = dwindle.load(tmp_path / "run").extra["results"]
    assert results["images"] == 6 and results["on"] == f"all of {elsewhere}: 6 images"
    assert results["classes"] == 2 and results["matched"] == "by name"
    with pytest.raises(DwindleError, match="classes of the data are not those"):
        os.rename(tmp_path / "d" / "train" / "cat", tmp_path / "d" / "train" / "aardvark")
        Run(recipe(), data, tmp_path / "run", eval_data=elsewhere, device="cpu", resume=True)


# Predictions


def test_predictions_have_names(tmp_path):
    model = build("vit", METHODS["AHT"]())  # five classes
    model.extra = {"classes": ["e", "d", "c", "b", "a"]}
    dwindle.save(model, tmp_path / "model")
    data = folders(tmp_path / "d", ["A", "c", "zebra"])
    told = predict(str(tmp_path / "model"), data, tmp_path / "p.parquet", batch=4)
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["class"] for row in rows] == ["A"] * 3 + ["c"] * 3 + ["zebra"] * 3
    assert [row["label"] for row in rows] == [4] * 3 + [2] * 3 + [None] * 3
    for row in rows:
        assert row["name"] == "edcba"[row["prediction"]] and row["top5_names"] == ["edcba"[i] for i in row["top5"]]
    right = [row["label"] == row["prediction"] for row in rows if row["label"] is not None]
    assert told["labelled"] == 6 and told["top1"] == round(100 * sum(right) / 6, 3)
    assert told["matched"] == "by name" and told["classes"] == 2
    again = predict(str(tmp_path / "model"), data, tmp_path / "p.parquet", batch=4)
    assert {**again, "done_before": 0} == told
    told = predict(str(tmp_path / "model"), folders(tmp_path / "f", ["x"]), tmp_path / "q.parquet")
    row = pq.read_table(tmp_path / "q.parquet").to_pylist()[0]
    assert row["class"] == "x" and row["label"] is None and told["matched"] is None and "none of the" in told["why"]
    assert "top1" not in told


# Held-out images


def test_the_held_out_are_those_of_every_run(tmp_path):
    data = folders(tmp_path / "d", ["ant", "bee"], each=20)
    train, held, kept = training_and_evaluation(data, None, 0.1)
    assert (len(train), len(held)) == (36, 4) and np.bincount(held.labels).tolist() == [2, 2]
    assert held.about()["on"] == f"10% held out of {data} by seed 0: 4 images"
    assert not set(train.rows) & set(held.rows)
    model = small(2, {"classes": ["ant", "bee"], "holdout": kept, "data": {"train": data}})
    assert evaluation_images(model, data).rows.tolist() == held.rows.tolist()
    assert len(evaluation_images(model, data, holdout=0)) == 40
    assert "trained on" in evaluation_images(model, data, holdout=0).where
    assert "trained on" in evaluation_images(model, data, holdout=0.2).where
    assert evaluation_images(model, data, holdout=0.1).rows.tolist() == held.rows.tolist()
    for damaged in (5, [], {"share": "much"}, {"share": 0.5}, {"share": 2.0, "seed": 0}):
        assert len(evaluation_images(small(2, {"classes": ["ant", "bee"], "holdout": damaged}), data)) == 40
    moved = str(tmp_path / "moved")
    os.rename(data, moved)
    assert evaluation_images(model, moved).rows.tolist() == held.rows.tolist()
    ours, theirs = splits_for(model, moved)
    assert (ours.rows.tolist(), theirs.rows.tolist()) == (train.rows.tolist(), held.rows.tolist())
    folders(tmp_path / "d", ["ant", "bee"], each=20)
    Image.new("RGB", (40, 40)).save(tmp_path / "d" / "ant" / "new.png")
    changed = evaluation_images(model, data)
    assert len(changed) == 41 and "images it was trained on among them" in changed.summary()
    assert len(evaluation_images(small(2, {"classes": ["ant", "bee"]}), data)) == 41
    same = training_and_evaluation(data, None, 0)
    assert len(same[0]) == len(same[1]) == 41 and "which it was trained on" in same[1].where and same[2] == {}


def test_splits_are_taken_as_they_are_and_one_alone_is_parted(tmp_path):
    data = folders(tmp_path / "d", ["ant", "bee"], each=10, split="train")
    train, held, kept = training_and_evaluation(data, None, 0.2)
    assert (len(train), len(held)) == (16, 4) and held.where == f"20% held out of split train of {data} by seed 0"
    model = small(2, {"classes": ["ant", "bee"], "holdout": kept})
    assert evaluation_images(model, data).rows.tolist() == held.rows.tolist()
    with pytest.raises(DwindleError, match="no split 'test', it has train"):
        evaluation_images(small(2), data)
    folders(tmp_path / "d", ["ant", "bee"], each=1, split="val")
    assert [len(part) for part in training_and_evaluation(data, None, 0.2)[:2]] == [20, 2]
    assert open_data(data, "test").where == f"split val of {data}"
    inner = hold_out(train, 0.25)[1]
    assert inner.where == f"25% held out of the rest of split train of {data} by seed 0"


@pytest.mark.usefixtures("tiny_vit")
def test_a_run_says_what_it_was_measured_on(tmp_path):
    data = folders(tmp_path / "d", ["ant", "bee"], each=10)
    runs = [trained(Run(recipe(seed=seed), data, tmp_path / f"{seed}", device="cpu")) for seed in (0, 1)]
    for run in runs:
        model = dwindle.load(run.out)
        assert model.extra["results"]["on"] == f"10% held out of {data} by seed 0: 2 images"
        assert model.extra["results"]["images"] == 2 and len(run.task.train_images) == 18
        assert "held out" in (run.out / "README.md").read_text()
        assert evaluate(model, loader(evaluation_images(model, data), 8))["top1"] == model.extra["results"]["top1"]
    assert runs[0].task.eval_images.rows.tolist() == runs[1].task.eval_images.rows.tolist()


# Corrupt images


def broken(root, *names):
    for name in names:
        path = root / name
        path.write_bytes(path.read_bytes()[:60])


@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("resident", [False, True])
def test_a_corrupt_image_has_another_of_its_class_in_its_place(tmp_path, resident):
    data = folders(tmp_path / "d", ["ant", "bee"], each=6, split="train")
    folders(tmp_path / "d", ["ant", "bee"], each=3, split="val")
    broken(tmp_path / "d", "train/ant/5.png", "train/bee/0.png", "val/bee/1.png")
    options = {"resident": resident, "batch": 4, "epochs": 2}
    with pytest.raises(DwindleError, match=r"(train|val)/(ant|bee)/[015]\.png'.*; --skip-corrupt"):
        trained(Run(recipe(**options), data, tmp_path / "no", device="cpu"))
    run = trained(Run(recipe(**options, skip_corrupt=True), data, tmp_path / "run", device="cpu"))
    assert run.steps_per_epoch == 3 and run.history[-1]["images"] == 5
    listed = [json.loads(line) for line in (tmp_path / "run" / "corrupt.jsonl").read_text().splitlines()]
    assert sorted(row["image"] for row in listed) == ["ant/5.png", "bee/0.png", "bee/1.png"]
    clean = tmp_path / "clean"
    for path in (tmp_path / "d").rglob("*.png"):
        to = clean / path.relative_to(tmp_path / "d")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
    for bad, instead in (("train/ant/5.png", "train/ant/0.png"), ("train/bee/0.png", "train/bee/1.png")):
        (clean / bad).write_bytes((clean / instead).read_bytes())
    (clean / "val/bee/1.png").unlink()
    same = trained(Run(recipe(**options), str(clean), tmp_path / "same", device="cpu"))
    assert [row["total"] for row in same.history] == [row["total"] for row in run.history]
    assert same.history[-1]["top1"] == run.history[-1]["top1"]
    broken(tmp_path / "d", *(f"train/bee/{i}.png" for i in range(1, 6)))
    with pytest.raises(DwindleError, match="None of the images like"):
        trained(Run(recipe(**options, skip_corrupt=True), data, tmp_path / "all", device="cpu"))
