"""Segmentation and depth on generated shapes: more pixels out than latents in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import dwindle
from dwindle.io.scenes import IGNORED, Scenes
from dwindle.models.adaperceiver.dense import predict
from dwindle.models.adaperceiver.figures import class_name
from dwindle.models.adaperceiver.recipe import AdaRecipe
from dwindle.tasks.dense import Depth, Segmentation, gradient_loss, maps, metres, of_bins, scale_loss
from dwindle.train.loop import Run
from dwindle.train.recipe import changed
from shared.command import refused
from shared.command import run as command
from shared.perceiver import images, tiny
from shared.scenes import scene, write_scenes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("shapes"))


def run(data, out, *settings, **options) -> Run:
    recipe = AdaRecipe(
        task="segmentation",
        stages=(1.0, 0.0, 0.0),
        model="tiny",
        epochs=12,
        batch=8,
        lr=4e-3,
        workers=0,
        warmup_epochs=0.0,
        eval_every=12,
    )
    return Run(changed(recipe, settings), str(data), out, device="cpu", **options)


@pytest.mark.parametrize("task, name", [("segmentation", "miou"), ("depth", "rmse")])
def test_learns_shapes(shapes, tmp_path, task, name):
    work = run(shapes, tmp_path / "run", f"task={task}", "method.patch=4")
    before, numbers = work.evaluate(), list(work.epochs())[-1]
    if task == "segmentation":
        assert numbers[name] > 60 and numbers[name] > before[name] + 20
    else:
        assert numbers[name] < 2.0 and numbers[name] < before[name] / 2
    model = dwindle.load(tmp_path / "run")
    x = next(iter(work.task.batches(train=False)))[0][:1]
    sizes = {tuple(predict(model, x, task, tokens=t).shape) for t in (1, 4, 16, 30)}
    assert sizes == {(1, 32, 32)}


@pytest.mark.parametrize("task, name", [("segmentation", "miou"), ("depth", "rmse")])
def test_a_dense_checkpoint_is_evaluated_and_drawn(shapes, tmp_path, task, name):
    """By the commands: at every setting what its run finds, a map for each number of tokens, and plain refusals."""
    work = run(shapes, tmp_path / "run", f"task={task}", "epochs=1", "method.mask=open")
    numbers = list(work.epochs())[-1]
    places = {"run": tmp_path / "run", "data": shapes, "out": tmp_path / "out"}
    line = "eval {run} --data {data} --workers 0 --batch 5 --device cpu"
    found = command(line, **places).json
    assert found[name] == pytest.approx(numbers[name], abs=1e-3) and found["images"] == 12
    assert found["gmacs"] == found["gmacs_static"] == numbers["gmacs"]
    fewest = command(line + " --tokens 4", **places).json
    assert fewest[name] == pytest.approx(numbers[f"{name}_fewest_tokens"], abs=1e-3)
    assert fewest["gmacs"] < found["gmacs"] and fewest["tokens"] == 4
    assert command(line + " --limit 3 --width 16 --depth 2", **places).json["images"] == 3

    photos = " ".join(str(shapes / "val" / "images" / f"{i}.png") for i in range(2))
    seen = command(f"view {{run}} {photos} --out {{out}} --device cpu", **places).json
    assert [row["image"] for row in seen["images"]] == ["0.png", "1.png"] and len(seen["figures"]) == 2
    if task == "depth":
        assert all(0 < row["nearest_m"] <= row["farthest_m"] for row in seen["images"])
    else:
        assert all(0.5 < sum(row["classes"].values()) <= 1.002 for row in seen["images"])

    refused(command(line + " --exit 0.5", **places), "--exit 0.5 is for networks that classify")
    refused(command(line + " --policy p", **places), "--policy p is for networks that classify")
    refused(command(line + " --tokens 999", **places), "from 1 to 64")
    refused(command("eval {run} --data {out} --device cpu", **places), "lacks val/images")


def test_features_are_no_maps(shapes, tmp_path):
    dwindle.save(tiny(torch.float32, outputs="dense"), tmp_path / "features")
    for line in ("eval {model} --data {data}", "view {model} {photo}"):
        places = {"model": tmp_path / "features", "data": shapes, "photo": shapes / "val" / "images" / "0.png"}
        refused(command(line + " --device cpu", **places), "gives features of patches, no maps")


def test_names_of_classes(tmp_path):
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for part, i in (("images", 0), ("masks", 1)):
            (tmp_path / split / part).mkdir(parents=True)
            Image.fromarray(scene(draw)[i]).save(tmp_path / split / part / "a.png")
    assert Scenes(str(tmp_path), "train", "segmentation").count_classes() == 3
    (tmp_path / "classes.txt").write_text("noise\nred\nblue\ngreen\n\n")
    scenes = Scenes(str(tmp_path), "train", "segmentation")
    assert scenes.count_classes() == 4 and scenes.classes == ["noise", "red", "blue", "green"]
    list(run(tmp_path, tmp_path / "run", "epochs=1").epochs())
    model = dwindle.load(tmp_path / "run")
    assert model.classes == 4 and model.extra["classes"] == scenes.classes
    (tmp_path / "classes.txt").write_text("noise\n\nblue\n\n")
    assert Scenes(str(tmp_path), "train", "segmentation").classes == ["noise", "", "blue"]
    assert [class_name(["noise", "", "blue"], c) for c in range(4)] == ["noise", "class 1", "blue", "class 3"]
    (tmp_path / "classes.txt").write_bytes("Bäume\n".encode("latin-1"))
    with pytest.raises(dwindle.DwindleError, match=r"classes.txt is no UTF-8"):
        Scenes(str(tmp_path), "train", "segmentation")


def test_a_map_has_the_photographs_resolution(shapes, tmp_path):
    list(run(shapes, tmp_path / "run", "epochs=1", "method.classes=5").epochs())
    model = dwindle.load(tmp_path / "run")
    model.readouts[0].head.bias.data[4] += 100  # a class that has no name
    dwindle.save(model, tmp_path / "run", extra=model.extra | {"classes": ["noise", "red", "blue"]})
    Image.new("RGB", (90, 20)).save(tmp_path / "wide.png")
    assert predict(model, images(1, torch.float32), size=(20, 90)).shape == (1, 20, 90)
    places = {"run": tmp_path / "run", "photo": tmp_path / "wide.png", "out": tmp_path / "out"}
    seen = command("view {run} {photo} --out {out} --device cpu", **places).json
    assert seen["images"][0]["classes"] == {"class 4": 1.0}


def test_only_the_write_head_learns(shapes, tmp_path):
    """D.3, from a classifier's weights."""
    dwindle.save(tiny(torch.float32), tmp_path / "ada")
    work = run(shapes, tmp_path / "run", f"weights={tmp_path / 'ada'}", "freeze_backbone=true", "epochs=1")
    learning = {name.split(".")[2] for name, p in work.model.named_parameters() if p.requires_grad}
    assert learning == {"write", "output_proj", "head"}
    list(work.epochs())


