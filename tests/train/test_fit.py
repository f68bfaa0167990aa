"""Features made true again without labels: by little that learns, within a budget, with the static model as teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dwindle
from dwindle.evaluate.fidelity import agreement
from dwindle.evaluate.readers import tensors, unlabelled
from dwindle.train.fit import epochs_in, fit_recipe
from shared.command import refused, run

QUICK = "--batch 8 --set lr=0.003 --device cpu --image-size 64 --set give_back={{'hidden':8}}"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Images without classes, and a small timm model's weights, in which tokens differ."""
    root, rng = tmp_path_factory.mktemp("fit"), np.random.default_rng(0)
    (root / "photos").mkdir()
    for i in range(40):
        pixels = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC).save(root / "photos" / f"{i:02d}.png")
    (root / "photos" / "03.png").write_bytes(b"broken")
    torch.manual_seed(0)
    vit = timm.create_model("test_vit", num_classes=1000)
    with torch.no_grad():
        for weight in vit.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
    save_file(vit.state_dict(), root / "model.safetensors")
    return {"root": root, "photos": root / "photos", "weights": root}


@pytest.fixture(scope="module")
def fitted(places):
    line = f"fit test_vit --weights {{weights}} --data {{photos}} --budget 0.6 --epochs 6 --out {{root}}/run {QUICK}"
    return run(line, **places)


def static_model(places) -> dwindle.AdaptiveViT:
    vit = timm.create_model("test_vit")
    vit.load_state_dict(dwindle.io.checkpoint.read_weights(places["root"] / "model.safetensors"))
    vit.set_input_size((64, 64))
    return dwindle.adapt(vit.eval(), dwindle.Static())


def test_features_come_nearer_to_those_of_the_model_it_was(places, fitted):
    """Judged here, by weights read anew; and no large weight has moved."""
    from dwindle.methods.tome import ToMe

    static = static_model(places)
    model = dwindle.load(places["root"] / "run")
    images = list(tensors(unlabelled(model, str(places["photos"])), 20))
    before = agreement(dwindle.adapt(static_model(places).unwrap(), ToMe(budget=0.6)).eval(), images, static)
    after = agreement(model, images, static)
    assert after.patch_cosine.mean() > before.patch_cosine.mean() + 0.01
    assert float(after.cost.mean()) == pytest.approx(0.6, abs=0.05)
    kept, moved = static.vit.state_dict(), model.vit.state_dict()
    differ = {name for name in kept if not torch.equal(kept[name], moved[name])}
    assert differ and all(kept[name].dim() == 1 for name in differ)
    assert model.give_back.hidden > 0 and model.give_back.fc2.weight.abs().sum() > 0


def test_what_it_says_is_what_it_saved(places, fitted):
    told = fitted.json
    assert told["epochs"] == 6 and told["images"] == 4 and "cosine to static" in " ".join(fitted.out.split())
    results = dwindle.load(places["root"] / "run").extra["results"]
    assert results["patch_cosine"] == told["patch_cosine"] and results["class_cosine"] == told["class_cosine"]
    recipe = dwindle.load(places["root"] / "run").extra["recipe"]
    assert recipe["small"] and recipe["task"] == "features" and recipe["layout"] == "packed"


def test_its_own_weights_are_not_what_it_agrees_with(places, fitted):
    line = "fidelity {root}/run --data {photos}"
    refused(run(line, **places), "--against")
    done = run(line + " --against test_vit --weights {weights} --image-size 64", **places)
    held = agreement(
        model := dwindle.load(places["root"] / "run"),
        tensors(unlabelled(model, str(places["photos"])), 16),
        static_model(places),
    )
    assert done.json["patch_cosine"] == pytest.approx(float(held.patch_cosine.mean()), abs=1e-4)


def test_only_what_is_given_back_learns(places, tmp_path):
    line = "fit test_vit --weights {weights} --data {photos} --learns return --epochs 1 --out {out} " + QUICK
    run(line, out=tmp_path / "run", **places)
    model, static = dwindle.load(tmp_path / "run"), static_model(places)
    assert all(torch.equal(a, b) for a, b in zip(model.vit.state_dict().values(), static.vit.state_dict().values()))
    again = "fit {first} --data {photos} --learns return --epochs 1 --out {out} --batch 8 --device cpu"
    done = run(again, first=tmp_path / "run", out=tmp_path / "two", **places)  # a checkpoint goes on from its weights
    assert done.json["images"] == 4


def test_minutes_become_epochs(places):
    recipe = fit_recipe("test_vit", 0.6, weights=str(places["root"]), image_size=64, batch=4)
    short, long = (epochs_in(recipe, str(places["photos"]), minutes, "cpu") for minutes in (0.001, 1.0))
    assert short == 1 and long > 3


@pytest.mark.parametrize(
    "line, said",
    [
        ("fit test_vit --data {photos} --epochs 2 --minutes 1", "give one"),
        ("fit test_vit --data {photos} --learns most", "choice of what learns"),
        ("fit test_vit --data {photos} --method Confidence", "no classes are learnt"),
        ("fit test_vit --data {photos} --method ToMee", "did you mean 'ToMe'"),
        ("fit test_vit --data {photos} --budget 1.5 --weights {weights} --out {root}/a", "share of the static cost"),
        ("fit test_vit --data {root}/gone --weights {weights} --out {root}/b", "not found"),
        ("fit nothing --data {photos} --out {root}/c", "unknown model"),
        ("fit test_vit --data {photos} --minutes 0 --weights {weights}", "above 0"),
    ],
)
def test_one_sentence_for_bad_input(places, line, said):
    refused(run(line, **places), said)
