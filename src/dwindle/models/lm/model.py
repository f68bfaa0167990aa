"""A causal transformer over characters: pre-norm, rotary positions (RoFormer), tied embeddings. Nothing adaptive here.

B sequences, N characters, D width, H heads, E head size, V vocabulary. A block is written in parts, so that execute.py
can run a part on some rows only: rows are (..., D), and `rotary` holds the rotary tables at the rows' positions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.method import require
from ...errors import DwindleError
from ...ops.causal import attend_causal
from ...settings import Classes, Depth, Size, Within, check_fields

Rotary = tuple[Tensor, ...]  # cos and sin (N, E/2); () where the embedding holds the positions


@dataclass(frozen=True)
class LMShape:
    """The sizes of a language model that routers and the cost model use."""

    blocks: int
    width: int
    heads: int
    head_size: int
    context: int
    vocabulary: int
    row_macs: int  # multiply-accumulates of one block's linear layers, for one row
    key_macs: int  # the part of row_macs for the key and the value
    read_macs: int  # multiply-accumulates of the final projection, for one row


@dataclass(frozen=True)
class LMSize:
    """Sizes of a CharLM."""

    vocabulary: Classes
    blocks: Depth = 6
    width: Size = 384
    heads: Size = 6
    context: Annotated[int, Within(1, 1 << 18)] = 256  # the rotary tables have a row for each position
    dropout: Annotated[float, Within(0, 1, under=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        fits = self.width % (2 * self.heads) == 0
        require(fits, f"width = {self.width}", f"rotary positions need an even size for each of {self.heads} heads")


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x (..., H, E) rotated by position: the channels i and i + E/2 are one complex number."""
    cos, sin = (t[..., None, :].to(x.dtype) for t in rotary)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """A pre-norm block: `forward` is its definition, the other methods are its parts."""

    def __init__(self, size: LMSize) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BND: Tensor, rotary: Rotary) -> Tensor:
        h = self.normed(x_BND)
        k, v = self.keys_values(h, rotary)
        attended = attend_causal(self.queries(h, rotary), k, v, dropout_p=self.attention_dropout)
        return self.rest(x_BND, attended.flatten(-2))

    def normed(self, x: Tensor) -> Tensor:
        return self.norm1(x)

    def queries(self, h: Tensor, rotary: Rotary) -> Tensor:
        return rotate(self.q(h).unflatten(-1, (self.heads, -1)), rotary)  # (..., H, E)

    def keys_values(self, h: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.kv(h).chunk(2, -1))
        return rotate(k, rotary), v

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block after attention, which treats each row alone: projection, residuals and MLP."""
        x = x + F.dropout(self.proj(attended), self.dropout, self.training)
        return x + F.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)))), self.dropout, self.training)

    @property
    def attention_dropout(self) -> float:
        return self.dropout if self.training else 0.0


class CharLM(nn.Module):
    family = "charlm"
    cos: Tensor
    sin: Tensor

    def __init__(self, size: LMSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)  # also the output projection (Press & Wolf)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        head = size.width // size.heads
        speeds = 10000.0 ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
        angles = torch.arange(size.context, dtype=torch.float64)[:, None] * speeds  # (N, E/2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, value in self.named_parameters():
            if value.dim() > 1:  # as GPT-2: the more layers add to the stream, the smaller each begins
                out = name.endswith(("proj.weight", "mlp_out.weight"))
                nn.init.normal_(value, std=0.02 / (2 * size.blocks) ** 0.5 if out else 0.02)

    def forward(self, ids_BN: Tensor) -> Tensor:
        x = self.embed(ids_BN)
        rotary = self.rotary(ids_BN.shape[1])
        for block in self.blocks:
            x = block(x, rotary)
        return self.readout(x)

    def embed(self, ids_BN: Tensor, begin: int = 0) -> Tensor:
        """(B, N, D): the embeddings of characters at positions `begin`, `begin` + 1, ..."""
        check_length(begin + ids_BN.shape[1], self.size.context)
        return F.dropout(self.embedding(ids_BN), self.size.dropout, self.training)

    def rotary(self, count: int, begin: int = 0) -> Rotary:
        return self.cos[begin : begin + count], self.sin[begin : begin + count]

    def readout(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)

    @property
    def shape(self) -> LMShape:
        s = self.size
        square = s.width**2
        head = s.width // s.heads
        return LMShape(
            s.blocks, s.width, s.heads, head, s.context, s.vocabulary, 12 * square, 2 * square, s.width * s.vocabulary
        )

    def describe(self) -> dict[str, Any]:
        return {"model": type(self).__name__, "options": asdict(self.size)}


def check_length(length: int, context: int) -> None:
    if length > context:
        raise DwindleError(f"{length} tokens are more than the model's context of {context}; give it fewer.")
