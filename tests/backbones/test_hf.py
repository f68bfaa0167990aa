"""Every Hugging Face encoder that is taken, called as transformers calls it."""

from __future__ import annotations

import pytest
import torch

import dwindle
from dwindle.core.packed import Packed
from dwindle.errors import DwindleError
from dwindle.methods.tome import ToMe
from shared.encoders import KINDS, call_of, cut, encoder, lively, pictures, tensors

pytest.importorskip("transformers", reason="extra `hf` is not installed")


def same(given, wanted, tolerance=1e-9):
    assert len(tensors(given)) == len(tensors(wanted)) > 0
    for one, other in zip(tensors(given), tensors(wanted)):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nothing_halted_is_the_wrapped_model_in_all_that_it_answers(kind):
    vit = lively(encoder(kind)).double()
    images = pictures(kind, dtype=torch.float64)
    call = call_of(kind, images)
    wanted, every = vit(**call), vit(**call, output_hidden_states=True)
    model = dwindle.adapt(vit, dwindle.Static()).eval()
    out, states = model(**call), model(**call, output_hidden_states=True)
    assert type(out) is type(wanted) and list(out) == list(wanted)
    assert list(states) == list(every)
    same(out, wanted)
    same(states, every)
    assert out.trace.shape == out.features.shape[:2] == (len(images), model.backbone.shape.tokens())
    # What runs fast embeds and reads out by itself.
    run, alone = model.run(images, Packed.start), model(images)
    pretraining = "Masked" in kind or "PreTraining" in kind  # whose logits are of patches
    if not pretraining:
        same(run.logits, alone.logits)
    assert len(run.logits) == len(images) and run.logits.dim() == 2


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_masked_is_packed_and_a_checkpoint_holds_it(kind, tmp_path):
    model = dwindle.adapt(lively(encoder(kind)).double(), ToMe(r=3)).eval()
    images = pictures(kind, dtype=torch.float64)
    packed, masked = model(images, layout="packed"), model(images, layout="masked")
    assert torch.equal(packed.trace.depth, masked.trace.depth) and len(packed.trace.depth.unique()) > 2
    same(packed, masked)
    same(packed.features, masked.features)
    same(model(images[1:2]).logits[0], packed.logits[1])
    again = dwindle.load(dwindle.save(model, tmp_path / kind)).double()
    assert type(again.vit) is type(model.vit)
    same(again(images), model(images))


def test_there_are_enough_of_them():
    asked = {name.removesuffix("Backbone") for name in KINDS}
    assert len(KINDS) >= 41 and {"DINOv3ViTModel", "CLIPModel", "Siglip2Model", "TimmWrapperModel"} <= asked


@pytest.mark.parametrize(
    "kind", ["ViTModel", "Dinov2Model", "DINOv3ViTModel", "CLIPModel", "SiglipVisionModel", "BeitModel", "ViTMAEModel"]
)
@torch.no_grad()
def test_images_of_another_size(kind):
    vit = lively(encoder(kind)).double()
    images = torch.randn(2, 3, 48, 64, dtype=torch.float64)
    model = dwindle.adapt(vit, dwindle.Static()).eval()
    out = model(images)
    assert out.trace.grid == (6, 8) and out.features.shape[1] == model.backbone.prefix + 48
    options = model.backbone.request(images, {})[1]
    same(out, vit.get_image_features(**options) if kind == "CLIPModel" else vit(**options))
    same(model.run(images, Packed.start).logits, out.logits)


@torch.no_grad()
def test_an_embedding_is_what_the_model_gives():
    images = pictures()
    for kind, field in (("ViTModel", "pooler_output"), ("CLIPVisionModelWithProjection", "image_embeds")):
        model = dwindle.adapt(lively(encoder(kind)), ToMe(r=3)).eval()
        out = model(images)
        assert model.classes == 0 and torch.equal(out.logits, out[field])
    with pytest.raises(DwindleError, match="no head"):
        model(images, labels=torch.tensor([0, 1, 2]))


