"""Tiny Hugging Face encoders of every class that is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

SIZE = 32
BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIZE,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 20,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STAGES = {"out_features": ["stage2", "stage4"]}
DECODER = {
    "decoder_hidden_size": 32,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
CUT = {name: value for name, value in BASE.items() if name != "image_size"} | {"num_patches": 16}
TIMM = {"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": SIZE}}


def two(vision: dict[str, Any] = BASE, **options: Any) -> dict[str, Any]:
    return {"text_config": TEXT, "vision_config": vision, **options}


LABELS = {"num_labels": 5}
PAIRS = {"use_relative_position_bias": True}
# class -> class of its config, options of that
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTModel": ("ViTConfig", BASE),
    "ViTForImageClassification": ("ViTConfig", BASE | LABELS),
    "ViTForMaskedImageModeling": ("ViTConfig", BASE | {"encoder_stride": 8}),
    "DeiTModel": ("DeiTConfig", BASE),
    "DeiTForImageClassification": ("DeiTConfig", BASE | LABELS),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", BASE | LABELS),
    "DeiTForMaskedImageModeling": ("DeiTConfig", BASE | {"encoder_stride": 8}),
    "ViTMSNModel": ("ViTMSNConfig", BASE),
    "ViTMSNForImageClassification": ("ViTMSNConfig", BASE | LABELS),
    "IJepaModel": ("IJepaConfig", BASE),
    "IJepaForImageClassification": ("IJepaConfig", BASE | LABELS),
    "Dinov2Model": ("Dinov2Config", BASE),
    "Dinov2Backbone": ("Dinov2Config", BASE | STAGES),
    "Dinov2ForImageClassification": ("Dinov2Config", BASE | LABELS),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", BASE),
    "Dinov2WithRegistersBackbone": ("Dinov2WithRegistersConfig", BASE | STAGES),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", BASE | LABELS),
    "DINOv3ViTModel": ("DINOv3ViTConfig", BASE | {"num_register_tokens": 2, "use_gated_mlp": True}),
    "DINOv3ViTBackbone": ("DINOv3ViTConfig", BASE | STAGES),
    "CLIPVisionModel": ("CLIPVisionConfig", BASE),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", BASE | {"projection_dim": 16}),
    "CLIPModel": ("CLIPConfig", two(projection_dim=16)),
    "CLIPForImageClassification": ("CLIPConfig", two(**LABELS)),
    "SiglipVisionModel": ("SiglipVisionConfig", BASE),
    "SiglipModel": ("SiglipConfig", two()),
    "SiglipForImageClassification": ("SiglipConfig", two(**LABELS)),
    "Siglip2VisionModel": ("Siglip2VisionConfig", CUT),
    "Siglip2Model": ("Siglip2Config", two(CUT)),
    "Siglip2ForImageClassification": ("Siglip2Config", two(CUT, **LABELS)),
    "BeitModel": ("BeitConfig", BASE | PAIRS | {"use_shared_relative_position_bias": True}),
    "BeitForImageClassification": ("BeitConfig", BASE | LABELS | PAIRS),
    "BeitForMaskedImageModeling": ("BeitConfig", BASE | {"vocab_size": 20, "use_mask_token": True}),
    "BeitBackbone": ("BeitConfig", BASE | STAGES | {"use_shared_relative_position_bias": True}),
    "Data2VecVisionModel": ("Data2VecVisionConfig", BASE | PAIRS | {"use_shared_relative_position_bias": True}),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", BASE | LABELS | PAIRS),
    "ViTMAEModel": ("ViTMAEConfig", BASE | {"mask_ratio": 0.0}),
    "ViTMAEForPreTraining": ("ViTMAEConfig", BASE | DECODER | {"mask_ratio": 0.0}),
    "VideoMAEModel": ("VideoMAEConfig", BASE | {"num_frames": 4}),
    "VideoMAEForVideoClassification": ("VideoMAEConfig", BASE | LABELS | {"num_frames": 4}),
    "TimmWrapperModel": ("TimmWrapperConfig", TIMM),
    "TimmWrapperForImageClassification": ("TimmWrapperConfig", TIMM | LABELS),
}


def encoder(kind: str, **options: Any) -> nn.Module:
    """With weights as its class draws them."""
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    config, own = KINDS[kind]
    return getattr(transformers, kind)(getattr(transformers, config)(**own | options)).eval()


def lively(model: nn.Module) -> nn.Module:
    """With weights so large that tokens differ."""
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if value.requires_grad:
            nn.init.normal_(value, std=0.3 if value.dim() > 1 else 0.1)
            if value.dim() == 1 and "norm" in name and "weight" in name:
                nn.init.ones_(value)
    return model


def pictures(kind: str = "", count: int = 3, dtype: torch.dtype = torch.float32, side: int = SIZE) -> Tensor:
    shape = (count, 4, 3, side, side) if kind.startswith("VideoMAE") else (count, 3, side, side)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def cut(images: Tensor) -> dict[str, Tensor]:
    """As SigLIP 2's processor gives images."""
    rows, columns = images.shape[2] // 8, images.shape[3] // 8
    patches = images.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).permute(0, 2, 4, 3, 5, 1)
    patches = patches.flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.int32)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[rows, columns]] * len(images)),
    }


def call_of(kind: str, images: Tensor) -> dict[str, Any]:
    """How transformers' own class is called with these images."""
    given: dict[str, Any] = cut(images) if kind.startswith("Siglip2") else {"pixel_values": images}
    if kind.startswith("ViTMAE"):  # else it draws an order of its own
        given["noise"] = torch.linspace(0, 1, 16, dtype=images.dtype).expand(len(images), -1)
    if kind in ("CLIPModel", "SiglipModel", "Siglip2Model"):
        given["input_ids"] = torch.arange(8).flip(0).expand(2, -1)
    return given


def tensors(value: Any) -> list[Tensor]:
    """All that an answer holds."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]
