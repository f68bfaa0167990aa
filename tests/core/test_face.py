"""The wrapped model's own methods, and models that stand inside larger ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from dwindle.core.backbone import backbone_of
from dwindle.errors import DwindleError
from dwindle.methods.tome import ToMe
from dwindle.methods.topk import TopK
from shared.encoders import BASE, TEXT, encoder, lively, pictures, tensors
from shared.tiny import BACKBONES, TINY

WAYS = [
    ("forward_features", {}),
    ("forward_intermediates", {"indices": 2, "return_prefix_tokens": True}),
    ("forward_intermediates", {"indices": [0, 2], "stop_early": True, "intermediates_only": True}),
    ("forward_intermediates", {"indices": [1, -1], "output_fmt": "NLC", "norm": True, "output_dict": True}),
    ("get_intermediate_layers", {"n": 2, "reshape": True, "return_prefix_tokens": True}),
]


def timm_vit(**options) -> VisionTransformer:
    return lively(VisionTransformer(**TINY | options)).double().eval()


def same(given, wanted):
    assert len(tensors(given)) == len(tensors(wanted)) > 0
    for one, other in zip(tensors(given), tensors(wanted)):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name, options", WAYS)
@torch.no_grad()
def test_timms_own_methods_give_what_timms_give(name, options):
    images, vit = pictures(dtype=torch.float64), timm_vit(reg_tokens=1)
    model = dwindle.adapt(copy.deepcopy(vit), dwindle.Static()).eval()
    wanted = getattr(vit, name)(images, **options)
    same(getattr(model, name)(images, **options), wanted)
    halting = dwindle.adapt(copy.deepcopy(vit), ToMe(r=3)).eval()
    packed = getattr(halting, name)(images, **options)
    assert [t.shape for t in tensors(packed)] == [t.shape for t in tensors(wanted)]  # all tokens, whatever halted
    halting.layout = "masked"
    same(packed, getattr(halting, name)(images, **options))
    changed = [not torch.allclose(one, other) for one, other in zip(tensors(packed), tensors(wanted))]
    assert any(changed)  # and it is our loop that ran


@pytest.mark.parametrize("backbone", [name for name in BACKBONES if not name.startswith("hf_")])
@torch.no_grad()
def test_of_every_family_of_timms(backbone):
    vit = lively(BACKBONES[backbone]()).double().eval()
    height, width = backbone_of(vit).shape.image
    images = pictures(dtype=torch.float64, side=height)[..., :width]
    images = torch.nn.functional.pad(images, (0, width - images.shape[-1]))
    wanted = [vit.forward_features(images), vit.forward_intermediates(images, indices=[0, 2])]
    model = dwindle.adapt(vit, dwindle.Static()).eval()
    same([model.forward_features(images), model.forward_intermediates(images, indices=[0, 2])], wanted)


@torch.no_grad()
def test_features_head_and_a_new_head():
    images, model = pictures(dtype=torch.float64), dwindle.adapt(timm_vit(), ToMe(r=3)).eval()
    out = model(images)
    same(model.forward_head(model.forward_features(images)), out.logits)
    same(model.forward_features(images), model.states(out))
    assert model.forward_head(out.features, pre_logits=True).shape == (3, 32)
    with model.traced() as traces:
        model.forward_features(images)
        model(images)
    assert [trace.depth.equal(out.trace.depth) for trace in traces] == [True]  # of forward: `out.trace`
    model.reset_classifier(3)
    model.double()
    assert model(images).logits.shape == (3, 3) and model.classes == 3 and model.num_features == 32
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = model.nothing_of_it


@torch.no_grad()
def test_layers_that_are_not_there():
    images, model = pictures(dtype=torch.float64), dwindle.adapt(timm_vit(), ToMe(r=3)).eval()
    for given in ([4], [-5], 0, 5):
        with pytest.raises(DwindleError, match="layers are 0 to 3"):
            model.forward_intermediates(images, indices=given)
    with pytest.raises(DwindleError, match="layers are 0 to 3"):
        model.get_intermediate_layers(images, n=[7])
    with pytest.raises(DwindleError, match="A mask hides"):
        model.forward_features(images, attn_mask=torch.zeros(17, 17, dtype=torch.float64))
    with pytest.raises(DwindleError, match="called with images alone, and 'labelz'"):
        model(images, labelz=1)
    with pytest.raises(DwindleError, match="missing"):
        model.forward_features(None)


def test_training_through_features():
    model = dwindle.adapt(timm_vit().float(), dwindle.AHT(stages=(1, 2))).train()
    model.vit.set_grad_checkpointing()
    model.forward_intermediates(pictures(), indices=[3])[0].square().mean().backward()
    assert model.vit.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0


class Outer(nn.Module):
    """Holds a timm ViT, and asks it for what timm's give."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"vit": vit})
        self.head = nn.Linear(5, 2)

    def forward(self, images: torch.Tensor) -> tuple:
        vit = self.parts["vit"]
        return self.head(vit(images)), vit.forward_features(images), vit.forward_intermediates(images, indices=[1, 3])


