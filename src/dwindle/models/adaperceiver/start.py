"""Initialisation of an AdaPerceiver from another one, or from a plain ViT with blocks of the same shape.

B images, N latents, P input tokens, D width, H heads, K head size.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import DwindleError
from ...io.checkpoint import load
from .model import AdaPerceiver

log = logging.getLogger("dwindle")
FOCUS = 60.0  # the scale of the read head's scores at the start: each latent reads nearly one patch
CODE = 3.5  # the norm of a position's code relative to that of the patch it is added to


def begin_from(
    model: AdaPerceiver, source: str, images: Tensor, frozen: bool = False, renewed: bool = False, head: bool = True
) -> None:
    """Initialise the model from `source`, a checkpoint.

    images: a sample (B, C, height, width), prepared, which shows how a ViT's channels are used. frozen: the blocks will
    not be trained, so they must have been trained with the model's tokens and mask. renewed: only some read-outs will
    be trained, so all must fit. head: whether the checkpoint's classes are the model's.
    """
    other: Any = load(source)
    if renewed and not head:
        raise DwindleError(
            f"weights = {source} has other classes than the data, and reinit_from keeps its; take its data."
        )
    if renewed and not _same_readouts(model, other):
        raise DwindleError(
            f"weights = {source} has no read-outs that reinit_from could keep: it must be an AdaPerceiver with one for "
            f"each of {model.depth} depths and {model.classes} classes; give weights=RUN, the network to mend."
        )
    if isinstance(other, AdaPerceiver):
        unmasked = len(model.tokens) == 1 and model.tokens == other.tokens  # both masks are then the same
        for name in ("tokens",) if unmasked else ("tokens", "mask"):
            theirs, own = getattr(other, name), getattr(model, name)
            if frozen and theirs != own:
                raise DwindleError(
                    f"weights = {source} was trained with {name} = {theirs}, and freeze_backbone keeps it from "
                    f'learning {own}; give --set "method.{name}={theirs}".'
                )
            if name == "mask" and theirs != own:
                log.warning(
                    "%s was trained with mask = %s and goes on with %s; method.mask=%s keeps it",
                    source,
                    theirs,
                    own,
                    theirs,
                )
        _from_ada(model, other, source, head)
    else:
        _from_vit(model, other, source, images, head)


def _same_readouts(model: AdaPerceiver, other: Any) -> bool:
    """Whether `other` is an AdaPerceiver whose read-outs have the model's number and shapes."""

    def shapes(network: AdaPerceiver) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in network.readouts.state_dict().items()}

    return isinstance(other, AdaPerceiver) and shapes(model) == shapes(other)


def _from_ada(model: AdaPerceiver, other: AdaPerceiver, source: str, head: bool) -> None:
    """Copy the weights of another AdaPerceiver. Weights of read-outs that do not fit keep their initialisation."""
    own, weights = model.state_dict(), other.state_dict()
    for i in range(len(model.readouts)):  # a shared read-out begins as that of the last block
        theirs = other.readout(min(i + 1 if len(model.readouts) > 1 else model.depth, other.depth))
        weights |= {f"readouts.{i}.{name}": value for name, value in theirs.state_dict().items()}
    if not head:
        weights = {n: v for n, v in weights.items() if ".head." not in n}
    fitting = {n: v for n, v in weights.items() if n in own and own[n].shape == v.shape}
    lost = [n for n in own if n not in fitting and not n.startswith("readouts.")]
    if lost:
        raise DwindleError(f"weights = {source} does not fit: '{lost[0]}' differs; train the same configuration.")
    model.load_state_dict(fitting, strict=False)


def _fitting_parts(model: AdaPerceiver, other: Any, source: str) -> list[Any]:
    """The parts of the ViT's first blocks, one for each block of the network; refused where they do not fit it."""
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
    for fits, setting, allowed in (
        (model.depth <= shape.blocks, f"depth {model.depth}", f"from 1 to {shape.blocks}"),
        # At least 2: the embedding FFN begins as an identity, which needs two neurons for each channel.
        (2 * model.width <= hidden <= shape.hidden, f"ffn_ratio {model.ffn_ratio}", f"from 2 to {most}"),
        # Positions are coded in two pairs of channels of each head.
        (model.width >= 4 * model.heads, f"{model.heads} heads in {model.width} channels", "4 channels a head or more"),
    ):
        if not fits:
            raise DwindleError(f"weights = {source} cannot begin a network of {setting}; it must be {allowed}.")
    return parts


