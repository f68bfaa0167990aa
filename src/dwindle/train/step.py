"""One optimiser step: the loss of a batch, its gradients averaged over processes, clipping, and the update.

Loss and gradients are recorded as a CUDA graph where `Learner.recording` says so.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..ops.half import autocast
from .learner import Learner
from .record import Recorded, record


class LossModule(nn.Module):
    """The terms of the loss, as a module of the inputs of a step in the order of `names`."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.model = learner.model  # a submodule, so that DDP finds its parameters
        self.learner = learner
        self.names: tuple[str, ...] = ()

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        with autocast(self.learner.device, self.learner.halves):
            return self.learner.terms(dict(zip(self.names, values)))


class Step:
    """`step(inputs, optimizer)` trains on one batch and returns its terms, detached, as means over all processes."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.recipe = learner, learner.recipe
        self.bare = LossModule(learner)
        # FSDP's parameters were sharded before the optimiser was made.
        exchanged = ranks.is_distributed() and not learner.sharded
        self.loss_module: Any = _exchanging(self.bare, learner.device) if exchanged else self.bare
        self.begun = False
        self.recorded: Recorded | None = None
        self.alone = [p for p in learner.model.parameters() if not p.dim()] if learner.sharded else []

    @property
    def recording(self) -> bool:
        return self.learner.recording and not ranks.is_distributed() and self.recipe.accumulate == 1

    def forget(self) -> None:
        """Free the memory of the recordings."""
        self.recorded = None
        if self.learner.teacher is not None:
            self.learner.teacher.recorded = None

    def __call__(self, inputs: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        model = self.learner.model
        if self.recording:
            sums = self._replayed(inputs)
        else:
            optimizer.zero_grad(set_to_none=True)
            self.bare.names = tuple(inputs)
            sums = self._gradients(tuple(inputs.values()))
        self.begun = True
        for parameter in self.alone:
            if parameter.grad is not None:
                parameter.grad = ranks.mean(parameter.grad)
        if self.recipe.clip:
            _clip(list(model.parameters()), self.recipe.clip)
        optimizer.step()
        return dict(zip(sums, ranks.mean(torch.stack(list(sums.values())))))

    def _replayed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The terms, by the recording; inputs of other names than the recorded ones are recorded anew."""
        weights = self.learner.weights()
        all_inputs = inputs if weights is None else inputs | {"weights": weights}
        if self.recorded is None or self.bare.names != tuple(all_inputs):
            self.recorded, self.bare.names = None, tuple(all_inputs)
            first = [value.to(self.learner.device) for value in all_inputs.values()]
            self.recorded = record(self.backward, self.learner.model, *first, what=self.learner.name)
            weights = self.learner.weights()  # again: the learner knows the names of its terms only now
        return self.recorded(*inputs.values(), *(() if weights is None else (weights,)))

    def _gradients(self, values: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Accumulate the gradients of the batch over the recipe's micro-batches. Returns the means of the terms."""
        count = self.recipe.accumulate
        parts = [values] if count == 1 else list(zip(*(value.chunk(count) for value in values)))
        sums: dict[str, Tensor] = {}
        for i, part in enumerate(parts):
            share = len(part[0]) / len(values[0])
            with self._exchange(last=i + 1 == len(parts)):
                terms = self.backward(*part, share=share)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + share * value
        return sums

    def _exchange(self, last: bool) -> contextlib.AbstractContextManager:
        """The context of a micro-batch. DDP averages gradients at the last one only; in its first step, in which it
        records the graph, at each."""
        if last or not self.begun or self.loss_module is self.bare:
            return contextlib.nullcontext()
        return self.loss_module.no_sync()

    def backward(self, *values: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        """Add the gradients of `share` of the loss to the parameters. Returns the terms, detached."""
        terms = self.loss_module(*values)
        (share * terms["total"]).backward()
        return {name: value.detach().float() for name, value in terms.items()}


def _exchanging(loss_module: LossModule, device: torch.device) -> nn.Module:
    """The module under DDP, which averages gradients over ranks."""
    ddp = nn.parallel.DistributedDataParallel
    # Buffers are updated by the same sums on every rank, so they need no broadcast. Newer torch renamed this option.
    new = "forward_sync_buffers" in inspect.signature(ddp).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    # A static graph: which parameters a method leaves unused does not change from step to step.
    return ddp(loss_module, device_ids=[device.index] if device.type == "cuda" else None, static_graph=True, **options)


def shard(model: Any) -> None:
    """Shard the model by FSDP2: every block's weights are spread over the ranks, and gathered while the block runs."""
    from torch.distributed.fsdp import fully_shard

    for block in model.backbone.blocks:
        fully_shard(block)
    scalars = {p for p in model.parameters() if not p.dim()}  # they cannot be sharded: `Step` averages their gradients
    fully_shard(model, ignored_params=scalars)


def _clip(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip to a norm over all parameters, of which some may be sharded and some not: torch takes one kind at a time."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(type(parameter.data), []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in kinds.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole))
    for group in kinds.values():
        nn.utils.clip_grads_with_norm_(group, limit, norm)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """State dicts with whole tensors on the CPU, whichever way they are spread; every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if optimizer is None:
        return get_model_state_dict(model, options=options)
    return get_optimizer_state_dict(model, optimizer, options=options)


def load_full_state(
    model: nn.Module, state: dict[str, Any], optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
