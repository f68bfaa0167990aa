"""What timm's vision transformers have in common: blocks, stems, heads, and how they are measured and named."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from timm.layers import Attention, DropPath, Format, LayerNorm, LayerScale, Mlp, PatchEmbed
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from ..core.backbone import Backbone, Shape
from ..core.parts import LINEAR, BlockParts, activation_name, as_written, linear_macs
from ..errors import DwindleError
from .timm_saved import FAILED, outline, rebuilt


class TimmModel(Backbone):
    """One of timm's classes of plain vision transformers. Subclasses say which, and what comes before its blocks."""

    family = "timm"
    kinds: ClassVar[tuple[type[nn.Module], ...]]
    named: ClassVar[tuple[str, ...]] = ("num_classes", "img_size", "global_pool")  # what timm's names take besides
    vit: Any

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.any_size = bool(getattr(vit, "dynamic_img_size", False))
        self._stem: tuple[tuple[int, int], int] | None = None  # image size, and what the stem costs at it
        for block in self.blocks:
            attentions = self.attentions(block)
            if self._mlp_of(block) is None or not all(hasattr(attention, "fused_attn") for attention in attentions):
                raise DwindleError(
                    f"{type(vit).__name__} cannot be adapted: its {type(block).__name__} has no separate attention and "
                    "MLP; models built from timm's own blocks can be."
                )
            for attention in attentions:
                _check_unfused(attention)
        self._check_grid()

    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        return isinstance(vit, cls.kinds)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.vit.blocks)

    def attention(self, block: Any) -> nn.Module:
        return self.attentions(block)[0]

    def attentions(self, block: Any) -> list[Any]:
        if hasattr(block, "attns"):  # several side by side (ParallelThingsBlock)
            return [branch.attn for branch in block.attns]
        return [getattr(block, "attn", block)]  # with a projection in common with the MLP, the block attends itself

    def _mlp_of(self, block: Any) -> Any:
        if hasattr(block, "ffns"):
            return block.ffns[0].mlp
        return getattr(block, "mlp", None) or getattr(block, "in_proj", None)

    def mlp_in(self, block: Any) -> Any:
        return next(m for m in self._mlp_of(block).modules() if isinstance(m, nn.Linear))

    def reads(self, owner: Any, name: str) -> bool:
        return name == "qkv" and getattr(owner, "q_bias", None) is not None  # one product with a bias put together

    def install(self) -> None:
        super().install()
        for block in self.blocks:
            for attention in self.attentions(block):
                # The unfused path writes its own softmax, where nothing can be caught. Unwrapping deletes this again:
                # the value the model was built with is kept beside it.
                attention._fused_before, attention.fused_attn = attention.fused_attn, True

    def remove(self) -> None:
        super().remove()
        for block in self.blocks:
            for attention in self.attentions(block):
                attention.fused_attn = attention.__dict__.pop("_fused_before", attention.fused_attn)

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

    def patches(self, images: Tensor) -> tuple[Any, Tensor]:
        """The model, and what its stem makes of images, as its positions take it. A model of one image size refuses
        others, though its positions can be resampled: then a view of it that may, and patches on their grid."""
        vit, stem, size = self.vit, self.stem, (images.shape[-2], images.shape[-1])
        if size == self.image:
            return vit, stem(images)
        view, whole = copy.copy(vit), copy.copy(stem)
        view.dynamic_img_size = True
        whole.flatten, whole.output_fmt, whole.strict_img_size = False, Format.NHWC, False
        patches_BRCD: Tensor = whole(images)
        rows, columns = patches_BRCD.shape[1:3]
        if (rows, columns) != self.shape.grid(size):  # a stem may round up where patches of one size round down
            raise DwindleError(
                f"The {type(stem).__name__} of this {type(vit).__name__} makes {rows} x {columns} tokens of images of "
                f"{size[0]} x {size[1]} pixels, which are no patches of {self.patch}; resize them to {self.image}."
            )
        return view, patches_BRCD

    @property
    def stem(self) -> Any:
        """What makes patches of images."""
        return self.vit.patch_embed

    @property
    def image(self) -> tuple[int, int]:
        height, width = self.stem.img_size
        return height, width

    @property
    def built_for(self) -> tuple[int, int]:
        rows, columns = self.stem.grid_size
        return rows, columns

    @property
    def patch(self) -> tuple[int, int]:
        """The pixels that a token stands for: of a convolutional stem more than its last layer looks at."""
        return self.image[0] // self.built_for[0], self.image[1] // self.built_for[1]

    def _check_grid(self) -> None:
        size, patch = self.image, self.patch
        if (size[0] // patch[0], size[1] // patch[1]) != self.built_for:
            rows, columns = self.built_for
            raise DwindleError(
                f"{type(self.vit).__name__} cannot be adapted: its {type(self.stem).__name__} makes {rows} x {columns} "
                f"tokens of {size[0]} x {size[1]} pixels, which are no equal patches; build it for another img_size."
            )

    @property
    def stem_macs(self) -> int:
        """Per patch."""
        stem, size = self.stem, self.image
        if type(stem) is PatchEmbed:
            return stem.proj.in_channels * self.patch[0] * self.patch[1] * self.vit.embed_dim
        if self._stem is None or self._stem[0] != size:
            self._stem = size, _counted(stem, self.channels, size)
        return round(self._stem[1] / (self.built_for[0] * self.built_for[1]))

    @property
    def channels(self) -> int:
        stem: Any = self.stem
        return stem.proj.in_channels if type(stem) is PatchEmbed else stem.in_chans

    @property
    def changeable(self) -> tuple:
        return self.image, self.patch, self.vit.num_classes, id(self.vit.head)

    def measure(self) -> Shape:
        vit = self.vit
        block = vit.blocks[0]
        attention, into = self.attentions(block)[0], self.mlp_in(block)
        heads = [vit.head, *([vit.head_dist] if hasattr(vit, "head_dist") else [])]
        pool_image, pool_token = _pool_macs(getattr(vit, "attn_pool", None))
        return Shape(
            blocks=len(vit.blocks),
            width=vit.embed_dim,
            hidden=block.in_split[0] if hasattr(block, "in_split") else into.out_features,
            heads=attention.num_heads,
            head_size=_head_size(attention),
            prefix=vit.num_prefix_tokens,
            patch=self.patch,
            image=self.image,
            channels=self.channels,
            classes=vit.num_classes,
            block_macs=round(sum(_linear_macs(one) for one in vit.blocks) / len(vit.blocks)),  # Sapiens 2 has two kinds
            token_macs=self.stem_macs,
            image_macs=sum(linear_macs(head) for head in heads) + pool_image,
            pool_macs=pool_token,
            pair_macs=sum(_pair_macs(attention) for attention in self.attentions(block)),
        )

    def describe(self) -> dict[str, Any] | None:
        """By timm's model name, where that and few options give these weights; or as a subclass knows."""
        vit = self.vit
        name = (getattr(vit, "pretrained_cfg", None) or {}).get("architecture")
        now = {
            "num_classes": vit.num_classes,
            "img_size": list(self.image),
            "global_pool": vit.global_pool,
            "dynamic_img_size": self.any_size,
        }
        options = {key: now[key] for key in self.named}
        candidates = [{"model": name, "options": options}] if name else []
        for described in [*candidates, *self.unnamed()]:
            try:
                with torch.device("meta"):
                    twin = rebuilt(described)
            except FAILED:
                continue
            if outline(twin, self) == outline(vit, self):
                return described
        return None

    def unnamed(self) -> list[dict[str, Any]]:
        """What of a model without a name of timm's could give its weights."""
        return []

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        return rebuilt(described)


def plain_parts(block: Any) -> BlockParts | None:
    """timm's plain Block taken apart."""
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
    if attention.scale != _head_size(attention) ** -0.5:
        what = f"its scale is {attention.scale:.4g}, where fused attention has {_head_size(attention) ** -0.5:.4g}"
    elif type(drop) not in (nn.Dropout, nn.Identity) or drop._forward_hooks or drop._forward_pre_hooks:
        what = "something was put in the place of its attn_drop, or hooked to it, which fused attention does not run"
    else:
        return
    raise DwindleError(
        f"{type(attention).__name__} cannot be adapted: its attention is unfused and {what}; write it so that it calls "
        "scaled_dot_product_attention."
    )


def _head_size(attention: Any) -> int:
    size = getattr(attention, "head_dim", None)
    return size or attention.qkv.out_features // (3 * attention.num_heads)


def _pair_macs(attention: Any) -> int:
    """The products of attention, per pair of tokens."""
    size = attention.num_heads * _head_size(attention)
    # Differential attention has two maps, of queries and keys half as wide as the values.
    return 6 * size if type(attention).__name__.startswith("Diff") else 2 * size


def _linear_macs(block: nn.Module) -> int:
    """Of what runs for each token: a bias of positions is computed once for all images, and from coordinates."""
    makers = [module for name, module in block.named_modules() if name.endswith("rel_pos")]
    return linear_macs(block) - sum(linear_macs(module) for module in makers)


def _pool_macs(pool: Any) -> tuple[int, int]:
    """Attention pooling, per image and per token: keys and values of every token, the rest for the latents."""
    if pool is None:
        return 0, 0
    per_token = linear_macs(pool.kv) if hasattr(pool, "kv") else 0
    latents = getattr(pool, "latent_len", 1)
    width = pool.num_heads * pool.head_dim
    return latents * (linear_macs(pool) - per_token), per_token + 2 * latents * width


def _counted(stem: nn.Module, channels: int, size: tuple[int, int]) -> int:
    """The convolutions and products of a stem at one image of this size, by torch's counter and without computing."""
    held = [*stem.named_parameters(), *stem.named_buffers()]
    weights = {name: torch.empty_like(value, device="meta") for name, value in held}
    dtype = next(stem.parameters()).dtype
    image = torch.empty(1, channels, *size, dtype=dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(stem, weights, (image,))
    return int(counter.get_total_flops() // 2)
