"""One optimiser step: augmentation mixes, the teacher speaks, the terms are weighed. Compiled where that pays."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..core.model import AdaptiveViT
from ..io.draws import seeded
from ..ops.half import autocast
from .recipe import Recipe
from .record import Recorded, record
from .teacher import Answers, Teacher, fast

WORTH_COMPILING = 200_000  # images; compiling takes about as long as these take without


class LossModule(nn.Module):
    """What a batch teaches: from images, labels and what the teacher said, to the loss and what the batch cost."""

    def __init__(self, model: AdaptiveViT, teacher: Teacher | None, recipe: Recipe, device: torch.device) -> None:
        super().__init__()
        self.model, self.teacher, self.recipe, self.device = model, teacher, recipe, device
        self.halves, self.compiled = recipe.halves(device), False

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None, *said: Tensor) -> dict[str, Tensor]:
        model, teacher, recipe = self.model, self.teacher, self.recipe
        with autocast(self.device, self.halves):
            with fast(model, self.compiled):
                out = model(x, layout=recipe.layout)
            taught = teacher.output(dict(zip(teacher.names, said)), x) if teacher is not None else None
            terms = model.loss(
                out,
                y,
                taught,
                label_weight=recipe.label_weight,
                teacher_weight=recipe.teacher_weight,
                weights=weights,
                distill=recipe.distill,
                temperature=recipe.teacher_temperature,
                label_smoothing=recipe.smoothing,
            )
            return terms | {"cost": model.cost(out.trace)}


class Step:
    """`step(x, y)` trains on one batch and returns its terms, detached."""

    def __init__(
        self,
        model: AdaptiveViT,
        teacher: AdaptiveViT | None,
        recipe: Recipe,
        device: torch.device,
        answers: Answers | None = None,
        classes: Tensor | None = None,
    ) -> None:
        """answers: what the teacher said to an earlier run on the same batches, or where to leave it. classes: which of
        its answers count, in the order of the data's classes."""
        self.model, self.recipe, self.device = model, recipe, device
        self.teacher = None if teacher is None else Teacher(teacher, model.method, recipe, device, answers, classes)
        self.bare = LossModule(model, self.teacher, recipe, device)
        # FSDP's parameters were sharded before the optimiser was made.
        exchanged = ranks.together() and recipe.parallel == "ddp"
        self.loss_module: Any = _exchanging(self.bare, device) if exchanged else self.bare
        self.begun = False
        self.recorded: Recorded | None = None
        self.alone = [p for p in model.parameters() if not p.dim()] if recipe.parallel == "fsdp" else []
        self.mixup = make_mixup(recipe, model.backbone.shape.classes)

    def compile(self) -> None:
        self.bare.compiled = True
        if self.teacher is not None:
            self.teacher.compiled = True

    def forget(self) -> None:
        """Give back the memory of what was recorded."""
        self.recorded = None
        if self.teacher is not None:
            self.teacher.recorded = None

    def __call__(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, at: int) -> dict[str, Tensor]:
        recipe, model = self.recipe, self.model
        if self.mixup is not None:
            with seeded(recipe.seed, at):
                x, y = self.mixup(x, y)
                y = y.to(x.device)
        recording = self.bare.compiled and x.is_cuda and not ranks.together() and recipe.accumulate == 1
        said = () if self.teacher is None else tuple(self.teacher(x, at, recording).values())
        if recording:
            if self.recorded is None:
                given = (x, y, self._weights().to(x.device), *said)
                self.recorded = record(self.backward, model, *given, what=type(model.method).__name__)
            sums = self.recorded(x, y, self._weights(), *said)
        else:
            optimizer.zero_grad(set_to_none=True)
            sums = self._gradients(x, y, *said)
        self.begun = True
        for parameter in self.alone:
            if parameter.grad is not None:
                parameter.grad = ranks.mean(parameter.grad)
        if recipe.clip:
            _clip(list(model.parameters()), recipe.clip)
        optimizer.step()
        means = ranks.mean(torch.stack(list(sums.values())))
        model.method.hold_budget(means[list(sums).index("cost")])
        return dict(zip(sums, means))

    def _weights(self) -> Tensor:
        """Of the terms, in their order: they are brought in over time, so a graph takes them as an input."""
        weights = torch.zeros(32)
        if self.recorded is not None:
            given = self.model.weights(self.recipe.label_weight, self.recipe.teacher_weight)
            names = [name for name in self.recorded.terms if name not in ("total", "cost")]
            weights[: len(names)] = torch.tensor([given[name] for name in names])
        return weights

    def _gradients(self, x: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        """Of the batch, in as many micro-batches as the recipe says. rest: labels, what the teacher said."""
        parts = list(zip(*(given.chunk(self.recipe.accumulate) for given in (x, *rest))))
        sums: dict[str, Tensor] = {}
        for i, (x_part, y_part, *said) in enumerate(parts):
            share = len(x_part) / len(x)
            with self._exchange(last=i + 1 == len(parts)):
                terms = self.backward(x_part, y_part, None, *said, share=share)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + share * value
        return sums

    def _exchange(self, last: bool) -> contextlib.AbstractContextManager:
        """DDP exchanges gradients at the last micro-batch only; in its first step always, where it learns the graph."""
        return (
            contextlib.nullcontext()
            if last or not self.begun or self.loss_module is self.bare
            else self.loss_module.no_sync()
        )

    def backward(
        self, x: Tensor, y: Tensor, weights: Tensor | None, *said: Tensor, share: float = 1.0
    ) -> dict[str, Tensor]:
        """weights: of the terms, on the device; None: as they are now."""
        terms = self.loss_module(x, y, weights, *said)
        (share * terms["total"]).backward()
        return {name: value.detach().float() for name, value in terms.items()}


def _exchanging(loss_module: LossModule, device: torch.device) -> nn.Module:
    """DDP: gradients become their means over ranks."""
    ddp = nn.parallel.DistributedDataParallel
    # Buffers are moved by the same sums on every rank and need no broadcast; newer torch has a new name for this.
    new = "forward_sync_buffers" in inspect.signature(ddp).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    # A static graph: which parameters a method leaves unused does not change from step to step.
    return ddp(loss_module, device_ids=[device.index] if device.type == "cuda" else None, static_graph=True, **options)


def shard(model: AdaptiveViT) -> None:
    """FSDP2: every block's weights are spread over the ranks, and gathered while it runs."""
    from torch.distributed.fsdp import fully_shard

    for block in model.backbone.blocks:
        fully_shard(block)
    scalars = {p for p in model.parameters() if not p.dim()}  # cannot be sharded; `Step` averages their gradients
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


def make_mixup(recipe: Recipe, classes: int) -> Any:
    if not (recipe.mixup or recipe.cutmix):
        return None
    from timm.data import Mixup

    # Smoothing is the loss's affair, so that it is the same with and without mixing.
    return Mixup(recipe.mixup, recipe.cutmix, prob=recipe.mix_prob, label_smoothing=0.0, num_classes=classes)


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
