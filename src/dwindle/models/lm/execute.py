"""AdaptiveLM: a language model and the router that decides which tokens run which block; the whole forward path.

B sequences, N tokens, T rows that run, D width, V vocabulary. The stream (B, N, D) stays in place; a token may skip a
block and run a later one. *Masked* computes every row and scales the updates, for training; *packed* computes only the
rows that run. Both give the same queries, keys and values to the same attention.
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
from .model import CharLM, Rotary
from .routing import Gate, Router, RouterInput
from .tsa import TSA

LAYOUTS = ("masked", "packed")
# On a CPU, attention of the live queries alone (`attend_queries`) is faster from MANY_TOKENS tokens of a batch on, in
# sequences of at most SHORT_SEQUENCE tokens: for longer ones torch's causal call does not compute all scores.
MANY_TOKENS, SHORT_SEQUENCE = 1024, 512
# In a step of generation gathering rows is faster where a block saves at least so many multiply-accumulates.
WORTH_GATHERING = 4_000_000


@dataclass
class LMOutput:
    logits: Tensor  # (B, N, V)
    trace: Trace  # who ran which block; `depth` counts the blocks a token ran
    exits: list[Tensor] = field(default_factory=list)  # (B, N, V) each: logits that the router read before a block
    real: Tensor | None = None  # (B, N) bool: True where a token is not padding; None: there is no padding


@dataclass
class Cache:
    """The keys and values of all earlier tokens, for each block, and the weight of each key."""

    keys: list[Tensor] = field(default_factory=list)  # (B, m, H, E)
    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # (B, m)
    length: int = 0

    def extend(self, depth: int, k: Tensor, v: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append new keys, values and weights (None: all 1) of block `depth`; returns those of all tokens so far."""
        w = k.new_ones(k.shape[:2]) if weight is None else weight
        stored: tuple[list[Tensor], ...] = (self.keys, self.values, self.weights)
        for kept, new in zip(stored, (k, v, w)):
            if depth == len(kept):
                kept.append(new)
            else:
                kept[depth] = torch.cat([kept[depth], new], 1)
        return self.keys[depth], self.values[depth], None if weight is None else self.weights[depth]


