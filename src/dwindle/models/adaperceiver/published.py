"""Checkpoints of AdaPerceiver's authors: a folder as their `save_pretrained` writes it, a flat config.json and
model.safetensors under their names.

Two of their classes are known: one that classifies, and the one of D.1 with features of patches beside the answer.
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

NAME = "published"  # what the config says instead of a class of ours: the weights have the authors' names
MARKS = ("embed_dim", "max_latent_tokens", "mask_token_grans", "use_embed_ffn")  # no other library's config has all
# Their images are normalised as CLIP's.
PREPROCESS = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bilinear",
    "crop_pct": 0.875,
}
MAYBE = ("mat_dims", "output_feat_dim")
No = Annotated[float, Within(0, 0)]
Grains = Annotated[list[Annotated[int, Within(1, 4096)]], Count(0, 64)]


class Published(TypedDict, total=False):
    """What a config may say; a value left out of a Literal has no counterpart here."""

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
    process_token_init: Literal["learned", "norm_randn"]  # how they begin, not what they are
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
    return all(name in config for name in MARKS)


def described(config: dict[str, Any]) -> dict[str, Any]:
    """Their config as ours."""
    try:
        given = options(config, Published, "an AdaPerceiver's published config")
    except DwindleError as error:
        raise DwindleError(
            f"This {CONFIG} is of a published AdaPerceiver that has no counterpart here: {str(error).rstrip('.')}; "
            "run it by its authors' code."
        ) from error
    if missing := [name for name in Published.__annotations__ if name not in given and name not in MAYBE]:
        raise DwindleError(f"This {CONFIG} is of a published AdaPerceiver and lacks {missing[0]}; take another copy.")
    width, most, features = given["embed_dim"], given["max_latent_tokens"], given.get("output_feat_dim")
    blocks = given["block_mask"] == "block" and given["attn_layer"] == "flex"
    settings = {
        **{"classes": given["num_classes"], "image": given["img_size"], "patch": given["patch_size"]},
        **{"channels": given["in_channels"], "width": width, "depth": given["depth"], "heads": given["num_heads"]},
        **{"ffn_ratio": given["ffn_ratio"], "layer_scale": given["ls_init_values"], "rope_theta": given["rope_theta"]},
        # A step that ends beyond the most latents trained is one that more of them would have anyhow.
        "tokens": sorted({grain for grain in given["mask_token_grans"] or () if grain < most} | {most}),
        "widths": sorted({dim for dim in given["mat_dims"] or () if dim < width} | {width}),
        "mask": "blocks" if blocks else "open",
        **{"rope": "pairs", "rope_beyond": "stretch", "norm_eps": 1e-6},
        **{"outputs": "class" if features is None else "both", "features": features},
        "head": "ffn" if given["use_output_ffn"] else "linear",
        "readouts": "shared",
    }
    return {
        "format": FORMAT,
        "library": "dwindle",
        "backbone": {"family": "adaperceiver", "model": NAME, "options": settings},
        "method": {"name": None, "options": {}},
        "saved": "all",
        "extra": {"preprocess": {"size": given["img_size"], **PREPROCESS}},
    }


def renamed(weights: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Their weights under our names; those of queries, keys and values are one of ours."""
    left, ours = dict(weights), {}
    for name, parts in _names(weights):
        if not (there := [part for part in parts if part in left]):
            continue
        if missing := [part for part in parts if part not in left]:
            raise DwindleError(f"{source} lacks the weight '{missing[0]}'; take another copy of the checkpoint.")
        try:
            ours[name] = torch.cat([left.pop(part) for part in there])
        except RuntimeError as error:
            raise DwindleError(f"{source} has weights {', '.join(there)} that do not belong together.") from error
    if "latent" in ours:
        ours["latent"] = ours["latent"][None]
    return ours | left  # what is left is no part of the network, and refused by its name


def _names(weights: dict[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our name of each weight, and theirs."""
    yield "latent", ("process_latents.token",)
    yield "position", ("patch_embed.pos_embed",)
    yield "readouts.0.output", ("output_latents.token",)
    modules = [
        ("patch_embed", ("patch_embed.embed.proj",)),
        ("embed_norm", ("patch_embed.norm",)),
        *_layers("embed_ffn", "patch_embed.ffn"),
        *_crossing("read", "read_head"),
        *_crossing("readouts.0.write", "write_head"),
        *_adapter("readouts.0.head", "output_adapter", "output_adapter.ffn.weight" not in weights),
        *_crossing("readouts.0.dense.write", "write_head_feat"),
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
    return [(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("fc1", "fc2")]


def _crossing(ours: str, theirs: str) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (f"{ours}.norm_sink", (f"{theirs}.snk_norm",)),
        (f"{ours}.norm_source", (f"{theirs}.src_norm",)),
        (f"{ours}.q", (f"{theirs}.cattn.q",)),
        (f"{ours}.kv", (f"{theirs}.cattn.k", f"{theirs}.cattn.v")),
        (f"{ours}.proj", (f"{theirs}.cattn.proj",)),
    ]


def _adapter(ours: str, theirs: str, ffn: bool) -> list[tuple[str, tuple[str, ...]]]:
    if not ffn:
        return [(ours, (f"{theirs}.ffn",))]
    return [
        (f"{ours}.0", (f"{theirs}.norm",)),
        (f"{ours}.1", (f"{theirs}.ffn.fc1",)),
        (f"{ours}.3", (f"{theirs}.ffn.fc2",)),
    ]
