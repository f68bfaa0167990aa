"""The run of one block on tokens, and what is caught while the family's own forward runs.

Three things are caught: the call of `scaled_dot_product_attention`, the output of the MLP's first linear layer, and
stochastic depth in the packed layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.half import AttentionMode
from .packed import Packed
from .tokens import Probe, Probed, Tokens

Rotated = Callable[[Tensor, Tensor, Tokens], tuple[Tensor, Tensor]]


class Run:
    """One run of a block: the tokens it computes, the probe, and what was caught."""

    def __init__(self, tokens: Tokens, probe: Probe, rotated: Rotated | None = None) -> None:
        """rotated: applies rotary positions to queries and keys, where the family's own forward does not."""
        self.tokens, self.probe, self.rotated = tokens, probe, rotated
        self.neuron: Tensor | None = None
        self.attention_probe = Probed()  # the part of `probed` that comes from attention
        self.called = False  # the block's own forward ran
        self.attended = False  # attention was called

    @property
    def probed(self) -> Probed:
        return Probed(self.neuron, self.attention_probe.attention, self.attention_probe.keys)

    def wrapped(self, block: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        """The block's forward with this run as the current one of the thread."""

        def call(x: Tensor) -> Tensor:
            _current.run, self.called = self, True
            try:
                out = block(x)
            finally:
                _current.run = None
            x_out: Tensor = out[0] if isinstance(out, tuple) else out
            return x_out

        return call


GRAPHS = 64  # the most graphs that blocks may be compiled to in one process


class _Current(threading.local):
    """The state of this thread. It is thread-local because one model may serve several threads."""

    run: Run | None = None  # the run in progress
    compiled: bool = False  # blocks run compiled


_current = _Current()


def compiled_now() -> bool:
    """Whether this thread runs blocks compiled."""
    return _current.compiled


@contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """A context in which this thread runs blocks compiled: one graph, which all blocks of a model share."""
    before, _current.compiled = _current.compiled, wanted
    # There is a graph for each state of the tokens (whole, masked, gated, probed) and each batch size, not per block.
    limit = torch._dynamo.config.patch(recompile_limit=GRAPHS) if wanted else nullcontext()
    try:
        with limit:
            yield
    finally:
        _current.compiled = before


class _TokensAttention(AttentionMode):
    """Passes calls of scaled_dot_product_attention to the tokens of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        tokens, bias = self.run.tokens, attn_mask
        if is_causal or (bias is not None and not _is_pair_bias(bias, tokens)):
            raise DwindleError(
                "This model masks its own attention, and only bidirectional attention can be adapted, plain or with a "
                "bias for each pair of an image's tokens; give a model without a mask."
            )
        if bias is not None:
            bias = bias.to(q.dtype)
        if self.run.rotated is not None:
            q, k = self.run.rotated(q, k, tokens)
        if not self.run.attended:  # a block may attend several times; the probe reads the first
            self.run.attention_probe = tokens.probe_attention(self.run.probe, q, k, scale, bias)
        self.run.attended = True
        return tokens.attend(q, k, v, pair_bias=bias, dropout_p=dropout_p, scale=scale)


def _is_pair_bias(bias: Tensor, tokens: Tokens) -> bool:
    """Whether `bias` holds a number for each pair of an image's tokens: floats (1 or B, 1 or H, N, N)."""
    images, count = tokens.shape
    fits = bias.dim() == 4 and bias.shape[0] in (1, images) and tuple(bias.shape[2:]) == (count, count)
    return fits and bias.is_floating_point()


def attention_forward(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, in which the tokens of the run in progress compute scaled_dot_product_attention."""
    forward = type(attention).forward
    if _current.run is None:
        return forward(attention, *args, **kwargs)
    with _TokensAttention(_current.run):
        return forward(attention, *args, **kwargs)


def catch_probe(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """Forward hook of the MLP's first linear layer: keeps the neuron that the probe asks for."""
    run = _current.run
    if run is not None and run.probe.neuron is not None:
        neuron = _neuron(run.probe, module, args[0], output)
        run.neuron = neuron[0] if isinstance(run.tokens, Packed) else neuron


def _neuron(probe: Probe, layer: Any, x: Tensor, out: Tensor) -> Tensor:
    """The values of the probe's neuron. out: what the linear layer made of `x`."""
    index = probe.neuron
    assert index is not None
    if not (probe.detach and torch.is_grad_enabled()):
        return out[..., index].clone()  # not a view, which would keep the whole hidden layer in memory
    bias = None if layer.bias is None else layer.bias[index : index + 1]
    return F.linear(x.detach(), layer.weight[index : index + 1], bias)[..., 0]


def is_drop_path(module: nn.Module) -> bool:
    """Whether the module is a library's stochastic depth."""
    return type(module).__name__.endswith("DropPath") and hasattr(module, "drop_prob")


def drop_per_image(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Forward hook of a DropPath: draws per image. By itself it takes packed rows (1, T, D) for one image."""
    run = _current.run
    if run is None or not isinstance(run.tokens, Packed) or not module.training or not module.drop_prob:
        return None
    keep_prob = 1.0 - module.drop_prob
    mask_B = torch.empty(run.tokens.shape[0], device=output.device).bernoulli_(keep_prob)
    return args[0] * (run.tokens.per_image(mask_B / keep_prob)[None, :, None]).to(output.dtype)


INSTALLED_HOOKS = (catch_probe, drop_per_image)  # the hooks that `Backbone.install` registers
