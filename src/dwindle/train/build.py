"""What a recipe trains: its backbone with its weights, and which parameters learn how fast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.model import AdaptiveViT
from ..errors import DwindleError, unknown
from ..io.checkpoint import find, load, load_vit_weights
from ..io.classes import known_classes, match
from ..io.config import read_config
from ..io.datasets import Images
from ..io.download import no_waiting
from ..tasks.classify import is_checkpoint

if TYPE_CHECKING:
    from .recipe import Recipe


def teacher_classes(model: Any, images: Images, named: str, device: torch.device) -> Tensor | None:
    """Which of a teacher's answers are about the images' classes; None: all, in this order."""
    found = match(
        images.classes,
        images.num_classes,
        known_classes(model),
        model.classes,
        named=images.name,
        owner=f"the teacher {named}",
    )
    if found.both < len(found.numbers):
        raise DwindleError(f"The teacher {named} does not know the data: {found.told()} Take one trained on this data.")
    return None if found.same else torch.from_numpy(found.numbers).to(device)


def build_vit(recipe: Recipe, classes: int) -> Any:
    """The backbone a recipe names, with its weights. A head of another size than the weights' starts anew."""
    import timm

    if not timm.is_model(recipe.model):
        raise unknown("model", recipe.model, timm.list_models(), hint="timm.list_models('*vit*') names them")
    options: dict[str, Any] = {"img_size": recipe.image_size} if recipe.image_size else {}
    if recipe.weights in (None, "pretrained"):
        pretrained = recipe.weights is not None
        try:
            with no_waiting() if pretrained else nullcontext():
                return timm.create_model(recipe.model, pretrained=pretrained, num_classes=classes, **options)
        except TypeError as error:
            raise DwindleError(
                f"{recipe.model} is no plain ViT that can be built with {options} ({error}); set another model."
            ) from error
        except (OSError, RuntimeError) as error:
            raise DwindleError(
                f"Weights for {recipe.model} could not be fetched ({type(error).__name__}); "
                "give a file with --set weights=PATH."
            ) from error
    vit: Any
    if is_checkpoint(recipe.weights):
        vit = _from_checkpoint(recipe)
    else:
        vit = timm.create_model(recipe.model, num_classes=1000)
        load_vit_weights(vit, recipe.weights)
    if classes != vit.num_classes:
        vit.reset_classifier(classes)
    if recipe.image_size:
        vit.set_input_size(img_size=(recipe.image_size, recipe.image_size))
    return vit


def _from_checkpoint(recipe: Recipe) -> Any:
    assert recipe.weights is not None
    described = read_config(find(recipe.weights))["backbone"]
    if described["family"] != "timm" or described["model"] not in (None, recipe.model):
        raise DwindleError(
            f"weights = {recipe.weights} holds a {described['family']} {described['model']}, but the recipe trains a "
            f"timm {recipe.model}; set model to what the checkpoint holds."
        )
    return load(recipe.weights).unwrap().train()


def parameter_groups(model: AdaptiveViT, recipe: Recipe) -> list[dict[str, Any]]:
    """Backbone and method each at its learning rate; no decay for vectors, scalars and embeddings."""
    undecayed = set(getattr(model.vit, "no_weight_decay", set)())
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = recipe.method_lr if name.startswith("method.") else recipe.lr
        plain = parameter.dim() <= 1 or name.removeprefix("vit.") in undecayed
        scalar = not parameter.dim()  # apart from the rest, which may be sharded: torch updates one kind at a time
        groups.setdefault((lr, 0.0 if plain else recipe.weight_decay, scalar), []).append(parameter)
    return [
        {"params": params, "lr": lr, "peak": lr, "weight_decay": decay} for (lr, decay, _), params in groups.items()
    ]