@torch.no_grad()
def test_two_towers_are_asked_for_images_alone_or_with_texts():
    model = dwindle.adapt(lively(encoder("CLIPModel")), ToMe(r=3)).eval()
    images = pictures()
    alone, features = model(images), model.get_image_features(pixel_values=images)
    together = model(pixel_values=images, input_ids=torch.arange(8).flip(0)[None])
    assert torch.equal(alone.pooler_output, features.pooler_output)
    directions = torch.nn.functional.normalize(alone.pooler_output, dim=-1)
    torch.testing.assert_close(together.image_embeds, directions)
    assert together.logits_per_image.shape == (3, 1) and together.trace.depth.equal(alone.trace.depth)


@torch.no_grad()
def test_siglip2_takes_cut_images_without_their_padding():
    model = dwindle.adapt(lively(encoder("Siglip2VisionModel")), ToMe(r=3)).eval()
    given = cut(pictures())
    wanted = model(**given)
    assert torch.equal(model(pictures()).pooler_output, wanted.pooler_output)
    padded = {
        "pixel_values": torch.nn.functional.pad(given["pixel_values"], (0, 0, 0, 4)),
        "pixel_attention_mask": torch.nn.functional.pad(given["pixel_attention_mask"], (0, 4)),
        "spatial_shapes": given["spatial_shapes"],
    }
    assert torch.equal(model(**padded).last_hidden_state, wanted.last_hidden_state)
    mixed = given | {"spatial_shapes": torch.tensor([[4, 4], [4, 4], [2, 8]])}
    with pytest.raises(DwindleError, match="2 sizes in patches"):
        model(**mixed)
    with pytest.raises(DwindleError, match="spatial_shapes"):
        model(pixel_values=given["pixel_values"])


def test_refusals_name_the_one_thing_in_the_way():
    transformers = pytest.importorskip("transformers")
    masked = encoder("ViTMAEModel", mask_ratio=0.75)
    eager = encoder("Data2VecVisionModel", attn_implementation="eager")
    small = {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 8, "image_size": 32, "patch_size": 4, "window_size": 4}
    swin = transformers.SwinModel(transformers.SwinConfig(**small))
    for vit, told in ((masked, "mask_ratio = 0.75"), (eager, "eager attention"), (swin, "SwinModel cannot be adapted")):
        with pytest.raises(DwindleError, match=told):
            dwindle.adapt(vit, dwindle.Static())
    model = dwindle.adapt(encoder("ViTModel"), dwindle.Static()).eval()
    for options, told in (
        ({"output_hidden_states": [9]}, "no hidden state 9; 0 is the embedding, 1 to 4"),
        ({"output_attentions": True}, "no maps"),
        ({"attention_mask": torch.ones(3, 17)}, "attention_mask hides"),
    ):
        with pytest.raises(DwindleError, match=told):
            model(pictures(), **options)
    video = dwindle.adapt(encoder("VideoMAEModel"), dwindle.Static()).eval()
    with pytest.raises(DwindleError, match=r"videos \(batch, 4, 3, 32, 32\)"):
        video(pictures())
    with pytest.raises(DwindleError, match="drops patches"):
        video(pictures("VideoMAE"), bool_masked_pos=torch.ones(3, 32, dtype=torch.bool))
    with pytest.raises(DwindleError, match="no head of its own"):
        model.backbone.reset_head(3)


def test_the_loss_is_of_the_models_own_kind_of_problem():
    images, marks = pictures(), torch.eye(5)[:3] + torch.eye(5)[1:4]
    vit = encoder("ViTForImageClassification", problem_type="multi_label_classification")
    wanted = vit(images, labels=marks).loss
    out = dwindle.adapt(vit, dwindle.Static()).eval()(pixel_values=images, labels=marks)
    torch.testing.assert_close(out.loss, wanted)
    assert list(out) == ["loss", "logits"] and out.trace is not None
    taught = dwindle.adapt(encoder("DeiTForImageClassificationWithTeacher"), dwindle.Static()).train()
    out = taught(images, labels=torch.tensor([0, 1, 2]))
    out["loss"].backward()
    assert taught.vit.cls_classifier.weight.grad.abs().sum() > 0
