"""Hugging Face's ViT, DeiT, ViT-MSN, I-JEPA and DINOv2, with and without heads (extra `hf`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hf_base import HuggingFace
from .hf_config import Plain


class HuggingFaceViT(HuggingFace):
    family = "hf"
    takes = "Hugging Face's ViT, DeiT, ViT-MSN, I-JEPA and DINOv2"
    kinds = (
        *("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
        *("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        *("DeiTForMaskedImageModeling", "ViTMSNModel", "ViTMSNForImageClassification"),
        *("IJepaModel", "IJepaForImageClassification"),
        *("Dinov2Model", "Dinov2Backbone", "Dinov2ForImageClassification"),
        *("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone", "Dinov2WithRegistersForImageClassification"),
    )
    plain = Plain

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.distilled = self.kind == "DeiTForImageClassificationWithTeacher"
        self.reads_patches = self.kind.startswith("IJepa") or (
            self.kind.startswith("Dinov2") and self.kind.endswith("ForImageClassification")
        )

    @property
    def prefix(self) -> int:
        if self.kind.startswith("IJepa"):
            return 0
        registers = self.tower.config.num_register_tokens if "Registers" in self.kind else 0
        return (2 if self.kind.startswith("DeiT") else 1) + registers

    def readout(self, stream_BND: Tensor) -> Tensor:
        vit: Any = self.vit
        if self.distilled:
            by_class, by_teacher = self.distilled_logits(stream_BND)
            return (by_class + by_teacher) / 2
        pooled: Tensor
        if not self.reads_patches:
            pooled = self.norm(stream_BND[:, 0])
        elif self.prefix:
            x = self.norm(stream_BND)
            pooled = torch.cat([x[:, 0], x[:, self.prefix :].mean(1)], -1)
        else:
            pooled = self.norm(stream_BND).mean(1)
        if (pooler := getattr(self.tower, "pooler", None)) is not None and self.tower is vit:
            pooled = pooler(pooled[:, None] if self.prefix else self.norm(stream_BND))
        return vit.classifier(pooled) if hasattr(vit, "classifier") else pooled

    @property
    def read_first(self) -> int | None:
        return None if self.reads_patches else self.prefix

    def distilled_logits(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        if not self.distilled:
            return super().distilled_logits(stream_BND)
        vit: Any = self.vit
        x = self.norm(stream_BND[:, :2])
        return vit.cls_classifier(x[:, 0]), vit.distillation_classifier(x[:, 1])
