"""A vision transformer learns maps and features as it learns classes: one loop, the same layouts, the same files."""

from __future__ import annotations

import pytest
import torch

import dwindle
from dwindle.core.cost import block_macs
from dwindle.core.heads import PatchHead
from dwindle.recipes.vision import tiny_test
from dwindle.train.loop import Run
from dwindle.train.recipe import changed
from shared.command import refused
from shared.command import run as command
from shared.scenes import write_scenes
from shared.tally import SLOW
from shared.tiny import BACKBONES, METHODS, OFF, build, images_for


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("shapes"))


def run(data, out, *settings, **options) -> Run:
    given = ("model=test_vit", "weights=none", "image_size=96", "method=ToMe", "method.r=2", "batch=8", "epochs=1")
    recipe = tiny_test()
    recipe.method_options = {}
    return Run(changed(recipe, (*given, *settings)), str(data), out, device="cpu", **options)


@pytest.mark.parametrize("task, name", [("segmentation", "miou"), ("depth", "rmse")])
def test_a_vision_transformer_learns_maps(shapes, tmp_path, task, name):
    work = run(shapes, tmp_path / "run", f"task={task}", "lr=0.003", "method_lr=0.01", "epochs=12", "eval_every=12")
    before, numbers = work.evaluate(), list(work.epochs())[-1]
    better = numbers[name] - before[name] if task == "segmentation" else before[name] - numbers[name]
    assert better > (15 if task == "segmentation" else 2)
    model = dwindle.load(tmp_path / "run")
    x = next(iter(work.task.batches(train=False)))[0][:3]
    with torch.inference_mode():
        masked, packed = model(x, "masked"), model(x, "packed")
    assert packed.logits.shape == (3, 36, 3 if task == "segmentation" else 1)
    torch.testing.assert_close(masked.logits, packed.logits, atol=1e-5, rtol=1e-4)
    found = command(f"eval {tmp_path / 'run'} --data {shapes} --workers 0 --device cpu").json
    assert found[name] == pytest.approx(numbers[name], abs=1e-3) and found["images"] == 12
    # What goes on with these weights has the head as well.
    again = run(shapes, tmp_path / "again", f"task={task}", f"weights={tmp_path / 'run'}")
    assert torch.equal(again.model.dense_head.linear.weight, model.dense_head.linear.weight)


def test_commands_for_classes_refuse_maps(shapes, tmp_path):
    list(run(shapes, tmp_path / "run", "task=segmentation").epochs())
    photo = shapes / "val" / "images" / "0.png"
    for line in (f"predict {{run}} --data {shapes} --out {tmp_path / 'o.parquet'}", f"view {{run}} {photo}"):
        refused(command(line.format(run=tmp_path / "run") + " --device cpu"), "was trained to tell maps of an image")
    refused(command(f"eval {tmp_path / 'run'} --data {shapes} --holdout 0.2 --device cpu"), "no effect on the task")


def test_a_head_for_patches_that_was_never_trained_names_no_class(shapes, tmp_path):
    """Its numbers would be read as the classes of an image."""
    folder = dwindle.save(build("vit", METHODS["AHT"](), outputs=5), tmp_path / "ck")
    photo = shapes / "val" / "images" / "0.png"
    for line in (
        f"eval {folder} --data {shapes} --workers 0",
        f"predict {folder} --data {shapes} --out {tmp_path / 'o.parquet'}",
        f"view {folder} {photo}",
        f"report {folder} --data {shapes} --out {tmp_path / 'page'}",
        f"serve {folder} --port 0",
    ):
        refused(command(f"{line} --device cpu"), "maps of an image")


