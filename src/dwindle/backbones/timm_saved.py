"""timm's models from a checkpoint: by name, or by the few constructor options that a checkpoint may have."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import timm
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..core.backbone import Backbone
from ..errors import unknown
from ..settings import Above0, Classes, Depth, ImageSize, Size, Within, options

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")
# The errors that building a model by wrong options may raise.
BUILD_ERRORS = (TypeError, RuntimeError, AssertionError, ValueError, StopIteration)

Sides = tuple[ImageSize, ImageSize] | ImageSize


class Named(TypedDict, total=False):
    """The options that a checkpoint may give one of timm's models. Some of timm's other options name files."""

    num_classes: Classes | Literal[0]
    img_size: Sides
    global_pool: Literal["", "avg", "avgmax", "max", "token", "map"]
    dynamic_img_size: bool


class Unnamed(Named, total=False):
    """The options that a checkpoint may give a VisionTransformer without a name in timm."""

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


def check_name(name: str) -> None:
    """Refuse a name that timm does not have. One with a colon is a place from which timm would fetch a model."""
    if not re.fullmatch(r"\w+", name) or not timm.is_model(name):
        raise unknown("model", name, timm.list_models())


def rebuilt(described: dict[str, Any]) -> nn.Module:
    """A model of the architecture that `TimmModel.describe` returned, with random weights."""
    name = described["model"]
    if name:
        check_name(name)
        return timm.create_model(name, pretrained=False, **options(described["options"], Named, name))
    checked = options(described["options"], Unnamed, "VisionTransformer")
    eps = checked.pop("norm_eps", 1e-6)
    return VisionTransformer(**checked, norm_layer=partial(nn.LayerNorm, eps=eps))


FLAGS = ("global_pool", "pool_include_prefix", "no_embed_class", "dynamic_img_size", "use_key_only_attn_mask")


def outline(vit: Any, backbone: Backbone) -> tuple:
    """The properties in which a rebuilt model must equal the model: names and shapes of weights, and how each module
    computes in eval. backbone: that of the model, which knows where blocks of both keep their attention."""
    weights = tuple((name, tuple(value.shape)) for name, value in vit.state_dict().items())
    idle = (nn.Identity, nn.Dropout, DropPath)
    kinds = tuple(
        type(m).__name__.removeprefix("FSDP")  # torch puts this before the class name of a sharded block
        for m in vit.modules()
        if not isinstance(m, (nn.LayerNorm, *idle))
    )
    norms = tuple(m.eps for m in vit.modules() if isinstance(m, nn.LayerNorm))
    heads = tuple((a.num_heads, a.scale) for block in vit.blocks for a in backbone.attentions(block))
    flags = tuple(getattr(vit, name, None) for name in FLAGS)
    return weights, kinds, norms, heads, flags, tuple(_settings(m) for m in vit.modules() if _of_positions(m))


def _of_positions(module: nn.Module) -> bool:
    """Whether a module of positions has settings that no weight shows."""
    name = type(module).__name__
    return name.startswith(("Rotary", "RelPos", "RelativePosition", "NaFlexEmbeds", "Eva")) or name == "AttentionRope"


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, except those that `adapt` changes."""
    left_out = ("training", "fused_attn")
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and name not in left_out}
    return {name: value for name, value in own.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
