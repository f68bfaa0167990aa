"""One optimiser step: augmentation mixes, the teacher speaks, the terms are weighed. Compiled where that pays."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import ranks
from ..engine.recording import cut_by_matmul
from ..model import AdaptiveViT, Output
from .batches import seeded
from .recipe import Recipe
from .record import Recorded, record

WORTH_COMPILING = 200_000  # images; compiling takes about as long as these take without


class Lesson(nn.Module):
    """What a batch teaches: from images and labels to loss terms and what the batch cost."""

    def __init__(self, model: AdaptiveViT, teacher: AdaptiveViT | None, recipe: Recipe, device: torch.device) -> None:
        super().__init__()
        self.model, self.recipe, self.device = model, recipe, device
        self.teacher = [teacher]  # in a list: it is no part of what is trained, averaged or sharded
        self.compiled = False

    def forward(self, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        model, teacher = self.model, self.teacher[0]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.amp and self.device.type == "cuda"):
            with self._fast(model):
                out = model(x, layout=self.recipe.layout)
            taught = None
            if teacher is not None:
                with torch.no_grad(), self._fast(teacher):
                    taught = teacher(x, layout="masked")
            return self.terms(out, y, taught)

    @contextlib.contextmanager
    def _fast(self, model: AdaptiveViT) -> Iterator[None]:
        cut = cut_by_matmul(model.vit) if self.compiled else contextlib.nullcontext()
        with cut, model.backbone.compiling(self.compiled):
            yield

    def terms(self, out: Output, y: Tensor, taught: Output | None) -> tuple[dict[str, Tensor], Tensor]:
        recipe = self.recipe
        terms = self.model.terms(
            out,
            y,
            taught,
            distill=recipe.distill,
            temperature=recipe.teacher_temperature,
            label_smoothing=recipe.smoothing,
        )
        return terms, self.model.cost(out.trace)


class Step:
    """`step(x, y)` trains on one batch and returns its terms, detached."""

    def __init__(self, model: AdaptiveViT, teacher: AdaptiveViT | None, recipe: Recipe, device: torch.device) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self.bare = Lesson(model, teacher, recipe, device)
        # FSDP's parameters were sharded before the optimiser was made.
        exchanged = ranks.together() and recipe.parallel == "ddp"
        self.lesson: Any = _exchanging(self.bare, device) if exchanged else self.bare
        self.begun = False
        self.recorded: Recorded | None = None
        self.alone = [p for p in model.parameters() if not p.dim()] if recipe.parallel == "fsdp" else []
        self.mixup = _mixup(recipe, model.backbone.shape.classes)

    def compile(self) -> None:
        self.bare.compiled = True

    def __call__(self, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, at: int) -> dict[str, Tensor]:
        recipe, model = self.recipe, self.model
        if self.mixup is not None:
            with seeded(recipe.seed, at):
                x, y = self.mixup(x, y)
                y = y.to(x.device)
        if self.bare.compiled and x.is_cuda and not ranks.together() and recipe.accumulate == 1:
            if self.recorded is None:
                weights = self._weights().to(x.device)
                self.recorded = record(self.backward, model, x, y, weights, what=type(model.method).__name__)
            sums = self.recorded(x, y, self._weights())
        else:
            optimizer.zero_grad(set_to_none=True)
            sums = self._gradients(x, y)
        self.begun = True
        for parameter in self.alone:
            if parameter.grad is not None:
                parameter.grad = ranks.mean(parameter.grad)
        if recipe.clip:
            _clip(list(model.parameters()), recipe.clip)
        optimizer.step()
        means = ranks.mean(torch.stack(list(sums.values())))
        model.method.observe(means[list(sums).index("cost")])
        return dict(zip(sums, means))

    def _weights(self) -> Tensor:
        """Of the terms, in their order: they are brought in over time, so a graph takes them as an input."""
        weights = torch.zeros(32)
        if self.recorded is not None:
            given = {"task": self.recipe.label_weight, "distill": self.recipe.teacher_weight}
            given |= self.model.method.loss_weights
            names = [name for name in self.recorded.terms if name not in ("total", "cost")]
            weights[: len(names)] = torch.tensor([given[name] for name in names])
        return weights

    def _gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Of the batch, in as many micro-batches as the recipe says."""
        parts = list(zip(x.chunk(self.recipe.accumulate), y.chunk(self.recipe.accumulate)))
        sums: dict[str, Tensor] = {}
        for i, (x_part, y_part) in enumerate(parts):
            share = len(x_part) / len(x)
            with self._exchange(last=i + 1 == len(parts)):
                terms = self.backward(x_part, y_part, None, share)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + share * value
        return sums

    def _exchange(self, last: bool) -> contextlib.AbstractContextManager:
        """DDP exchanges gradients at the last micro-batch only; in its first step always, where it learns the graph."""
        return contextlib.nullcontext() if last or not self.begun or self.lesson is self.bare else self.lesson.no_sync()

    def backward(self, x: Tensor, y: Tensor, weights: Tensor | None, share: float = 1.0) -> dict[str, Tensor]:
        """weights: of the terms, on the device; None: as they are now."""
        terms, cost = self.lesson(x, y)
        total = (
            self.model.weighted(terms, self.recipe.label_weight, self.recipe.teacher_weight)
            if weights is None
            else (torch.stack([term.float() for term in terms.values()]) * weights[: len(terms)]).sum()
        )
        (share * total).backward()
        return {n: v.detach().float() for n, v in (terms | {"total": total, "cost": cost}).items()}


def _exchanging(lesson: Lesson, device: torch.device) -> nn.Module:
    """DDP: gradients become their means over ranks."""
    ddp = nn.parallel.DistributedDataParallel
    # Buffers are moved by the same sums on every rank and need no broadcast; newer torch has a new name for this.
    new = "forward_sync_buffers" in inspect.signature(ddp).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    # A static graph: which parameters a method leaves unused does not change from step to step.
    return ddp(lesson, device_ids=[device.index] if device.type == "cuda" else None, static_graph=True, **options)


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


def _mixup(recipe: Recipe, classes: int) -> Any:
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
