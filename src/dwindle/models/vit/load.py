"""Loading a vision transformer and its method from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...core.backbone import Backbone, backbone_of
from ...core.give_back import GiveBack
from ...core.heads import PatchHead
from ...core.model import AdaptiveViT, adapt
from ...errors import DwindleError, unknown
from ...io.checkpoint import ADDED, by_config, check_fit, check_method, filled, planned, read_both
from ...io.config import CONFIG
from ...methods import Method
from ...methods.static import Static
from ...ops.int8 import to_int8

WEIGHT_KINDS = ("float", "int8")


def adapted(folder: Path, config: dict[str, Any], vit: nn.Module | None) -> AdaptiveViT:
    """The model of a checkpoint. vit: the backbone it belongs to; None builds the one in the checkpoint."""
    backbone, method, kind = config["backbone"], config["method"], config.get("weights", "float")
    if method["name"] not in Method.registry:
        raise unknown("method", method["name"], Method.registry, hint=f"{folder / CONFIG} was saved with it")
    if kind not in WEIGHT_KINDS:
        raise unknown("kind of weights", kind, WEIGHT_KINDS, hint=f"{folder / CONFIG} names it")
    weights = read_both(folder, config)
    head = config.get("head")
    give_back = config.get("give_back")
    saved = {"method": True, "dense_head": head, "give_back": give_back}
    parts = {name: _with_prefix(f"{name}.", weights) for name, present in saved.items() if present}
    if config["saved"] == "all":
        parts["vit"] = {n: w for n, w in weights.items() if not n.startswith(ADDED)}
    make_method = partial(Method.registry[method["name"]].from_config, method["options"])

    def make(vit: nn.Module, method: Method) -> AdaptiveViT:
        dense_head = PatchHead(width=backbone_of(vit).shape.width, **head) if head else None
        model = adapt(vit, method, dense_head, None if give_back is None else GiveBack(**give_back))
        return to_int8(model) if kind == "int8" else model

    if vit is None:
        rebuild = _rebuilder(folder, config)
        twin = planned(lambda: make(rebuild(backbone), Static()), folder)
        check_fit(twin.vit, parts["vit"], folder)
        shape = twin.backbone.shape
    else:
        family, shape = backbone_of(vit).family, backbone_of(vit).shape
        if family != backbone["family"]:
            raise DwindleError(
                f"{folder} belongs to a {backbone['family']} model, but vit is a {family} model; pass one it fits."
            )
    check_method(make_method, shape, parts["method"], folder)
    with by_config(folder):
        model = make(rebuild(backbone) if vit is None else vit, make_method())
    model.method.trained = model.method.budget_held = method.get("trained", True)
    return filled(model, parts, folder)


def _with_prefix(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights whose names begin with the prefix, under their names without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _rebuilder(folder: Path, config: dict[str, Any]) -> Callable[[dict[str, Any]], nn.Module]:
    """The function that builds the backbone from its entry in the config."""
    backbone = config["backbone"]
    if config["saved"] == "method" or backbone["options"] is None:
        raise DwindleError(
            f"{folder} does not hold its {backbone['family']} backbone; pass the model it belongs to as vit=..."
        )
    families = {family.family: family for family in Backbone.families}
    if backbone["family"] not in families:
        raise unknown("backbone family", backbone["family"], families)
    return families[backbone["family"]].rebuild
