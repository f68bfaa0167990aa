"""The terms of a model's loss: the task's, the teacher's, and the method's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DwindleError, unknown
from .losses import DISTILLATIONS, distill_loss, label_loss

if TYPE_CHECKING:
    from .model import AdaptiveViT, Output


def loss_terms(
    model: AdaptiveViT,
    out: Output,
    labels: Tensor,
    teacher: Output | None = None,
    *,
    distill: str = "soft",
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    answers: Tensor | None = None,
    task_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    teacher_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The loss terms, unweighted.

    answers: (B, ...) the outputs that the task's loss reads; None: the logits.
    task_loss: a loss of (answers, labels), one number per image; None: the cross-entropy with labels.
    teacher_loss: a loss of (answers, the teacher's logits), one number per image; None: the one that `distill` names.

    distill: 'soft', KL(teacher || student); 'hard', cross-entropy with the teacher's class; 'token', the same for the
    head of the distillation token, while the head of the class token learns from the labels (DeiT).
    """
    if task_loss is None:
        check_labels(model, labels, out.logits)
        task_loss = partial(label_loss, smoothing=label_smoothing)
    if teacher_loss is None:
        if distill not in DISTILLATIONS:
            raise unknown("distillation", distill, DISTILLATIONS)
        teacher_loss = partial(distill_loss, kind=distill, temperature=temperature)
    outputs = [out.logits if answers is None else answers]  # one, or one per depth
    distilled = outputs
    weights = model.method.exit_weights(out.trace)
    if weights is not None and teacher is not None and distill == "token":
        raise DwindleError(
            f"{type(model.method).__name__} learns from an answer at every depth, the distillation token answers "
            "once; distil with distill='soft' or 'hard'."
        )
    if weights is not None:
        outputs = distilled = _exits(model, out, answers)
    elif teacher is not None and distill == "token":
        by_class, by_token = model.backbone.distilled_logits(out.features)
        outputs, distilled = [by_class], [by_token]

    def mean(loss: Callable[[Tensor], Tensor], answers: list[Tensor]) -> Tensor:
        """The mean over images of a loss per image; for answers of several depths their weighted sum."""
        losses = torch.stack([loss(answer) for answer in answers])
        return (losses if weights is None else weights[: len(losses)] * losses).sum(0).mean()

    terms = {"task": mean(lambda a: task_loss(a, labels), outputs)}
    if teacher is not None and teacher.logits is not None:
        terms["distill"] = mean(lambda a: teacher_loss(a, teacher.logits), distilled)
    return terms | model.method.losses(out, teacher)


def _exits(model: AdaptiveViT, out: Output, answers: Tensor | None) -> list[Tensor]:
    """The logits of every depth. A task that reads other outputs than logits is refused."""
    if answers is not None:
        raise DwindleError(
            f"{type(model.method).__name__} learns from the logits of every depth, and this task reads something "
            "else of the model; take a method that answers once."
        )
    return out.trace.exits


def check_labels(model: AdaptiveViT, labels: Tensor, logits: Tensor) -> None:
    """Refuse labels of another type, shape or range than the logits need."""
    images, classes = logits.shape
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool or labels.is_complex():
        kind = labels.dtype if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise DwindleError(f"The labels are {kind}; give a tensor of whole numbers, or of each class's share.")
    if not model.backbone.shape.classes:
        raise DwindleError(
            f"This {type(model.vit).__name__} has no head (num_classes=0): it answers with an embedding, which has "
            "no loss with labels; give it one (num_classes=...)."
        )
    shares = labels.is_floating_point()
    if tuple(labels.shape) != ((images, classes) if shares else (images,)):
        raise DwindleError(
            f"Labels of shape {tuple(labels.shape)} and type {labels.dtype} do not fit {images} images; give whole "
            f"numbers ({images},), or shares of the {classes} classes as floats ({images}, {classes})."
        )
    # On a GPU this check would cost a synchronisation, and `io` checked the data when it opened them.
    if (
        torch.compiler.is_compiling()
        or labels.is_cuda
        or shares
        or 0 <= int(labels.min()) <= int(labels.max()) < classes
    ):
        return
    raise DwindleError(
        f"Labels run from {int(labels.min())} to {int(labels.max())}, but the model has {classes} classes (0 to "
        f"{classes - 1}); give it a head that fits the data (num_classes=...)."
    )
