"""The model of a recipe: its backbone with its weights, its heads, and the learning rates of its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import processes as ranks
from ..core.backbone import backbone_of
from ..core.heads import PatchHead
from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..io.checkpoint import ADDED, fill, find, load_as, read_both
from ..io.classes import known_classes, match
from ..io.config import read_config
from ..io.datasets import Images
from ..io.encoders import open_encoder, prepared_as, timm_vit
from ..tasks.images import is_checkpoint
from .narrow import narrowed

if TYPE_CHECKING:
    from .recipe import Recipe


def teacher_classes(model: Any, images: Images, named: str, device: torch.device) -> Tensor | None:
    """The indices of the teacher's logits for the images' classes; None: all of them, in the same order."""
    found = match(
        images.classes,
        images.num_classes,
        known_classes(model),
        model.classes,
        named=images.name,
        owner=f"the teacher {named}",
    )
    if found.both < len(found.numbers):
        raise DwindleError(
            f"The teacher {named} does not know the data: {found.summary()} Take one trained on this data."
        )
    return None if found.same else torch.from_numpy(found.numbers).to(device)


def build_vit(recipe: Recipe, classes: int | None) -> Any:
    """The backbone that a recipe names, with its weights.

    classes: a head of another number of classes is replaced by a new one; None: the head stays.
    """
    if is_checkpoint(recipe.weights):
        vit = _from_checkpoint(recipe)
    elif Path(recipe.model).is_dir():
        vit = _from_folder(recipe)
    else:
        vit = timm_vit(recipe.model, recipe.weights, recipe.image_size, classes)
    backbone = backbone_of(vit)
    if classes not in (None, backbone.shape.classes):
        backbone.reset_head(classes)
    if recipe.heads is not None:
        vit = narrowed(vit, recipe.heads)
        backbone = backbone_of(vit)
    if recipe.image_size and backbone.shape.image != (recipe.image_size, recipe.image_size):
        if not hasattr(vit, "set_input_size"):
            raise DwindleError(
                f"image_size = {recipe.image_size}: {type(vit).__name__} was built for {backbone.shape.image[0]}; "
                "leave it out, or build the model for that size."
            )
        vit.set_input_size(img_size=(recipe.image_size, recipe.image_size))
    return vit


def _from_folder(recipe: Recipe) -> Any:
    """The model of a Hugging Face folder."""
    vit = open_encoder(recipe.model)
    if isinstance(vit, AdaptiveViT):
        raise DwindleError(f"model = {recipe.model}: that is a checkpoint; give it as weights={recipe.model}.")
    return vit.train()


def own_preprocess(recipe: Recipe) -> dict[str, Any]:
    """The preprocessing settings in the recipe's Hugging Face folder; empty if it names none."""
    folder = not is_checkpoint(recipe.weights) and Path(recipe.model).is_dir()
    settings: dict[str, Any] = prepared_as(recipe.model).get("preprocess", {}) if folder else {}
    return settings


def build_head(recipe: Recipe, width: int, outputs: int) -> PatchHead:
    """A head for patches: a new one, or that of the checkpoint in `weights` if it has one of this size."""
    head = PatchHead(width, outputs)
    if recipe.weights is not None and is_checkpoint(recipe.weights):
        folder = find(recipe.weights)
        config, name = read_config(folder), "dense_head."
        if config.get("head") == head.config:
            weights = {n.removeprefix(name): w for n, w in read_both(folder, config).items() if n.startswith(name)}
            fill(head, weights, folder)
    return head


def fill_method(model: AdaptiveViT, recipe: Recipe) -> None:
    """Load the method's weights (planners, scalars, bar) from the checkpoint of the backbone."""
    if recipe.weights is None or not is_checkpoint(recipe.weights):
        raise DwindleError(
            f"keep_method = True: weights = {recipe.weights} is no checkpoint whose method could go on; give the "
            "folder of a training, by --set weights=FOLDER."
        )
    folder = find(recipe.weights)
    config, name = read_config(folder), type(model.method).__name__
    if config["method"]["name"] != name:
        raise DwindleError(
            f"keep_method = True: {recipe.weights} holds {config['method']['name']}, but the recipe trains {name}; "
            "give a checkpoint of that method."
        )
    weights = {n.removeprefix("method."): w for n, w in read_both(folder, config).items() if n.startswith("method.")}
    fill(model.method, weights, folder)


def _from_checkpoint(recipe: Recipe) -> Any:
    assert recipe.weights is not None
    described = read_config(find(recipe.weights))["backbone"]
    if described["model"] not in (None, recipe.model):
        raise DwindleError(
            f"weights = {recipe.weights} holds a {described['model']}, but the recipe trains a {recipe.model}; say "
            f"model={described['model']} as well."
        )
    return load_as(AdaptiveViT, recipe.weights).unwrap().train()


def parameter_groups(model: AdaptiveViT, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameter groups: the backbone at `lr`, added parts at `method_lr`; vectors, scalars and embeddings undecayed."""
    scale = recipe.scaled(ranks.world())
    undecayed = set(getattr(model.vit, "no_weight_decay", set)())
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = scale * (recipe.method_lr if name.startswith(ADDED) else recipe.lr)
        plain = parameter.dim() <= 1 or name.removeprefix("vit.") in undecayed
        scalar = not parameter.dim()  # a group of its own: others may be sharded, and torch takes one kind at a time
        groups.setdefault((lr, 0.0 if plain else recipe.weight_decay, scalar), []).append(parameter)
    return [
        {"params": params, "lr": lr, "peak": lr, "weight_decay": decay} for (lr, decay, _), params in groups.items()
    ]
