"""adapt() and the loop: what is refused, and what the user hears."""

from __future__ import annotations

import copy

import pytest
import timm
import torch

import dwindle
from conftest import METHODS, build, images_for


def test_readme_example():
    vit = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=7)
    model = dwindle.adapt(vit, dwindle.AHT(stages=(3, 6, 9)))
    out = model(torch.randn(2, 3, 32, 32))
    terms = model.loss(out, torch.tensor([0, 6]))
    assert set(terms) == {"task", "ponder", "target_depth", "total"}
    terms["total"].backward()
    model.eval()
    out = model(torch.randn(2, 3, 32, 32))
    assert out.logits.shape == (2, 7) and out.trace.depth.shape == (2, 5)


@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "resnet18", "vit_base_patch16_rope_reg1_gap_256", "vit_tiny_r_s16_p8_224"],
)
def test_models_that_cannot_be_wrapped(name):
    with pytest.raises(dwindle.DwindleError, match="cannot be adapted"), torch.device("meta"):
        dwindle.adapt(timm.create_model(name), dwindle.AHT())


def test_parallel_blocks_and_other_huggingface_models_are_refused():
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, block_fn=ParallelScalingBlock
    )
    with pytest.raises(dwindle.DwindleError, match="no separate attention"):
        dwindle.adapt(vit, dwindle.Static())
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    config = transformers.BeitConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    with pytest.raises(dwindle.DwindleError, match="BeitForImageClassification cannot be adapted"):
        dwindle.adapt(transformers.BeitForImageClassification(config), dwindle.Static())


def test_what_is_not_a_method_or_adapted_twice():
    model = build("vit", dwindle.Static())
    with pytest.raises(dwindle.DwindleError, match="adaptive already"):
        dwindle.adapt(model, dwindle.Static())
    with pytest.raises(dwindle.DwindleError, match="is no method"):
        dwindle.adapt(model.unwrap(), dwindle.AHT)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(2, 3, 48, 48), r"\(2, 3, 48, 48\).*32 x 32"),
        (torch.randn(2, 1, 32, 32), "batch, 3"),
        (torch.randn(3, 32, 32), "do not fit"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "uint8"),
        (torch.full((2, 3, 32, 32), torch.nan), "NaN"),
        (torch.randn(0, 3, 32, 32), r"\(0, 3, 32, 32\)"),
        (torch.randn(2, 3, 32, 32).half(), r"float16.*images\.to"),
    ],
)
def test_bad_images(images, message):
    for method in METHODS.values():
        model = build("vit", method())
        for layout in ("packed", "masked"):
            with pytest.raises(dwindle.DwindleError, match=message):
                model(images, layout=layout)


def test_bad_labels_and_layout():
    model = build("vit", METHODS["AHT"]()).train()
    out = model(images_for(model, 2))
    for labels in ([0, 5], [-1, 0]):
        with pytest.raises(dwindle.DwindleError, match="5 classes"):
            model.loss(out, torch.tensor(labels))
    for labels in (torch.tensor([0]), torch.tensor([0.0, 1.0]), torch.rand(2, 6)):
        with pytest.raises(dwindle.DwindleError, match="do not fit 2 images"):
            model.loss(out, labels)
    with pytest.raises(dwindle.DwindleError, match="did you mean 'packed'"):
        model(images_for(model), layout="paked")
    for layout in ("packed", "masked"):
        with pytest.raises(dwindle.DwindleError, match="one per image and token"):
            model(images_for(model, 2), layout=layout, depths=torch.ones(2, 3))


def test_unfused_attention_is_switched_and_restored():
    model = build("vit", METHODS["AHT"]())
    vit = model.unwrap()
    for block in vit.blocks:
        block.attn.fused_attn = False
    expected = vit(images_for(model, 2))
    wrapped = dwindle.adapt(vit, dwindle.Static()).eval()
    torch.testing.assert_close(wrapped(images_for(model, 2)).logits, expected, atol=1e-5, rtol=1e-5)
    wrapped.unwrap()
    assert not vit.blocks[0].attn.fused_attn


def test_a_copy_is_independent():
    """EMA and teachers deep-copy a wrapped model: the copy must run its own weights."""
    model = build("vit", METHODS["AHT"]())
    images = images_for(model)
    with torch.no_grad():
        before = model(images).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(twin(images).logits, before)
        assert not torch.allclose(model(images).logits, before)


def test_stochastic_depth_drops_whole_images_in_a_pack():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, drop_path_rate=0.9)
    model = dwindle.adapt(vit, dwindle.Static()).train()
    images = torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        start, block = model.backbone.embed(images), vit.blocks[1]
        from dwindle.tokens import Packed

        after = model.backbone.run(block, Packed.start(start, 1)).x.unflatten(0, (64, -1))
    changed = (after - start).abs().amax(-1) > 0  # (B, N)
    whole = changed.all(-1) | ~changed.any(-1)
    assert whole.all() and 0 < changed.any(-1).sum() < 64


def test_masked_compiles_without_graph_breaks():
    model = build("vit", METHODS["AHT"]())
    images = images_for(model, 2)
    compiled = torch.compile(lambda x: model(x, layout="masked").logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images, layout="masked").logits)


def test_sizes_that_are_no_multiple_of_the_patch():
    for backbone in ("dynamic", "hf_vit"):
        model = build(backbone, dwindle.Static())
        with pytest.raises(dwindle.DwindleError, match="multiples of"):
            model(torch.randn(1, 3, 36, 36))


def test_a_wrapped_model_is_not_wrapped_again_and_checkpointing_is_refused():
    model = build("hf_vit", METHODS["AHT"]())
    with pytest.raises(dwindle.DwindleError, match="unwrap"):
        dwindle.adapt(model.vit, dwindle.Static())
    model.vit.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(dwindle.DwindleError, match="checkpointing"):
        model(images_for(model))
