"""Checkpoints of AdaPerceiver's authors, as their `save_pretrained` writes them: a folder with a flat config.json, and
model.safetensors with their names of the weights.

Two of their classes can be read: the one that classifies, and the one of D.1 with features of patches as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from ...errors import DwindleError
from ...io.config import CONFIG, FORMAT
from ...settings import Above0, Classes, Count, Depth, Size, Within, options

NAME = "published"  # stands in the config in place of our class, where the weights have the authors' names
MARKS = ("embed_dim", "max_latent_tokens", "mask_token_grans", "use_embed_ffn")  # no other library's config has all
# The authors normalise images as CLIP does.
PREPROCESS = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bilinear",
    "crop_pct": 0.875,
}
OPTIONAL = ("mat_dims", "output_feat_dim")
No = Annotated[float, Within(0, 0)]
Grains = Annotated[list[Annotated[int, Within(1, 4096)]], Count(0, 64)]


class Published(TypedDict, total=False):
    """The options of a published config. A value that its Literal leaves out has no counterpart here."""

    embed_dim: Size
    num_heads: Size
    depth: Depth
    max_latent_tokens: Annotated[int, Within(1, 4096)]
    rope_theta: Above0
    ffn_ratio: Annotated[float, Within(0, 64, over=True)]
    qkv_bias: Literal[True]
    proj_bias: Literal[True]
    ls_init_values: Above0
    proj_drop: No
    attn_drop: No
    drop_path: No
    head_drop: No
    act_layer: Literal["gelu"]
    norm_layer: Literal["layernorm"]
    ffn_layer: Literal["mlp"]
    attn_layer: Literal["flex", "full"]
    process_token_init: Literal["learned", "norm_randn"]  # the initialisation, which trained weights replace
    block_mask: Literal["block", "none"]
    mask_token_grans: Grains | None
    mat_dims: Annotated[list[Size], Count(0, 64)] | None
    img_size: Size
    in_channels: Size
    patch_size: Size
    num_classes: Classes
    use_embed_ffn: Literal[True]
    use_output_ffn: bool
    output_feat_dim: Size


def is_published(config: dict[str, Any]) -> bool:
    """Whether a config is of a checkpoint by AdaPerceiver's authors."""
    return all(name in config for name in MARKS)


def described(config: dict[str, Any]) -> dict[str, Any]:
    """A published config in the form of ours."""
    try:
        theirs = options(config, Published, "an AdaPerceiver's published config")
    except DwindleError as error:
        raise DwindleError(
            f"This {CONFIG} is of a published AdaPerceiver that has no counterpart here: {str(error).rstrip('.')}; "
            "run it by its authors' code."
        ) from error
    if missing := [name for name in Published.__annotations__ if name not in theirs and name not in OPTIONAL]:
        raise DwindleError(f"This {CONFIG} is of a published AdaPerceiver and lacks {missing[0]}; take another copy.")
    width, most, features = theirs["embed_dim"], theirs["max_latent_tokens"], theirs.get("output_feat_dim")
    blocks = theirs["block_mask"] == "block" and theirs["attn_layer"] == "flex"
    settings = {
        **{"classes": theirs["num_classes"], "image": theirs["img_size"], "patch": theirs["patch_size"]},
        **{"channels": theirs["in_channels"], "width": width, "depth": theirs["depth"], "heads": theirs["num_heads"]},
        **{
            "ffn_ratio": theirs["ffn_ratio"],
            "layer_scale": theirs["ls_init_values"],
            "rope_theta": theirs["rope_theta"],
        },
        # Steps beyond the largest trained number of latents are left out: the mask adds one for more latents anyway.
        "tokens": sorted({grain for grain in theirs["mask_token_grans"] or () if grain < most} | {most}),
        "widths": sorted({dim for dim in theirs["mat_dims"] or () if dim < width} | {width}),
        "mask": "blocks" if blocks else "open",
        **{"rope": "pairs", "rope_beyond": "stretch", "norm_eps": 1e-6},
        **{"outputs": "class" if features is None else "both", "features": features},
        "head": "ffn" if theirs["use_output_ffn"] else "linear",
        "readouts": "shared",
    }
    return {
        "format": FORMAT,
        "library": "dwindle",
        "backbone": {"family": "adaperceiver", "model": NAME, "options": settings},
        "method": {"name": None, "options": {}},
        "saved": "all",
        "extra": {"preprocess": {"size": theirs["img_size"], **PREPROCESS}},
    }


