"""A model of one's own is trained without a recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dwindle
from shared.command import refused, run

QUICK = "--set batch=4 --set augment=none --set method.stages=(2,4) --device cpu"


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for word in "ab":
            (root / "data" / split / word).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / "data" / split / word / f"{i}.png")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), root / "model.safetensors")
    return {"root": root, "data": root / "data", "weights": root}


def test_a_timm_name_and_then_its_checkpoint(places):
    line = (
        f"train --model test_vit --weights {{weights}} --data {{data}} --epochs 1 --budget 0.8 --out {{root}}/a {QUICK}"
    )
    assert run(line + " --set image_size=32", **places).json["images"] == 4
    model = dwindle.load(places["root"] / "a")
    assert type(model.method).__name__ == "AHT" and model.method.budget == 0.8 and model.classes == 2
    assert model.extra["recipe"]["epochs"] == 1 and model.extra["recipe"]["model"] == "test_vit"
    again = "train --model {root}/a --method TopK --data {data} --epochs 1 --out {root}/b " + QUICK
    run(again, **places)
    method = dwindle.load(places["root"] / "b").method
    assert type(method).__name__ == "TopK" and 0 < float(method.keep) < 1


@pytest.mark.parametrize(
    "line, said",
    [
        ("train --data {data} --out x", "neither a recipe nor --model"),
        ("train aht_cifar100 --model test_vit --data {data} --out x", "give the name of a recipe, or --model"),
        ("train aht_cifar100 --epochs 3 --data {data} --out x", "--epochs 3 is for --model"),
        ("train --model test_vit --preset balanced --data {data} --out x", "--preset balanced is for recipes"),
        ("train --model test_vit --method AHTT --data {data} --out x", "did you mean 'AHT'"),
        ("train --model test_vit --method AViT --budget 0.5 --data {data} --out x", "holds none"),
        ("train --model nothing_vit --data {data} --out {root}/c", "unknown model"),
    ],
)
def test_one_sentence_for_bad_input(places, line, said):
    refused(run(line, **places), said)