@torch.no_grad()
def _from_vit(model: AdaPerceiver, other: Any, source: str, images: Tensor, head: bool) -> None:
    """Copy a ViT's patch embedding, positions, blocks and head. Each latent begins as one patch, so that the blocks get
    inputs like those of the ViT. The embedding FFN and the values of the write heads begin as identities.
    """
    vit, shape = other.vit, other.backbone.shape
    parts = _fitting_parts(model, other, source)
    conv, position = vit.patch_embed.proj, vit.pos_embed
    _copy(model.patch_embed, conv)
    cells, side = shape.grid(), model.image // model.patch
    square = position[:, -cells[0] * cells[1] :].unflatten(1, cells).permute(0, 3, 1, 2)
    if cells != (side, side):
        square = F.interpolate(square, size=(side, side), mode="bicubic", antialias=True)
    model.position.copy_(square.flatten(2).mT)
    for block, part in zip(model.blocks, parts):
        _block(block, part)
    one = torch.eye(model.width)
    ffn = model.embed_ffn  # GELU(x) - GELU(-x) = x
    for layer in (ffn.fc1, ffn.fc2):
        layer.bias.zero_()
    ffn.fc1.weight[: 2 * model.width] = torch.cat([one, -one])
    ffn.fc2.weight.zero_()
    ffn.fc2.weight[:, : 2 * model.width] = torch.cat([one, -one], 1)
    model.read.proj.weight.copy_(one)
    for readout in model.readouts:
        readout.write.kv.weight[model.width :] = one
        readout.write.proj.weight.copy_(one)
    norm, theirs = getattr(vit, "norm", None), getattr(vit, "head", None) if head else None
    for readout in model.readouts:
        readout.write.q.weight.zero_()  # all scores are equal: a mean over latents
        if isinstance(norm, nn.LayerNorm):
            _copy(readout.write.norm_source, norm)
        if (
            isinstance(theirs, nn.Linear)
            and isinstance(readout.head, nn.Linear)
            and theirs.weight.shape == readout.head.weight.shape
        ):
            _copy(readout.head, theirs)
    _begin_read(model, images)
    _sort_channels_for_rope(model, images)


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    """Copy weight and bias of a layer."""
    state = {name: value for name, value in theirs.state_dict().items() if name in ("weight", "bias")}
    own.load_state_dict(state)


def _block(block: Any, part: Any) -> None:
    """Copy a ViT's block. Its FFN's neurons are sorted by their norms, as narrower widths keep the first ones."""
    _copy(block.norm1, part.norm1)
    _copy(block.norm2, part.norm2)
    _copy(block.attn.qkv, part.qkv[0])
    _copy(block.attn.proj, part.proj)
    hidden = block.ffn.fc1.out_features
    order = (part.fc1.weight.norm(dim=1) * part.fc2.weight.norm(dim=0)).argsort(descending=True)[:hidden]
    block.ffn.fc1.weight.copy_(part.fc1.weight[order])
    block.ffn.fc1.bias.copy_(part.fc1.bias[order])
    block.ffn.fc2.weight.copy_(part.fc2.weight[:, order])
    block.ffn.fc2.bias.copy_(part.fc2.bias)
    block.scale1.copy_(part.scale1 if part.scale1 is not None else torch.ones_like(block.scale1))
    block.scale2.copy_(part.scale2 if part.scale2 is not None else torch.ones_like(block.scale2))


def _begin_read(model: AdaPerceiver, images: Tensor) -> None:
    """Latent n begins as the patch around (x_n, y_n) = (n s_x + c, n s_y + c), angles that go once around over the
    image's width and height; s_x and s_y are speeds of RoPE, c is the middle of a patch.

    To each position a code, (cos x, sin x, cos y, sin y), is added along directions that patches hardly use. The code
    is larger than the patch, so that after LayerNorm it is nearly as large for every patch; keys read the code alone.
    A query in two pairs of channels, rotated by n, then scores FOCUS * (cos(x_n - x) + cos(y_n - y)). Values leave the
    code out.
    """
    read, width, size = model.read, model.width, model.width // model.heads
    side = model.image // model.patch
    angle = (torch.arange(side) + 0.5) / side * 2 * math.pi
    y, x = (a.flatten() for a in torch.meshgrid(angle, angle, indexing="ij"))
    code = torch.stack([x.cos(), x.sin(), y.cos(), y.sin()], -1)  # (P, 4)

    tokens = model.patch_embed(images).flatten(2).mT + model.position  # (B, P, D)
    seen = tokens.flatten(0, 1).double()
    seen = seen - seen.mean(-1, keepdim=True)
    used = seen.T @ seen
    used += used.trace()  # excludes the mean over channels, which LayerNorm removes
    along = torch.linalg.eigh(used)[1][:, :4].float()  # (D, 4)
    large = CODE * float(seen.square().sum(-1).mean().sqrt()) / math.sqrt(2)
    codes = large * code @ along.T  # (P, D)
    model.position.add_(codes)
    spread = float((tokens + codes).std(-1).mean())

    model.latent.zero_()
    read.q.weight.zero_()
    read.q.bias.zero_()
    read.kv.weight.zero_()
    read.kv.bias.zero_()
    read.kv.weight[width:] = spread * (torch.eye(width) - along @ along.T)
    across, down = _scanning_pairs(model)
    gain = math.sqrt(FOCUS * math.sqrt(size))
    for at in range(0, width, size):
        for pair, rows in ((across, (0, 1)), (down, (2, 3))):
            one, two = (at + channel for channel in model.channels_of(pair))
            read.q.bias[one] = gain * math.cos(math.pi / side)
            read.q.bias[two] = gain * math.sin(math.pi / side)
            read.kv.weight[[one, two]] = gain * spread / large * along.T[list(rows)]


