"""One block at work on tokens, and what is caught while its family's own forward runs.

Three things are caught: the call of `scaled_dot_product_attention`, the output of the MLP's first linear layer, and
stochastic depth in a pack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import DwindleError
from .packed import Packed
from .tokens import Probe, Probed, Tokens

Turned = Callable[[Tensor, Tensor, Tokens], tuple[Tensor, Tensor]]


class Run:
    """One block at work: its rows, what it is asked to leave behind, and what was caught on the way."""

    def __init__(self, tokens: Tokens, probe: Probe, turned: Turned | None = None) -> None:
        """turned: what positions make of queries and keys, where the family's own forward is not told of positions."""
        self.tokens, self.probe, self.turned = tokens, probe, turned
        self.neuron: Tensor | None = None
        self.of_attention = Probed()  # what the probe asks of attention
        self.called = False  # the block's own forward ran
        self.attended = False

    @property
    def probed(self) -> Probed:
        return Probed(self.neuron, self.of_attention.attention, self.of_attention.keys)

    def calling(self, block: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        """The block's forward as part of this run."""

        def call(x: Tensor) -> Tensor:
            _now.run, self.called = self, True
            try:
                out = block(x)
            finally:
                _now.run = None
            x_out: Tensor = out[0] if isinstance(out, tuple) else out
            return x_out

        return call


GRAPHS = 64  # that blocks may be compiled to, all of a process together


class _Now(threading.local):
    """What is in progress in this thread. Thread-local: one model may serve several threads."""

    run: Run | None = None
    compiled: bool = False  # blocks run compiled


_now = _Now()


def compiled_now() -> bool:
    return _now.compiled


@contextmanager
def compiling(wanted: bool) -> Iterator[None]:
    """Blocks that this thread runs in here run compiled: one graph, which all blocks of a model share."""
    before, _now.compiled = _now.compiled, wanted
    # A graph for each way tokens can come (whole, masked, gated, probed) and each size of batch, not for every block.
    more = torch._dynamo.config.patch(recompile_limit=GRAPHS) if wanted else nullcontext()
    try:
        with more:
            yield
    finally:
        _now.compiled = before


class _Core(TorchFunctionMode):
    """Hands the attention core to the tokens; every other call passes."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.work = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self.attend(*args, **kwargs)

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
        tokens, bias = self.work.tokens, attn_mask
        if is_causal or (bias is not None and not _of_pairs(bias, tokens)):
            raise DwindleError(
                "This model masks its own attention, and only bidirectional attention can be adapted, plain or with a "
                "bias for each pair of an image's tokens; give a model without a mask."
            )
        if bias is not None:
            bias = bias.to(q.dtype)
        if self.work.turned is not None:
            q, k = self.work.turned(q, k, tokens)
        if not self.work.attended:  # of a block that attends several times, the first
            self.work.of_attention = tokens.look(self.work.probe, q, k, scale, bias)
        self.work.attended = True
        return tokens.attend(q, k, v, pair_bias=bias, dropout_p=dropout_p, scale=scale)


def _of_pairs(bias: Tensor, tokens: Tokens) -> bool:
    """Whether it is added to the scores of all pairs of tokens, of every image or of each: (1 or B, 1 or H, N, N)."""
    images, count = tokens.shape
    fits = bias.dim() == 4 and bias.shape[0] in (1, images) and tuple(bias.shape[2:]) == (count, count)
    return fits and bias.is_floating_point()


def attention_forward(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with the attention core handed to the tokens of the run in progress."""
    forward = type(attention).forward
    if _now.run is None:
        return forward(attention, *args, **kwargs)
    with _Core(_now.run):
        return forward(attention, *args, **kwargs)


def catch_probe(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    run = _now.run
    if run is not None and run.probe.neuron is not None:
        neuron = _neuron(run.probe, module, args[0], output)
        run.neuron = neuron[0] if isinstance(run.tokens, Packed) else neuron


def _neuron(probe: Probe, layer: Any, x: Tensor, out: Tensor) -> Tensor:
    """The neuron that a method asked for, of a linear layer that made `out` from `x`."""
    index = probe.neuron
    assert index is not None
    if not (probe.detach and torch.is_grad_enabled()):
        return out[..., index].clone()  # a view would keep the whole hidden layer in memory
    bias = None if layer.bias is None else layer.bias[index : index + 1]
    return F.linear(x.detach(), layer.weight[index : index + 1], bias)[..., 0]


def is_drop_path(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DropPath") and hasattr(module, "drop_prob")


def drop_per_image(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """A stock DropPath sees a pack (1, T, D) as one sample and drops all images at once: draw per image instead."""
    run = _now.run
    if run is None or not isinstance(run.tokens, Packed) or not module.training or not module.drop_prob:
        return None
    kept = 1.0 - module.drop_prob
    drawn = torch.empty(run.tokens.shape[0], device=output.device).bernoulli_(kept)
    return args[0] * (run.tokens.per_image(drawn / kept)[None, :, None]).to(output.dtype)


OURS = (catch_probe, drop_per_image)  # hooks of `install`
