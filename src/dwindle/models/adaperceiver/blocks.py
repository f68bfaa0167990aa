"""The parts of AdaPerceiver: RoPE, three forms of block-masked attention, the Matryoshka FFN, read and write.

B images, N latent tokens, P input tokens, G granularities read out together, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...ops import half


class Angles(NamedTuple):
    """RoPE's angles. pairs: an angle rotates two neighbouring channels; else one channel of each half of a head."""

    cos: Tensor  # (N, K / 2)
    sin: Tensor
    pairs: bool = False


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Table = tuple[Tensor, Tensor] | None
ANY_BATCH = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def rope_angles(
    tokens: int, head_size: int, theta: float, like: Tensor, pairs: bool = False, most: int | None = None
) -> Angles:
    """RoPE's angles of positions 0 .. tokens - 1, in the dtype of `like` and on its device. most: the angles of more
    positions than these are scaled into the range of so many."""
    speed = theta ** (-torch.arange(0, head_size, 2, device=like.device, dtype=torch.float64) / head_size)
    if most is not None and tokens > most:
        speed = speed / (tokens / most)
    angle = torch.arange(tokens, device=like.device, dtype=torch.float64)[:, None] * speed
    return Angles(angle.cos().to(like.dtype), angle.sin().to(like.dtype), pairs)


def rotate(x: Tensor, angles: Angles, back: bool = False) -> Tensor:
    """x (..., N, K), each row rotated by the angles of its position; `back`: by the opposite angles."""
    cos, sin, pairs = angles
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1) if pairs else x.chunk(2, -1)
    sin = -sin if back else sin
    one, two = one * cos - two * sin, one * sin + two * cos
    return (torch.stack([one, two], -1).flatten(-2) if pairs else torch.cat([one, two], -1)).to(x.dtype)


@cache
def int_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """(n,) integers on the device. They are kept, as each copy to a GPU waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def steps(tokens: int, granularities: Sequence[int]) -> tuple[int, ...]:
    """The ends of the mask's blocks (C.4): a token sees all tokens up to the end of its own block.

    For a number of tokens between two granularities the last block is shorter; beyond the largest, one more is added.
    """
    return (*[end for end in granularities if end < tokens], tokens)


def block_mask(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """(N, N) bool, True where the query of the row sees the key of the column."""
    at, edges = torch.arange(ends[-1], device=device), int_tensor(ends, device)
    return at < edges[torch.searchsorted(edges, at, right=True)][:, None]


def drawn_mask(drawn: Tensor, granularities: tuple[int, ...]) -> Tensor:
    """(N, N) bool: the `block_mask` of the granularities that drawn (G,) bool selects, always the last among them. The
    host does not wait for `drawn`."""
    most = granularities[-1]
    at, ends = torch.arange(most, device=drawn.device), int_tensor(granularities, drawn.device)
    seen = torch.where(drawn & (ends > at[:, None]), ends, most).amin(1)  # (N,)
    return at < seen[:, None]


def attend_steps(q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int]) -> Tensor:
    """Attention block by block: the scores that the mask forbids are not computed."""
    parts, start = [], 0
    for end in ends:
        parts.append(half.attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attend_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask (N, N) bool in one fused call."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@cache
def attention(kind: str, ends: tuple[int, ...], device: torch.device) -> Attend:
    """The attention function of a kind, 'steps', 'mask' or 'flex'; all give the same result. Functions are kept, so
    that a compiled block gets the same one in each call."""
    if len(ends) == 1:
        return half.attend
    if kind == "steps":
        return partial(attend_steps, ends=ends)
    with torch.inference_mode(False):  # the mask is kept, and may serve a backward pass later
        mask = block_mask(ends, device)
    if kind == "mask":
        return partial(attend_mask, mask=mask)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask[i, j]

    blocks = create_block_mask(visible, None, None, ends[-1], ends[-1], device=str(device))
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks)


def any_batch(shrinks: bool) -> AbstractContextManager[None]:
    """A context in which the batch may shrink from block to block. It excludes cuDNN's attention, torch's first choice
    on Hopper, which makes a plan for each batch size; each plan takes longer than all the blocks."""
    return sdpa_kernel(list(ANY_BATCH)) if shrinks else nullcontext()


def default_attention(steps: int, device: torch.device) -> str:
    """The kind of attention for a number of steps on a device. The rule is fixed, as another kind rounds otherwise. On
    an H200 the mask was fastest at every size measured, forward and backward."""
    return "mask" if device.type == "cuda" and steps > 1 else "steps"


def sliced_linear(layer: nn.Linear, x: Tensor, outputs: int, inputs: int) -> Tensor:
    """The layer with only its first `outputs` outputs and `inputs` inputs."""
    return F.linear(x, layer.weight[:outputs, :inputs], None if layer.bias is None else layer.bias[:outputs])


class SelfAttention(nn.Module):
    """Multi-head self-attention of the latents, with RoPE."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, K) each
        out = attend(rotate(q, angles), rotate(k, angles), v)
        return self.proj(out.transpose(1, 2).flatten(2))


