"""A narrower network: the leading part of a wider one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from dwindle.recipes.vision import tiny_test
from dwindle.train.build import build_vit
from dwindle.train.narrow import narrowed
from shared.tiny import BACKBONES


def test_the_heads_that_stay_compute_as_before():
    """With the other heads' part of every weight 0, the wide one's leading channels are the narrow one's."""
    wide = VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5).eval()
    narrow = narrowed(wide, 2)
    assert (narrow.embed_dim, narrow.blocks[0].attn.num_heads, narrow.blocks[0].mlp.fc1.out_features) == (16, 2, 64)
    x = torch.randn(2, 5, 24)
    x[..., 16:] = 0
    with torch.no_grad():
        qkv = wide.blocks[0].attn.qkv(x).unflatten(-1, (3, 3, 8))[:, :, :, :2].flatten(2)
        torch.testing.assert_close(narrow.blocks[0].attn.qkv(x[..., :16]), qkv)
        hidden = wide.blocks[1].mlp.fc1(x)[..., :64]
        torch.testing.assert_close(narrow.blocks[1].mlp.fc1(x[..., :16]), hidden)
        assert torch.equal(narrow.pos_embed, wide.pos_embed[..., :16])
    assert narrowed(wide, 3) is wide


def test_a_recipe_names_the_heads(tmp_path):
    recipe = dataclasses.replace(tiny_test(), heads=2, method="Static", method_options={})
    vit = build_vit(recipe, 4)
    assert vit.embed_dim == 128 and vit.head.out_features == 4  # of vit_tiny's 192, in 3 heads
    model = dwindle.adapt(vit, dwindle.Static()).eval()
    images = torch.randn(2, 3, 32, 32)
    again = dwindle.load(dwindle.save(model, tmp_path / "narrow"))
    torch.testing.assert_close(again(images).logits, model(images).logits)


@pytest.mark.parametrize(("vit", "heads", "said"), [("hf_vit", 1, "a timm VisionTransformer can"), ("vit", 3, "1..2")])
def test_what_cannot_be_cut(vit, heads, said):
    model: nn.Module = BACKBONES[vit]()
    with pytest.raises(dwindle.DwindleError, match=said):
        narrowed(model, heads)
