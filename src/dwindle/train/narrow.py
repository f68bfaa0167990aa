"""A narrower network cut from a trained one: a baseline for adaptive models, beside shallower networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backbones.timm import TimmViT
from ..core.backbone import backbone_of
from ..core.method import require
from ..errors import DwindleError


def narrowed(vit: Any, heads: int) -> Any:
    """A timm model cut to its first heads and, everywhere, their channels, as HydraViT nests its networks.

    It has to be trained afterwards.
    """
    backbone = backbone_of(vit)
    if not isinstance(backbone, TimmViT):
        raise DwindleError(
            f"heads = {heads}: {type(vit).__name__} cannot be cut narrower; a timm VisionTransformer can."
        )
    own = backbone.shape.heads
    require(1 <= heads <= own, f"heads = {heads}", f"this {type(vit).__name__} has 1..{own}")
    if heads == own:
        return vit
    described = backbone.unnamed()
    if not described:
        raise DwindleError(f"heads = {heads}: this {type(vit).__name__} is of no plain blocks; take another model.")
    options = dict(described[0]["options"])
    options |= {"embed_dim": backbone.shape.head_size * heads, "num_heads": heads}
    narrow: Any = TimmViT.rebuild({"model": None, "options": options})
    wide = vit.state_dict()
    with torch.no_grad():
        for name, value in narrow.state_dict().items():
            value.copy_(_part(name, wide[name], value, own))
    return narrow.train(vit.training)


def _part(name: str, wide: Tensor, like: Tensor, heads: int) -> Tensor:
    """The leading part of a weight. In `qkv` queries, keys and values follow one another, each ordered by heads."""
    if ".attn.qkv." in name:
        split = wide.unflatten(0, (3, heads, -1))
        kept = split[:, : like.shape[0] // (3 * split.shape[2])].flatten(0, 2)
        return kept[..., : like.shape[-1]] if like.dim() > 1 else kept
    return wide[tuple(slice(size) for size in like.shape)]
