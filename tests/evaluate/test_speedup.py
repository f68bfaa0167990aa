"""What can be had of a model without training, and what is said where nothing can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.evaluate import speedup as module
from dwindle.evaluate.speedup import Goal, Row, _chosen, speedup
from shared.command import refused, run
from shared.tiny import BACKBONES, METHODS, ONE_GRID, build, images_for


@pytest.fixture(autouse=True)
def eager_alone(monkeypatch):
    """No graph is recorded of models that take less time than that."""
    monkeypatch.setattr(module, "variants_on", lambda place, dtype: ("eager",))
    monkeypatch.setattr(module, "prepared_or_self", lambda model, details: model)


def headless(**options) -> VisionTransformer:
    torch.manual_seed(0)
    given = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 2, "num_classes": 0}
    return VisionTransformer(**(given | options)).eval()


def look(model, images, **options):
    return speedup(model, images, **({"budgets": (0.8, 0.6), "seconds": 0.0} | options))


def test_methods_and_smaller_images_are_compared_with_static():
    vit, images = headless(), torch.randn(20, 3, 32, 32)
    before = vit(images)
    found = look(vit, images, patch_cosine=0.01)
    names = {row.name: row for row in found.rows}
    methods = ("ToMe", "ToMe.for_features", "TopK", "Resolution")
    assert {f"{name} at {budget}" for name in methods for budget in (0.8, 0.6)} == set(names)
    assert names["ToMe at 0.6"].cost == pytest.approx(0.6, abs=0.06) and names["Resolution at 0.6"].cost < 0.7
    for row in found.rows:
        assert 0 < row.ms < 1e4 and row.speedup > 0 and row.kept and -1 <= row.metrics["patch_cosine"] <= 1
    assert names["ToMe at 0.8"].metrics["patch_cosine"] > names["ToMe at 0.6"].metrics["patch_cosine"]
    assert set(found.static) == {"eager"} and {row.kind for row in found.rows} == {"adaptive", "smaller image"}
    assert torch.equal(vit(images), before) and not hasattr(vit.blocks[0].attn, "_fused_before")


def test_a_smaller_image_is_compared_on_the_whole_grid():
    """A constant picture looks alike at any size, but for its borders; features of patches come back on 4 x 4."""
    vit = headless(pos_embed="none", class_token=False, global_pool="avg")
    images = torch.ones(4, 3, 32, 32) * torch.linspace(-1, 1, 4).view(-1, 1, 1, 1)
    found = look(vit, images, patch_cosine=0.5)
    (small,) = [row for row in found.rows if row.kind == "smaller image" and row.name == "Resolution at 0.6"]
    assert small.metrics["patch_cosine"] == pytest.approx(1, abs=1e-3)


def test_accuracy_where_labels_are_given():
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 12)
    with torch.no_grad():
        labels = model.vit(images).argmax(-1)
    found = look(model, images, labels=labels, max_drop=100.0)
    own = found.rows[0]
    assert own.name == "AHT as it is" and own.metrics["drop"] == pytest.approx(100 - own.metrics["top1"])
    with torch.no_grad():
        right = (model(images).logits.argmax(-1) == labels).float().mean()
    assert own.metrics["top1"] == pytest.approx(100 * float(right), abs=1e-3)
    assert "top1" not in look(model, images).rows[0].metrics


@pytest.mark.parametrize("backbone", ONE_GRID)
def test_a_method_that_refuses_the_model_is_left_out(backbone):
    """A model that takes one image size only refuses a smaller image when it is called; other methods are compared."""
    vit = BACKBONES[backbone]().eval()
    found = look(vit, torch.randn(20, 3, 32, 32), max_drop=100.0, budgets=(0.6,))
    assert {row.name for row in found.rows} == {f"{name} at 0.6" for name in ("ToMe", "ToMe.for_features", "TopK")}
    assert list(found.left_out) == ["Resolution at 0.6"]
    assert "takes images of 32 x 32 pixels alone" in found.left_out["Resolution at 0.6"]
    assert all(0 < row.ms < 1e4 and row.metrics["cost"] < 1 for row in found.rows)


def row(name: str, kind: str, cosine: float, faster: float) -> Row:
    goal = Goal(patch_cosine=0.9)
    made = Row(name, kind, 0.7, {"patch_cosine": cosine, "class_cosine": cosine}, None, 10 / faster, faster)
    made.kept = goal.missing(made) <= 0
    return made


@pytest.mark.parametrize(
    "rows, winner, said",
    [
        ([("ToMe at 0.7", "adaptive", 0.95, 1.3), ("ToMe at 0.5", "adaptive", 0.7, 1.8)], "ToMe at 0.7", "1.30x"),
        ([("ToMe at 0.7", "adaptive", 0.95, 1.02)], None, "Nothing is worth it"),
        ([("ToMe at 0.7", "adaptive", 0.85, 1.3)], None, "nearest is ToMe at 0.7 with patch cosine 0.850"),
        (
            [("ToMe at 0.7", "adaptive", 0.95, 1.3), ("Resolution at 0.5", "smaller image", 0.95, 1.5)],
            None,
            "image is better",
        ),
        (
            [("ToMe at 0.7", "adaptive", 0.95, 1.3), ("Resolution at 0.5", "smaller image", 0.6, 1.5)],
            "ToMe at 0.7",
            "1.",
        ),
        ([], None, "No method reaches"),
    ],
)
def test_who_wins(rows, winner, said):
    found, told = _chosen([row(*one) for one in rows], Goal(patch_cosine=0.9), {"eager": 10.0, "onnxruntime": 12.0})
    assert (found.name if found else None) == winner and said in told and told.endswith(".") and ". " not in told


def test_bad_input():
    images = torch.randn(4, 3, 32, 32)
    for options, said in (
        ({"max_drop": 1.0}, "no head"),
        ({"patch_cosine": 1.2}, "between 0 and 1"),
        ({"budgets": (1.5,)}, "between 0 and 1"),
        ({"budgets": ()}, "no budgets"),
    ):
        with pytest.raises(dwindle.DwindleError, match=said):
            look(headless(), images, **options)
    with pytest.raises(dwindle.DwindleError, match="cannot be adapted"):
        look(torch.nn.Conv2d(3, 3, 1), images)
    low = look(headless(), images, budgets=(0.05,), patch_cosine=0.5)
    assert "cannot be reached" in low.left_out["TopK at 0.05"]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("speedup")
    rng = np.random.default_rng(0)
    for i in range(9):
        (root / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(
            root / "photos" / "ab"[i % 2] / f"{i}.png"
        )
    dwindle.save(dwindle.adapt(headless(), dwindle.Static()), root / "encoder")
    labelled = dwindle.adapt(headless(num_classes=2), dwindle.Static())
    dwindle.save(labelled, root / "classifier", extra={"classes": ["a", "b"]})
    return {"root": root, "photos": root / "photos", "encoder": root / "encoder", "classifier": root / "classifier"}


def test_the_command_saves_the_winner(places, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WORTH", 0.0)
    methods = {name: kind for name, kind in module.methods_by_name().items() if name != "Resolution"}
    monkeypatch.setattr(module, "methods_by_name", lambda: methods)
    line = "speedup {encoder} --data {photos} --patch-cosine 0.01 --budgets 0.8,0.6 --seconds 0 --out {out}"
    done = run(line, out=tmp_path / "fast", **places)
    assert done.json["winner"] in done.json["message"] and (tmp_path / "fast" / "frontier.png").is_file()
    model = dwindle.load(done.json["out"])
    wanted = next(row for row in done.json["rows"] if row["name"] == done.json["winner"])
    with torch.no_grad():
        macs = float(model.macs(model(torch.randn(3, 3, 32, 32)).trace).mean())
    assert (
        macs / model.static_macs() == pytest.approx(wanted["cost"], abs=0.02)
        and model.extra["speedup"]["winner"] == wanted["name"]
    )


def test_the_command_saves_nothing_where_nothing_is_worth_it(places, tmp_path):
    line = "speedup {encoder} --data {photos} --patch-cosine 0.9999 --budgets 0.5 --seconds 0 --out {out}"
    done = run(line, out=tmp_path / "fast", **places)
    assert done.json["winner"] is None and "Nothing that needs no training keeps" in done.out
    assert not (tmp_path / "fast" / "config.json").exists() and (tmp_path / "fast" / "frontier.png").is_file()


def test_the_command_knows_labels(places, tmp_path):
    line = "speedup {classifier} --data {photos} --max-drop 100% --budgets 0.6 --seconds 0 --out {out}"
    rows = run(line, out=tmp_path / "fast", **places).json["rows"]
    assert all({"top1", "drop", "same_class"} <= set(row) for row in rows)
    refused(run(line.replace("100%", "much"), out=tmp_path / "fast", **places), "expected points")
    refused(run(line.replace("0.6", "1.6"), out=tmp_path / "fast", **places), "share of the static cost")