@torch.no_grad()
def test_a_timm_model_inside_a_larger_one():
    images, outer = pictures(dtype=torch.float64), Outer(timm_vit()).double().eval()
    wanted, weights = outer(images), copy.deepcopy(outer.state_dict())
    with pytest.raises(DwindleError, match=r"holds one.*inside='parts\.vit'"):
        dwindle.adapt(outer, dwindle.Static())
    assert dwindle.adapt(outer, dwindle.Static(), inside="parts.vit") is outer
    same(outer(images), wanted)
    assert outer.state_dict().keys() == weights.keys()
    dwindle.unwrap(outer)
    assert isinstance(outer.parts["vit"], VisionTransformer)
    same(outer(images), wanted)

    dwindle.adapt(outer, TopK(stages=(1,), keep=0.5), inside="parts.vit")
    part = dwindle.adaptive_part(outer)
    with part.traced() as traces:
        given = outer(images)
    assert len(traces) == 3 and all(trace.mean_depth.max() < 4 for trace in traces)
    assert [t.shape for t in tensors(given)] == [t.shape for t in tensors(wanted)]
    for twin in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        same(twin(images), given)
    with part.traced() as silent:
        pass
    assert silent == []
    with pytest.raises(DwindleError, match="no part 'encoder'; its parts are parts, head"):
        dwindle.adapt(Outer(timm_vit()), dwindle.Static(), inside="encoder")
    with pytest.raises(DwindleError, match="Linear cannot be adapted"):
        dwindle.adapt(Outer(timm_vit()), dwindle.Static(), inside="head")
    for nothing in (nn.Linear(2, 2), dwindle.unwrap(outer)):
        with pytest.raises(DwindleError, match="holds no adaptive part"):
            dwindle.adaptive_part(nothing)


@torch.no_grad()
def test_weights_of_a_part_keep_their_names_and_the_methods_come_beside():
    clip = lively(encoder("CLIPModel")).double()
    before = copy.deepcopy(clip.state_dict())
    dwindle.adapt(clip, dwindle.AHT(stages=(1, 2)), inside="vision_model")
    after = clip.state_dict()
    added = after.keys() - before.keys()
    assert before.keys() <= after.keys() and added and all(name.startswith("vision_model.method.") for name in added)
    clip.load_state_dict({name: value * 0 for name, value in after.items()})
    assert not clip.vision_model.vit.encoder.layers[0].mlp.fc1.weight.any()
    clip.load_state_dict(after)
    same(list(clip.state_dict().values()), list(after.values()))


