"""Checkpoints: what is saved comes back, and what is damaged or foreign is refused in one sentence."""

from __future__ import annotations

import copy
import os
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import dwindle
from dwindle.io.card import model_card
from dwindle.io.checkpoint import find, load_vit_weights, read_config, shipped
from dwindle.io.sets import evaluation_images
from dwindle.models.adaperceiver.images import served
from shared.checkpoint import edit
from shared.tiny import BACKBONES, METHODS, build, images_for


@pytest.mark.parametrize("backbone", BACKBONES)
@torch.no_grad()
def test_round_trip_on_every_backbone(backbone, tmp_path):
    model = build(backbone, METHODS["AHT"]())
    model.method.threshold = 1.2
    dwindle.save(model, tmp_path / "ck", extra={"note": [1, 2]})
    if model.backbone.describe() is None:  # an architecture that cannot be named: the weights need its model again
        with pytest.raises(dwindle.DwindleError, match="vit="):
            dwindle.load(tmp_path / "ck")
        again = dwindle.load(tmp_path / "ck", vit=BACKBONES[backbone]())
    else:
        again = dwindle.load(tmp_path / "ck")
    images = images_for(model)
    assert torch.equal(again(images).logits, model(images).logits)
    assert again.method.threshold == 1.2 and again.extra["note"] == [1, 2] and not again.training


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_round_trip_of_every_method(method, tmp_path):
    model = build("vit", METHODS[method]())
    again = dwindle.load(dwindle.save(model, tmp_path / "ck"))
    assert again.method.config == model.method.config
    assert torch.equal(again(images_for(model)).logits, model(images_for(model)).logits)


def test_the_umask_says_who_may_read(tmp_path):
    model = build("vit", METHODS["Static"]())
    for mask, files, folders in ((0o022, 0o644, 0o755), (0o077, 0o600, 0o700)):
        before = os.umask(mask)
        try:
            folder = dwindle.save(model, tmp_path / f"{mask:o}")
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == folders
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {files}


def test_only_the_method(tmp_path):
    model = build("vit", METHODS["AHT"]())
    dwindle.save(model, tmp_path / "ck", what="method")
    assert all(name.startswith("method.") for name in load_file(tmp_path / "ck" / "model.safetensors"))
    with pytest.raises(dwindle.DwindleError, match="vit="):
        dwindle.load(tmp_path / "ck")
    vit = BACKBONES["vit"]()
    vit.load_state_dict(model.vit.state_dict())
    again = dwindle.load(tmp_path / "ck", vit=vit)
    assert torch.equal(again(images_for(model)).logits, model(images_for(model)).logits)


def test_keys_stay_those_of_the_wrapped_model_and_half_is_only_storage(tmp_path):
    model = build("vit", METHODS["AHT"]())
    dwindle.save(model, tmp_path / "ck", half=True)
    stored = load_file(tmp_path / "ck" / "model.safetensors")
    vit = BACKBONES["vit"]()
    assert not vit.load_state_dict({k: v.float() for k, v in stored.items()}, strict=False).missing_keys
    assert stored["blocks.0.attn.qkv.weight"].dtype == torch.float16
    again = dwindle.load(tmp_path / "ck")
    assert again.vit.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert again.method.gamma.item() == pytest.approx(model.method.gamma.item())