def test_scores_against_a_slow_count():
    draw = torch.Generator().manual_seed(0)
    seen, target = torch.randn(2, 3, 8, 8, generator=draw), torch.randint(0, 3, (2, 8, 8), generator=draw)
    target[0, 0] = IGNORED
    answer, known = seen.argmax(1), target != IGNORED
    patches = seen.flatten(2).mT
    counts = Segmentation.measure(patches, target)["pixels"]
    assert counts.shape == (2, 3, 3) and int(counts.sum()) == int(known.sum())
    pairs = [(answer == c, target == c) for c in range(3)]
    slow = [(one & two & known).sum() / ((one | two) & known).sum() for one, two in pairs]
    found = Segmentation.summary({"pixels": counts.sum(0)}, 2)["miou"]
    assert found == pytest.approx(100 * float(sum(slow)) / 3, abs=1e-4)
    far = torch.rand(2, 8, 8, generator=draw) * 5
    far[1, 2] = 0
    sums = {name: values.sum(0) for name, values in Depth.measure(patches[..., :1], far).items()}
    error = (metres(seen[:, 0]) - far)[far > 0]
    assert Depth.summary(sums, 2)["rmse"] == pytest.approx(float((error**2).mean().sqrt()), abs=1e-4)


def test_losses_are_means_over_what_counts():
    """Per image, for several answers at once; 0 where nothing counts."""
    draw = torch.Generator().manual_seed(0)
    answers, target = torch.randn(2, 3, 16, 4, generator=draw), torch.randint(0, 4, (3, 8, 8), generator=draw)
    target[0, :3], target[2] = IGNORED, IGNORED
    losses = Segmentation.loss(None, answers, target)
    assert losses.shape == (2, 3) and not losses[:, 2].any()
    seen = maps(answers[1], (4, 4), (8, 8))
    for image in range(2):
        one = torch.nn.functional.cross_entropy(
            seen[image : image + 1], target[image : image + 1], ignore_index=IGNORED
        )
        assert float(losses[1, image]) == pytest.approx(float(one), rel=1e-5)
    far = torch.rand(3, 8, 8, generator=draw) * 5
    far[0, :3], far[2] = 0, 0
    losses = Depth.loss(None, answers[..., :1], far)
    error, known = metres(seen[0, 0]).log() - far[0].clamp_min(1e-9).log(), far[0] > 0
    there = error[known]
    sig = ((there**2).mean() - 0.85 * there.mean() ** 2).sqrt()
    edges = float(gradient_loss(error, known.float()))
    assert float(losses[1, 0]) == pytest.approx(float(sig) + 0.5 * edges, rel=1e-5) and edges > 0
    assert losses.shape == (2, 3) and float(losses[:, 2].max()) < 1e-3


