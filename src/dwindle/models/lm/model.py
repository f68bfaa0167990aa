"""A causal transformer over characters: pre-norm, rotary positions (RoFormer), tied embeddings. Nothing adaptive here.

B sequences, N characters, D width, H heads, E head size, V vocabulary. A block is written in parts, so that execution
can run some of them on some rows only: rows are (..., D), and `turns` are what the rows' positions need.
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

Turns = tuple[Tensor, ...]  # what positions are encoded with, rows first; () where they were added to the embedding


@dataclass(frozen=True)
class LMShape:
    """What routers and cost need to know of a language model."""

    blocks: int
    width: int
    heads: int
    head_size: int
    context: int
    vocabulary: int
    row_macs: int  # linear layers of one block, for a row that runs
    key_macs: int  # of these, its key and value
    read_macs: int  # the final projection, for one row


@dataclass(frozen=True)
class LMSize:
    """Sizes of a CharLM."""

    vocabulary: Classes
    blocks: Depth = 6
    width: Size = 384
    heads: Size = 6
    context: Annotated[int, Within(1, 1 << 18)] = 256  # a table of angles is made for all of it
    dropout: Annotated[float, Within(0, 1, under=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        fits = self.width % (2 * self.heads) == 0
        require(fits, f"width = {self.width}", f"rotary positions need an even size for each of {self.heads} heads")


def rotate(x: Tensor, turns: Turns) -> Tensor:
    """(..., H, E) turned by position: coordinate pairs (i, i + E/2) as complex numbers."""
    cos, sin = (t[..., None, :].to(x.dtype) for t in turns)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
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

    def forward(self, x_BND: Tensor, turns: Turns) -> Tensor:
        h = self.normed(x_BND)
        heard = attend_causal(self.queries(h, turns), *self.keys_values(h, turns), dropout_p=self.attention_dropout)
        return self.rest(x_BND, heard.flatten(-2))

    def normed(self, x: Tensor) -> Tensor:
        return self.norm1(x)

    def queries(self, h: Tensor, turns: Turns) -> Tensor:
        return rotate(self.q(h).unflatten(-1, (self.heads, -1)), turns)  # (..., H, E)

    def keys_values(self, h: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.kv(h).chunk(2, -1))
        return rotate(k, turns), v

    def rest(self, x: Tensor, heard: Tensor) -> Tensor:
        """After attention: everything that looks at one row alone."""
        x = x + F.dropout(self.proj(heard), self.dropout, self.training)
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
        self.embedding = nn.Embedding(size.vocabulary, size.width)  # read from at the end, too (Press & Wolf)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        head = size.width // size.heads
        speeds = 10000.0 ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
        angles = torch.arange(size.context, dtype=torch.float64)[:, None] * speeds  # (N, E/2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, value in self.named_parameters():
            if value.dim() > 1:  # GPT-2's: what is added to the stream begins smaller, the more of it there is
                out = name.endswith(("proj.weight", "mlp_out.weight"))
                nn.init.normal_(value, std=0.02 / (2 * size.blocks) ** 0.5 if out else 0.02)

    def forward(self, ids_BN: Tensor) -> Tensor:
        x = self.embed(ids_BN)
        turns = self.turns(ids_BN.shape[1])
        for block in self.blocks:
            x = block(x, turns)
        return self.readout(x)

    def embed(self, ids_BN: Tensor, begin: int = 0) -> Tensor:
        """(B, N, D) of the characters at positions `begin`, `begin` + 1, ..."""
        check_length(begin + ids_BN.shape[1], self.size.context)
        return F.dropout(self.embedding(ids_BN), self.size.dropout, self.training)

    def turns(self, count: int, begin: int = 0) -> Turns:
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
        raise DwindleError(f"{length} characters are more than the model's context of {context}; give it fewer.")
