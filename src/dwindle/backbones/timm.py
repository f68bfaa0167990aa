"""timm's VisionTransformer family: ViT, DeiT (distilled or not), DeiT-III, AugReg, DINOv2, CLIP and SigLIP towers, with
plain or parallel blocks, and with patches of the image or of a convolutional stem's output."""

from __future__ import annotations

from typing import Any

from timm.layers import PatchEmbed, get_act_layer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..core.parts import BlockParts
from ..errors import DwindleError
from .timm_base import TimmModel, plain_parts
from .timm_saved import ACTIVATIONS

# Classes of timm that resemble a plain vision transformer, and why each cannot be adapted.
UNFIT = {
    "Cait": "its talking heads mix the scores of all heads before the softmax and after it, which "
    "scaled_dot_product_attention cannot",
    "VisionTransformerSAM": "its blocks attend within windows of the grid, and add a bias that depends on each query",
    "Xcit": "its attention is among channels and not among tokens, and convolutions look at a token's neighbours",
    "VOLO": "its outlookers look at a token's neighbours on the grid",
}


class TimmViT(TimmModel):
    takes = "timm's VisionTransformer"
    kinds = (VisionTransformer,)
    named = ("num_classes", "img_size", "global_pool", "dynamic_img_size")

    def __init__(self, vit: VisionTransformer) -> None:
        if not all(hasattr(vit.patch_embed, name) for name in ("img_size", "grid_size")):
            raise DwindleError(
                f"{type(vit).__name__} cannot be adapted: its {type(vit.patch_embed).__name__} does not say which grid "
                "of tokens it makes of an image; models with timm's PatchEmbed or HybridEmbed can be."
            )
        super().__init__(vit)

    @classmethod
    def refuses(cls, vit: nn.Module) -> str | None:
        return UNFIT.get(type(vit).__name__) if type(vit).__module__.startswith("timm.") else None

    def embed(self, images: Tensor) -> Tensor:
        vit = self.vit
        view, patches = self.patches(images)
        embedded: Tensor = vit.norm_pre(vit.patch_drop(view._pos_embed(patches)))
        return embedded

    def distilled_logits(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        vit = self.vit
        if not hasattr(vit, "head_dist"):
            return super().distilled_logits(stream_BND)
        x = vit.norm(stream_BND[:, :2])
        return vit.head(vit.head_drop(x[:, 0])), vit.head_dist(vit.head_drop(x[:, 1]))

    def parts(self, block: Any) -> BlockParts | None:
        return plain_parts(block) if hasattr(block, "attn") else None

    def unnamed(self) -> list[dict[str, Any]]:
        vit, block = self.vit, self.vit.blocks[0]
        if not hasattr(block, "attn") or type(vit.patch_embed) is not PatchEmbed:
            return []
        acts = [name for name in ACTIVATIONS if any(type(m) is get_act_layer(name) for m in block.mlp.modules())]
        options = {
            "img_size": list(self.image),
            "patch_size": list(vit.patch_embed.patch_size),
            "in_chans": vit.patch_embed.proj.in_channels,
            "num_classes": vit.num_classes,
            "global_pool": vit.global_pool,
            "embed_dim": vit.embed_dim,
            "depth": len(vit.blocks),
            "num_heads": block.attn.num_heads,
            "mlp_ratio": self.mlp_in(block).out_features / vit.embed_dim,
            "qkv_bias": block.attn.qkv.bias is not None,
            "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
            "init_values": 1.0 if hasattr(block, "ls1") and not isinstance(block.ls1, nn.Identity) else None,
            "class_token": vit.cls_token is not None,
            "no_embed_class": vit.no_embed_class,
            "reg_tokens": vit.num_reg_tokens,
            "pre_norm": not isinstance(vit.norm_pre, nn.Identity),
            "fc_norm": not isinstance(vit.fc_norm, nn.Identity),
            "pool_include_prefix": vit.pool_include_prefix,
            "dynamic_img_size": vit.dynamic_img_size,
            "pos_embed": "learn" if vit.pos_embed is not None else "none",
            "norm_eps": block.norm1.eps,
            "act_layer": acts[0] if acts else "gelu",
        }
        return [{"model": None, "options": options}]
