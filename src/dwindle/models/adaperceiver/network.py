"""The configuration and the parameters of an AdaPerceiver, and the steps that all its forward passes share.

B images, P input tokens, N latents, D width. The forward passes over these parts are in model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.tokens import wide
from ...errors import DwindleError, unknown
from ...ops.patches import embed_patches
from ...settings import Above0, Classes, Count, Depth, Size, Within, checked
from .blocks import (
    Angles,
    Attend,
    Block,
    MatFFN,
    Read,
    ReadOut,
    TwoReadOuts,
    attend_mask,
    attention,
    default_attention,
    drawn_mask,
    rope_angles,
    steps,
)

MASKS = ("blocks", "open")
Rising = Annotated[tuple[Size, ...], Count(1, 64)]
Tokens = Annotated[tuple[Annotated[int, Within(1, 4096)], ...], Count(1, 64)]  # bounded, as attention is quadratic


@dataclass(frozen=True)
class Images:
    """The images that the network takes."""

    image: Size = 224  # side of the training images
    patch: Size = 16
    channels: Size = 3


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. rope_beyond: the angles of positions beyond the trained ones (see `AdaPerceiver`)."""

    rope_theta: Above0 = 10000.0
    rope: Literal["halves", "pairs"] = "halves"
    rope_beyond: Literal["continue", "stretch"] = "continue"


@dataclass(frozen=True)
class Answering:
    """What the network answers. features: with outputs = both, the size of a patch's features."""

    classes: Classes = 1000
    outputs: Literal["class", "dense", "both"] = "class"
    head: Literal["linear", "mlp", "ffn"] = "linear"
    features: Size | None = None
    readouts: Literal["shared", "own"] = "shared"


IMAGES, ROPE, ANSWERING = Images(), Rope(), Answering()