@torch.no_grad()
def test_towers_inside_hugging_face_models():
    transformers = pytest.importorskip("transformers")
    images = pictures(dtype=torch.float64)
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}
    backbone = transformers.Dinov2Config(**BASE, **stages)
    neck = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    depth = transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=32, patch_size=8, head_hidden_size=8, **neck
    )
    made = [
        (lively(encoder("CLIPModel")), "vision_model", {"input_ids": torch.arange(8).flip(0)[None]}),
        (lively(encoder("SiglipModel")), "vision_model", {"input_ids": torch.arange(8)[None]}),
        (transformers.DepthAnythingForDepthEstimation(depth), "backbone", {}),
        (transformers.DPTForDepthEstimation(transformers.DPTConfig(backbone_config=backbone, **neck)), "backbone", {}),
    ]
    for outer, inside, options in made:
        outer = outer.double().eval()
        wanted = outer(pixel_values=images, **options)
        dwindle.adapt(outer, dwindle.Static(), inside=inside)
        same(outer(pixel_values=images, **options), wanted)
        dwindle.unwrap(outer)
        dwindle.adapt(outer, ToMe(r=3), inside=inside)
        with dwindle.adaptive_part(outer).traced() as traces:
            given = outer(pixel_values=images, **options)
        assert type(given) is type(wanted) and len(traces) == 1 and traces[0].mean_depth.max() < 4
        assert [t.shape for t in tensors(given)] == [t.shape for t in tensors(wanted)]
        dwindle.unwrap(outer)
        same(outer(pixel_values=images, **options), wanted)


@torch.no_grad()
def test_generation_by_a_model_that_looks_through_it():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {name: value for name, value in TEXT.items() if name != "max_position_embeddings"} | {"vocab_size": 60}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**BASE, projection_dim=16),
        text_config=transformers.LlamaConfig(**text | {"num_key_value_heads": 2}),
        image_token_id=59,
        vision_feature_layer=-2,
    )
    llava = lively(transformers.LlavaForConditionalGeneration(config)).eval()
    ids = torch.tensor([[1] + [59] * 16 + [5, 6]])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pictures(count=1)}
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    wanted, logits = llava.generate(**call, **how), llava(**call).logits
    with pytest.raises(DwindleError, match="vision_tower") as told:
        dwindle.adapt(llava, dwindle.Static())
    inside = str(told.value).split("inside='")[1].split("'")[0]
    dwindle.adapt(llava, dwindle.Static(), inside=inside)
    assert llava.generate(**call, **how).equal(wanted)
    dwindle.unwrap(llava)
    dwindle.adapt(llava, ToMe(r=3), inside=inside)
    with dwindle.adaptive_part(llava).traced() as traces:
        assert llava.generate(**call, **how).shape == wanted.shape
    assert len(traces) == 1 and not torch.allclose(llava(**call).logits, logits)


@torch.no_grad()
def test_a_tower_alone_and_transformers_pipelines():
    transformers = pytest.importorskip("transformers")
    from PIL import Image

    photo = Image.new("RGB", (40, 50), (200, 30, 90))
    prepare = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    tower = dwindle.adapt(lively(encoder("CLIPModel")).vision_model, ToMe(r=3)).eval()
    assert tower(pictures()).pooler_output.shape == (3, 32) and tower.config.hidden_size == 32

    model = dwindle.adapt(lively(encoder("ViTForImageClassification")), ToMe(r=3)).eval()
    said = transformers.pipeline("image-classification", model=model, image_processor=prepare)(photo)
    logits = model(prepare(photo, return_tensors="pt").pixel_values).logits
    best = logits.softmax(-1)[0].max()
    assert said[0]["score"] == pytest.approx(float(best), abs=1e-5)
    bare = dwindle.adapt(lively(encoder("ViTModel")), ToMe(r=3)).eval()
    features = transformers.pipeline("image-feature-extraction", model=bare, image_processor=prepare)(photo)
    assert torch.tensor(features).shape == (1, 17, 32)
    assert isinstance(bare(pictures(), return_dict=False), tuple)
