"""Forward and backward as one CUDA graph, since launching their kernels one by one takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..runtime.cuda.recording import captured

Backward = Callable[..., dict[str, Tensor]]


class Recorded:
    """`backward` recorded. Like it, a call leaves gradients on the model's parameters and returns detached terms."""

    def __init__(self, backward: Backward, model: nn.Module, *inputs: Tensor) -> None:
        self.inputs = [value.clone(memory_format=torch.preserve_format) for value in inputs]
        device = inputs[0].device
        # Recording changes buffers and the random state. They are restored, so that a resumed run is the same run.
        before, random_state = [b.clone() for b in model.buffers()], torch.cuda.get_rng_state(device)

        def forward_and_backward() -> None:
            _clear(model)
            self.terms = backward(*self.inputs)

        self.graph = captured(forward_and_backward)
        for buffer, value in zip(model.buffers(), before):
            buffer.copy_(value)
        torch.cuda.set_rng_state(random_state, device)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        for target, value in zip(self.inputs, inputs):
            target.copy_(value)
        self.graph.replay()
        return {name: value.clone() for name, value in self.terms.items()}


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def record(backward: Backward, model: nn.Module, *inputs: Tensor, what: str) -> Recorded:
    """`backward` recorded on inputs like these. what: the model's name, for the error if it cannot be recorded."""
    try:
        return Recorded(backward, model, *inputs)
    except RuntimeError as error:  # the base of torch's errors of CUDA and of capturing
        raise DwindleError(
            f"A training step of {what} cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): something "
            "in it waits for the GPU; train with --set compile=false."
        ) from error
