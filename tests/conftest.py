"""What tests share: tiny backbones of every kind, and each method set so that tokens halt at many depths."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from timm.layers import SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import dwindle
from dwindle.methods import Method

torch.set_num_threads(1)  # two test processes share two cores, and the models are tiny
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
    "hf_vit": lambda: _hf("ViTForImageClassification", "ViTConfig"),
    "hf_deit": lambda: _hf("DeiTForImageClassification", "DeiTConfig"),
    "hf_deit_teacher": lambda: _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "hf_dinov2": lambda: _hf("Dinov2ForImageClassification", "Dinov2Config"),
    "hf_dinov2_swiglu": lambda: _hf("Dinov2ForImageClassification", "Dinov2Config", use_swiglu_ffn=True),
    "hf_registers": lambda: _hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"),
}

# Each method so that it halts some tokens at every depth of a random network, and so that it halts none.
METHODS: dict[str, Callable[[], Method]] = {
    "AHT": lambda: dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6),
    "AHT_printed": lambda: dwindle.AHT.as_printed(stages=(1, 3), gamma=2.0, beta=-1.0),
    "AHT_class": lambda: dwindle.AHT.as_printed(stages=(2,), gamma=2.0, beta=-0.5, halt_class=True),
    "AViT": lambda: dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2),
    "AViT_class_kept": lambda: dwindle.AViT(gamma=1.5, beta=-1.0, target_depth=2, halt_class=False),
    "Static": lambda: dwindle.Static(attention=True),
}
OFF: dict[str, Callable[[], Method]] = {
    "AHT": lambda: dwindle.AHT(stages=(1, 2), beta=-1e9),
    "AViT": lambda: dwindle.AViT(beta=-1e9, target_depth=2),
    "Static": lambda: dwindle.Static(),
}


def build(backbone: str, method: Method, dtype: torch.dtype = torch.float32, seed: int = 0) -> dwindle.AdaptiveViT:
    """An adapted tiny model with weights large enough that tokens differ, in eval mode."""
    torch.manual_seed(seed)
    vit = BACKBONES[backbone]()
    for name, value in vit.named_parameters():
        nn.init.normal_(value, std=0.3 if value.dim() > 1 else 0.1)
        if value.dim() == 1 and "norm" in name and "weight" in name:
            nn.init.ones_(value)
    model = dwindle.adapt(vit, method).to(dtype).eval()
    for name, value in model.method.named_parameters():
        if "planner" in name:
            nn.init.normal_(value, std=0.5)
    if isinstance(method, dwindle.AHT):
        method.bar.fill_(0.0)
    return model


def images_for(model: dwindle.AdaptiveViT, count: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    height, width = model.backbone.shape.image
    scale = torch.linspace(0.5, 2, count).view(-1, 1, 1, 1)  # so that images differ in how long they take
    return (torch.randn(count, 3, height, width, generator=generator) * scale).to(dtype)
