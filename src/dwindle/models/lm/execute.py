"""AdaptiveLM: a language model and the router that says which tokens run which block. The whole forward path is here.

B sequences, N tokens, T rows that run, D width, V vocabulary. The stream (B, N, D) stays in place; a token may skip a
block and come back. *Masked* computes every row and scales the updates, for training; *packed* computes only the rows
that run. Both hand the same queries, keys and values to the same attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.tokens import Where
from ...core.trace import Trace
from ...errors import DwindleError, unknown
from ...ops.causal import Queries, attend_causal, attend_queries
from .cost import lm_macs, static_lm_macs
from .hf import HFLanguage
from .model import CharLM, Turns
from .routing import Gate, Moment, Router
from .tsa import TSA

LAYOUTS = ("masked", "packed")
MANY = 1024  # tokens, from which it pays on a CPU to find out who asks
WORTH = 4_000_000  # multiply-accumulates saved in a block, from which gathering rows pays in a step of generation
SHORT = 512  # tokens of a sequence: of a longer one torch's causal call does not compute all scores


@dataclass
class LMOutput:
    logits: Tensor  # (B, N, V)
    trace: Trace  # who ran which block; `depth` counts the blocks a token ran
    exits: list[Tensor] = field(default_factory=list)  # (B, N, V) read before blocks, by routers that do
    real: Tensor | None = None  # (B, N) bool: which tokens are no padding, where there is some


@dataclass
class Cache:
    """Keys and values of every block so far, and what each key counts, where that differs."""

    keys: list[Tensor] = field(default_factory=list)  # (B, m, H, E)
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # (B, m)
    length: int = 0

    def extend(self, depth: int, k: Tensor, v: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        w = k.new_ones(k.shape[:2]) if weight is None else weight
        stored: tuple[list[Tensor], ...] = (self.keys, self.values, self.weights)
        for kept, new in zip(stored, (k, v, w)):
            if depth == len(kept):
                kept.append(new)
            else:
                kept[depth] = torch.cat([kept[depth], new], 1)
        return self.keys[depth], self.values[depth], None if weight is None else self.weights[depth]


class AdaptiveLM(nn.Module):
    """`lm` keeps its weights and keys; `method` decides."""

    def __init__(self, lm: nn.Module, method: Router) -> None:
        super().__init__()
        # In a list: the backbone of a Hugging Face model is a view of `lm`, whose weights have their names already.
        self._asked = [language_backbone(lm)]
        method.bind(self.backbone.shape)
        self.lm, self.method = lm, method
        self.extra: dict[str, Any] = {}
        self.compiled: dict[Any, Callable[..., Tensor]] = {}  # by function, and whether it is for training

    @property
    def backbone(self) -> Any:
        """embed, turns, blocks (in parts) and readout: a CharLM itself, or a view of a Hugging Face model."""
        return self._asked[0]

    def _check_ids(self, ids: Tensor) -> None:
        vocabulary = self.backbone.shape.vocabulary
        if ids.dtype not in (torch.int64, torch.int32):
            raise DwindleError(f"Tokens of type {ids.dtype} do not fit; give ids as whole numbers (torch.long).")
        if ids.is_cuda or torch.compiler.is_compiling():
            return  # a look at the numbers would wait for the GPU
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise DwindleError(
                f"Tokens run from {int(ids.min())} to {int(ids.max())}, but the model knows {vocabulary} (0 to "
                f"{vocabulary - 1}); encode the text as it was for training."
            )

    def forward(
        self,
        ids: Tensor,
        layout: str | None = None,
        cache: Cache | None = None,
        keep: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> LMOutput:
        """cache: the tokens before `ids`, to which these are added. keep (L, B, N): who runs, whatever the router says;
        it is asked all the same, and its p still scales. attention_mask (B, N): 0 for padding, before or after a
        sequence; it runs no block, and a sequence is what it is alone."""
        if attention_mask is not None:
            if cache is not None or keep is not None:
                raise DwindleError("attention_mask is for whole sequences; leave out cache and keep.")
            return self._padded(ids, layout, padding(attention_mask, ids))
        return self._run(ids, layout, cache, keep)

    def _padded(self, ids: Tensor, layout: str | None, real: Tensor) -> LMOutput:
        """Padding goes behind its sequence, where no token that counts sees it; what is found goes back."""
        if self.training and self.method.looks_ahead:
            name = type(self.method).__name__
            raise DwindleError(f"{name} chooses among all tokens of a sequence in training; give it no padding.")
        order = (~real).int().argsort(dim=1, stable=True)  # (B, N)
        out, back = self._run(ids.gather(1, order), layout, None, None, real.gather(1, order)), order.argsort(1)

        def home(x: Tensor) -> Tensor:
            where = back.view(*back.shape, *[1] * (x.dim() - 2))
            return x.gather(1, where.expand(*back.shape, *x.shape[2:]))

        trace = Trace(out.trace.shape, 0, (1, ids.shape[1]), len(out.trace.lives))
        trace.lives = [Where(trace.shape, home(live)) for live in out.trace.live]
        trace.values = [{name: home(value) for name, value in row.items()} for row in out.trace.values]
        return LMOutput(home(out.logits), trace, [home(exit) for exit in out.exits], real)

    def _run(
        self, ids: Tensor, layout: str | None, cache: Cache | None, keep: Tensor | None, real: Tensor | None = None
    ) -> LMOutput:
        layout = layout or ("masked" if self.training else "packed")
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            given = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"the type {type(ids).__name__}"
            raise DwindleError(f"Tokens of {given} do not fit; give a tensor of ids (batch, length), none of them 0.")
        self._check_ids(ids)
        begin, lm = cache.length if cache else 0, self.backbone
        shape = (ids.shape[0], ids.shape[1])
        x = lm.embed(ids, begin)
        turns = lm.turns(ids.shape[1], begin)
        trace, exits = Trace(shape, 0, (1, shape[1]), len(lm.blocks)), []
        everyone = torch.ones(shape, dtype=torch.bool, device=ids.device)
        gate: Gate | None = None

        for depth, block in enumerate(lm.blocks):
            gate = self.method.gate(Moment(depth, x, gate, lm.readout, begin))
            if keep is not None:
                gate = gate or Gate(torch.ones(shape, device=x.device), everyone, self.method.keys)
                gate = replace(gate, keep=keep[depth].to(x.device))
            if real is not None:
                gate = gate or Gate(torch.ones(shape, device=x.device), everyone, self.method.keys)
                gate = replace(gate, keep=gate.keep & real)
            at = depth if cache else 0  # for the cache alone: one compiled function serves all blocks
            scale, weight = (None, None) if gate is None else (gate.scale, gate.weight)
            rows = None if gate is None or layout == "masked" else gate.keep.flatten().nonzero()[:, 0]  # (T,)
            inputs = (block, x, scale, weight, turns, cache, at)
            if rows is None or len(rows) == ids.numel() or (cache and self._few(len(rows), ids.numel())):
                x = self._best(_masked, cache)(*inputs)
            else:
                plain = weight is None and cache is None and not self.training  # no other keys, no dropout
                alone = plain and x.device.type == "cpu" and 4 <= shape[1] <= SHORT and ids.numel() >= MANY
                queries = Queries.of(gate.keep) if alone and gate is not None else None
                x = self._best(_rows_run, cache)(*inputs, rows, queries)
            trace.lives.append(Where(shape, everyone if gate is None else gate.keep))
            trace.values.append({} if gate is None else gate.record)
            if gate is not None and gate.exit is not None:
                exits.append(gate.exit)
        if cache is not None:
            cache.length += shape[1]
        return LMOutput(lm.readout(x), trace, exits)

    def _few(self, rows: int, all_rows: int) -> bool:
        """Whether gathering the rows that run, in a step of generation, takes longer than to compute the others too."""
        return rows > 0 and (all_rows - rows) * self.backbone.shape.row_macs < WORTH

    def _best(self, run: Callable[..., Tensor], cache: Cache | None) -> Callable[..., Tensor]:
        """A block's function, compiled where it is; with a cache sizes change at every call."""
        return run if cache is not None else self.compiled.get((run, self.training), run)

    def compile_blocks(self) -> None:
        """Compile blocks as they are executed hard, for however many rows run. It stays so: for timing and serving."""
        compiled = torch.compile(_rows_run)

        def rows_run(*given: Any) -> Tensor:
            *_, rows, queries = given
            torch._dynamo.maybe_mark_dynamic(rows, 0)  # who runs, and nothing else: known sizes make better code
            if queries is not None:
                torch._dynamo.maybe_mark_dynamic(queries.flat_index, 0)
                for half in queries.halves:
                    torch._dynamo.maybe_mark_dynamic(half, 1)
            return compiled(*given)

        self.compiled |= {(_rows_run, False): rows_run, (_masked, False): torch.compile(_masked)}
        self.method.compile_parts(training=False)

    def compile_training(self) -> None:
        """Compile masked blocks: one function for the blocks of all models of a process that are of one shape."""
        self.compiled[_masked, True] = torch.compile(_masked, dynamic=False)
        self.method.compile_parts(training=True)

    def terms(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        """The cross-entropy of the next token in nats, the router's own terms, and their weighted sum under "total"."""
        terms = {"task": F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())}
        terms |= self.method.losses(out, targets)
        weights = {"task": 1.0} | self.method.loss_weights
        terms["total"] = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
        return terms

    @torch.no_grad()
    def macs_saved(self, trace: Trace) -> Tensor:
        """(B,) share of the static model's multiply-accumulates, the decisions' own counted in."""
        return 1 - lm_macs(self.backbone.shape, trace, self.method) / static_lm_macs(self.backbone.shape, trace)


