"""Features against the static model's, and a promise of them that holds on images nobody looked at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import dwindle
from dwindle.evaluate import calibration
from dwindle.evaluate.calibration import (
    Calibration,
    FidelityGoal,
    keep_promise,
    last_kept,
    most_failures,
    settings_of,
    tail,
)
from dwindle.evaluate.fidelity import agreement, embedding, nearest, static_twin
from dwindle.evaluate.readers import halves, tensors, unlabelled
from dwindle.io.card import model_card
from dwindle.io.config import read_config
from dwindle.io.promise import promise_of, sentence
from dwindle.methods.tome import ToMe
from dwindle.methods.topk import TopK
from dwindle.serve.models import Served
from shared.command import refused, run
from shared.tiny import METHODS, OFF, build, images_for


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("fidelity")
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(140):
        small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(small).resize((40, 40)).save(root / "photos" / f"{i:03d}.png")
    (root / "photos" / "007.png").write_bytes(b"broken")
    dwindle.save(build("vit", ToMe(r=2.5)), root / "model")
    dwindle.save(build("vit", dwindle.Static()), root / "static")
    return {"root": root, "photos": root / "photos", "model": root / "model", "static": root / "static"}


def test_features_against_those_of_the_wrapped_model():
    """By the wrapped model's own forward, computed here."""
    model = build("vit", ToMe(r=2.5))
    images = images_for(model, 6)
    found = agreement(model, [images[:4], images[4:]])
    with torch.no_grad():
        out, wanted = model(images), model.vit.forward_features(images)
        alike = F.cosine_similarity(model.states(out), wanted, dim=-1)
    assert torch.allclose(found.class_cosine, alike[:, 0], atol=1e-5)
    assert torch.allclose(found.patch_cosine, alike[:, 1:].mean(1), atol=1e-5)
    assert found.low == pytest.approx(float(alike[:, 1:].flatten().quantile(0.05)), abs=0.05)
    assert found.cost.mean() == pytest.approx(float(model.cost(out.trace)), abs=1e-5)
    same = out.logits.argmax(-1) == model.vit(images).argmax(-1)
    assert torch.equal(found.same_class, same)
    told = found.summary()
    assert told["images"] == 6 and told["patch_least"] == pytest.approx(float(alike[:, 1:].mean(1).min()), abs=1e-4)


@pytest.mark.parametrize("backbone", ["vit", "average", "attention_pool", "hf_dinov2"])
def test_nothing_halted_agrees_wholly(backbone):
    model = build(backbone, OFF["ToMe"]())
    told = agreement(model, [images_for(model)]).summary()
    assert told["patch_least"] == told["class_least"] == told["patch_q05"] == 1
    assert told["neighbours"] == told["same_class"] == 100


def test_what_an_index_keeps():
    model = build("average_with_class", dwindle.Static())
    images = images_for(model)
    with torch.no_grad():
        pooled = model.vit.forward_features(images)[:, 1:].mean(1)
        assert torch.allclose(embedding(model, model(images)), pooled, atol=1e-5)
    model.vit.reset_classifier(0)
    with torch.no_grad():
        assert torch.allclose(embedding(model, model(images)), model.vit(images), atol=1e-5)


def test_nearest_is_another_image():
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    assert nearest(rows).tolist() == [1, 0, 3, 2]


def test_the_tail_is_the_binomial_one():
    draws = np.random.default_rng(0).binomial(200, 0.05, 400_000)
    for failures in (4, 10, 16):
        assert tail(failures, 200, 0.05) == pytest.approx(float((draws <= failures).mean()), abs=3e-3)
    assert most_failures(58, 0.05) == -1 and most_failures(59, 0.05) == 0
    assert tail(most_failures(500, 0.05), 500, 0.05) <= 0.05 < tail(most_failures(500, 0.05) + 1, 500, 0.05)
    assert FidelityGoal(patch_cosine=0.9).least_images == 59


def test_the_promise_holds_over_random_splits():
    """Scores of a population at 20 settings, calibrated on 300 and looked at on the rest: of 200 splits at most 5%, and
    what chance adds, let more images below than allowed; a choice of the setting without the bound breaks its word."""
    rng = np.random.default_rng(0)
    hardness = rng.gamma(2.0, 1.0, 4000)
    scores = np.stack([1 - 0.004 * step * hardness * rng.uniform(0.8, 1.2, 4000) for step in range(1, 21)])
    goal = FidelityGoal(patch_cosine=0.9)
    most, broken, naive, chosen = most_failures(300, goal.allowed), 0, 0, []
    for _ in range(200):
        order = rng.permutation(4000)
        calibrating, rest = scores[:, order[:300]], scores[:, order[300:]]
        below, truly = (calibrating < 0.9).sum(1), (rest < 0.9).mean(1)
        count = last_kept(below, most)
        assert count > 0
        chosen.append(count)
        broken += truly[count - 1] > goal.allowed
        naive += truly[last_kept(below, int(300 * goal.allowed)) - 1] > goal.allowed
    assert broken <= 0.05 * 200 + 2 * (200 * 0.05 * 0.95) ** 0.5
    assert naive > 2 * broken
    best = int(((scores < 0.9).mean(1) <= goal.allowed).sum())
    assert np.mean(chosen) >= best - 2  # and it is not kept by computing everything


def test_the_first_failure_ends_the_sequence():
    looked_at = iter([0, 3, 9, 0, 0])
    assert last_kept(looked_at, 5) == 2 and list(looked_at) == [0, 0]


