"""timm's VisionTransformer family: ViT, DeiT (distilled or not), DeiT-III, AugReg, DINOv2, CLIP and SigLIP towers..."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import torch
from timm.layers import Attention, DropPath, LayerNorm, LayerScale, Mlp, PatchEmbed, get_act_layer
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..core.backbone import LINEAR, Backbone, BlockParts, Shape, activation_name, as_written, linear_macs
from ..errors import DwindleError, unknown
from ..settings import Above0, Classes, Depth, ImageSize, Size, Within, options

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")

Sides = tuple[ImageSize, ImageSize] | ImageSize


class Named(TypedDict, total=False):
    """What a checkpoint may ask of one of timm's models: these and no others, some of which name files."""

    num_classes: Classes | Literal[0]
    img_size: Sides
    global_pool: Literal["", "avg", "avgmax", "max", "token", "map"]
    dynamic_img_size: bool


class Unnamed(Named, total=False):
    """And of a VisionTransformer that has no name."""

    patch_size: Sides
    in_chans: Size
    embed_dim: Size
    depth: Depth
    num_heads: Size
    mlp_ratio: Annotated[float, Within(0, 256, over=True)]
    qkv_bias: bool
    qk_norm: bool
    init_values: float | None
    class_token: bool
    no_embed_class: bool
    reg_tokens: Size | Literal[0]
    pre_norm: bool
    fc_norm: bool | None
    pool_include_prefix: bool
    pos_embed: Literal["learn", "none", ""]
    norm_eps: Above0
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]


