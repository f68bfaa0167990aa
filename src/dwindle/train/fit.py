"""The recipe that makes a model's features true again at a budget, from images without labels; nothing here trains.

The static model teaches the states of class token and patches (the task 'features'). Little of the model learns: norms,
scales and biases, the planners of a method that has some, and a small layer that says what a token gets back that
stopped early.
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
from ..core.method import Method, constructor, ways
from ..errors import DwindleError, unknown
from ..evaluate.fidelity import agreement
from ..evaluate.readers import tensors
from ..io.card import write_card
from ..io.checkpoint import load, save
from .loop import Run
from .own import placed
from .recipe import Recipe, changed

log = logging.getLogger("dwindle")
LEARNS = ("return", "small", "all")
STEPS = 4  # that are timed, after one that warms up
HIDDEN = 128  # neurons of the return


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
    """model: a timm name, a folder of Hugging Face's or a checkpoint. learns: 'return', only the layer that gives back
    (and planners); 'small', norms, scales and biases too; 'all'. settings: of the recipe, as `dwindle train --set`.
    """
    if learns not in LEARNS:
        raise unknown("choice of what learns", learns, LEARNS)
    if method not in ways():
        raise unknown("method", method, ways())
    kind = ways()[method]
    if kind.judges_answers:
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
    return changed(placed(recipe, model, weights), settings)


class _Enough(Exception):
    """As many steps as are timed."""


def epochs_in(recipe: Recipe, data: str, minutes: float, device: str | None, **given: Any) -> int:
    """How many epochs there is time for, by a few steps that are timed and forgotten; at least one."""
    if not 0 < minutes < 1e6:
        raise DwindleError(f"--minutes {minutes:g}: give a number above 0.")
    if ranks.started() > 1:
        raise DwindleError(f"--minutes {minutes:g}: it is for one process; give --epochs under torchrun.")
    times: list[float] = []

    def tick(step: int, steps: int, terms: Any) -> None:
        times.append(time.perf_counter() + 0 * float(terms["total"]))  # a GPU is waited for
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
    """What came of a run: its model against its teacher, on the images to evaluate on. Kept in its card too."""
    model, images, teacher = run.best_model, run.task.eval_images, run.learner.teacher
    assert teacher is not None
    images.transform = run.task.preprocess.eval_transform()
    found = agreement(model, tensors(images, batch), teacher.model, count=len(images), device=run.device).summary()
    kept = load(run.out)
    kept.extra["results"] = kept.extra.get("results", {}) | found
    save(kept, run.out)
    write_card(run.out)
    goal = budget_share(run.recipe.method_options["budget"], model.backbone.shape)
    if abs(found["cost"] / goal - 1) > 0.05:
        log.warning("asked for %.3f of the static cost, reached %.3f: the method cannot go there", goal, found["cost"])
    return found