def _scanning_pairs(model: AdaPerceiver) -> tuple[int, int]:
    """The two pairs of RoPE's channels whose angles scan the image best: for each trained number of latents, the mean
    distance from a patch to the nearest latent is smallest."""
    side, pairs = model.image // model.patch, model.width // model.heads // 2
    speed = model.rope_theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    place = torch.arange(model.tokens[-1], dtype=torch.float64)[:, None] * speed / (2 * math.pi) + 0.5 / side  # turns
    patch = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    away = ((place[..., None] - patch + 0.5) % 1 - 0.5).square()  # (N, pairs, side), the short way around

    def distance(across: int, down: int) -> float:
        both = away[:, down, :, None] + away[:, across, None, :]  # (N, side, side)
        return sum(float(both[:count].amin(0).mean()) for count in model.tokens)

    found = {(i, j): distance(i, j) for i in range(pairs) for j in range(i + 1, pairs)}
    return min(found, key=found.__getitem__)


def _sort_channels_for_rope(model: AdaPerceiver, images: Tensor) -> None:
    """Change the basis of each head's queries and keys so that RoPE changes a ViT's scores as little as possible.

    The ViT was trained without RoPE. Scores stay the same in any basis, q' = A q, k' = A^-T k. The basis chosen sorts
    channels by how much they add to the scores of these images; the largest go to the pairs that RoPE rotates slowest.

    With E[q q'] = L L' and cov k = M M', the scores' singular values are those of L'M = U S V'; then A = sqrt(S) U' / L
    and A^-T = sqrt(S) V' / M.
    """
    patches = model.embed(images)
    angles, attend = model._angles_and_attention(model.tokens[-1], patches)
    z, width, size = model.read.latents(model.latent, patches, angles), model.width, model.width // model.heads
    places = torch.tensor([model.channels_of(pair) for pair in range(size // 2)]).flatten()
    rank = torch.empty_like(places)  # a channel's rank; those of the slowest pair, the last, are 0 and 1
    rank[places] = torch.arange(size).view(-1, 2).flip(0).flatten()
    blocks: Any = model.blocks
    for block in blocks:
        weight, bias = block.attn.qkv.weight, block.attn.qkv.bias
        seen = block.norm1(z).flatten(0, 1).double()
        for at in range(0, width, size):
            queries, keys = slice(at, at + size), slice(width + at, width + at + size)
            q = seen @ weight[queries].double().T + bias[queries].double()
            k = seen @ weight[keys].double().T
            # The mean of all keys changes no softmax, but would after a rotation, so it is removed.
            mean = k.mean(0)
            left, right = _root(q), _root(k - mean)
            u, s, v = torch.linalg.svd(left.T @ right)
            for rows, basis, root, shift in ((queries, u.T, left, bias[queries].double()), (keys, v, right, -mean)):
                change = s.sqrt()[:, None] * torch.linalg.solve_triangular(root, basis, upper=False, left=False)
                moved = (change @ torch.cat([weight[rows].double(), shift[:, None]], 1)).float()
                weight[rows], bias[rows] = moved[rank, :-1], moved[rank, -1]
        z = block(z, angles, attend)


def _root(x: Tensor) -> Tensor:
    """(K, K) lower L with L L' the second moment of x (n, K)."""
    moment = x.T @ x / len(x)
    ridge = (1e-6 * moment.diagonal().mean()).clamp_min(1e-12)
    return torch.linalg.cholesky(moment + ridge * torch.eye(len(moment)).to(moment))