class AdaptiveLM(nn.Module):
    """A language model `lm` with a router `method` that decides which tokens run which block.

    `lm` keeps its weights and the names of its parameters.
    """

    def __init__(self, lm: nn.Module, method: Router) -> None:
        super().__init__()
        # A list, so that torch does not register the backbone: `lm` holds the same weights, under their own names.
        self._backbone = [language_backbone(lm)]
        method.bind(self.backbone.shape)
        self.lm, self.method = lm, method
        self.extra: dict[str, Any] = {}
        self.tokenizer: bytes | None = None  # the content of its tokenizer.json, which `save` writes beside the weights
        self.compiled: dict[Any, Callable[..., Tensor]] = {}  # key: (function, training)

    @property
    def backbone(self) -> Any:
        """What has embed, rotary, blocks (in parts) and readout: a CharLM itself, or a view of a Hugging Face model."""
        return self._backbone[0]

    def _check_ids(self, ids: Tensor) -> None:
        vocabulary = self.backbone.shape.vocabulary
        if ids.dtype not in (torch.int64, torch.int32):
            raise DwindleError(f"Tokens of type {ids.dtype} do not fit; give ids as whole numbers (torch.long).")
        if ids.is_cuda or torch.compiler.is_compiling():
            return  # reading the ids would wait for the GPU, or break the compiled graph
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
        """Logits and trace of a batch of sequences.

        cache: keys and values of the tokens before `ids`; those of `ids` are added to it. keep (L, B, N): which tokens
        run, in place of the router's choice; the router still runs, and its p still scales the updates.
        attention_mask (B, N): 0 for padding, before or after a sequence. Padding runs no block, and a sequence has the
        same result as without padding.
        """
        if attention_mask is not None:
            if cache is not None or keep is not None:
                raise DwindleError("attention_mask is for whole sequences; leave out cache and keep.")
            return self._padded(ids, layout, padding(attention_mask, ids))
        return self._run(ids, layout, cache, keep)

    def _padded(self, ids: Tensor, layout: str | None, real: Tensor) -> LMOutput:
        """`forward` with padding, real (B, N) bool: padding is moved behind its sequence, where causal attention hides
        it from all real tokens, and the results are moved back."""
        if self.training and self.method.looks_ahead:
            name = type(self.method).__name__
            raise DwindleError(f"{name} chooses among all tokens of a sequence in training; give it no padding.")
        order = (~real).int().argsort(dim=1, stable=True)  # (B, N)
        out = self._run(ids.gather(1, order), layout, None, None, real.gather(1, order))
        inverse = order.argsort(1)

        def restored(x: Tensor) -> Tensor:
            """x (B, N, ...) in the order of `ids`."""
            index = inverse.view(*inverse.shape, *[1] * (x.dim() - 2))
            return x.gather(1, index.expand(*inverse.shape, *x.shape[2:]))

        trace = Trace(out.trace.shape, 0, (1, ids.shape[1]), len(out.trace.lives))
        trace.lives = [Where(trace.shape, restored(live)) for live in out.trace.live]
        trace.values = [{name: restored(value) for name, value in row.items()} for row in out.trace.values]
        return LMOutput(restored(out.logits), trace, [restored(exit) for exit in out.exits], real)

    def _run(
        self, ids: Tensor, layout: str | None, cache: Cache | None, keep: Tensor | None, real: Tensor | None = None
    ) -> LMOutput:
        layout = layout or ("masked" if self.training else "packed")
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            shown = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"the type {type(ids).__name__}"
            raise DwindleError(f"Tokens of {shown} do not fit; give ids (batch, length), at least one.")
        self._check_ids(ids)
        begin, lm = cache.length if cache else 0, self.backbone
        shape = (ids.shape[0], ids.shape[1])
        x = lm.embed(ids, begin)
        rotary = lm.rotary(ids.shape[1], begin)
        trace, exits = Trace(shape, 0, (1, shape[1]), len(lm.blocks)), []
        everyone = torch.ones(shape, dtype=torch.bool, device=ids.device)
        gate: Gate | None = None

        for depth, block in enumerate(lm.blocks):
            gate = self.method.gate(RouterInput(depth, x, gate, lm.readout, begin))
            if keep is not None:
                gate = gate or Gate(torch.ones(shape, device=x.device), everyone, self.method.keys)
                gate = replace(gate, keep=keep[depth].to(x.device))
            if real is not None:
                gate = gate or Gate(torch.ones(shape, device=x.device), everyone, self.method.keys)
                gate = replace(gate, keep=gate.keep & real)
            # Only the cache needs the depth; a constant 0 lets one compiled function serve all blocks.
            cache_depth = depth if cache else 0
            scale, weight = (None, None) if gate is None else (gate.scale, gate.weight)
            whole = layout == "masked" or (cache is not None and self._never_gathers(ids.numel()))
            rows = None if gate is None or whole else gate.keep.flatten().nonzero()[:, 0]  # (T,)
            inputs = (block, x, scale, weight, rotary, cache, cache_depth)
            if rows is None or len(rows) == ids.numel() or (cache and self._too_few_to_gather(len(rows), ids.numel())):
                x = self._compiled_or_plain(_masked, cache)(*inputs)
            else:
                # `attend_queries` knows no key weights, no earlier keys and no dropout.
                plain = weight is None and cache is None and not self.training
                fits = 4 <= shape[1] <= SHORT_SEQUENCE and ids.numel() >= MANY_TOKENS
                live_only = plain and fits and x.device.type == "cpu"
                queries = Queries.of(gate.keep) if live_only and gate is not None else None
                x = self._compiled_or_plain(_packed, cache)(*inputs, rows, queries)
            trace.lives.append(Where(shape, everyone if gate is None else gate.keep))
            trace.values.append({} if gate is None else gate.record)
            if gate is not None and gate.exit is not None:
                exits.append(gate.exit)
        if cache is not None:
            cache.length += shape[1]
        return LMOutput(lm.readout(x), trace, exits)

    def _too_few_to_gather(self, rows: int, all_rows: int) -> bool:
        """Whether, in a step of generation, computing all rows is faster than gathering those that run."""
        return rows > 0 and (all_rows - rows) * self.backbone.shape.row_macs < WORTH_GATHERING

    def _never_gathers(self, all_rows: int) -> bool:
        """Whether, in a step of generation for several sequences, even the skips of nearly all rows save less than
        asking who runs costs. A single row either runs or leaves out the whole block, which pays."""
        return all_rows > 1 and self._too_few_to_gather(1, all_rows)

    def _compiled_or_plain(self, run: Callable[..., Tensor], cache: Cache | None) -> Callable[..., Tensor]:
        """The compiled form of a block's function, where there is one and no cache: with a cache the sizes change at
        every call."""
        return run if cache is not None else self.compiled.get((run, self.training), run)

    def compile_blocks(self) -> None:
        """Compile the blocks for evaluation, for any number of rows that run. It cannot be undone: it is for timing and
        serving."""
        compiled = torch.compile(_packed)

        def packed(*inputs: Any) -> Tensor:
            *_, rows, queries = inputs
            # Only the number of rows that run is dynamic: known sizes make faster code.
            torch._dynamo.maybe_mark_dynamic(rows, 0)
            if queries is not None:
                torch._dynamo.maybe_mark_dynamic(queries.flat_index, 0)
                for half in queries.halves:
                    torch._dynamo.maybe_mark_dynamic(half, 1)
            return compiled(*inputs)

        self.compiled |= {(_packed, False): packed, (_masked, False): torch.compile(_masked)}
        self.method.compile_parts(training=False)

    def compile_training(self) -> None:
        """Compile the masked blocks for training. Models of one shape in a process share the compiled code."""
        self.compiled[_masked, True] = torch.compile(_masked, dynamic=False)
        self.method.compile_parts(training=True)

    def terms(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        """Loss terms by name: "task", the cross-entropy of the next token in nats; the router's own; "total", their
        weighted sum."""
        terms = {"task": F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())}
        terms |= self.method.losses(out, targets)
        weights = {"task": 1.0} | self.method.loss_weights
        terms["total"] = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
        return terms

    @torch.no_grad()
    def macs_saved(self, trace: Trace) -> Tensor:
        """(B,) saved share of the static model's multiply-accumulates. The router's own count as cost."""
        return 1 - lm_macs(self.backbone.shape, trace, self.method) / static_lm_macs(self.backbone.shape, trace)