def tlops_saved(trace: Trace, real: Tensor | None = None) -> Tensor:
    """(B,) share of token-layer operations that were skipped: the paper's TLOps. real: as in `LMOutput`; padding is
    then no operation that could be saved."""
    if real is None:
        return 1 - trace.live.double().mean((0, 2))
    return 1 - trace.live.double().sum((0, 2)) / (len(trace.lives) * real.sum(1))


def padding(mask: Tensor, ids: Tensor) -> Tensor:
    """(B, N) bool, an attention mask as Hugging Face gives it: True where a token is none of the padding."""
    if mask.shape != ids.shape:
        raise DwindleError(f"attention_mask of shape {tuple(mask.shape)}: the tokens have {tuple(ids.shape)}.")
    real = mask.to(ids.device).bool()
    begins = F.pad(real, (1, 0))[:, :-1].logical_not() & real
    if not bool((begins.sum(1) == 1).all()):
        raise DwindleError(
            "attention_mask has a sequence without tokens or with padding inside; padding must stand before or after."
        )
    return real


def _masked(
    block: Any,
    x: Tensor,
    scale_BN: Tensor | None,
    weight_BN: Tensor | None,
    turns: Turns,
    cache: Cache | None,
    depth: int,
) -> Tensor:
    """The stream after a block that all rows run, as much of it as they are scaled by; None: as it is."""
    h = block.normed(x)
    k, v = block.keys_values(h, turns)
    new = block.rest(x, _attend(block, block.queries(h, turns), k, v, weight_BN, cache, depth))
    return new if scale_BN is None else x + scale_BN[..., None].to(x.dtype) * (new - x)


