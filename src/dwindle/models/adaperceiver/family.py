"""The entry of AdaPerceivers in the registry: how they are described, loaded, and put on cards and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ...core.registry import Family
from ...errors import DwindleError
from ...io.card import vision_card
from ...io.checkpoint import check_fit, filled, planned, read_both
from . import published
from .model import PRESETS, AdaPerceiver
from .prepared import PreparedPerceiver

PRESET = "adaperceiver_"  # with a preset's name behind it: the name of that network, untrained


class AdaPerceivers(Family):
    one, many, model = "an AdaPerceiver", "AdaPerceivers", AdaPerceiver
    cli = "dwindle.models.adaperceiver.cli"
    commands = {
        "eval": "",
        "bench": "An AdaPerceiver (a checkpoint, or adaperceiver_paper, untrained) at several settings, or by --exit "
        "with early exit.",
        "view": "Of an AdaPerceiver how sure it is at every depth and number of tokens.",
        "grid": "Accuracy of an AdaPerceiver at every number of tokens, depth and width; and how its latency falls. "
        "Of a dense one the principal components of its patch features (--limit images, 4 if not given).",
        "policies": "Table 6 for an AdaPerceiver: fixed settings, early exit, a learned choice of tokens (the "
        "paper's) or of tokens and depth, and the oracle.",
    }
    backbones = ("adaperceiver",)

    def foreign(self, config: dict[str, Any]) -> dict[str, Any] | None:
        return published.described(config) if published.is_published(config) else None

    def describe(self, model: AdaPerceiver) -> dict[str, Any]:
        """The network's part of a checkpoint's config: its settings."""
        backbone = {"family": self.backbones[0], "model": AdaPerceiver.__name__, "options": model.config}
        return {"backbone": backbone, "method": {"name": None, "options": {}}}

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> AdaPerceiver:
        if inner is not None:
            raise DwindleError(f"{folder} holds an AdaPerceiver, which is whole by itself; load it without vit=...")
        options, weights = config["backbone"]["options"] or {}, read_both(folder, config)
        if config["backbone"]["model"] == published.NAME:
            weights = published.renamed(weights, folder)
        elif "readouts" not in options:  # checkpoints without the setting have one read-out, without a prefix
            nameless = ("write.", "output", "head.")
            weights = {f"readouts.0.{n}" if n.startswith(nameless) else n: w for n, w in weights.items()}
        check_fit(planned(lambda: AdaPerceiver(**options), folder), weights, folder)
        return filled(AdaPerceiver(**options), {"": weights}, folder)

    def card(self, config: dict[str, Any], name: str) -> str:
        return vision_card(config, name, "AdaPerceiver: tokens, depth and width are chosen at run time.")

    def preprocess(self, model: AdaPerceiver) -> dict[str, Any]:
        return {"size": model.image}

    def prepare(self, model: AdaPerceiver, **options: Any) -> PreparedPerceiver:
        return PreparedPerceiver(model, **options)

    def untrained(self) -> list[str]:
        return [PRESET + name for name in PRESETS]
