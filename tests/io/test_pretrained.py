"""Adapted Hugging Face models written as transformers keeps models, and read again."""

from __future__ import annotations

import json

import pytest
import torch

import dwindle
from dwindle.errors import DwindleError
from dwindle.io.pretrained import from_pretrained, save_pretrained
from dwindle.methods.tome import ToMe
from shared.encoders import encoder, lively, pictures
from shared.tiny import build

transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")


@torch.no_grad()
def test_a_model_comes_back_and_transformers_alone_reads_the_static_one(tmp_path):
    vit = lively(encoder("ViTForImageClassification"))
    images = pictures()
    static = vit(images).logits
    model = dwindle.adapt(vit, dwindle.AHT(stages=(1, 2), gamma=2.0)).eval()
    model.method.trained = True
    wanted = model(images)
    folder = model.save_pretrained(tmp_path / "one")
    again = dwindle.AdaptiveViT.from_pretrained(folder)
    torch.testing.assert_close(again(images).logits, wanted.logits)
    assert again.method.config == model.method.config
    plain = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert type(plain) is type(vit)
    torch.testing.assert_close(plain.eval()(images).logits, static)
    half = dwindle.AdaptiveViT.from_pretrained(folder, dtype=torch.bfloat16)
    assert {value.dtype for value in half.vit.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_a_part_of_a_larger_model(tmp_path):
    clip = lively(encoder("CLIPModel"))
    call = {"pixel_values": pictures(), "input_ids": torch.arange(8).flip(0)[None]}
    dwindle.adapt(clip, ToMe(r=3), inside="vision_model").eval()
    again = from_pretrained(save_pretrained(clip, tmp_path))
    assert type(again) is type(clip) and type(dwindle.adaptive_part(again).method) is ToMe
    torch.testing.assert_close(again(**call).logits_per_image, clip(**call).logits_per_image)


def test_what_is_not_read_and_not_written(tmp_path):
    with pytest.raises(DwindleError, match="no Hugging Face model"):
        build("vit", dwindle.Static()).save_pretrained(tmp_path / "timm")
    encoder("ViTModel").save_pretrained(tmp_path / "static")
    with pytest.raises(DwindleError, match="holds no folder 'dwindle'"):
        from_pretrained(tmp_path / "static")
    folder = dwindle.adapt(encoder("ViTModel"), dwindle.Static()).save_pretrained(tmp_path / "named")
    config = json.loads((folder / "config.json").read_text())
    for name in ("AutoModel", "os", "modeling_utils", ["x"], None):
        auto_map = {"AutoModel": "code.Model"}  # never looked at
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name], "auto_map": auto_map}))
        with pytest.raises(DwindleError, match="which is no model of transformers"):
            from_pretrained(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(DwindleError, match="cannot be read"):
        from_pretrained(folder)
