"""The model card of a checkpoint, by the Hub's conventions: the model, its training data and its results."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..core.registry import family_named
from ..files import write_text
from .config import read_config
from .promise import promise_in, sentence

CARD = "README.md"


def model_card(config: dict[str, Any], name: str) -> str:
    """The card's text, made from a checkpoint's config alone, as the model's family writes it."""
    return family_named(config["backbone"]["family"]).card(config, name)


def vision_card(config: dict[str, Any], name: str, told: str) -> str:
    """The card of a model that classifies images. told: a sentence on what the model is."""
    extra, method = config.get("extra", {}), config["method"]
    recipe, results, data = extra.get("recipe", {}), extra.get("results", {}), extra.get("data", {})
    measured = [results.get(name) for name in ("top1", "top5", "gmacs", "gmacs_static", "images")]
    tabled = all(isinstance(value, int | float) and math.isfinite(value) for value in measured) and measured[3]
    promise = promise_in(config)
    lines = [
        "---",
        "library_name: dwindle",
        "tags: [dwindle, vision, image-classification, adaptive-computation]",
        "---",
        f"# {name}",
        "",
        told,
        "",
        "```python",
        "import dwindle",
        f'model = dwindle.load("{name}")',
        "out = model(images)  # out.logits, out.trace",
        "```",
        "",
    ]
    if tabled:
        share = results["gmacs"] / results["gmacs_static"]
        lines += [
            "| top-1 | top-5 | GMACs | of static | images | layout |",
            "|---|---|---|---|---|---|",
            f"| {results['top1']:.2f} | {results['top5']:.2f} | {results['gmacs']:.3f} | {share:.1%} | "
            f"{int(results['images']):,} | packed |",
            "",
        ]
    notes = {
        "Promise": None if promise is None else f"{sentence(promise)}.",
        "Data": ", ".join(f"{part}: {Path(str(where)).name}" for part, where in data.items()),
        "Measured on": extra.get("measured_on") or results.get("on"),
        "Command": extra.get("command"),
        "Licence": extra.get("licence"),
        "Note": extra.get("note"),
    }
    settings = {"Results": {} if tabled else results, "Method": method["options"], "Recipe": recipe}
    return "\n".join([*lines, *closing(notes, settings)])


def closing(notes: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The last lines of a card. notes: text by title. settings: settings by title; empty entries are left out."""
    lines = []
    for title, value in notes.items():
        if value:
            lines += [f"**{title}**: {value}", ""]
    for title, values in settings.items():
        if values:
            listing = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
            lines += [f"**{title}**: `{listing}`", ""]
    return lines


def write_card(folder: str | os.PathLike, name: str | None = None) -> Path:
    """Write README.md beside a checkpoint's config, and return its path. name: the model's; None: the folder's."""
    folder = Path(folder)
    return write_text(folder / CARD, model_card(read_config(folder), name or folder.name))