def test_saving_over_an_old_one_keeps_other_files(tmp_path):
    model = build("vit", METHODS["AHT"]())
    folder = dwindle.save(model, tmp_path / "ck")
    (folder / "metrics.csv").write_text("mine")
    dwindle.save(model, folder)
    assert (folder / "metrics.csv").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["ck"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    model = build("vit", METHODS["AHT"]())
    folder = dwindle.save(model, tmp_path / "ck")
    before = (folder / "model.safetensors").read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("dwindle.files.save_file", fail)
    with pytest.raises(dwindle.DwindleError, match="disk full"):
        dwindle.save(model, folder)
    assert (folder / "model.safetensors").read_bytes() == before and sorted(os.listdir(tmp_path)) == ["ck"]


@pytest.fixture
def folder(tmp_path):
    return dwindle.save(build("vit", METHODS["AHT"]()), tmp_path / "ck")


def test_damaged_and_foreign_checkpoints(folder, tmp_path):
    def refused(message, **options):
        with pytest.raises(dwindle.DwindleError, match=message):
            dwindle.load(folder, **options)

    good = (folder / "config.json").read_text()
    for changes, said in (
        ({"method": {"name": "AHTT", "options": {}}}, "did you mean 'AHT'"),
        ({"method": {"name": "AHT", "options": {"colour": 1}}}, "does not know"),
        ({"method": {"name": "AViT", "options": {"target_depth": 2}}}, "does not fit this AViT"),
        ({"library": "other"}, "not written by Dwindle"),
        ({"library": "dwindle", "format": 99}, "format 99"),
    ):
        edit(folder, lambda config: config.update(changes))  # noqa: B023  (called at once)
        refused(said)
    (folder / "config.json").write_text(good.replace("0.05", "0.06"))
    refused("changed after it was saved")
    (folder / "config.json").write_text(good[:50])
    refused("not valid JSON")
    (folder / "config.json").write_text(good)
    refused("does not fit this VisionTransformer", vit=BACKBONES["registers"]())
    refused("belongs to a timm model", vit=BACKBONES["hf_vit"]())

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("truncated")
    (folder / "model.safetensors").unlink()
    refused("is missing")
    (folder / "config.json").unlink()
    refused("no config.json")
    (tmp_path / "file").write_text("x")
    with pytest.raises(dwindle.DwindleError, match="is a file"):
        dwindle.load(tmp_path / "file")
    with pytest.raises(dwindle.DwindleError, match="is a file"):
        dwindle.save(build("vit", dwindle.Static()), tmp_path / "file")


@pytest.mark.parametrize("source", [None, 3, b"x", "", "a" * 5000, "a\0b", "/dev/null", "x\n/y", "../..", ["x"]])
def test_what_names_no_checkpoint(source):
    with pytest.raises(dwindle.DwindleError):
        dwindle.load(source)


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": {1, 2}}, {"classes": 3}, {"preprocess": 5}, {"recipe": []}])
def test_what_is_said_besides_must_be_read_again(extra, tmp_path):
    with pytest.raises(dwindle.DwindleError):
        dwindle.save(build("vit", METHODS["Static"]()), tmp_path / "ck", extra=extra)
    assert not list(tmp_path.iterdir())


def test_names_and_hub_ids(monkeypatch, folder):
    with pytest.raises(dwindle.DwindleError, match="did you mean 'aht_deit_tiny_imagenet'"):
        dwindle.load("aht_deit_tiny_imagenett")
    with pytest.raises(dwindle.DwindleError, match="could not be fetched"):
        dwindle.load("nobody/nothing")
    asked = {}

    def snapshot_download(name, revision=None, allow_patterns=None):
        asked.update(name=name, revision=revision, files=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert dwindle.load("someone/model", revision="v1").method.stages == (1, 2)
    assert asked == {
        "name": "someone/model",
        "revision": "v1",
        "files": ["config.json", "model.safetensors", "tokenizer.json"],
    }


@pytest.mark.parametrize(("name", "classes"), [("aht_deit_tiny_imagenet", 1000), ("aht_deit_tiny_cifar100", 100)])
def test_shipped_checkpoint_is_a_real_aht(name, classes):
    assert find(name) == shipped()[name]
    model = dwindle.load(name)
    assert isinstance(model.method, dwindle.AHT) and model.backbone.shape.classes == classes == len(
        model.extra["classes"]
    )
    assert (find(name) / "README.md").read_text() == model_card(read_config(find(name)), name)
    results = model.extra["results"]
    assert results["gmacs"] / results["gmacs_static"] == pytest.approx(0.67, rel=0.02)


def test_shipped_adaperceiver_is_a_trained_one():
    name = "ada_small_cifar100"
    model = dwindle.load(name)
    assert isinstance(model, dwindle.AdaPerceiver) and model.mask == "open" and len(model.extra["classes"]) == 100
    assert (find(name) / "README.md").read_text() == model_card(read_config(find(name)), name)
    assert model.static_macs() / 1e9 == pytest.approx(model.extra["results"]["gmacs"], abs=1e-4)
    data = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar100"
    if not data.is_dir():
        pytest.skip("no CIFAR-100 beside the repository")
    images = evaluation_images(model, str(data), 128)
    ((x, y),) = served(model, images, "cpu")(128)
    largest, early, least = model(x), model(x, exit=0.8), model(x, tokens=32, depth=6, width=96)
    right = [float((out.logits.argmax(-1) == y).float().mean()) for out in (largest, early, least)]
    assert right[0] > 0.75 and right[1] > right[0] - 0.05 and 0.4 < right[2] < right[0]
    assert model.macs(early.trace).mean() < 0.9 * model.macs(largest.trace).mean()


def test_plain_weights(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    save_file(vit.state_dict(), tmp_path / "w.safetensors")
    torch.save({"model": vit.state_dict()}, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        other = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
        load_vit_weights(other, tmp_path / name)
        assert torch.equal(other.head.weight, vit.head.weight)
    torch.save({"model": print}, tmp_path / "evil.pth")  # a pickle that names a function is not loaded
    for name in ("evil.pth", "missing.pth"):
        with pytest.raises(dwindle.DwindleError):
            load_vit_weights(vit, tmp_path / name)
    with pytest.raises(dwindle.DwindleError, match="does not fit"):
        load_vit_weights(timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=3), tmp_path / "w.pth")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_that_wrappers_put_before_weights(prefix, tmp_path):
    """DistributedDataParallel's and torch.compile's; and compiled blocks', amid a name."""
    model = build("vit", METHODS["AHT"]())
    vit, wrapped = model.vit.state_dict(), {f"{prefix}{name}": w for name, w in model.vit.state_dict().items()}
    compiled = {name.replace("blocks.1.", "blocks.1._orig_mod."): weight for name, weight in vit.items()}
    told = {"epoch": 3, "args": Namespace(lr=1.0)}
    nested = ({"state_dict": wrapped}, {"model": {"state_dict": wrapped}}, {"model_ema": compiled})
    for held in (wrapped, *(told | one for one in nested)):
        torch.save(held, tmp_path / "w.pth")
        other = load_vit_weights(BACKBONES["vit"](), tmp_path / "w.pth")
        assert all(torch.equal(value, vit[name]) for name, value in other.state_dict().items())
    save_file(wrapped, tmp_path / "w.safetensors")
    assert torch.equal(load_vit_weights(BACKBONES["vit"](), tmp_path / "w.safetensors").cls_token, vit["cls_token"])
    whole = {f"{prefix}{name}": weight for name, weight in model.state_dict().items()}
    again = dwindle.load(dwindle.save(model, tmp_path / "ck", weights=whole))
    assert torch.equal(again(images_for(model)).logits, model(images_for(model)).logits)


@pytest.mark.parametrize(
    "held", [[1, 2], {"model": 3}, {1: torch.ones(1)}, torch.ones(2), {"state_dict": {"a": "b"}}, {}]
)
def test_a_file_that_holds_no_weights(held, tmp_path):
    torch.save(held, tmp_path / "w.pth")
    with pytest.raises(dwindle.DwindleError, match=r"w\.pth"):
        load_vit_weights(BACKBONES["vit"](), tmp_path / "w.pth")


@torch.no_grad()
def test_a_rebuilt_model_behaves_like_the_saved_one(tmp_path):
    for options in ({"num_heads": 6}, {"drop_path_rate": 0.1}, {"global_pool": "avg"}, {"qk_norm": True}):
        vit = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=4, **options).eval()
        model = dwindle.adapt(vit, dwindle.Static()).eval()
        again = dwindle.load(dwindle.save(model, tmp_path / next(iter(options))))
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(again(images).logits, model(images).logits), options


def test_a_budget_out_of_reach_still_saves_what_loads(tmp_path):
    model = build("vit", METHODS["AViT"]())
    reached = dwindle.calibrate(model, images_for(model), 0.05)
    assert reached > 0.05
    assert dwindle.load(dwindle.save(model, tmp_path / "ck")).method.threshold > 0


def test_a_card_says_what_the_config_knows(tmp_path):
    from dwindle.io.card import write_card

    results = {"top1": 81.25, "top5": 97.0, "gmacs": 0.5, "gmacs_static": 1.0, "images": 10000}
    extra = {"results": results, "data": {"train": "some/where/cifar100"}, "recipe": {"epochs": 20}, "note": "a test"}
    dwindle.save(build("vit", dwindle.AHT(stages=(1,))), tmp_path / "mine", extra=extra)
    card = write_card(tmp_path / "mine").read_text()
    assert card.startswith("---\nlibrary_name: dwindle")
    for said in ("| 81.25 | 97.00 | 0.500 | 50.0% | 10,000 |", 'dwindle.load("mine")', "train: cifar100", "epochs=20"):
        assert said in card
    assert "some/where" not in card  # no path of the machine it was made on
    write_card(tmp_path / "mine", "bare")
    dwindle.save(build("vit", dwindle.AHT(stages=(1,))), tmp_path / "bare")
    assert "top-1" not in write_card(tmp_path / "bare").read_text()


def test_config_and_weights_of_two_models_are_not_taken_for_one(tmp_path, monkeypatch):
    """As a kill leaves them between the two, when one model is saved over another."""
    vit = BACKBONES["vit"]()
    dwindle.save(dwindle.adapt(copy.deepcopy(vit), dwindle.AHT(stages=(1,), merge="none")), tmp_path / "one")
    replace = os.replace

    def killed(source, target):
        if os.fspath(target).endswith("config.json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        dwindle.save(dwindle.adapt(copy.deepcopy(vit), dwindle.AHT(stages=(1,), merge="nearest")), tmp_path / "one")
    monkeypatch.undo()
    with pytest.raises(dwindle.DwindleError, match="two different models"):
        dwindle.load(tmp_path / "one", vit=vit)
    dwindle.save(dwindle.adapt(copy.deepcopy(vit), dwindle.AHT(stages=(1,), merge="nearest")), tmp_path / "one")
    assert dwindle.load(tmp_path / "one", vit=vit).method.merge == "nearest"


@pytest.mark.parametrize("method", METHODS)
def test_what_calibration_set_is_kept(method, tmp_path):
    model = build("vit", METHODS[method]())
    if model.method.operating_point is None:
        pytest.skip("nothing to turn")
    images = images_for(model)
    dwindle.calibrate(model, images, 0.85)
    dwindle.save(model, tmp_path / "saved")
    again = dwindle.load(tmp_path / "saved", vit=copy.deepcopy(model).unwrap())
    with torch.no_grad():
        assert torch.equal(again(images).trace.depth, model(images).trace.depth)