def renamed(weights: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """The authors' weights under our names. Their separate weights of queries, keys and values become one."""
    left, ours = dict(weights), {}
    for name, parts in _names(weights):
        if not (found := [part for part in parts if part in left]):
            continue
        if missing := [part for part in parts if part not in left]:
            raise DwindleError(f"{source} lacks the weight '{missing[0]}'; take another copy of the checkpoint.")
        try:
            ours[name] = torch.cat([left.pop(part) for part in found])
        except RuntimeError as error:
            raise DwindleError(f"{source} has weights {', '.join(found)} that do not belong together.") from error
    if "latent" in ours:
        ours["latent"] = ours["latent"][None]
    return ours | left  # weights of no known name are refused by the caller


def _names(weights: dict[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our name of each weight, and the authors' names of its parts."""
    yield "latent", ("process_latents.token",)
    yield "position", ("patch_embed.pos_embed",)
    yield "readouts.0.output", ("output_latents.token",)
    modules = [
        ("patch_embed", ("patch_embed.embed.proj",)),
        ("embed_norm", ("patch_embed.norm",)),
        *_layers("embed_ffn", "patch_embed.ffn"),
        *_cross_attention("read", "read_head"),
        *_cross_attention("readouts.0.write", "write_head"),
        *_adapter("readouts.0.head", "output_adapter", "output_adapter.ffn.weight" not in weights),
        *_cross_attention("readouts.0.dense.write", "write_head_feat"),
        ("readouts.0.dense.output_proj", ("output_latents_feat.proj",)),
        *_adapter("readouts.0.dense.head", "output_adapter_feat", True),
    ]
    for at in sorted({name.split(".")[1] for name in weights if name.startswith("blocks.")}):
        block = f"blocks.{at}"
        yield f"{block}.scale1", (f"{block}.ls1.gamma",)
        yield f"{block}.scale2", (f"{block}.ls2.gamma",)
        modules += [(f"{block}.{name}", (f"{block}.{name}",)) for name in ("norm1", "norm2", "attn.proj")]
        modules += [(f"{block}.attn.qkv", tuple(f"{block}.attn.{name}" for name in "qkv"))]
        modules += _layers(f"{block}.ffn", f"{block}.ffn")
    for ours, theirs in modules:
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs)


def _layers(ours: str, theirs: str) -> list[tuple[str, tuple[str, ...]]]:
    """The layers of an FFN."""
    return [(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("fc1", "fc2")]


def _cross_attention(ours: str, theirs: str) -> list[tuple[str, tuple[str, ...]]]:
    """The layers of a cross-attention."""
    return [
        (f"{ours}.norm_sink", (f"{theirs}.snk_norm",)),
        (f"{ours}.norm_source", (f"{theirs}.src_norm",)),
        (f"{ours}.q", (f"{theirs}.cattn.q",)),
        (f"{ours}.kv", (f"{theirs}.cattn.k", f"{theirs}.cattn.v")),
        (f"{ours}.proj", (f"{theirs}.cattn.proj",)),
    ]


def _adapter(ours: str, theirs: str, ffn: bool) -> list[tuple[str, tuple[str, ...]]]:
    """The layers of a head: one linear layer, or a normalised FFN."""
    if not ffn:
        return [(ours, (f"{theirs}.ffn",))]
    return [
        (f"{ours}.0", (f"{theirs}.norm",)),
        (f"{ours}.1", (f"{theirs}.ffn.fc1",)),
        (f"{ours}.3", (f"{theirs}.ffn.fc2",)),
    ]
