"""timm's models with rotary positions: Eva (EVA-02, DINOv3, Perception Encoder, RoPE-ViT, Sapiens 2), and NaFlexVit
(SigLIP 2, RADIO) on images of one size."""

from __future__ import annotations

import copy
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from ..core.parts import BlockParts
from ..core.tokens import Tokens
from ..errors import DwindleError
from .timm_base import TimmModel, plain_parts


class Rotary(TimmModel):
    """A family whose queries and keys of patches are rotated by a table of sines and cosines: (N, 2 E), or (L, H, N,
    2 E) with one for each block and head."""

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        if getattr(vit, "patch_drop", None) is not None and vit.rope is not None:
            raise DwindleError(
                f"{type(vit).__name__} cannot be adapted: its patch_drop leaves out patches while training, and with "
                "them which rotary position belongs to which; build it with patch_drop_rate=0."
            )

    def positions(self, images: Tensor) -> Tensor | None:
        """The table of all tokens. Those of the prefix are not rotated, so their angle is 0."""
        rope = self.vit.rope
        if rope is None:
            return None
        patches = self._table(images)
        half = patches.shape[-1] // 2
        sin, cos = patches.new_zeros(1), patches.new_ones(1)
        angle_0 = torch.cat([sin.expand(half), cos.expand(half)])
        prefix = angle_0.expand(*patches.shape[:-2], self.vit.num_prefix_tokens, 2 * half)
        return torch.cat([prefix, patches], -2)

    def _table(self, images: Tensor) -> Tensor:
        """The table of the patches of these images, from timm's module."""
        grid = self.shape.grid((images.shape[-2], images.shape[-1]))
        table: Tensor = self.vit.rope.get_embed(shape=grid)
        return table

    def rotated(self, block: Any, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        if tokens.positions is None:
            return q, k
        positions = tokens.positions
        if positions.dim() == 4:
            positions = positions[next(depth for depth, other in enumerate(self.vit.blocks) if other is block)]
        table, half = tokens.gather_positions(positions), getattr(block.attn, "rotate_half", False)
        return tuple(apply_rot_embed_cat(x, table, half=half).to(x.dtype) for x in (q, k))  # type: ignore[return-value]


class TimmEva(Rotary):
    takes = "Eva"
    kinds = (Eva,)
    named = ("num_classes", "img_size", "global_pool", "dynamic_img_size")

    def embed(self, images: Tensor) -> Tensor:
        view, patches = self.patches(images)
        x, _ = view._pos_embed(patches)
        embedded: Tensor = self.vit.norm_pre(x)
        return embedded

    def _table(self, images: Tensor) -> Tensor:
        rope, size = self.vit.rope, (images.shape[-2], images.shape[-1])
        if self.any_size or not hasattr(rope, "feat_shape"):
            return super()._table(images)
        if size != self.image:
            if not getattr(rope, "_use_cached_embed", False):
                return super()._table(images)
            rope = copy.deepcopy(rope)  # it holds the table of one grid only, to which it scales other grids
            rope.update_feat_shape(self.shape.grid(size))
        table: Tensor = rope.get_embed()
        return table


class TimmNaFlex(Rotary):
    takes = "NaFlexVit"
    kinds = (NaFlexVit,)
    vit: Any

    def __init__(self, vit: NaFlexVit) -> None:
        super().__init__(vit)
        self.any_size = True  # positions are interpolated to any grid

    @property
    def stem(self) -> Any:
        return self.vit.embeds

    @property
    def patch(self) -> tuple[int, int]:
        rows, columns = self.stem.patch_size
        return rows, columns

    @property
    def native_grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def image(self) -> tuple[int, int]:
        """Height and width that the model is meant for: by its own options, its weights or its learned positions."""
        by_options = (getattr(self.vit, "_traits", None) or {}).get("img_size") or self.stem.default_img_size
        by_weights = (getattr(self.vit, "pretrained_cfg", None) or {}).get("input_size") or ()
        if size := by_options or by_weights[-2:]:
            height, width = size
            return height, width
        rows, columns = self.stem.pos_embed_grid_size or (14, 14)
        return rows * self.patch[0], columns * self.patch[1]

    @property
    def stem_macs(self) -> int:
        return self.channels * self.patch[0] * self.patch[1] * self.vit.embed_dim

    @property
    def channels(self) -> int:
        channels: int = self.stem.in_chans
        return channels

    def embed(self, images: Tensor) -> Tensor:
        vit = self.vit
        x, _ = vit.embeds(images)
        if vit.training and vit.patch_drop is not None:
            x, _ = vit.patch_drop(x)
        embedded: Tensor = vit.norm_pre(x)
        return embedded

    def parts(self, block: Any) -> BlockParts | None:
        return plain_parts(block) if isinstance(getattr(block, "attn", None), nn.Module) else None