class Network(nn.Module):
    """The parts of an `AdaPerceiver`; the arguments are explained there. A caller gives the fields of the groups
    (`images`, `rotary`, `answering`) by their own names."""

    @checked
    def __init__(
        self,
        *,
        images: Images = IMAGES,
        width: Size = 832,
        depth: Depth = 21,
        heads: Size = 13,
        ffn_ratio: Annotated[float, Within(0, 64, over=True)] = 2.57,
        tokens: Tokens = (32, 64, 96, 128, 192, 256),
        widths: Rising | None = (416, 624, 832),
        layer_scale: float = 1e-5,
        norm_eps: Annotated[float, Within(0, 1, over=True, under=True)] = 1e-5,
        rotary: Rope = ROPE,
        answering: Answering = ANSWERING,
        mask: Literal["blocks", "open"] = "blocks",
    ) -> None:
        super().__init__()
        widths = widths or (width,)
        image, patch, channels = images.image, images.patch, images.channels
        for setting, fits, expected in (
            (f"image = {image}", not image % patch, f"it must be a multiple of the patch, {patch}"),
            (f"width = {width}", not width % (2 * heads), f"it must be a multiple of 2 x {heads} heads"),
            (f"tokens = {tokens}", _rising(tokens), "they must rise"),
            (
                f"widths = {widths}",
                _rising(widths) and widths[-1] == width,
                f"they must rise and end with the width, {width}",
            ),
            (f"ffn_ratio = {ffn_ratio}", int(min(widths) * ffn_ratio) >= 1, "it leaves the least width no neuron"),
            (
                f"features = {answering.features}",
                (answering.features is None) == (answering.outputs != "both"),
                "outputs = both, and nothing else, needs the size of a patch's features",
            ),
        ):
            if not fits:
                raise DwindleError(f"{setting}: {expected}.")
        shape: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "ffn_ratio": ffn_ratio}
        shape |= {"tokens": tokens, "widths": widths, "layer_scale": layer_scale, "norm_eps": norm_eps}
        self.config: dict[str, Any] = asdict(images) | shape | asdict(rotary) | asdict(answering)
        self.mask = mask
        self.classes, self.image, self.patch, self.channels = answering.classes, image, patch, channels
        self.width, self.depth, self.heads, self.ffn_ratio = width, depth, heads, ffn_ratio
        self.tokens, self.widths, self.rope_theta, self.outputs = tokens, widths, rotary.rope_theta, answering.outputs
        self._drawn: partial | None = None
        self.attention: str | None = None  # 'steps', 'mask' or 'flex'; None: by `default_attention`
        self.extra: dict[str, Any] = {}

        self.patch_embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(torch.empty(1, self.patches(), width))
        self.embed_norm, self.embed_ffn = nn.LayerNorm(width), MatFFN(width, self.hidden(width))
        self.latent = nn.Parameter(torch.empty(1, width))
        self.read = Read(width, heads)
        self.blocks = nn.ModuleList(Block(width, heads, self.hidden(width), layer_scale) for _ in range(depth))
        count = depth if answering.readouts == "own" else 1
        self.readouts: Any = nn.ModuleList(self._readout() for _ in range(count))
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = norm_eps
        self._start()

    def _readout(self) -> ReadOut:
        """A new read-out."""
        config, hidden = self.config, self.hidden(self.width)
        if self.outputs == "both":
            return TwoReadOuts(self.width, self.heads, self.classes, config["features"], config["head"], hidden)
        return ReadOut(self.width, self.heads, self.classes, self.outputs, config["head"], hidden)

    @property
    def mask(self) -> str:
        """The mask, 'blocks' or 'open'. It may be changed at any time, and is saved with the network."""
        return self.config["mask"]

    @mask.setter
    def mask(self, mask: str) -> None:
        if mask not in MASKS:
            raise unknown("mask", mask, MASKS)
        self.config = self.config | {"mask": mask}  # a new dictionary, as a copy of the network may share the old one

    @torch.no_grad()
    def _start(self) -> None:
        """Initialise the parameters."""
        # 0.02 at the published width. The scores of narrower networks start as large: only they distinguish latents.
        std = 0.02 * (832 / self.width) ** 0.5
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        outputs = [readout.output for readout in self.readouts] if self.outputs != "dense" else []
        for parameter in (self.position, self.latent, *outputs):
            nn.init.trunc_normal_(parameter, std=0.02)

    def readout(self, depth: int) -> ReadOut:
        """The read-out after block `depth`, from 1."""
        return self.readouts[depth - 1 if len(self.readouts) > 1 else 0]

    def hidden(self, width: int) -> int:
        """The number of the FFN's neurons at this width."""
        return int(width * self.ffn_ratio)

    def patches(self, image: tuple[int, int] | None = None) -> int:
        """The number of patches of an image (height, width); None: of a training image."""
        rows, columns = self.grid(image or (self.image, self.image))
        return rows * columns

    def grid(self, image: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image (height, width)."""
        return image[0] // self.patch, image[1] // self.patch

    def embed(self, images: Tensor) -> Tensor:
        """(B, P, D): the input tokens of images (C.5). For another image size the positions are resampled."""
        x = embed_patches(images, self.patch_embed.weight, self.patch_embed.bias)
        side = self.image // self.patch
        position: Tensor = self.position
        if tuple(x.shape[-2:]) != (side, side):
            square = position.unflatten(1, (side, side)).permute(0, 3, 1, 2)
            # In float32, as torch does not resample bf16 on a CPU.
            square = F.interpolate(wide(square), size=x.shape[-2:], mode="bicubic", antialias=True)
            position = square.flatten(2).mT.to(position.dtype)
        return self.embed_ffn(self.embed_norm(x.flatten(2).mT + position))

    def ends(self, tokens: int) -> tuple[int, ...]:
        """The last latents, counted from 1, of the mask's steps for this many latents."""
        return steps(tokens, self.tokens) if self.mask == "blocks" else (tokens,)

    def _angles_and_attention(
        self, tokens: int, patches: Tensor, ends: tuple[int, ...] | None = None
    ) -> tuple[Angles, Attend]:
        """RoPE's angles and the attention function for this many latents. ends: of the mask; None: the network's."""
        ends = ends or self.ends(tokens)
        kind = self.attention or default_attention(len(ends), patches.device)
        return self._angles(tokens, patches), attention(kind, ends, patches.device)

    def _angles(self, tokens: int, patches: Tensor) -> Angles:
        most, pairs = (
            self.tokens[-1] if self.config["rope_beyond"] == "stretch" else None,
            self.config["rope"] == "pairs",
        )
        return rope_angles(tokens, self.width // self.heads, self.rope_theta, patches, pairs, most)

    def channels_of(self, pair: int) -> tuple[int, int]:
        """The two channels of a head that RoPE's angle `pair` rotates."""
        if self.config["rope"] == "pairs":
            return 2 * pair, 2 * pair + 1
        return pair, pair + self.width // self.heads // 2

    def _attend_drawn(self, drawn: Tensor) -> Attend:
        """Attention with the mask of these steps, drawn (G,) bool. Each call overwrites one tensor, as compiled blocks
        and recordings hold its address.
        """
        device, most = drawn.device, self.tokens[-1]
        if self._drawn is None or self._drawn.keywords["mask"].device != device:
            with torch.inference_mode(False):  # the mask is kept, and may serve a backward pass later
                self._drawn = partial(attend_mask, mask=torch.ones(most, most, dtype=torch.bool, device=device))
        self._drawn.keywords["mask"].copy_(drawn_mask(drawn, self.tokens))
        return self._drawn

    def _readout_function(self, angles: Angles) -> Callable[..., tuple[Tensor, Tensor]]:
        """A function (depth, z, patches, keep) that calls that depth's `ReadOut`; each read-out's table is computed
        once for all calls."""
        tables: dict[ReadOut, Any] = {}

        def answer_at(depth: int, z: Tensor, patches: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
            readout = self.readout(depth)
            if readout not in tables:
                tables[readout] = readout.table(angles)
            return readout(z, patches, angles, tables[readout], keep)

        return answer_at


def _rising(values: tuple[int, ...]) -> bool:
    return list(values) == sorted(set(values))