class TimmViT(Backbone):
    family = "timm"
    takes = "timm's VisionTransformer"
    vit: Any  # a VisionTransformer

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__(vit)
        self.any_size = bool(vit.dynamic_img_size)
        if type(vit.patch_embed) is not PatchEmbed:
            raise DwindleError(
                f"{type(vit).__name__} cannot be adapted: its {type(vit.patch_embed).__name__} does not cut the image "
                "into plain patches; models with timm's PatchEmbed can be."
            )
        for block in self.blocks:
            if not (hasattr(block, "mlp") and hasattr(getattr(block, "attn", None), "fused_attn")):
                raise DwindleError(
                    f"{type(vit).__name__} cannot be adapted: its {type(block).__name__} has no separate attention and "
                    "MLP; models built from timm's plain Block can be."
                )
            _check_unfused(block.attn)

    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        return isinstance(vit, VisionTransformer)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.vit.blocks)

    def attention(self, block: Any) -> nn.Module:
        return block.attn

    def mlp_in(self, block: Any) -> Any:
        return next(m for m in block.mlp.modules() if isinstance(m, nn.Linear))

    def install(self) -> None:
        super().install()
        for block in self.vit.blocks:
            # The unfused path writes its own softmax, where nothing can be caught. Unwrapping deletes this again:
            # the value the model was built with is kept beside it.
            block.attn._fused_before, block.attn.fused_attn = block.attn.fused_attn, True

    def remove(self) -> None:
        super().remove()
        for block in self.vit.blocks:
            block.attn.fused_attn = block.attn.__dict__.pop("_fused_before", block.attn.fused_attn)

    def embed(self, images: Tensor) -> Tensor:
        vit = self.vit
        return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))

    def readout(self, stream_BND: Tensor) -> Tensor:
        return self.vit.forward_head(self.vit.norm(stream_BND[:, : self.read_first]))  # who is not read needs no norm

    def normed(self, stream_BND: Tensor) -> Tensor:
        return self.vit.norm(stream_BND)

    @property
    def preprocess(self) -> dict[str, Any]:
        known = getattr(self.vit, "pretrained_cfg", None) or {}
        kept = {name: known[name] for name in ("mean", "std", "interpolation", "crop_pct") if known.get(name)}
        return super().preprocess | kept

    def reset_head(self, classes: int) -> None:
        self.vit.reset_classifier(classes)

    @property
    def read_first(self) -> int | None:
        return self.vit.num_prefix_tokens if self.vit.global_pool == "token" else None

    @property
    def checkpoints(self) -> bool:
        return bool(self.vit.grad_checkpointing)

    def _checkpoint(self) -> None:
        self.vit.set_grad_checkpointing(True)

    def answers(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        vit = self.vit
        if not hasattr(vit, "head_dist"):
            return super().answers(stream_BND)
        x = vit.norm(stream_BND[:, :2])
        return vit.head(vit.head_drop(x[:, 0])), vit.head_dist(vit.head_drop(x[:, 1]))

    @property
    def changeable(self) -> tuple:
        vit = self.vit
        return tuple(vit.patch_embed.img_size), tuple(vit.patch_embed.patch_size), vit.num_classes, id(vit.head)

    def measure(self) -> Shape:
        vit = self.vit
        block, patch = vit.blocks[0], vit.patch_embed.patch_size
        heads = [vit.head, *([vit.head_dist] if hasattr(vit, "head_dist") else [])]
        pool_image, pool_token = _pool_macs(vit.attn_pool)
        return Shape(
            blocks=len(vit.blocks),
            width=vit.embed_dim,
            hidden=self.mlp_in(block).out_features,
            heads=block.attn.num_heads,
            head_size=block.attn.head_dim,
            prefix=vit.num_prefix_tokens,
            patch=tuple(patch),
            image=tuple(vit.patch_embed.img_size),
            channels=vit.patch_embed.proj.in_channels,
            classes=vit.num_classes,
            block_macs=linear_macs(block),
            token_macs=vit.patch_embed.proj.in_channels * patch[0] * patch[1] * vit.embed_dim,
            image_macs=sum(linear_macs(head) for head in heads) + pool_image,
            pool_macs=pool_token,
        )

    def parts(self, block: Any) -> BlockParts | None:
        if (type(block), type(block.attn), type(block.mlp)) != (Block, Attention, Mlp):
            return None
        attention: Any = block.attn
        mlp: Any = block.mlp
        idle = [getattr(attention, "norm", None), getattr(attention, "gate", None), getattr(mlp, "norm", None)]
        act = activation_name(mlp.act)
        plain = (
            as_written(block)
            and all(part is None or type(part) is nn.Identity for part in idle)
            and _alike(attention.q_norm, attention.k_norm)
            and all(_is_norm(norm) for norm in (block.norm1, block.norm2))
            and all(type(scale) in (nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
            and all(type(drop) in (nn.Identity, nn.Dropout) for drop in (attention.proj_drop, mlp.drop1, mlp.drop2))
            and all(type(drop) in (nn.Identity, DropPath) for drop in (block.drop_path1, block.drop_path2))
            and all(type(layer) in LINEAR for layer in (attention.qkv, attention.proj, mlp.fc1, mlp.fc2))
            and act is not None
        )
        if not plain:
            return None
        norms = [attention.q_norm, attention.k_norm]
        assert act is not None
        q_norm, k_norm = (norm if _is_norm(norm) else None for norm in norms)
        scale1, scale2 = (getattr(getattr(block, name, None), "gamma", None) for name in ("ls1", "ls2"))
        return BlockParts(
            norm1=block.norm1,
            qkv=(attention.qkv,),
            heads=attention.num_heads,
            scale=attention.head_dim**-0.5,
            q_norm=q_norm,
            k_norm=k_norm,
            proj=attention.proj,
            scale1=scale1,
            norm2=block.norm2,
            fc1=mlp.fc1,
            act=act,
            fc2=mlp.fc2,
            scale2=scale2,
        )

    def describe(self) -> dict[str, Any] | None:
        """By timm's model name where there is one, else by constructor arguments; whichever gives these weights."""
        vit = self.vit
        size = list(vit.patch_embed.img_size)
        named = {
            "model": (getattr(vit, "pretrained_cfg", None) or {}).get("architecture"),
            "options": {
                "num_classes": vit.num_classes,
                "img_size": size,
                "global_pool": vit.global_pool,
                "dynamic_img_size": vit.dynamic_img_size,
            },
        }
        for described in ([named] if named["model"] else []) + [{"model": None, "options": self._options(size)}]:
            try:
                with torch.device("meta"):
                    twin = self.rebuild(described)
            except (TypeError, RuntimeError, AssertionError, ValueError, StopIteration):
                continue
            if _outline(twin) == _outline(vit):
                return described
        return None

    def _options(self, size: list[int]) -> dict[str, Any]:
        vit, block = self.vit, self.vit.blocks[0]
        acts = [name for name in ACTIVATIONS if any(type(m) is get_act_layer(name) for m in block.mlp.modules())]
        return {
            "img_size": size,
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

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        import timm

        name = described["model"]
        if name:
            if not re.fullmatch(r"\w+", name) or not timm.is_model(name):  # with a colon timm takes it for a place
                raise unknown("model", name, timm.list_models())
            return timm.create_model(name, pretrained=False, **options(described["options"], Named, name))
        given = options(described["options"], Unnamed, "VisionTransformer")
        eps = given.pop("norm_eps", 1e-6)
        return VisionTransformer(**given, norm_layer=partial(nn.LayerNorm, eps=eps))


def _is_norm(norm: nn.Module) -> bool:
    """A LayerNorm and nothing more; timm's own may round where autocast tells it to."""
    return type(norm) is nn.LayerNorm or (type(norm) is LayerNorm and not norm._fast_norm)


def _alike(q_norm: nn.Module, k_norm: nn.Module) -> bool:
    """Whether runtimes know what becomes of queries and keys: nothing, or norms that differ in weights alone."""
    if type(q_norm) is type(k_norm) is nn.Identity:
        return True
    norms: tuple[Any, Any] = (q_norm, k_norm)
    whole = all(_is_norm(norm) and norm.weight is not None and norm.bias is not None for norm in norms)
    return whole and norms[0].eps == norms[1].eps


def _check_unfused(attention: Any) -> None:
    """Refuse what unfused attention computes and fused attention, which runs in its place, does not."""
    if attention.fused_attn:
        return
    drop: Any = getattr(attention, "attn_drop", None)
    if attention.scale != attention.head_dim**-0.5:
        what = f"its scale is {attention.scale:.4g}, where fused attention has {attention.head_dim**-0.5:.4g}"
    elif type(drop) not in (nn.Dropout, nn.Identity) or drop._forward_hooks or drop._forward_pre_hooks:
        what = "something was put in the place of its attn_drop, or hooked to it, which fused attention does not run"
    else:
        return
    raise DwindleError(
        f"{type(attention).__name__} cannot be adapted: its attention is unfused and {what}; write it so that it calls "
        "scaled_dot_product_attention."
    )


def _pool_macs(pool: Any) -> tuple[int, int]:
    """Attention pooling, per image and per token: keys and values of every token, the rest for the latents."""
    if pool is None:
        return 0, 0
    per_token = linear_macs(pool.kv) if hasattr(pool, "kv") else 0
    latents = getattr(pool, "latent_len", 1)
    width = pool.num_heads * pool.head_dim
    return latents * (linear_macs(pool) - per_token), per_token + 2 * latents * width


def _outline(vit: Any) -> tuple:
    """What a rebuilt model must have in common: every weight's name and shape, and how each part behaves in eval."""
    weights = tuple((name, tuple(value.shape)) for name, value in vit.state_dict().items())
    idle = (nn.Identity, nn.Dropout, DropPath)
    kinds = tuple(
        type(m).__name__.removeprefix("FSDP")  # so torch calls the class of a sharded block
        for m in vit.modules()
        if not isinstance(m, (nn.LayerNorm, *idle))
    )
    norms = tuple(m.eps for m in vit.modules() if isinstance(m, nn.LayerNorm))
    heads = tuple((block.attn.num_heads, block.attn.scale) for block in vit.blocks)
    flags = (vit.global_pool, vit.pool_include_prefix, vit.no_embed_class, vit.dynamic_img_size)
    return weights, kinds, norms, heads, flags