@pytest.mark.parametrize("method", [ToMe(r=4), TopK(stages=(1, 2, 3))], ids=["ToMe", "TopK"])
def test_a_model_is_turned_to_the_cheapest_setting_that_keeps_it(method):
    model = build("vit", method)
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(160, 3, 32, 32, generator=generator)
    name = model.method.operating_point[0]
    own = float(getattr(model.method, name))
    settings = settings_of(model)
    assert len(settings) > 3 and float(getattr(model.method, name)) == own
    goal = FidelityGoal(patch_cosine=0.6, confidence=0.8)
    promise, tested = keep_promise(model, images[:80].split(20), goal)
    assert [point.setting for point in tested] == settings[: len(tested)]
    assert promise["setting"] == [name, pytest.approx(float(getattr(model.method, name)))]
    assert promise["below"] <= most_failures(80, 0.2) and 0 < promise["cost"] < 1 and promise["images"] == 80
    model.extra = {"promise": promise}
    assert promise_of(model) == promise
    if len(tested) < len(settings):
        assert tested[-1].below > most_failures(80, 0.2)
    held = agreement(model, [images[80:]])
    assert float((held.patch_cosine < 0.6).float().mean()) < 0.35


def test_a_promise_out_of_reach_says_what_could_be_had(monkeypatch):
    model = build("vit", ToMe(r=4))
    own = model.method.r
    with pytest.raises(dwindle.DwindleError, match=r"at 0\.\d\d of it so many images reach 0\.\d+ \(--patch-cosine\)"):
        keep_promise(model, [images_for(model, 80)], FidelityGoal(patch_cosine=0.9999))
    assert model.method.r == own
    with pytest.raises(dwindle.DwindleError, match="5 images to calibrate on"):
        Calibration(model, [images_for(model, 5)], FidelityGoal(patch_cosine=0.9), None)
    with pytest.raises(dwindle.DwindleError, match="no operating point"):
        settings_of(build("vit", dwindle.Static()))
    assert calibration.BATCH >= 1


def test_broken_images_are_left_out(places):
    model = dwindle.load(places["model"])
    images = unlabelled(model, str(places["photos"]))
    one, other = halves(images)
    assert len(one) + len(other) == 140 and not set(one.rows) & set(other.rows)
    seen = sum(len(x) for part in (one, other) for x in tensors(part, 32))
    assert seen == 139 and [*one.corrupt, *other.corrupt] == [7]


def test_the_command_and_what_it_saves(places, tmp_path):
    done = run("fidelity {model} --data {photos} --batch 32", **places)
    assert done.json["images"] == 139 and 0 < done.json["patch_cosine"] < 1
    keep = "fidelity {model} --data {photos} --patch-cosine 0.6 --confidence 0.8 --out {out}"
    told_of = run(keep, **places, out=tmp_path / "kept")
    promise = told_of.json["promise"]
    assert promise["confidence"] == 0.8 and promise["held_out"]["images"] in (69, 70)
    assert "keep it" in told_of.out
    model = dwindle.load(tmp_path / "kept")
    assert promise_of(model) == promise and "0.8 of images" in sentence(promise)
    assert "**Promise**: at least 0.8 of images" in model_card(read_config(tmp_path / "kept"), "kept")
    assert Served("kept", model).about()["promise"] == promise
    model.method.r += 0.5  # at another setting nothing was promised
    assert promise_of(model) is None
    against = run("fidelity {kept} --data {photos} --against {static}", **places, kept=tmp_path / "kept")
    assert against.json["patch_cosine"] == pytest.approx(promise["held_out"]["patch_cosine"], abs=0.05)


@pytest.mark.parametrize(
    "line, said",
    [
        ("fidelity {model} --data {photos} --patch-cosine 1.5", "between 0 and 1"),
        ("fidelity {model} --data {photos} --out {root}/x", "--patch-cosine or --class-cosine"),
        ("fidelity {model} --data {photos} --patch-cosine 0.5 --limit 20", "to calibrate on"),
        ("fidelity {model} --data {photos} --method TopK", "adapted already"),
        ("fidelity {model} --data {photos} --weights w.pth", "brings its own"),
        ("fidelity {static} --data {photos} --patch-cosine 0.5", "no operating point"),
        ("fidelity nothing --data {photos}", "unknown model or checkpoint"),
        ("fidelity resnet18 --data {photos} --weights {root}/w.pth", "does not exist"),
        ("fidelity test_vit --data {photos} --method AHT --weights {model}", "method without training"),
        ("fidelity {model} --data {root}/gone", "not found"),
    ],
)
def test_one_sentence_for_bad_input(places, line, said):
    refused(run(line, **places), said)


def test_a_plain_name_with_its_weights(places, tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "model.safetensors")
    line = "fidelity test_vit --weights {folder} --image-size 64 --data {photos} --limit 8 --budget 0.7"
    done = run(line, folder=tmp_path, **places)
    assert done.json["cost"] == pytest.approx(0.7, abs=0.05)
    refused(run(line.replace("64", "60"), folder=tmp_path, **places), "multiple of 16, such as 64")
    refused(run("fidelity resnet18 --weights {file} --data {photos}", file=_resnet(tmp_path), **places), "cannot be")


def _resnet(folder):
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model("resnet18").state_dict(), folder / "resnet.safetensors")
    return folder / "resnet.safetensors"


def test_every_method_has_features():
    for name in ("AHT", "TopK_fused", "Confidence"):
        model = build("vit", METHODS[name]())
        assert agreement(model, [images_for(model)], static_twin(model)).summary()["images"] == 5
