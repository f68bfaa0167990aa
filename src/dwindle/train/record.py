"""Forward and backward as one CUDA graph: launching their kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..runtime.cuda.recording import captured

Backward = Callable[..., dict[str, Tensor]]


class Recorded:
    """`backward(*inputs)` leaves gradients on the model's parameters and returns detached terms; so does this."""

    def __init__(self, backward: Backward, model: nn.Module, *inputs: Tensor) -> None:
        self.inputs = [given.clone(memory_format=torch.preserve_format) for given in inputs]
        device = inputs[0].device
        # Trying out moves running moments and random numbers: put back, so that a resumed run is the same run.
        before, drawn = [b.clone() for b in model.buffers()], torch.cuda.get_rng_state(device)

        def forward_and_backward() -> None:
            _clear(model)
            self.terms = backward(*self.inputs)

        self.graph = captured(forward_and_backward)
        for buffer, value in zip(model.buffers(), before):
            buffer.copy_(value)
        torch.cuda.set_rng_state(drawn, device)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        for held, given in zip(self.inputs, inputs):
            held.copy_(given)
        self.graph.replay()
        return {name: value.clone() for name, value in self.terms.items()}


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def record(backward: Backward, model: nn.Module, *inputs: Tensor, what: str) -> Recorded:
    """what: whose training step it is, for the sentence that says why it cannot be."""
    try:
        return Recorded(backward, model, *inputs)
    except RuntimeError as error:  # torch's errors of CUDA and of capturing derive from it
        raise DwindleError(
            f"A training step of {what} cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): something "
            "in it waits for the GPU; train with --set compile=false."
        ) from error
