"""The recipe of `dwindle fit`, which restores a model's features at a budget, from images without labels.

The static model teaches the states of class token and patches (the task 'features'). Few weights are trained: norms,
scales and biases, the planners of a method that has some, and the small `GiveBack` layer, which computes the final
states of tokens that stopped early.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ..core import processes as ranks
from ..core.cost import budget_share
from ..core.method import Method, constructor, methods_by_name
from ..errors import DwindleError, unknown
from ..evaluate.fidelity import agreement
from ..evaluate.readers import tensors
from ..io.card import write_card
from ..io.checkpoint import load, save
from .loop import Run
from .own import with_model
from .recipe import Recipe, changed

log = logging.getLogger("dwindle")
LEARNS = ("return", "small", "all")
STEPS = 4  # steps that are timed, after one that warms up
HIDDEN = 128  # neurons of the `GiveBack` layer


def fit_recipe(
    model: str,
    budget: float | str,
    *,
    method: str = "ToMe.for_features",
    learns: str = "small",
    epochs: int = 10,
    batch: int = 32,
    weights: str | None = None,
    image_size: int | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """The recipe for a model and a budget.

    model: a timm name, a Hugging Face folder or a checkpoint. learns: what is trained: 'return', only the `GiveBack`
    layer and planners; 'small', norms, scales and biases too; 'all'. settings: changes, as in `dwindle train --set`.
    """
    if learns not in LEARNS:
        raise unknown("choice of what learns", learns, LEARNS)
    if method not in methods_by_name():
        raise unknown("method", method, methods_by_name())
    kind = methods_by_name()[method]
    if kind.exits_by_confidence:
        raise DwindleError(
            f"--method {method}: it stops an image when its class is clear, and no classes are learnt here; take ToMe, "
            "TopK or AHT."
        )
    recipe = Recipe(
        task="features",
        image_size=image_size,
        method=kind.__name__,
        method_options={"budget": budget} if method in Method.registry else constructor(method)(budget=budget).config,
        teacher="static",
        freeze_backbone=learns == "return",
        small=learns == "small",
        give_back={"hidden": HIDDEN} if kind.keeps_prefix else {},
        layout="masked" if kind.needs_training else "packed",
        epochs=epochs,
        batch=batch,
        lr=5e-5 if learns == "all" else 1e-3,
        method_lr=1e-3,
        weight_decay=0.0,
        warmup_epochs=0.5,
        augment=None,
        erase=0.0,
        min_scale=0.4,
        skip_corrupt=True,
        eval_every=epochs,
    )
    return changed(with_model(recipe, model, weights), settings)


class _Enough(Exception):
    """Raised to end a run after the steps that are timed."""


def epochs_in(recipe: Recipe, data: str, minutes: float, device: str | None, **given: Any) -> int:
    """How many epochs fit into so many minutes, at least one. It times a few steps of a run that is then discarded."""
    if not 0 < minutes < 1e6:
        raise DwindleError(f"--minutes {minutes:g}: give a number above 0.")
    if ranks.started() > 1:
        raise DwindleError(f"--minutes {minutes:g}: it is for one process; give --epochs under torchrun.")
    times: list[float] = []

    def tick(step: int, steps: int, terms: Any) -> None:
        times.append(time.perf_counter() + 0 * float(terms["total"]))  # float() waits for the GPU
        if len(times) > STEPS:
            raise _Enough

    with tempfile.TemporaryDirectory() as folder:
        trial = Run(dataclasses.replace(recipe, epochs=STEPS + 1), data, folder, device=device, **given)
        try:
            for _ in trial.epochs(tick):
                pass
        except _Enough:
            pass
    step = (times[-1] - times[0]) / max(len(times) - 1, 1)
    return max(1, int(60 * minutes / (step * trial.task.steps_per_epoch)))


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    return dataclasses.replace(recipe, epochs=epochs, eval_every=epochs)


def fitted(run: Run, batch: int) -> dict[str, Any]:
    """The agreement of a run's model with its teacher on the evaluation images; also added to the checkpoint."""
    model, images, teacher = run.best_model, run.task.eval_images, run.learner.teacher
    assert teacher is not None
    images.transform = run.task.preprocess.eval_transform()
    metrics = agreement(model, tensors(images, batch), teacher.model, count=len(images), device=run.device).summary()
    saved = load(run.out)
    saved.extra["results"] = saved.extra.get("results", {}) | metrics
    save(saved, run.out)
    write_card(run.out)
    goal, cost = budget_share(run.recipe.method_options["budget"], model.backbone.shape), metrics["cost"]
    if abs(cost / goal - 1) > 0.05:
        log.warning("asked for %.3f of the static cost, reached %.3f: the method cannot go there", goal, cost)
    return metrics