def _rows_run(
    block: Any,
    x: Tensor,
    scale_BN: Tensor,
    weight_BN: Tensor | None,
    turns: Turns,
    cache: Cache | None,
    depth: int,
    rows: Tensor,
    queries: Queries | None,
) -> Tensor:
    """The stream after a block that only these rows (T,) run; without weights all offer keys.

    Without gradients it is written in place, the one before is gone.
    """
    shape, flat = x.shape[:2], x.flatten(0, 1)
    live = flat.index_select(0, rows)

    def here() -> Turns:
        return tuple(t.index_select(0, rows % shape[1]) for t in turns)

    def spread(rows_T: Tensor) -> Tensor:
        """(T, H, E) back to (B, N, H, E), 0 where nobody ran."""
        everywhere = rows_T.new_zeros(len(flat), *rows_T.shape[1:])
        return everywhere.index_copy(0, rows, rows_T).unflatten(0, shape)

    if weight_BN is None:
        h = block.normed(x)
        k, v = block.keys_values(h, turns)
    else:
        h = block.normed(live)
        k, v = (spread(t) for t in block.keys_values(h, here()))
    if not len(rows):  # keys go to the cache also where nobody listens
        if cache is not None:
            cache.extend(depth, k, v, weight_BN)
        return x
    if queries is not None:
        q = block.queries(h.flatten(0, 1).index_select(0, rows), here())
        mixed = attend_queries(q, rows % shape[1], k, v, queries).flatten(-2)
    else:
        if weight_BN is not None:
            q = spread(block.queries(h, here()))
        elif 2 * len(rows) < len(flat):
            q = spread(block.queries(h.flatten(0, 1).index_select(0, rows), here()))
        else:  # moving queries there and back saves nothing over computing those that nobody asks for
            q = block.queries(h, turns)
        mixed = _attend(block, q, k, v, weight_BN, cache, depth).flatten(0, 1).index_select(0, rows)
    new = block.rest(live[None], mixed[None])[0]  # as one sequence: x + h W of matrices is compiled to a copy and a sum
    new = live + scale_BN.flatten().index_select(0, rows)[:, None].to(x.dtype) * (new - live)
    written = flat.index_copy(0, rows, new) if torch.is_grad_enabled() else flat.index_copy_(0, rows, new)
    return written.unflatten(0, shape)


def _attend(
    block: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, cache: Cache | None, depth: int
) -> Tensor:
    """(B, N, H * E): what every token hears of those up to itself."""
    if cache is not None:
        k, v, weight = cache.extend(depth, k, v, weight)
    return attend_causal(q, k, v, weight, dropout_p=block.attention_dropout).flatten(-2)


def language_backbone(lm: nn.Module) -> Any:
    if isinstance(lm, CharLM):
        return lm
    return HFLanguage(lm)


def adapt_lm(lm: nn.Module, method: Router | None = None) -> AdaptiveLM:
    """Give a causal language model a router: `adapt_lm(CharLM(LMSize(65)), TSA())`."""
    method = TSA() if method is None else method
    if not isinstance(method, Router):
        raise DwindleError(f"{method!r} is no router; pass an instance such as TSA().")
    return AdaptiveLM(lm, method)
