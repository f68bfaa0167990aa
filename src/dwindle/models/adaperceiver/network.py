"""What an AdaPerceiver is made of: its configuration, its parameters, and how each part is asked.

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
    Attend,
    Block,
    MatFFN,
    Read,
    ReadOut,
    Turn,
    TwoReadOuts,
    attend_mask,
    attention,
    drawn_mask,
    steps,
    suited,
    turns,
)

MASKS = ("blocks", "open")
Rising = Annotated[tuple[Size, ...], Count(1, 64)]
Tokens = Annotated[tuple[Annotated[int, Within(1, 4096)], ...], Count(1, 64)]  # each of them sees all the others


@dataclass(frozen=True)
class Images:
    """What the network is given."""

    image: Size = 224  # the side it is trained at
    patch: Size = 16
    channels: Size = 3


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: `rope_beyond` is what positions beyond the trained ones are given."""

    rope_theta: Above0 = 10000.0
    rope: Literal["halves", "pairs"] = "halves"
    rope_beyond: Literal["continue", "stretch"] = "continue"


@dataclass(frozen=True)
class Answering:
    """What the network answers; features: with outputs = both, the size of a patch's."""

    classes: Classes = 1000
    outputs: Literal["class", "dense", "both"] = "class"
    head: Literal["linear", "mlp", "ffn"] = "linear"
    features: Size | None = None
    readouts: Literal["shared", "own"] = "shared"


IMAGES, ROPE, ANSWERING = Images(), Rope(), Answering()


class Network(nn.Module):
    """The parts of `AdaPerceiver`, which says what the arguments mean. The fields of the groups (`images`, `rotary`,
    `answering`) are given by their own names."""

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
        for given, fits, expected in (
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
                raise DwindleError(f"{given}: {expected}.")
        shape: dict[str, Any] = {"width": width, "depth": depth, "heads": heads, "ffn_ratio": ffn_ratio}
        shape |= {"tokens": tokens, "widths": widths, "layer_scale": layer_scale, "norm_eps": norm_eps}
        self.config: dict[str, Any] = asdict(images) | shape | asdict(rotary) | asdict(answering)
        self.mask = mask
        self.classes, self.image, self.patch, self.channels = answering.classes, image, patch, channels
        self.width, self.depth, self.heads, self.ffn_ratio = width, depth, heads, ffn_ratio
        self.tokens, self.widths, self.rope_theta, self.outputs = tokens, widths, rotary.rope_theta, answering.outputs
        self._drawn: partial | None = None
        self.attention: str | None = None  # 'steps', 'mask' or 'flex'; None: what suits the device
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
        of, hidden = self.config, self.hidden(self.width)
        if self.outputs == "both":
            return TwoReadOuts(self.width, self.heads, self.classes, of["features"], of["head"], hidden)
        return ReadOut(self.width, self.heads, self.classes, self.outputs, of["head"], hidden)

    @property
    def mask(self) -> str:
        """'blocks' or 'open'; it may be changed at any time, and is saved with the network."""
        return self.config["mask"]

    @mask.setter
    def mask(self, mask: str) -> None:
        if mask not in MASKS:
            raise unknown("mask", mask, MASKS)
        self.config = self.config | {"mask": mask}  # a copy of the network may share it

    @torch.no_grad()
    def _start(self) -> None:
        # 0.02 at the published width. Narrower networks start as large in their scores: only these tell latents apart.
        std = 0.02 * (832 / self.width) ** 0.5
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        asking = [readout.output for readout in self.readouts] if self.outputs != "dense" else []
        for parameter in (self.position, self.latent, *asking):
            nn.init.trunc_normal_(parameter, std=0.02)

    def readout(self, depth: int) -> ReadOut:
        """What reads answers out after block `depth`, from 1."""
        return self.readouts[depth - 1 if len(self.readouts) > 1 else 0]

    def hidden(self, width: int) -> int:
        """Neurons of the FFN at this width."""
        return int(width * self.ffn_ratio)

    def patches(self, image: tuple[int, int] | None = None) -> int:
        rows, columns = self.grid(image or (self.image, self.image))
        return rows * columns

    def grid(self, image: tuple[int, int]) -> tuple[int, int]:
        return image[0] // self.patch, image[1] // self.patch

    def embed(self, images: Tensor) -> Tensor:
        """(B, P, D) input tokens (C.5). Another image size resamples the positions."""
        x = embed_patches(images, self.patch_embed.weight, self.patch_embed.bias)
        side = self.image // self.patch
        position: Tensor = self.position
        if tuple(x.shape[-2:]) != (side, side):
            square = position.unflatten(1, (side, side)).permute(0, 3, 1, 2)
            # Wide, as torch resamples no bf16 on a CPU.
            square = F.interpolate(wide(square), size=x.shape[-2:], mode="bicubic", antialias=True)
            position = square.flatten(2).mT.to(position.dtype)
        return self.embed_ffn(self.embed_norm(x.flatten(2).mT + position))

    def ends(self, tokens: int) -> tuple[int, ...]:
        """Where the steps of the mask end for this many latents."""
        return steps(tokens, self.tokens) if self.mask == "blocks" else (tokens,)

    def _prepare(self, tokens: int, patches: Tensor, ends: tuple[int, ...] | None = None) -> tuple[Turn, Attend]:
        """RoPE's angles and the attention for this many latents."""
        ends = ends or self.ends(tokens)
        kind = self.attention or suited(len(ends), patches.device)
        return self._angles(tokens, patches), attention(kind, ends, patches.device)

    def _angles(self, tokens: int, patches: Tensor) -> Turn:
        most = self.tokens[-1] if self.config["rope_beyond"] == "stretch" else None
        return turns(tokens, self.width // self.heads, self.rope_theta, patches, self.config["rope"] == "pairs", most)

    def channels_of(self, pair: int) -> tuple[int, int]:
        """The two channels of a head that RoPE's angle `pair` turns."""
        if self.config["rope"] == "pairs":
            return 2 * pair, 2 * pair + 1
        return pair, pair + self.width // self.heads // 2

    def _attend_drawn(self, drawn: Tensor) -> Attend:
        """Attention by these steps of the mask, written where the last ones were: compiled blocks and recordings know
        the place.
        """
        device, most = drawn.device, self.tokens[-1]
        if self._drawn is None or self._drawn.keywords["mask"].device != device:
            with torch.inference_mode(False):  # kept, and a backward pass may come later
                self._drawn = partial(attend_mask, mask=torch.ones(most, most, dtype=torch.bool, device=device))
        self._drawn.keywords["mask"].copy_(drawn_mask(drawn, self.tokens))
        return self._drawn

    def _answering(self, turn: Turn) -> Callable[..., tuple[Tensor, Tensor]]:
        """`answers(depth, z, patches, keep)`: what the depth's `ReadOut` gives, its table made once for all calls."""
        tables: dict[ReadOut, Any] = {}

        def answers(depth: int, z: Tensor, patches: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
            readout = self.readout(depth)
            if readout not in tables:
                tables[readout] = readout.table(turn)
            return readout(z, patches, turn, tables[readout], keep)

        return answers


def _rising(values: tuple[int, ...]) -> bool:
    return list(values) == sorted(set(values))
