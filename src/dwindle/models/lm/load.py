"""Loading of adaptive language models from checkpoint folders."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import DwindleError, unknown
from ...io.checkpoint import by_config, check_fit, check_method, filled, load_as, planned, read_both
from ...io.config import CONFIG, FORMAT
from ...io.encoders import hugging_face_model
from ...io.text import Vocabulary
from ...io.tokenizer import TOKENIZER, Tokenizer, read_tokenizer
from ...settings import checked
from .execute import AdaptiveLM, adapt_lm
from .hf import KINDS, rebuild
from .model import CharLM, LMSize
from .routing import Router, Static

FOLDER = "hf_folder"  # stands in the config for a folder in Hugging Face's own format
LONGEST = 1024  # tokens of a window, where the model's context is longer and none is given


def load_lm(source: str | os.PathLike, *, lm: nn.Module | None = None) -> AdaptiveLM:
    """The model of a checkpoint, in eval mode on the CPU. lm: put the weights into this model; needed where only the
    router was saved."""
    return load_as(AdaptiveLM, source, inner=lm)


def routed(folder: Path, config: dict[str, Any], lm: Any) -> AdaptiveLM:
    """The language model and its router from a checkpoint's folder and config. lm: as for `load_lm`."""
    backbone, method = config["backbone"], config["method"]
    if backbone["family"] == FOLDER:
        return _plain(folder, config, lm)
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
    model.tokenizer = read_tokenizer(folder, config)
    return filled(model, parts, folder)


def plain_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Our config for that of a Hugging Face causal language model; None where it is of none that can be adapted."""
    named = config.get("architectures")
    kind = next((name for name in named if name in KINDS), None) if isinstance(named, list) else None
    if kind is None:
        return None
    backbone = {"family": FOLDER, "model": kind, "options": None}
    method: dict[str, Any] = {"name": "Static", "options": {}}
    return {"format": FORMAT, "library": "dwindle", "backbone": backbone, "method": method, "saved": "all", "extra": {}}


def _plain(folder: Path, config: dict[str, Any], lm: Any) -> AdaptiveLM:
    """The untouched model of a folder in Hugging Face's format, in float32: nothing of it is skipped."""
    if lm is not None:
        raise DwindleError(f"{folder} holds a whole language model of Hugging Face's; load it without another.")
    model = adapt_lm(hugging_face_model(folder).float(), Static())
    model.tokenizer = read_tokenizer(folder, config)
    return model


def _rebuild(backbone: dict[str, Any]) -> Any:
    """The language model that a config describes, without its weights."""
    if backbone["family"] == "charlm":
        return CharLM(checked(LMSize)(**backbone["options"] or {}))
    return rebuild(backbone)


def vocabulary_of(model: AdaptiveLM) -> Vocabulary | Tokenizer:
    """What the model's tokens mean: the characters that its checkpoint names, or its tokenizer."""
    known = model.backbone.shape.vocabulary
    if model.tokenizer is not None:
        tokenizer = Tokenizer(model.tokenizer)
        if len(tokenizer) > known:
            raise DwindleError(
                f"The checkpoint's {TOKENIZER} has {len(tokenizer)} tokens, and its model knows {known}; put the "
                "tokenizer that belongs to it there."
            )
        return tokenizer
    if "vocabulary" not in model.extra:
        raise DwindleError(
            f"This checkpoint does not say what its tokens mean; put its {TOKENIZER} beside its weights."
        )
    characters = model.extra["vocabulary"]
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


def own_context(model: AdaptiveLM) -> int:
    """Tokens of a window where none are asked for: as many as the router learnt from, or else the model's context, of
    which the first LONGEST are enough."""
    shape = model.backbone.shape
    learnt = model.extra.get("recipe", {}).get("context")
    return learnt if isinstance(learnt, int) and 1 <= learnt <= shape.context else min(shape.context, LONGEST)
