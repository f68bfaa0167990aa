"""Where the weights of an AdaPerceiver begin: those of another one, or of a plain ViT with blocks of the same shape.

B images, N latents, P input tokens, D width, H heads, K head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint import load
from ..errors import DwindleError
from .model import AdaPerceiver

FOCUS = (2.0, 12.0)  # how narrowly the first and the last head look at their place at the start


def begin_from(model: AdaPerceiver, source: str, images: Tensor, frozen: bool = False) -> None:
    """Load `source`, a checkpoint. images: some (B, C, height, width), prepared, to read places off their patches.
    frozen: its blocks will not learn other tokens than it has.
    """
    other: Any = load(source)
    if isinstance(other, AdaPerceiver):
        if frozen and other.tokens != model.tokens:
            raise DwindleError(
                f"weights = {source} was trained with tokens = {other.tokens}, and freeze_backbone keeps it from "
                f'learning {model.tokens}; give --set "method.tokens={other.tokens}".'
            )
        _from_ada(model, other, source)
    else:
        _from_vit(model, other, source, images)


def _from_ada(model: AdaPerceiver, other: AdaPerceiver, source: str) -> None:
    """What belongs to its task (outputs, head) starts anew where it does not fit."""
    own, given = model.state_dict(), other.state_dict()
    for i in range(len(model.readouts)):  # one for all depths begins as that of the last block
        theirs = other.readout(min(i + 1 if len(model.readouts) > 1 else model.depth, other.depth))
        given |= {f"readouts.{i}.{name}": value for name, value in theirs.state_dict().items()}
    fitting = {n: v for n, v in given.items() if n in own and own[n].shape == v.shape}
    lost = [n for n in own if n not in fitting and not n.startswith("readouts.")]
    if lost:
        raise DwindleError(f"weights = {source} does not fit: '{lost[0]}' differs; train the same configuration.")
    model.load_state_dict(fitting, strict=False)


@torch.no_grad()
def _from_vit(model: AdaPerceiver, other: Any, source: str, images: Tensor) -> None:
    """Its patch embedding, positions, blocks and head; and latents that each begin as a patch seen from one place, so
    that the blocks meet what they know. The embedding FFN and the values of read and write begin as identities.
    """
    vit, shape, backbone = other.vit, other.backbone.shape, other.backbone
    parts = [backbone.parts(block) for block in backbone.blocks[: model.depth]]
    conv, position = getattr(getattr(vit, "patch_embed", None), "proj", None), getattr(vit, "pos_embed", None)
    plain = all(p is not None and len(p.qkv) == 1 and p.q_norm is None and p.act == "gelu" for p in parts)
    if not plain or not isinstance(conv, nn.Conv2d) or position is None:
        raise DwindleError(
            f"weights = {source} is no plain timm ViT (patch_embed, pos_embed, GELU) to begin from; give one, or none."
        )
    for name, own, theirs in (
        ("width", model.width, shape.width),
        ("heads", model.heads, shape.heads),
        ("patch", (model.patch, model.patch), tuple(shape.patch)),
        ("channels", model.channels, shape.channels),
    ):
        if own != theirs:
            raise DwindleError(f"weights = {source} has {name} {theirs}, the network {own}; set method.{name} alike.")
    hidden, most = model.hidden(model.width), shape.hidden // shape.width
    for fits, given, allowed in (
        (model.depth <= shape.blocks, f"depth {model.depth}", f"from 1 to {shape.blocks}"),
        # At least 2: the embedding FFN begins as an identity, which takes two neurons a channel.
        (2 * model.width <= hidden <= shape.hidden, f"ffn_ratio {model.ffn_ratio}", f"from 2 to {most}"),
    ):
        if not fits:
            raise DwindleError(f"weights = {source} cannot begin a network of {given}; it must be {allowed}.")

    _copy(model.patch_embed, conv)
    cells, side = shape.grid(), model.image // model.patch
    square = position[:, -cells[0] * cells[1] :].unflatten(1, cells).permute(0, 3, 1, 2)
    if cells != (side, side):
        square = F.interpolate(square, size=(side, side), mode="bicubic", antialias=True)
    model.position.copy_(square.flatten(2).mT)
    for block, part in zip(model.blocks, parts):
        _block(block, part)
    size = float((model.patch_embed(images).flatten(2).mT + model.position).std(-1).mean())
    one = torch.eye(model.width)
    ffn = model.embed_ffn  # GELU(x) - GELU(-x) = x
    for layer in (ffn.fc1, ffn.fc2):
        layer.bias.zero_()
    ffn.fc1.weight[: 2 * model.width] = torch.cat([one, -one])
    ffn.fc2.weight.zero_()
    ffn.fc2.weight[:, : 2 * model.width] = torch.cat([one, -one], 1)
    for cross, scale in ((model.read, size), *((readout.write, 1.0) for readout in model.readouts)):
        cross.kv.weight[model.width :] = scale * one
        cross.proj.weight.copy_(one)
    norm, head = getattr(vit, "norm", None), getattr(vit, "head", None)
    for readout in model.readouts:
        if isinstance(norm, nn.LayerNorm):
            _copy(readout.write.norm_source, norm)
        if (
            isinstance(head, nn.Linear)
            and isinstance(readout.head, nn.Linear)
            and head.weight.shape == readout.head.weight.shape
        ):
            _copy(readout.head, head)
    _look_at_places(model, images)


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    state = {name: value for name, value in theirs.state_dict().items() if name in ("weight", "bias")}
    own.load_state_dict(state)


def _block(block: Any, part: Any) -> None:
    """The neurons that weigh most come first: narrower widths keep those."""
    _copy(block.norm1, part.norm1)
    _copy(block.norm2, part.norm2)
    _copy(block.attn.qkv, part.qkv[0])
    _copy(block.attn.proj, part.proj)
    hidden = block.ffn.fc1.out_features
    order = (part.rise.weight.norm(dim=1) * part.fall.weight.norm(dim=0)).argsort(descending=True)[:hidden]
    block.ffn.fc1.weight.copy_(part.rise.weight[order])
    block.ffn.fc1.bias.copy_(part.rise.bias[order])
    block.ffn.fc2.weight.copy_(part.fall.weight[:, order])
    block.ffn.fc2.bias.copy_(part.fall.bias)
    block.scale1.copy_(part.scale1 if part.scale1 is not None else torch.ones_like(block.scale1))
    block.scale2.copy_(part.scale2 if part.scale2 is not None else torch.ones_like(block.scale2))


def _look_at_places(model: AdaPerceiver, images: Tensor) -> None:
    """Latent n begins by reading around (n s_x, n s_y), angles that go once around over the image's width and height.

    s_x = 1 and s_y, about 2 pi / the fewest tokens, are speeds of RoPE: turned by n, a query of two such pairs of
    channels has the score focus * (cos(n s_x - x) + cos(n s_y - y)) with a key (cos x, sin x, cos y, sin y), which is
    a linear function of a patch, fitted here. So the latents scan the image line by line, as many as the fewest once,
    each time shifted.
    """
    read, width, size = model.read, model.width, model.width // model.heads
    side = model.image // model.patch
    angle = (torch.arange(side) + 0.5) / side * 2 * math.pi
    y, x = (a.flatten() for a in torch.meshgrid(angle, angle, indexing="ij"))
    wanted = torch.stack([x.cos(), x.sin(), y.cos(), y.sin()], -1).double()  # (P, 4)
    seen = read.norm_source(model.embed(images)).double().cpu()  # (B, P, D)
    ones = torch.ones(*seen.shape[:2], 1, dtype=torch.float64)
    seen, goal = torch.cat([seen, ones], -1).flatten(0, 1), wanted.repeat(len(seen), 1)
    damped = seen.T @ seen + 1e-4 * len(seen) * torch.eye(width + 1, dtype=torch.float64)
    keys = torch.linalg.solve(damped, seen.T @ goal).T.float()  # (4, D + 1)
    pairs = size // 2
    # Pair j turns by theta^(-j / pairs) a latent.
    across, down = 0, max(1, round(pairs * math.log(model.tokens[0] / (2 * math.pi)) / math.log(model.rope_theta)))
    read.q.weight.zero_()
    read.q.bias.zero_()
    read.kv.weight[:width] = 0
    read.kv.bias.zero_()
    focuses = torch.logspace(math.log10(FOCUS[0]), math.log10(FOCUS[1]), model.heads)
    for head, focus in enumerate(focuses.tolist()):
        at, gain = head * size, math.sqrt(focus * math.sqrt(size))
        read.q.bias[at + across] = read.q.bias[at + down] = gain
        for row, key in zip((across, across + pairs, down, down + pairs), gain * keys):
            read.kv.weight[at + row], read.kv.bias[at + row] = key[:width], key[width]
