"""Language models from checkpoints: the same folder as any other, told apart by its backbone's family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint import CONFIG, LANGUAGE, OTHER_VERSION, as_options, fill, find, read_both, read_config
from ..errors import DwindleError, unknown
from .execute import AdaptiveLM, adapt_lm
from .model import CharLM, LMSize
from .routing import Router
from .text import Vocabulary


def is_language(config: dict[str, Any]) -> bool:
    return config["backbone"]["family"] in LANGUAGE


def load_lm(source: Any, *, lm: Any = None) -> AdaptiveLM:
    """In eval mode, on the CPU. lm: put the weights into this model; needed where only the router was saved."""
    folder = find(source)
    config = read_config(folder)
    backbone, method = config["backbone"], config["method"]
    if not is_language(config):
        raise DwindleError(
            f"{folder} holds a {backbone['family']} model, which is no language model; open it with dwindle.load."
        )
    if method["name"] not in Router.registry:
        raise unknown("router", method["name"], Router.registry, hint=f"{folder / CONFIG} was saved with it")
    weights = read_both(folder, config)
    if lm is None:
        if config["saved"] == "method":
            raise DwindleError(f"{folder} does not hold its language model; pass the model it belongs to as lm=...")
        lm = _rebuild(backbone, folder)
    try:
        model = adapt_lm(lm, Router.registry[method["name"]](**as_options(method["options"])))
    except TypeError as error:
        raise DwindleError(
            f"{folder / CONFIG} has settings this version's {method['name']} does not know ({error}); {OTHER_VERSION}."
        ) from error
    for prefix, module in (("method.", model.method), ("lm.", model.lm)):
        if prefix == "method." or config["saved"] == "all":
            fill(module, {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}, folder)
    model.extra = config.get("extra", {})
    return model.eval()


def _rebuild(backbone: dict[str, Any], folder: Path) -> Any:
    try:
        if backbone["family"] == "charlm":
            return CharLM(LMSize(**backbone["options"]))
        from .hf import rebuild

        return rebuild(backbone)
    except (TypeError, RuntimeError) as error:
        raise DwindleError(
            f"{folder / CONFIG} describes a model that cannot be built ({error}); {OTHER_VERSION}."
        ) from error


def vocabulary_of(model: AdaptiveLM) -> Vocabulary:
    """What the checkpoint says its numbers mean."""
    if "vocabulary" not in model.extra:
        raise DwindleError("This checkpoint does not say what its tokens mean; use it from Python, with its tokenizer.")
    return Vocabulary(model.extra["vocabulary"])