class MatFFN(nn.Module):
    """An FFN whose first `hidden` neurons are a smaller FFN (Algorithm 2): sliced in evaluation, masked in training."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, hidden: int | None = None, kept: Tensor | None = None) -> Tensor:
        """hidden: run only so many neurons. kept (B, 1, hidden): 1 for each image's neurons and 0 for the others, in
        training. As GELU(0) = 0, masking after GELU is the same as masking before it."""
        if hidden is None or hidden == self.fc1.out_features:
            x = F.gelu(self.fc1(x))
            return self.fc2(x if kept is None else x * kept.to(x.dtype))
        width = x.shape[-1]
        return sliced_linear(self.fc2, F.gelu(sliced_linear(self.fc1, x, hidden, width)), width, hidden)


class Block(nn.Module):
    """A block (Eq. 11-12) with LayerScale."""

    def __init__(self, width: int, heads: int, hidden: int, layer_scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.ffn = SelfAttention(width, heads), MatFFN(width, hidden)
        self.scale1 = nn.Parameter(torch.full((width,), layer_scale))
        self.scale2 = nn.Parameter(torch.full((width,), layer_scale))

    def forward(
        self,
        z: Tensor,
        angles: Angles,
        attend: Attend,
        hidden: int | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        z = z + self.scale1 * self.attn(self.norm1(z), angles, attend)
        return z + self.scale2 * self.ffn(self.norm2(z), hidden, kept)


class CrossAttention(nn.Module):
    """Cross-attention: sinks give the queries, sources the keys and values, both normalised. RoPE rotates only latents,
    as patches have position embeddings."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_sink, self.norm_source = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def queries(self, sink: Tensor) -> Tensor:
        return self.q(self.norm_sink(sink)).unflatten(-1, (self.heads, -1)).transpose(-2, -3)  # (..., H, M, K)

    def forward(
        self,
        q: Tensor,
        source: Tensor,
        angles: Angles | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """q (B, H, M, K) to (B, M, D). angles: of the sources, where they are latents. keep (M, S) bool: the sources
        that each sink may read."""
        k, v = self.kv(self.norm_source(source)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k = k if angles is None else rotate(k, angles)
        out = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=keep)
        return self.proj(out.transpose(1, 2).flatten(2))


class Read(CrossAttention):
    """The read head (Eq. 9). The N queries are one learned latent at N positions, the same for every image."""

    def latents(self, z: Tensor, patches: Tensor, angles: Angles) -> Tensor:
        """(B, N, D): the latent z (1, D) at N positions, after it has read the input tokens (B, P, D)."""
        tokens, images = len(angles.cos), len(patches)
        q = rotate(self.queries(z).expand(-1, tokens, -1), angles)  # (H, N, K)
        return z + self(q.expand(images, -1, -1, -1), patches)


class Write(CrossAttention):
    """The write head (Eq. 13). The query of a learned output token is the same for every image, so keys need not be
    computed: with R_n, RoPE at position n, q . R_n W_k x_n = (W_k^T R_n^T q) . x_n, where the left factor is a table
    computed once, and sum_n a_n W_v x_n = W_v sum_n a_n x_n. A read-out then costs 2 H D per latent instead of 2 D^2,
    so that reading out at every depth is cheap.
    """

    compiled = False  # training compiles `fold`, as its many steps are alike

    def table(self, output: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Weight (N, H, D) and bias (N, H), which give the scores of each position's normalised latent."""
        width = output.shape[-1]
        q = self.queries(output)  # (H, 1, K)
        q = rotate(q.expand(-1, len(angles.cos), -1), angles, back=True) * q.shape[-1] ** -0.5  # (H, N, K)
        weight, bias = self.kv.weight[:width].unflatten(0, (self.heads, -1)), self.kv.bias[:width].view(self.heads, -1)
        return torch.einsum("hnk,hkd->nhd", q, weight), torch.einsum("hnk,hk->nh", q, bias)

    def folded(self, latents: Tensor, table: tuple[Tensor, Tensor], keep: Tensor | None = None) -> Tensor:
        """(B, G, D): a read-out for each row of `keep` (G, N) bool, of its latents alone; (B, 1, D) without `keep`."""
        return (_compiled_fold() if self.compiled else fold)(self, latents, *table, keep)


def fold(write: Write, latents: Tensor, weight: Tensor, bias: Tensor, keep: Tensor | None) -> Tensor:
    """`Write.folded` with the table's weight and bias."""
    x, width, heads = write.norm_source(latents), latents.shape[-1], write.heads
    fine = torch.promote_types(x.dtype, torch.float32)
    score = torch.bmm(x.transpose(0, 1), weight.to(x.dtype).mT).permute(1, 2, 0).to(fine) + bias.to(fine).T  # (B, H, N)
    if keep is not None:
        score = score[:, :, None].masked_fill(~keep, -torch.inf).flatten(1, 2)  # (B, H G, N)
    pooled = torch.bmm(score.softmax(-1).to(x.dtype), x)  # (B, H G, D)
    pooled = pooled.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2)  # (H, B G, D)
    values = write.kv.weight[width:].unflatten(0, (heads, -1)).to(x.dtype)  # (H, K, D)
    out = torch.bmm(pooled, values.mT).transpose(0, 1).reshape(len(x), -1, width)  # (B, G, D)
    return write.proj(out + write.kv.bias[width:].to(x.dtype))


class ReadOut(nn.Module):
    """Latents to answers (Eq. 13): the queries, from a learned output token or from the projected patches; the write
    head; and the head that gives answers from output tokens.
    """

    def __init__(self, width: int, heads: int, classes: int, outputs: str, head: str, hidden: int) -> None:
        """head: 'linear', 'mlp' as wide as the network, or 'ffn', normalised and with `hidden` neurons."""
        super().__init__()
        self.write = Write(width, heads)
        if outputs == "class":
            self.output = nn.Parameter(torch.empty(1, width))
        else:
            self.output_proj = nn.Linear(width, width)  # C.6
        if head == "linear":
            self.head: nn.Module = nn.Linear(width, classes)
        elif head == "mlp":
            self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
        else:
            neurons = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, classes)
            self.head = nn.Sequential(nn.LayerNorm(width), *neurons)

    def table(self, angles: Angles) -> Table:
        """The write head's table for the learned output token; None for patches."""
        return self.write.table(self.output, angles) if hasattr(self, "output") else None

    def forward(
        self,
        z: Tensor,
        patches: Tensor,
        angles: Angles,
        table: Table,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Answers (B, classes), dense (B, M, classes), and output tokens (B, M, D).

        keep (G, N) bool: G sets of latents to read from; answers and output tokens are then (G, B, ...).
        """
        if table is not None:
            out = self.output + self.write.folded(z, table, keep)  # (B, M, D), or (B, G, D)
            out = out if keep is None else out.transpose(0, 1)[:, :, None]
            return self.head(out).squeeze(-2), out
        start = self.output_proj(patches)
        q = self.write.queries(start)
        if keep is None:
            out = start + self.write(q, z, angles)
        else:
            rows = [row.expand(q.shape[-2], -1) for row in keep]
            out = torch.stack([start + self.write(q, z, angles, row) for row in rows])
        return self.head(out), out


class TwoReadOuts(ReadOut):
    """An answer for the image from a learned token, and features for each patch, by two write heads (D.1)."""

    def __init__(self, width: int, heads: int, classes: int, features: int, head: str, hidden: int) -> None:
        super().__init__(width, heads, classes, "class", head, hidden)
        self.dense = ReadOut(width, heads, features, "dense", "ffn", hidden)

    def forward(
        self, z: Tensor, patches: Tensor, angles: Angles, table: Table, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Answers (B, classes) and features (B, P, features)."""
        answers, _ = super().forward(z, patches, angles, table, keep)
        features, _ = self.dense(z, patches, angles, None, keep)
        return answers, features


@cache
def _compiled_fold() -> Callable[..., Tensor]:
    return torch.compile(fold, dynamic=False)
