"""Hugging Face's CLIP, SigLIP and SigLIP 2: vision towers, with or without projection or head, and two-tower models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from ..core.backbone import Shape
from ..core.parts import linear_macs
from ..core.tokens import Tokens
from ..errors import DwindleError
from ..settings import Above0, AtLeast0, Classes, Depth, Share, Size, Word
from .hf_base import HuggingFace
from .hf_config import Names, Tower


class VisionTower(Tower, total=False):
    projection_dim: Size | None
    attention_dropout: Share
    initializer_factor: AtLeast0
    vision_use_head: bool
    num_patches: Size
    hidden_size: Size


class TextTower(TypedDict, total=False):
    vocab_size: Classes
    hidden_size: Size
    intermediate_size: Size
    projection_dim: Size | None
    projection_size: Size | None
    num_hidden_layers: Depth
    num_attention_heads: Size
    max_position_embeddings: Size
    hidden_act: Word
    layer_norm_eps: Above0
    attention_dropout: Share
    initializer_range: AtLeast0
    initializer_factor: AtLeast0
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None


class TwoTowers(TypedDict, total=False):
    vision_config: VisionTower
    text_config: TextTower
    projection_dim: Size | None
    logit_scale_init_value: float
    initializer_factor: AtLeast0
    num_labels: Classes
    id2label: Names
    label2id: Names


class HuggingFaceCLIP(HuggingFace):
    family = "hf_clip"
    takes = "CLIP"
    kinds: ClassVar[tuple[str, ...]] = (
        *("CLIPVisionModel", "CLIPVisionTransformer", "CLIPVisionModelWithProjection", "CLIPModel"),
        "CLIPForImageClassification",
    )
    two = "CLIPModel"

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        return block(x, None)

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.pre_layrnorm(super().embed(images))
        return embedded

    def normed(self, stream_BND: Tensor) -> Tensor:
        return stream_BND  # CLIP applies its last norm only to the pooled state

    def readout(self, stream_BND: Tensor) -> Tensor:
        vit: Any = self.vit
        logits: Tensor
        if hasattr(vit, "classifier"):
            logits = vit.classifier(stream_BND[:, 1:].mean(1))
            return logits
        pooled: Tensor = self.norm(stream_BND[:, 0])
        return vit.visual_projection(pooled) if hasattr(vit, "visual_projection") else pooled

    @property
    def read_first(self) -> int | None:
        return None if hasattr(self.vit, "classifier") else 1

    @property
    def heads(self) -> list[nn.Module]:
        named = dict(self.vit.named_children())
        return [named[name] for name in ("classifier", "visual_projection") if name in named]

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        name, options = super().request(images, options)
        alone = self.kind == self.two and options.get("input_ids") is None
        return ("get_image_features" if alone else name), options

    @classmethod
    def plain_of(cls, kind: str) -> Any:
        return TwoTowers if kind == cls.two or kind.endswith("ForImageClassification") else VisionTower


class HuggingFaceSigLIP(HuggingFaceCLIP):
    family = "hf_siglip"
    takes = "SigLIP"
    kinds = ("SiglipVisionModel", "SiglipVisionTransformer", "SiglipModel", "SiglipForImageClassification")
    two = "SiglipModel"

    @property
    def prefix(self) -> int:
        return 0

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.embeddings(images, **self.resizing(images))
        return embedded

    def normed(self, stream_BND: Tensor) -> Tensor:
        states: Tensor = self.norm(stream_BND)
        return states

    def pooled(self, answer: Any) -> Tensor | None:
        return None if self.pooler is None else getattr(answer, "pooler_output", None)

    @property
    def pooler(self) -> Any:
        return getattr(self.tower, "head", None)

    def readout(self, stream_BND: Tensor) -> Tensor:
        x = self.normed(stream_BND)
        if hasattr(self.vit, "classifier"):
            logits: Tensor = self.vit.classifier(x.mean(1))
            return logits
        pooled: Tensor = x.mean(1) if self.pooler is None else self.pooler(x)
        return pooled

    @property
    def read_first(self) -> int | None:
        return None

    def measure(self) -> Shape:
        shape = super().measure()
        if self.pooler is None:
            return shape
        # SigLIP's own code also pools where a classifier reads the mean of the patches. The pooling has one query. Each
        # patch costs its key, its value and the two products of attention; each image two projections and the MLP.
        projection = shape.width * shape.width
        per_image = 2 * projection + linear_macs(self.pooler.mlp)
        return replace(shape, image_macs=shape.image_macs + per_image, pool_macs=2 * projection + 2 * shape.width)


class HuggingFaceSigLIP2(HuggingFaceSigLIP):
    """A family whose processor cuts images into patches. It takes such patches, or plain images."""

    family = "hf_siglip2"
    takes = "SigLIP 2"
    kinds = ("Siglip2VisionModel", "Siglip2VisionTransformer", "Siglip2Model", "Siglip2ForImageClassification")
    two = "Siglip2Model"

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.embeddings(self._cut(images), self._grids(images))
        return embedded

    @property
    def image(self) -> tuple[int, int]:
        side = int(self.tower.config.num_patches**0.5) * self.tower.config.patch_size
        return side, side

    @property
    def changeable(self) -> tuple:
        return self.tower.config.num_patches, *super().changeable[1:]

    def given(self, images: Any, options: dict[str, Any]) -> Any:
        """The images (B, C, height, width), assembled if they came as patches (B, patches, side * side * channels)."""
        grids = options.pop("spatial_shapes", None)
        options.pop("pixel_attention_mask", None)
        if not isinstance(images, Tensor) or images.dim() != 3:
            return images
        if grids is None:
            raise DwindleError("pixel_values of cut images came without spatial_shapes; give what the processor gave.")
        if len(sizes := set(map(tuple, grids.tolist()))) != 1:
            raise DwindleError(
                f"The images of this batch have {len(sizes)} sizes in patches ({sorted(sizes)[:3]}...); give images of "
                "one size at a time, or resize them before they are cut."
            )
        rows, columns = sizes.pop()
        side = self.tower.config.patch_size
        cut = images[:, : rows * columns].unflatten(2, (side, side, -1)).unflatten(1, (rows, columns))
        return cut.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        patches = self._cut(images)
        cut = {"pixel_values": patches, "spatial_shapes": self._grids(images)}
        mask = torch.ones(patches.shape[:2], dtype=torch.int32, device=images.device)
        name, arguments = super().request(images, options)
        return name, arguments | cut | {"pixel_attention_mask": mask}

    def _grids(self, images: Tensor) -> Tensor:
        """(B, 2) rows and columns of patches of each image."""
        return torch.tensor([self.grid(images)] * len(images), device=images.device)

    def _cut(self, images: Tensor) -> Tensor:
        """(B, patches, side * side * channels): the images cut as the family's processor does."""
        side = self.tower.config.patch_size
        cut = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))  # (B, C, rows, side, columns, side)
        return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
