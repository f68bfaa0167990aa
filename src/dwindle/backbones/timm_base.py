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
from .timm_saved import BUILD_ERRORS, outline, rebuilt


class TimmModel(Backbone):
    """A family of timm's vision transformers. Subclasses name its classes and compute what precedes the blocks."""

    family = "timm"
    kinds: ClassVar[tuple[type[nn.Module], ...]]
    named: ClassVar[tuple[str, ...]] = ("num_classes", "img_size", "global_pool")  # options beside a timm model name
    vit: Any

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.any_size = bool(getattr(vit, "dynamic_img_size", False))
        self._stem: tuple[tuple[int, int], int] | None = None  # an image size, and the stem's cost at that size
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
        return [getattr(block, "attn", block)]  # a block whose projection also feeds the MLP computes attention itself

    def _mlp_of(self, block: Any) -> Any:
        """The module whose first linear layer is that of the MLP; None: the block has no separate MLP."""
        if hasattr(block, "ffns"):
            return block.ffns[0].mlp
        return getattr(block, "mlp", None) or getattr(block, "in_proj", None)

    def mlp_in(self, block: Any) -> Any:
        return next(m for m in self._mlp_of(block).modules() if isinstance(m, nn.Linear))

    def reads_weight(self, owner: Any, name: str) -> bool:
        return name == "qkv" and getattr(owner, "q_bias", None) is not None  # the bias is a parameter beside the layer

    def install(self) -> None:
        super().install()
        for block in self.blocks:
            for attention in self.attentions(block):
                # The unfused path computes its own softmax, where nothing can be caught. `remove` restores the value
                # that the model was built with.
                attention._fused_before, attention.fused_attn = attention.fused_attn, True

    def remove(self) -> None:
        super().remove()
        for block in self.blocks:
            for attention in self.attentions(block):
                attention.fused_attn = attention.__dict__.pop("_fused_before", attention.fused_attn)

    def readout(self, stream_BND: Tensor) -> Tensor:
        return self.vit.forward_head(self.vit.norm(stream_BND[:, : self.read_first]))

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
        """The model and the stem's output, as the model's positions take it. A model built for one image size refuses
        others, although its positions can be resampled. For those this returns a shallow copy of the model that accepts
        them, and the patches on their grid."""
        vit, stem, size = self.vit, self.stem, (images.shape[-2], images.shape[-1])
        if size == self.image:
            return vit, stem(images)
        view, any_size_stem = copy.copy(vit), copy.copy(stem)
        view.dynamic_img_size = True
        any_size_stem.flatten, any_size_stem.output_fmt, any_size_stem.strict_img_size = False, Format.NHWC, False
        patches_BRCD: Tensor = any_size_stem(images)
        rows, columns = patches_BRCD.shape[1:3]
        if (rows, columns) != self.shape.grid(size):  # a stem may round up where patches of one size round down
            raise DwindleError(
                f"The {type(stem).__name__} of this {type(vit).__name__} makes {rows} x {columns} tokens of images of "
                f"{size[0]} x {size[1]} pixels, which are no patches of {self.patch}; resize them to {self.image}."
            )
        return view, patches_BRCD

    @property
    def stem(self) -> Any:
        """The module that makes patches of images."""
        return self.vit.patch_embed

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images that the model was built for."""
        height, width = self.stem.img_size
        return height, width

    @property
    def native_grid(self) -> tuple[int, int]:
        """Rows and columns of patches of the images that the model was built for."""
        rows, columns = self.stem.grid_size
        return rows, columns

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width in pixels that a token stands for. With a convolutional stem these are more than the kernel
        of its last layer."""
        return self.image[0] // self.native_grid[0], self.image[1] // self.native_grid[1]

    def _check_grid(self) -> None:
        """Refuse a stem whose tokens are no equal patches of the image."""
        size, patch = self.image, self.patch
        if (size[0] // patch[0], size[1] // patch[1]) != self.native_grid:
            rows, columns = self.native_grid
            raise DwindleError(
                f"{type(self.vit).__name__} cannot be adapted: its {type(self.stem).__name__} makes {rows} x {columns} "
                f"tokens of {size[0]} x {size[1]} pixels, which are no equal patches; build it for another img_size."
            )

    @property
    def stem_macs(self) -> int:
        """Multiply-accumulates of the stem, per patch."""
        stem, size = self.stem, self.image
        if type(stem) is PatchEmbed:
            return stem.proj.in_channels * self.patch[0] * self.patch[1] * self.vit.embed_dim
        if self._stem is None or self._stem[0] != size:
            self._stem = size, _stem_macs(stem, self.channels, size)
        return round(self._stem[1] / (self.native_grid[0] * self.native_grid[1]))

    @property
    def channels(self) -> int:
        """The number of channels of the images."""
        stem: Any = self.stem
        return stem.proj.in_channels if type(stem) is PatchEmbed else stem.in_chans

    @property
    def changeable(self) -> tuple:
        return self.image, self.patch, self.vit.num_classes, id(self.vit.head)

    def measure(self) -> Shape:
        vit = self.vit
        block = vit.blocks[0]
        attention = self.attentions(block)[0]
        heads = [vit.head, *([vit.head_dist] if hasattr(vit, "head_dist") else [])]
        pool_image, pool_token = _pool_macs(getattr(vit, "attn_pool", None))
        return Shape(
            blocks=len(vit.blocks),
            width=vit.embed_dim,
            hidden=block.in_split[0] if hasattr(block, "in_split") else self.mlp_in(block).out_features,
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
        """timm's model name and a few options if they give this architecture, else an item of `unnamed` that does."""
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
            except BUILD_ERRORS:
                continue
            if outline(twin, self) == outline(vit, self):
                return described
        return None

    def unnamed(self) -> list[dict[str, Any]]:
        """Descriptions by constructor options, for a model that no timm name gives. `describe` tries each of them."""
        return []

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        return rebuilt(described)


def plain_parts(block: Any) -> BlockParts | None:
    """The parts of timm's plain Block; None if it is another class or has options that kernels do not compute."""
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
    assert act is not None
    q_norm, k_norm = (norm if _is_norm(norm) else None for norm in (attention.q_norm, attention.k_norm))
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
    """Whether the module is exactly a LayerNorm. timm's own counts if it cannot compute in half under autocast."""
    return type(norm) is nn.LayerNorm or (type(norm) is LayerNorm and not norm._fast_norm)


def _alike(q_norm: nn.Module, k_norm: nn.Module) -> bool:
    """Whether runtimes can compute the norms of queries and keys: no norms, or two that differ only in weights."""
    if type(q_norm) is type(k_norm) is nn.Identity:
        return True
    norms: tuple[Any, Any] = (q_norm, k_norm)
    whole = all(_is_norm(norm) and norm.weight is not None and norm.bias is not None for norm in norms)
    return whole and norms[0].eps == norms[1].eps


def _check_unfused(attention: Any) -> None:
    """Refuse unfused attention that computes something else than fused attention, which replaces it."""
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
    """Multiply-accumulates of the two matrix products of attention, per pair of tokens."""
    size = attention.num_heads * _head_size(attention)
    # Differential attention has two maps, and values twice as wide as its queries and keys.
    return 6 * size if type(attention).__name__.startswith("Diff") else 2 * size


def _linear_macs(block: nn.Module) -> int:
    """`linear_macs` without MLPs that make a bias of positions: they compute it once for all images."""
    bias_mlps = [module for name, module in block.named_modules() if name.endswith("rel_pos")]
    return linear_macs(block) - sum(linear_macs(module) for module in bias_mlps)


def _pool_macs(pool: Any) -> tuple[int, int]:
    """Multiply-accumulates of attention pooling, per image and per token. A token costs its key, its value and its
    attention; everything else is computed for the latents."""
    if pool is None:
        return 0, 0
    per_token = linear_macs(pool.kv) if hasattr(pool, "kv") else 0
    latents = getattr(pool, "latent_len", 1)
    width = pool.num_heads * pool.head_dim
    return latents * (linear_macs(pool) - per_token), per_token + 2 * latents * width


def _stem_macs(stem: nn.Module, channels: int, size: tuple[int, int]) -> int:
    """Multiply-accumulates of a stem for one image of this size, by torch's counter on the meta device."""
    named = [*stem.named_parameters(), *stem.named_buffers()]
    weights = {name: torch.empty_like(value, device="meta") for name, value in named}
    dtype = next(stem.parameters()).dtype
    image = torch.empty(1, channels, *size, dtype=dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        functional_call(stem, weights, (image,))
    return int(counter.get_total_flops() // 2)
