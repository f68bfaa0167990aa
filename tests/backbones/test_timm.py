"""timm's plain vision transformers by their names: which are taken, that each is right, what is in the others' way."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.models import _registry as registry
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dwindle
from dwindle.core.backbone import backbone_of
from dwindle.core.cost import static_macs
from dwindle.errors import DwindleError
from dwindle.methods.topk import TopK
from shared.tally import SLOW
from shared.tiny import METHODS, OFF, build, images_for

FILES = ("beit", "cait", "deit", "eva", "naflexvit", "vitamin")
FILES += tuple(f"vision_transformer{kind}" for kind in ("", "_hybrid", "_relpos", "_sam"))

# One of each make, small; all run in the slow test.
SOME = (
    "beitv2_base_patch16_224",
    "eva02_tiny_patch14_224",
    "naflexvit_base_patch16_siglip",
    "vit_dpwee_patch16_reg1_gap_256",
    "vit_pe_core_tiny_patch16_384",
    "vit_pwee_patch16_reg1_gap_256",
    "vit_small_patch16_18x2_224",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_resnet26d_224",
    "vit_srelpos_small_patch16_224",
    "vitamin_small_224",
)


def names() -> list[str]:
    """Of timm's classes of plain vision transformers: all that its files of them define."""
    return [name for name in timm.list_models() if registry._model_entrypoints[name].__module__.split(".")[-1] in FILES]


def outlined(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def fewer(name: str) -> dict[str, int]:
    """Blocks; Sapiens 2 has a setting for each."""
    return {} if "sapiens2" in name else {"depth": 2}


def small(name: str) -> nn.Module:
    """Two blocks, on an image of a few patches, with weights at which tokens differ."""
    outline = outlined(name, **fewer(name))
    patch, stem = max(backbone_of(outline).shape.patch), type(getattr(outline, "patch_embed", None)).__name__
    vit = timm.create_model(name, **fewer(name), img_size=max(4 * patch, 128 if stem == "HybridEmbed" else 0)).eval()
    generator = torch.Generator().manual_seed(0)
    for value in vit.parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=0.05, generator=generator)
    return vit


@torch.no_grad()
def holds(name: str) -> None:
    """Nothing halted is timm's own answer; masked is packed."""
    vit = small(name)
    backbone = backbone_of(vit)
    height, width = backbone.shape.image
    images = torch.randn(2, backbone.shape.channels, min(height, 128), min(width, 128))
    expected = vit(images)
    model = dwindle.adapt(vit, TopK(stages=(1,), keep=0.5)).eval()
    packed, masked = model(images, layout="packed"), model(images, layout="masked")
    assert (packed.trace.depth == 1).any() and torch.equal(packed.trace.depth, masked.trace.depth)
    far = float(expected.abs().max()) * 1e-4
    torch.testing.assert_close(packed.logits, masked.logits, atol=far, rtol=1e-4)
    whole = model(images, depths=torch.full_like(packed.trace.depth, backbone.shape.blocks))
    torch.testing.assert_close(whole.logits, expected, atol=far, rtol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_a_name_of_each_make(name):
    holds(name)


@pytest.mark.parametrize("backbone", ["parallel_mlp", "stem", "dinov3", "rope_mixed", "beit", "relative", "naflex"])
@torch.no_grad()
def test_it_is_called_as_timm_calls_it(backbone):
    """timm's own forward computes positions too, and hands them to blocks in whose place the loop runs."""
    model = build(backbone, OFF["ToMe"]())
    images, vit = images_for(model), copy.deepcopy(model).unwrap()
    torch.testing.assert_close(model.forward_features(images), vit.forward_features(images), atol=1e-4, rtol=1e-4)
    ours, theirs = (one.forward_intermediates(images, indices=[1, 3])[1] for one in (model, vit))
    for layer, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(layer, expected, atol=1e-3, rtol=1e-3)
    model = build(backbone, METHODS["ToMe"]())
    torch.testing.assert_close(model.forward_head(model.forward_features(images)), model(images).logits)


@pytest.mark.parametrize("name", SOME)
def test_a_checkpoint_names_it(name):
    vit = outlined(name, num_classes=7)
    described = backbone_of(vit).describe()
    assert described is not None and described["model"] == name and described["options"]["num_classes"] == 7


@pytest.mark.parametrize("name", SOME)
def test_the_cost_is_what_torch_counts(name):
    """Of the whole model at its own image size, stems and all."""
    vit = outlined(name).eval().requires_grad_(False)
    shape = backbone_of(vit).shape
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        vit(torch.empty(1, shape.channels, *shape.image, device="meta"))
    assert static_macs(shape) == pytest.approx(counter.get_total_flops() / 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cait_xxs24_224", "talking heads"),
        ("samvit_base_patch16", "within windows"),
        ("xcit_nano_12_p16_224", "among channels"),
        ("volo_d1_224", "outlookers"),
    ],
)
def test_a_refusal_names_what_is_in_the_way(name, reason):
    with pytest.raises(DwindleError, match=f"cannot be adapted: .*{reason}"):
        backbone_of(outlined(name))


def test_what_a_rotary_setting_changes_is_not_lost_in_a_checkpoint(tmp_path):
    """A name alone would give another model."""
    plain, other = (outlined("vit_small_patch16_rope_224", **o) for o in ({}, {"rope_temperature": 50.0}))
    assert backbone_of(plain).describe() is not None and backbone_of(other).describe() is None


def test_patches_dropped_with_their_positions_are_refused():
    with pytest.raises(DwindleError, match="patch_drop_rate=0"):
        backbone_of(outlined("eva02_tiny_patch14_224", patch_drop_rate=0.5))


def test_a_bias_for_one_grid_takes_one_size():
    model = dwindle.adapt(timm.create_model("test_vit_relpos"), dwindle.Static()).eval()
    height, width = model.backbone.shape.image
    with pytest.raises(DwindleError, match="for each pair"):
        model.backbone.embed(torch.randn(1, 3, height // 2, width // 2))


@pytest.mark.skipif(not SLOW, reason="all of timm's names: DWINDLE_SLOW=1")
def test_at_least_300_names():
    taken, refused = [], []
    for name in names():
        try:
            backbone_of(outlined(name))
        except DwindleError as error:
            refused.append((name, str(error)))
        else:
            taken.append(name)
    print(f"{len(taken)} of {len(taken) + len(refused)} names; refused:", *refused, sep="\n")
    assert len(taken) >= 306 and all("cannot be adapted" in reason for _, reason in refused)


@pytest.mark.skipif(not SLOW, reason="all of timm's names: DWINDLE_SLOW=1")
@pytest.mark.parametrize("name", names() if SLOW else [])
def test_each_name(name):
    vit = outlined(name, **fewer(name))
    if sum(weight.numel() for weight in vit.parameters()) > 1.2e8:
        pytest.skip("too large for this test")
    try:
        backbone_of(vit)
    except DwindleError:
        pytest.skip("refused")
    holds(name)
