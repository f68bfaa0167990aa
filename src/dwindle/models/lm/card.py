"""The model card of a language model's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...io.card import closing

COLUMNS = ("loss", "loss_soft", "bpc", "tlops_saved", "macs_saved")


def lm_card(config: dict[str, Any], name: str) -> str:
    """The card in Markdown, from a checkpoint's config alone. name: the checkpoint's."""
    extra, method, size = config.get("extra", {}), config["method"], config["backbone"]["options"] or {}
    results, data = extra.get("results", {}), extra.get("data", {})
    unit = "token" if "tokenizer_sha256" in config else "character"
    lines = [
        "---",
        "library_name: dwindle",
        f"tags: [dwindle, text-generation, {unit}-level, adaptive-computation]",
        "---",
        f"# {name}",
        "",
        f"A causal language model ({', '.join(f'{k} {v}' for k, v in size.items())}) with {method['name']}: every "
        "token chooses which blocks it runs.",
        "",
        "```sh",
        f'dwindle generate {name} --prompt "ROMEO:"',
        "```",
        "",
    ]
    if isinstance(results.get("loss"), int | float):
        columns = [key for key in COLUMNS if isinstance(results.get(key), int | float)]
        lines += [
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            f"| {' | '.join(f'{results[key]:.4f}' for key in columns)} |",
            "",
            f"Validation text; loss in nats per {unit}, bpc in bits per character; TLOps and MACs as shares of the "
            "static model's.",
            "",
        ]
    notes = {
        "Data": ", ".join(Path(str(place)).name for place in data.values()),
        "Measured on": extra.get("measured_on"),
        "Note": extra.get("note"),
    }
    notes |= {"Command": extra.get("command"), "Licence": extra.get("licence")}
    return "\n".join([*lines, *closing(notes, {"Router": method["options"], "Recipe": extra.get("recipe")})])
