"""timm's models with a bias for each pair of tokens, by how these lie to each other: BEiT and VisionTransformerRelPos.

A block computes its bias itself, or all blocks are handed one that they share; either is caught where it goes into
attention, and the live rows' numbers are taken of it.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor

from ..core.tokens import Tokens
from ..errors import DwindleError
from .timm_base import TimmModel


class TimmRelative(TimmModel):
    takes = "Beit and VisionTransformerRelPos"
    kinds = (Beit, VisionTransformerRelPos)

    def embed(self, images: Tensor) -> Tensor:
        vit, (height, width) = self.vit, self.image
        if tuple(images.shape[-2:]) != self.image:
            raise DwindleError(
                f"{type(vit).__name__} has a bias for each pair of {self.built_for[0]} x {self.built_for[1]} patches, "
                f"and takes images of {height} x {width} pixels alone; build it for others with img_size=..."
            )
        x: Tensor = vit.patch_embed(images)
        if vit.cls_token is not None:
            x = torch.cat([vit.cls_token.expand(x.shape[0], -1, -1), x], 1)
        if not isinstance(vit, Beit):
            return x
        return vit.pos_drop(x if vit.pos_embed is None else x + vit.pos_embed)

    def positions(self, images: Tensor) -> Tensor | None:
        """(1 or none, H, N, N): the bias that blocks share."""
        vit = self.vit
        if isinstance(vit, Beit):
            return None if vit.rel_pos_bias is None else vit.rel_pos_bias.forward()
        return None if vit.shared_rel_pos is None else vit.shared_rel_pos.get_bias()

    def call(self, block: Any, x: Tensor, tokens: Tokens) -> Any:
        return block(x, tokens.positions)