def tlops_saved(trace: Trace, real: Tensor | None = None) -> Tensor:
    """(B,) share of token-layer operations (the paper's TLOps) that were skipped. real: as in `LMOutput`; padding then
    counts neither as saved nor as spent."""
    if real is None:
        return 1 - trace.live.double().mean((0, 2))
    return 1 - trace.live.double().sum((0, 2)) / (len(trace.lives) * real.sum(1))


def padding(mask: Tensor, ids: Tensor) -> Tensor:
    """(B, N) bool from an attention mask in Hugging Face's form: True where a token is not padding."""
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
    rotary: Rotary,
    cache: Cache | None,
    depth: int,
) -> Tensor:
    """The stream (B, N, D) after a block that all rows run: x + scale * (block(x) - x). scale None: 1 everywhere."""
    h = block.normed(x)
    k, v = block.keys_values(h, rotary)
    new = block.rest(x, _attend(block, block.queries(h, rotary), k, v, weight_BN, cache, depth))
    return new if scale_BN is None else x + scale_BN[..., None].to(x.dtype) * (new - x)


def _packed(
    block: Any,
    x: Tensor,
    scale_BN: Tensor,
    weight_BN: Tensor | None,
    rotary: Rotary,
    cache: Cache | None,
    depth: int,
    rows: Tensor,
    queries: Queries | None,
) -> Tensor:
    """The stream (B, N, D) after a block that only the rows (T,) run. weight None: all tokens are keys; else only those
    that run. Without gradients x is overwritten.
    """
    shape, flat = x.shape[:2], x.flatten(0, 1)
    live = flat.index_select(0, rows)

    def rotary_rows() -> Rotary:
        """The rotary tables at the positions of the rows."""
        return tuple(t.index_select(0, rows % shape[1]) for t in rotary)

    def scattered(rows_T: Tensor) -> Tensor:
        """(T, H, E) to (B, N, H, E), 0 where a token skips."""
        dense = rows_T.new_zeros(len(flat), *rows_T.shape[1:])
        return dense.index_copy(0, rows, rows_T).unflatten(0, shape)

    if weight_BN is None:
        h = block.normed(x)
        k, v = block.keys_values(h, rotary)
    else:
        h = block.normed(live)
        k, v = (scattered(t) for t in block.keys_values(h, rotary_rows()))
    if not len(rows):  # no query, but later tokens need the keys
        if cache is not None:
            cache.extend(depth, k, v, weight_BN)
        return x
    if queries is not None:
        q = block.queries(h.flatten(0, 1).index_select(0, rows), rotary_rows())
        attended = attend_queries(q, rows % shape[1], k, v, queries).flatten(-2)
    else:
        if weight_BN is not None:
            q = scattered(block.queries(h, rotary_rows()))
        elif 2 * len(rows) < len(flat):
            q = scattered(block.queries(h.flatten(0, 1).index_select(0, rows), rotary_rows()))
        else:  # computing all queries is as fast as gathering and scattering half of them or more
            q = block.queries(h, rotary)
        attended = _attend(block, q, k, v, weight_BN, cache, depth).flatten(0, 1).index_select(0, rows)
    # As one sequence (1, T, D): for 2-D tensors torch.compile makes x + h W a copy and a sum.
    new = block.rest(live[None], attended[None])[0]
    new = live + scale_BN.flatten().index_select(0, rows)[:, None].to(x.dtype) * (new - live)
    written = flat.index_copy(0, rows, new) if torch.is_grad_enabled() else flat.index_copy_(0, rows, new)
    return written.unflatten(0, shape)


def _attend(
    block: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, cache: Cache | None, depth: int
) -> Tensor:
    """(B, N, H * E): causal attention; with a cache, also over the keys in it."""
    if cache is not None:
        k, v, weight = cache.extend(depth, k, v, weight)
    return attend_causal(q, k, v, weight, dropout_p=block.attention_dropout).flatten(-2)


def language_backbone(lm: nn.Module) -> Any:
    """What `AdaptiveLM` asks for the model's parts: a CharLM itself, or a view of a Hugging Face model."""
    return lm if isinstance(lm, CharLM) else HFLanguage(lm)


def adapt_lm(lm: nn.Module, method: Router | None = None) -> AdaptiveLM:
    """Give a causal language model a router: `adapt_lm(CharLM(LMSize(65)), TSA())`."""
    method = TSA() if method is None else method
    if not isinstance(method, Router):
        raise DwindleError(f"{method!r} is no router; pass an instance such as TSA().")
    return AdaptiveLM(lm, method)