def test_bins_and_losses_by_hand():
    """D.4: expectation over bins, SigLoss and the gradient loss, against sums done by hand."""
    scores = torch.tensor([[0.0, -3.0, 0.9]])  # weights 0.1, 0.1, 1.0 of the bins at 0.001, 5.0005 and 10 metres
    assert float(of_bins(scores)) == pytest.approx((0.1 * 0.001 + 0.1 * 5.0005 + 1.0 * 10) / 1.2)
    error = torch.tensor([[1.0, 3.0, 50.0], [2.0, 7.0, 50.0]])
    known = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    assert float(scale_loss(error, known)) == pytest.approx((63 / 4 - 0.85 * (13 / 4) ** 2) ** 0.5)
    # Neighbours differ by 2 and 5 in rows, by 1 and 4 in columns; coarser scales have one known pixel each.
    assert float(gradient_loss(error, known)) == pytest.approx((2 + 5 + 1 + 4) / 4)
    line = torch.arange(9.0).expand(1, 9)  # differs by 1 over 8 gaps of 9, by 2 over 4 of 5, by 4 over 2 of 3, by 8
    assert float(gradient_loss(line, torch.ones(1, 9))) == pytest.approx(8 / 9 + 8 / 5 + 8 / 3 + 8 / 2)
    assert not gradient_loss(torch.full((8, 8), 3.0), torch.ones(8, 8)).any()


def test_gradients_of_depth_are_finite():
    """Also where nothing is known, where all is right, and for one number as for bins."""
    draw = torch.Generator().manual_seed(0)
    far = torch.rand(3, 8, 8, generator=draw) * 5
    far[0, :3], far[2] = 0, 0
    for bins in (1, 16):
        answers = torch.randn(2, 3, 16, bins, generator=draw).requires_grad_()
        Depth.loss(None, answers, far).sum().backward()
        assert answers.grad.isfinite().all() and answers.grad[:, 1].any() and not answers.grad[:, 2].any()
    exact = metres(torch.zeros(1, 1, 8, 8))[:, 0]
    answers = torch.zeros(1, 16, 1, requires_grad=True)
    Depth.loss(None, answers, exact).sum().backward()
    assert answers.grad.isfinite().all()


