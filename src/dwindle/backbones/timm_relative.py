"""timm's models with a bias for each pair of tokens by their relative position: BEiT and VisionTransformerRelPos.

Each block computes its own bias, or all blocks are given one that they share. In both cases the bias is caught in the
call of attention, which takes the part that belongs to the live rows.
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
            rows, columns = self.native_grid
            raise DwindleError(
                f"{type(vit).__name__} has a bias for each pair of {rows} x {columns} patches, "
                f"and takes images of {height} x {width} pixels alone; build it for others with img_size=..."
            )
        x: Tensor = vit.patch_embed(images)
        if vit.cls_token is not None:
            x = torch.cat([vit.cls_token.expand(x.shape[0], -1, -1), x], 1)
        if not isinstance(vit, Beit):
            return x
        return vit.pos_drop(x if vit.pos_embed is None else x + vit.pos_embed)

    def positions(self, images: Tensor) -> Tensor | None:
        """(1, H, N, N) or (H, N, N): the bias that blocks share; None: each block computes its own."""
        vit = self.vit
        if isinstance(vit, Beit):
            return None if vit.rel_pos_bias is None else vit.rel_pos_bias.forward()
        return None if vit.shared_rel_pos is None else vit.shared_rel_pos.get_bias()

    def call(self, block: Any, x: Tensor, tokens: Tokens) -> Any:
        return block(x, tokens.positions)