def test_a_head_for_patches_counts_and_is_exact_without_halting():
    model = build("vit", OFF["ToMe"](), outputs=7)
    x, vit = images_for(model, 2), model.vit
    with torch.inference_mode():
        wanted = model.dense_head(vit.forward_features(x)[:, vit.num_prefix_tokens :])
        torch.testing.assert_close(model(x).logits, wanted)
    shape = model.backbone.shape
    assert shape.classes == 7 and shape.image_macs == 0 and shape.pool_macs == 7 * vit.embed_dim
    assert model.static_macs() == 16 * shape.pool_macs + 16 * shape.token_macs + 4 * block_macs(shape, 17.0)


@pytest.mark.parametrize("backbone", ["vit", "average", "hf_dinov2"])
@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name]().exits_by_confidence])
def test_layouts_agree_on_patches(backbone, method):
    model = build(backbone, METHODS[method](), torch.float64, outputs=3)
    x = images_for(model, 4, torch.float64)
    with torch.inference_mode():
        masked, packed = model(x, "masked"), model(x, "packed")
        alone = model(x[1:2], "packed")
    assert masked.logits.shape == (4, 16, 3) and torch.equal(masked.trace.depth, packed.trace.depth)
    torch.testing.assert_close(masked.logits, packed.logits, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(alone.logits[0], packed.logits[1], atol=1e-9, rtol=1e-9)


@pytest.mark.graphs
@pytest.mark.parametrize("method", ["ToMe", "AHT_merge"] if SLOW else ["AHT_merge"])
def test_prepared_answers_for_patches(method):
    model = build("vit", METHODS[method](), outputs=3)
    fast, x = model.prepare(), images_for(model, 4)
    with torch.inference_mode():
        wanted = model(x, "packed")
    assert fast.path(x) == "graph"
    torch.testing.assert_close(fast(x).logits, wanted.logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("what", ["all", "method"])
def test_saved_and_loaded(tmp_path, what):
    model = build("registers", METHODS["TopK"](), outputs=3)
    dwindle.save(model, tmp_path / "model", what=what)
    x = images_for(model, 2)
    with torch.inference_mode():
        wanted = model(x).logits
        again = dwindle.load(tmp_path / "model", vit=None if what == "all" else model.unwrap())
        torch.testing.assert_close(again(x).logits, wanted)


def test_methods_that_judge_classes_take_no_head_for_patches():
    with pytest.raises(dwindle.DwindleError, match="Confidence stops an image when its class is clear"):
        dwindle.adapt(BACKBONES["vit"](), dwindle.methods.Confidence(), PatchHead(32, 5))


def test_features_are_learnt_without_labels(shapes, tmp_path):
    data = tmp_path / "data"
    for kind in "ab":
        (data / kind).mkdir(parents=True)
        for path in sorted((shapes / "train" / "images").glob("*.png"))[kind == "b" :: 2]:
            (data / kind / path.name).symlink_to(path)
    work = run(data, tmp_path / "run", "task=features", "teacher=static", "method.r=8", "lr=0.0003", "epochs=8")
    before, numbers = work.evaluate(), list(work.epochs())[-1]
    assert before["cosine"] < numbers["cosine"] <= 1
    mixed = run(data, tmp_path / "mixed", "task=features", "teacher=static", "method.r=8", "mixup=1.0")
    (row,) = mixed.epochs()
    assert mixed.task.mixup is not None and 0 < row["total"] < 10
    loaded = dwindle.load(tmp_path / "run")
    assert loaded.extra["task"] == {"name": "features", "answers": "features"} and loaded.dense_head is None


@pytest.mark.parametrize(
    "settings, said",
    [
        (("task=language",), "A vision transformer learns"),
        (("task=features",), "learnt from a teacher"),
        (("task=segmentation", "teacher=static"), "learns from its targets alone, and ToMe asks a teacher nothing"),
        (("task=segmentation", "mixup=0.5"), "mixup = 0.5: it has no effect on the task 'segmentation'"),
        (("task=colour",), "Unknown task 'colour'"),
    ],
)
def test_what_does_not_go_together_is_refused(shapes, tmp_path, settings, said):
    with pytest.raises(dwindle.DwindleError, match=said):
        run(shapes, tmp_path / "run", *settings)
