"""A recipe for any model, without a recipe function of its own: that of `dwindle train --model M --method AHT`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..errors import DwindleError, unknown
from ..io.checkpoint import WEIGHTS, find, is_checkpoint, shipped
from ..io.config import CONFIG, read_config
from ..methods import Method
from ..settings import parameters
from .recipe import Recipe


def own_recipe(
    model: str,
    method: str = "AHT",
    *,
    budget: float | str | None = None,
    epochs: int | None = None,
    weights: str | None = None,
    image_size: int | None = None,
) -> Recipe:
    """The paper's fine-tuning of a model.

    model: a timm name, a Hugging Face folder or a checkpoint. budget: None: 0.67 of the static cost, for methods that
    train with a budget. epochs: None: the default of `Recipe`.
    """
    if method not in Method.registry:
        raise unknown("method", method, Method.registry)
    holds = "budget" in parameters(Method.registry[method])
    if budget is not None and not holds:
        raise DwindleError(f"--budget {budget}: {method} holds none while it is trained; leave it out.")
    options = {"budget": 0.67 if budget is None else budget} if holds else {}
    made = Recipe(method=method, method_options=options, image_size=image_size)
    made = made if epochs is None else dataclasses.replace(made, epochs=epochs)
    return with_model(made, model, weights)


def with_model(recipe: Recipe, model: str, weights: str | None) -> Recipe:
    """The recipe with `model` and `weights` set.

    model: a timm name, with its weights; a Hugging Face folder; or a checkpoint, which then gives the weights, and the
    timm name that its config holds.
    """
    import timm

    if timm.is_model(model) or not is_checkpoint(model):
        return dataclasses.replace(recipe, model=model, weights=_file(weights) or "pretrained")
    if weights is not None:
        raise DwindleError(f"--weights {weights}: {model} brings its own; leave it out.")
    folder = find(model)
    try:
        described = read_config(folder)["backbone"]
    except DwindleError:
        if model in shipped() or not (folder / CONFIG).is_file():
            raise
        return dataclasses.replace(recipe, model=str(folder), weights=None)  # Hugging Face's
    return dataclasses.replace(recipe, model=described["model"] or recipe.model, weights=str(folder))


def _file(weights: str | None) -> str | None:
    folder = None if weights is None else Path(weights)
    return str(folder / WEIGHTS) if folder and folder.is_dir() and not (folder / CONFIG).is_file() else weights
