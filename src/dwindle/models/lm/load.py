"""Loading of adaptive language models from checkpoint folders."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import DwindleError, unknown
from ...io.checkpoint import by_config, check_fit, check_method, filled, load_as, planned, read_both
from ...io.config import CONFIG
from ...io.text import Vocabulary
from ...settings import checked
from .execute import AdaptiveLM, adapt_lm
from .hf import rebuild
from .model import CharLM, LMSize
from .routing import Router, Static


def load_lm(source: str | os.PathLike, *, lm: nn.Module | None = None) -> AdaptiveLM:
    """The model of a checkpoint, in eval mode on the CPU. lm: put the weights into this model; needed where only the
    router was saved."""
    return load_as(AdaptiveLM, source, inner=lm)


def routed(folder: Path, config: dict[str, Any], lm: Any) -> AdaptiveLM:
    """The language model and its router from a checkpoint's folder and config. lm: as for `load_lm`."""
    backbone, method = config["backbone"], config["method"]
    if method["name"] not in Router.registry:
        raise unknown("router", method["name"], Router.registry, hint=f"{folder / CONFIG} was saved with it")
    weights = read_both(folder, config)
    saved = ("method", "lm") if config["saved"] == "all" else ("method",)
    parts: dict[str, Any] = {part: {} for part in saved}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = weight
    if lm is None and config["saved"] == "method":
        raise DwindleError(f"{folder} does not hold its language model; pass the model it belongs to as lm=...")

    make_router = partial(Router.registry[method["name"]], **method["options"])
    # `twin` has the model's shape: weights are compared with it before the model is built.
    if lm is None:
        twin = planned(lambda: adapt_lm(_rebuild(backbone), Static()), folder)
        check_fit(twin.lm, parts["lm"], folder)
    else:
        twin = adapt_lm(lm, Static())
    check_method(make_router, twin.backbone.shape, parts["method"], folder)
    with by_config(folder):
        model = adapt_lm(_rebuild(backbone) if lm is None else lm, make_router())
    return filled(model, parts, folder)


def _rebuild(backbone: dict[str, Any]) -> Any:
    """The language model that a config describes, without its weights."""
    if backbone["family"] == "charlm":
        return CharLM(checked(LMSize)(**backbone["options"] or {}))
    return rebuild(backbone)


def vocabulary_of(model: AdaptiveLM) -> Vocabulary:
    """The vocabulary that the model's checkpoint names: which character each id stands for."""
    if "vocabulary" not in model.extra:
        raise DwindleError("This checkpoint does not say what its tokens mean; use it from Python, with its tokenizer.")
    characters, known = model.extra["vocabulary"], model.backbone.shape.vocabulary
    vocabulary = Vocabulary(characters)
    if len(vocabulary) != known or (characters and list(characters) != sorted(set(characters))):
        raise DwindleError(
            f"This checkpoint names {len(vocabulary)} characters, and its model knows {known}, each once and in order; "
            "take another copy."
        )
    return vocabulary


def own_text(model: AdaptiveLM) -> str:
    """The name of the text that, by its checkpoint, the model was trained on."""
    name = model.extra.get("data", {}).get("train")
    if not isinstance(name, str):
        raise DwindleError("This checkpoint does not say what text it learnt from; name one with --data.")
    return name
