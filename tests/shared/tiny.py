"""Tiny backbones of every kind, and each method set so that tokens halt at many depths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch
from timm.layers import HybridEmbed, SwiGLUPacked
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    VisionTransformer,
)
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

import dwindle
from dwindle.core.backbone import backbone_of
from dwindle.core.heads import PatchHead
from dwindle.methods import Method
from dwindle.methods.act import ACT
from dwindle.methods.confidence import Confidence
from dwindle.methods.dynamicvit import DynamicViT
from dwindle.methods.pondernet import PonderNet
from dwindle.methods.random import Random
from dwindle.methods.resolution import Resolution
from dwindle.methods.shallow import Shallow
from dwindle.methods.similarity import Similarity
from dwindle.methods.tome import ToMe
from dwindle.methods.topk import TopK
from shared.encoders import encoder
from shared.tally import SLOW

SIZE = 32
TINY = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}


def _hf(kind: str, config: str, **options) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": SIZE,
    }
    return getattr(transformers, kind)(getattr(transformers, config)(**settings, patch_size=8, num_labels=5, **options))


def _stem(embed_dim: int, patch_size: int, **options) -> HybridEmbed:
    """Patches of what a small convolutional network makes of the image."""
    made = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1))
    return HybridEmbed(made, embed_dim=embed_dim, patch_size=patch_size, **options)


ROTARY = {"use_rot_pos_emb": True, "use_abs_pos_emb": False}
NAFLEX = {"pos_embed_grid_size": (4, 4), "rope_type": "axial", "class_token": False, "global_pool": "avg"}
DINOV3 = {
    "rope_type": "dinov3",
    "rope_rotate_half": True,
    "num_reg_tokens": 2,
    "init_values": 0.5,
    "attn_type": "rope",
    "num_kv_heads": 1,
    "qkv_fused": False,
    "dynamic_img_size": True,
}

BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: VisionTransformer(**TINY),
    "distilled": lambda: VisionTransformerDistilled(**TINY),
    "registers": lambda: VisionTransformer(**TINY, reg_tokens=3, no_embed_class=True),
    "average": lambda: VisionTransformer(**TINY, global_pool="avg", class_token=False),
    "average_with_class": lambda: VisionTransformer(**TINY, global_pool="avg"),
    "attention_pool": lambda: VisionTransformer(**TINY, global_pool="map", class_token=False),
    "layerscale": lambda: VisionTransformer(**TINY, init_values=0.5),
    "qk_norm": lambda: VisionTransformer(**TINY, qk_norm=True),
    "no_bias": lambda: VisionTransformer(**TINY, qkv_bias=False, proj_bias=False),
    "swiglu": lambda: VisionTransformer(**TINY, mlp_layer=SwiGLUPacked, act_layer=nn.SiLU),
    "clip": lambda: VisionTransformer(**TINY, pre_norm=True, act_layer="quick_gelu"),
    "dynamic": lambda: VisionTransformer(**TINY, dynamic_img_size=True),
    "oblong": lambda: VisionTransformer(**{**TINY, "img_size": (SIZE, 48), "patch_size": (8, 16)}),
    "parallel": lambda: VisionTransformer(**TINY, block_fn=ParallelThingsBlock),
    "parallel_mlp": lambda: VisionTransformer(**TINY, block_fn=ParallelScalingBlock, qkv_bias=False),
    "differential": lambda: VisionTransformer(**TINY, block_fn=DiffParallelScalingBlock, init_values=0.5),
    "stem": lambda: VisionTransformer(**{**TINY, "patch_size": 2}, embed_layer=_stem),
    "eva02": lambda: Eva(**TINY, **ROTARY, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True),
    "dinov3": lambda: Eva(**{**TINY, **ROTARY, **DINOV3}),
    "rope_mixed": lambda: Eva(**TINY, **ROTARY, rope_type="mixed", attn_type="rope", global_pool="token"),
    "beit": lambda: Beit(**TINY, use_rel_pos_bias=True, init_values=0.5),
    "relative": lambda: VisionTransformerRelPos(**TINY, rel_pos_type="bias", shared_rel_pos=True, class_token=True),
    "naflex": lambda: NaFlexVit(**TINY, **NAFLEX),
    "hf_vit": lambda: _hf("ViTForImageClassification", "ViTConfig"),
    "hf_deit": lambda: _hf("DeiTForImageClassification", "DeiTConfig"),
    "hf_deit_teacher": lambda: _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "hf_dinov2": lambda: _hf("Dinov2ForImageClassification", "Dinov2Config"),
    "hf_dinov2_swiglu": lambda: _hf("Dinov2ForImageClassification", "Dinov2Config", use_swiglu_ffn=True),
    "hf_registers": lambda: _hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"),
    "hf_dinov3": lambda: encoder("DINOv3ViTModel"),
    "hf_clip": lambda: encoder("CLIPForImageClassification"),
    "hf_siglip": lambda: encoder("SiglipForImageClassification"),
    "hf_beit": lambda: encoder("BeitForImageClassification"),
}

# Whose blocks have no kernels of ours: they run as their family wrote them.
WHOLE = ("swiglu", "hf_dinov2_swiglu", "parallel", "parallel_mlp", "differential", "eva02", "dinov3", "rope_mixed")
WHOLE += ("beit", "relative", "naflex", "hf_dinov3", "hf_beit")

ONE_GRID = ("beit", "relative")

# Each method so that it halts some tokens at every depth of a random network, and so that it halts none.
METHODS: dict[str, Callable[[], Method]] = {
    "AHT": lambda: dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6),
    "AHT_rest": lambda: dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6, merge="rest"),
    "AHT_merge": lambda: dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6, merge="nearest"),
    "AHT_late": lambda: dwindle.AHT(stages=(2, 3), gamma=2.0, follow=0.7, budget=0.6, merge="nearest"),
    "AHT_printed": lambda: dwindle.AHT.as_printed(stages=(1, 3), gamma=2.0, beta=-1.0),
    "AHT_class": lambda: dwindle.AHT.as_printed(stages=(2,), gamma=2.0, beta=-0.5, halt_class=True),
    "AViT": lambda: dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2),
    "AViT_merge": lambda: dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2, halt_class=False, merge="nearest"),
    "AViT_network": lambda: dwindle.AViT(target_depth=2, network=8, bias=-1.0),
    "AViT_class_kept": lambda: dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2, halt_class=False),
    "Static": lambda: dwindle.Static(attention=True),
    "ACT": lambda: parting(ACT(bias=-1.0)),
    "PonderNet": lambda: parting(PonderNet()),
    "PonderNet_token": lambda: PonderNet(gamma=1.5, beta=-1.0, per="token"),
    "PonderNet_sampled": lambda: PonderNet(gamma=1.5, beta=-1.0, per="token", sample=True),
    "Confidence": lambda: parting(Confidence()),
    "Similarity": lambda: parting(Similarity()),
    "Similarity_cosine": lambda: parting(Similarity(kind="cosine")),
    "Similarity_lpips": lambda: parting(Similarity(kind="lpips")),
    "Shallow": lambda: Shallow(2),
    "Resolution": lambda: Resolution(0.6),
    "Random": lambda: Random(stages=(1, 2, 3), keep=0.7),
    "Random_merge": lambda: Random(stages=(1, 3), keep=0.5, merge="nearest"),
    "TopK": lambda: TopK(stages=(1, 2, 3), keep=0.7),
    "TopK_fused": lambda: TopK(stages=(1, 3), keep=0.5, fuse=True),
    "TopK_merge": lambda: TopK(stages=(1, 2), keep=0.5, merge="nearest"),
    "ToMe": lambda: ToMe(r=2.5),
    "ToMe_states": lambda: ToMe(r=3.5, alike="states", even=0.1, until=0.5, proportion=0.6),
    "DynamicViT_merge": lambda: DynamicViT(stages=(1, 2), keep=0.7, merge="nearest"),
    "DynamicViT": lambda: DynamicViT(stages=(1, 2), keep=0.7),
    "DynamicViT_image": lambda: DynamicViT(stages=(1, 2, 3), count="image"),
}
OFF: dict[str, Callable[[], Method]] = {
    "AHT": lambda: dwindle.AHT(stages=(1, 2), beta=-1e9),
    "AViT": lambda: dwindle.AViT(beta=-1e9, target_depth=2),
    "Static": lambda: dwindle.Static(),
    "ACT": lambda: ACT(bias=-1e9),
    "PonderNet": lambda: PonderNet(beta=-1e9),
    "Confidence": lambda: Confidence(threshold=1.0),
    "Similarity": lambda: Similarity(threshold=0.0),
    "Shallow": lambda: Shallow(4),
    "Resolution": lambda: Resolution(1.0),
    "Random": lambda: Random(stages=(1, 2), keep=1.0),
    "TopK": lambda: TopK(stages=(1, 2), keep=1.0),
    "ToMe": lambda: ToMe(r=0),
    "DynamicViT": lambda: DynamicViT(stages=(1, 2), keep=1.0),
}

# Methods of a kind stop tokens in one way, so a backbone meets one of each kind. Who is in none is a kind of its own.
KINDS = (
    ("AHT", "AHT_printed", "AHT_class", "AViT", "AViT_class_kept"),  # each token by what it has summed up
    ("AHT_rest", "AHT_merge", "AHT_late", "TopK_fused", "ToMe"),  # and another token takes it in
    ("AViT_merge", "TopK_merge", "DynamicViT_merge", "Random_merge", "ToMe_states"),  # likewise, by options
    ("TopK", "DynamicViT", "DynamicViT_image", "Random", "AViT_network"),  # by what a layer, or chance, says of it
    ("ACT", "PonderNet", "Confidence", "Similarity", "Similarity_cosine"),  # whole images
    ("Static", "Shallow", "Resolution", "Similarity_lpips"),  # all at once
    ("PonderNet_token", "PonderNet_sampled"),  # each token by its own chance
)


def cover(methods: Iterable[str] = METHODS, turn: int = 0, kinds_each: int | None = None) -> list[tuple[str, str]]:
    """Pairs (backbone, method): every backbone with a method of every kind, and every method with some backbone; all
    pairs under DWINDLE_SLOW=1. Tests with different turns meet different pairs.

    kinds_each: of how many kinds each backbone meets a method, in a test of something else than the first law."""
    methods = list(methods)
    if SLOW:
        return list(product(BACKBONES, methods))
    kinds = [[name for name in kind if name in methods] for kind in KINDS]
    kinds += [[name] for name in methods if not any(name in kind for kind in kinds)]
    kinds = [kind for kind in kinds if kind]
    count = len(kinds) if kinds_each is None else kinds_each
    return [
        (backbone, kind[(place + turn) % len(kind)])
        for place, backbone in enumerate(BACKBONES)
        for kind in (kinds[(place + turn + nth) % len(kinds)] for nth in range(count))
    ]


# How many depths tokens stop at, where it may be fewer than 3: images stop whole, or as random weights have it.
FEWEST = {"Static": 1, "Shallow": 1, "Resolution": 1, "Similarity_lpips": 2, "PonderNet_token": 2} | dict.fromkeys(
    (
        "AHT_late",
        "ACT",
        "PonderNet",
        "Confidence",
        "Similarity",
        "Similarity_cosine",
        "Similarity_lpips",
        "DynamicViT_image",
    ),
    2,
)


def parting(method: Method) -> Method:
    """Marks a method that stops whole images: `build` turns its threshold until the images part."""
    method.parting = True
    return method


def part(model: dwindle.AdaptiveViT) -> None:
    """Set the threshold so that images stop at as many depths as can be, as far as can be from any tie."""
    method = model.method
    sign = -1 if isinstance(method, Similarity) else 1  # stops below the threshold, the others at or above it
    method.threshold = method.operating_point[2]
    with torch.no_grad():
        out = model(images_for(model, dtype=next(model.parameters()).dtype), layout="masked")
    score = sign * out.trace.stack("score", sign * -torch.inf)[:-1, :, 0]  # (L - 1, B)
    measure = {ACT: score.cumsum(0), PonderNet: 1 - (1 - score).cumprod(0)}.get(type(method), score)
    values = measure[measure.isfinite()].unique()

    def quality(i: int) -> tuple[int, float]:
        stops = (measure < (values[i] + values[i + 1]) / 2).long().cumprod(0).sum(0)
        return len(stops.unique()), float((values[i + 1] - values[i]) / values[i].abs())

    best = max(range(len(values) - 1), key=quality)
    method.threshold = sign * float(values[best] + values[best + 1]) / 2


def build(
    backbone: str, method: Method, dtype: torch.dtype = torch.float32, seed: int = 0, outputs: int | None = None
) -> dwindle.AdaptiveViT:
    """An adapted tiny model with weights large enough that tokens differ, in eval mode. outputs: with a head for
    patches that gives so many numbers."""
    if backbone in ONE_GRID and isinstance(method, Resolution) and method.scale < 1:
        pytest.skip("its bias of pairs is for one grid of patches")
    torch.manual_seed(seed)
    vit = BACKBONES[backbone]()
    head = None if outputs is None else PatchHead(backbone_of(vit).shape.width, outputs)
    for name, value in vit.named_parameters():
        nn.init.normal_(value, std=0.3 if value.dim() > 1 else 0.1)
        if value.dim() == 1 and "norm" in name and "weight" in name:
            nn.init.ones_(value)
    model = dwindle.adapt(vit, method, head).to(dtype).eval()
    for name, value in model.method.named_parameters():
        if "planner" in name or "predictor" in name or "network" in name:
            nn.init.normal_(value, std=0.5)
    if isinstance(method, dwindle.AHT):
        method.bar.fill_(0.0)
    if hasattr(method, "parting"):
        part(model)
    return model


def images_for(model: dwindle.AdaptiveViT, count: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    height, width = model.backbone.shape.image
    scale = torch.linspace(0.5, 2, count).view(-1, 1, 1, 1)  # so that images differ in how long they take
    return (torch.randn(count, 3, height, width, generator=generator) * scale).to(dtype)
