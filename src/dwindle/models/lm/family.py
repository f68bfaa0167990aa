"""The entry of language models in the registry: how they are described, loaded, and put on cards and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...core.registry import Family
from .card import lm_card
from .execute import AdaptiveLM
from .load import FOLDER, plain_config, routed


class LanguageModels(Family):
    one, many, model = "a language model", "language models", AdaptiveLM
    cli = "dwindle.models.lm.cli"
    commands = {
        "eval": "",
        "bench": "",
        "view": "Of a language model a page of text, coloured by depth.",
        "routing": "Whether a language model's hard characters run more blocks: blocks against the loss and the "
        "entropy of the next character, in quarters, and by kind of character.",
        "calibrate": "Set a language model's operating point to the one that saves most within a loss, and save it.",
        "generate": "Write text with a language model, skipping blocks token by token.",
    }
    backbones = ("charlm", "hf_lm", FOLDER)

    def foreign(self, config: dict[str, Any]) -> dict[str, Any] | None:
        return plain_config(config)

    def describe(self, model: AdaptiveLM) -> dict[str, Any]:
        backbone = {"family": model.backbone.family, **model.backbone.describe()}
        method = {"name": type(model.method).__name__, "options": model.method.config, "trained": True}
        return {"backbone": backbone, "method": method}

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> AdaptiveLM:
        return routed(folder, config, inner)

    def card(self, config: dict[str, Any], name: str) -> str:
        return lm_card(config, name)