def test_depths_in_bins(shapes, tmp_path):
    work = run(shapes, tmp_path / "run", "task=depth", "method.classes=32", "epochs=6", "eval_every=6")
    before, numbers = work.evaluate(), list(work.epochs())[-1]
    assert numbers["rmse"] < before["rmse"] - 0.4
    model = dwindle.load(tmp_path / "run")
    x, far = next(iter(work.task.batches(train=False)))
    told = predict(model, x, "depth")
    known = far > 0
    assert float(told.min()) > 0 and float(told.max()) < 10
    sums = {n: v.sum(0) for n, v in Depth.measure(model(x).logits.detach(), far).items()}
    wanted = Depth.summary(sums, len(x))["rmse"]
    assert float(((told - far)[known] ** 2).mean().sqrt()) == pytest.approx(wanted, abs=1e-4)
    deep = np.full((32, 32), 12_000, np.uint16)
    for path in sorted((shapes / "train" / "depths").glob("*.png")):
        copy = tmp_path / "deep" / "train"
        for part in ("images", "depths"):
            (copy / part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(deep).save(copy / "depths" / path.name)
        (copy / "images" / path.name).symlink_to(shapes / "train" / "images" / path.name)
    (tmp_path / "deep" / "val").symlink_to(shapes / "val")
    with pytest.raises(dwindle.DwindleError, match=r"has a depth of 12\.0 m, and bins end at 10 m"):
        list(run(tmp_path / "deep", tmp_path / "far", "task=depth", "method.classes=32").epochs())


def test_maps():
    model = tiny(outputs="dense")
    answers = model(images(2)).logits
    assert maps(answers, (4, 4), (32, 48)).shape == (2, 5, 32, 48)
    assert maps(answers[None].expand(3, -1, -1, -1), (4, 4), (8, 8)).shape == (3, 2, 5, 8, 8)
    torch.testing.assert_close(maps(answers, (4, 4), (4, 4)).flatten(2).mT, answers.float())


def test_ade20k_layout(tmp_path):
    draw = np.random.default_rng(0)
    for split in ("training", "validation"):
        for part, i in (("images", 0), ("annotations", 1)):
            (tmp_path / part / split).mkdir(parents=True)
            Image.fromarray(scene(draw)[i]).save(tmp_path / part / split / "a.png")
    scenes = Scenes(str(tmp_path), "train", "segmentation")
    assert scenes.count_classes() == 150 and set(np.unique(scenes.target(0))) <= {0, 1, IGNORED, IGNORED - 1}


@pytest.mark.parametrize(
    "settings, said",
    [
        (("task=colour",), "unknown task"),
        (("teacher=x",), "from its targets alone"),
        (("mixup=0.5",), "mixup = 0.5: it has no effect"),
        (("augment=rand-m9-inc1",), "augment = rand-m9-inc1: it has no effect"),
        (("erase=0.1",), "erase = 0.1: it has no effect"),
        (("skip_corrupt=true",), "skip_corrupt = true: it has no effect"),
    ],
)
def test_bad_recipes(shapes, tmp_path, settings, said):
    with pytest.raises(dwindle.DwindleError, match=f"(?i){said}"):
        run(shapes, tmp_path / "run", *settings)


def test_bad_data(shapes, tmp_path):
    with pytest.raises(dwindle.DwindleError, match="lacks train/images"):
        run(tmp_path, tmp_path / "run")
    for part in ("images", "masks"):
        (tmp_path / "train" / part).mkdir(parents=True)
    with pytest.raises(dwindle.DwindleError, match="holds no images"):
        run(tmp_path, tmp_path / "run")
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "images" / "a.png")
    with pytest.raises(dwindle.DwindleError, match="no target of its name"):
        run(tmp_path, tmp_path / "run")
    Image.new("L", (9, 8)).save(tmp_path / "train" / "masks" / "a.png")
    with pytest.raises(dwindle.DwindleError, match="not as large as its image"):
        Scenes(str(tmp_path), "train", "segmentation")[0]
    with pytest.raises(dwindle.DwindleError, match="dense network"):
        predict(tiny(), images())
    (tmp_path / "val").symlink_to(tmp_path / "train")
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "train" / "masks" / "a.png")
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    with pytest.raises(dwindle.DwindleError, match=r"a.png has the class 7, and known are 0 to 1"):
        list(run(tmp_path, tmp_path / "run").epochs())
    (tmp_path / "train" / "masks" / "a.png").write_bytes(b"no picture")
    with pytest.raises(dwindle.DwindleError, match=r"Cannot decode the target .*a.png"):
        Scenes(str(tmp_path), "train", "segmentation")[0]
