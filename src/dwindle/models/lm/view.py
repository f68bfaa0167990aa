"""An HTML page of text coloured by how many blocks each character ran. It loads no other file."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DwindleError
from ...files import check_folder, write_text
from ...show.drawing import depth_colours
from ...show.figures import SHELL, STYLE, table
from .execute import AdaptiveLM
from .load import vocabulary_of

MOST_CHARACTERS = 4000  # on a page
CSS = """
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: .95rem/1.9 ui-monospace, monospace; background: #fff;
  border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; color: #000; }
.text span, .key span { padding: .15em 0; }
.key span { display: inline-block; padding: .1rem .6rem; font-variant-numeric: tabular-nums; }
"""


@torch.inference_mode()
def page(model: AdaptiveLM, ids: Tensor, out: str | os.PathLike, title: str, device: str = "cpu") -> dict[str, Any]:
    """Write `out`/index.html for a text (N,); returns its path and the numbers on it."""
    ids = ids[:MOST_CHARACTERS].long()
    if not len(ids):
        raise DwindleError(f"'{title}' holds no text to look at; give some.")
    model, context = model.eval().to(device), model.backbone.shape.context
    lives = [model(part[None].to(device)).trace.live[:, 0].cpu() for part in ids.split(context)]  # (L, n) each
    live = torch.cat(lives, 1)
    depth, blocks = live.sum(0), len(live)
    pieces = vocabulary_of(model).pieces(ids)

    numbers: dict[str, Any] = {"characters": len(ids), "depth": round(depth.double().mean().item(), 3)}
    numbers |= {"blocks": blocks, "tlops_saved": round(1 - live.double().mean().item(), 4)}
    kinds = {name: depth[mask].double().mean().item() for name, mask in _kinds(pieces).items() if mask.any()}
    cards = [
        ("mean depth", f"{numbers['depth']:.2f}", f"of {blocks} blocks"),
        ("TLOps saved", f"{numbers['tlops_saved']:.1%}", "token-layer operations skipped"),
        ("characters", str(len(ids)), f"in windows of {context}"),
    ]
    head = "".join(f"<div><dt>{t}</dt><dd>{v}<small>{note}</small></dd></div>" for t, v, note in cards)
    shades = _shades(blocks)
    key = "".join(f'<span style="{style}">{n}</span>' for n, style in enumerate(shades) if n)
    spans = "".join(
        f'<span style="{shades[int(d)]}" title="{_tooltip(live[:, i])}">{escape(piece)}</span>'
        for i, (piece, d) in enumerate(zip(pieces, depth))
    )
    body = [
        f"<dl>{head}</dl>",
        "<p>Each character is coloured by how many blocks it ran while the one after it was predicted; point at one to "
        f'see which. Blocks run: </p><p class="key">{key}</p>',
        f'<div class="text">{spans}</div>',
        "<h2>Blocks</h2>",
        table(["block", "ran it"], [[i, f"{share:.1%}"] for i, share in enumerate(live.double().mean(1).tolist(), 1)]),
        "<h2>Characters</h2>",
        table(["kind", "mean depth"], [[name, f"{value:.2f}"] for name, value in kinds.items()]),
    ]
    footer = f"Made by dwindle view, {type(model.method).__name__}."
    html = SHELL.format(title=escape(title), style=STYLE + CSS, body="\n".join(body), footer=footer)
    folder = Path(out)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = write_text(folder / "index.html", html)
    return {"page": str(path), **numbers, "by_kind": {name: round(value, 3) for name, value in kinds.items()}}


def _shades(blocks: int) -> list[str]:
    """CSS for every depth from 0: the background is the depth's colour in all figures, the ink is readable on it."""
    styles = []
    for red, green, blue, _ in depth_colours(blocks).to_rgba(np.arange(blocks + 1)):
        ink = "#000" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "#fff"
        styles.append(f"background:rgb({red * 255:.0f} {green * 255:.0f} {blue * 255:.0f});color:{ink}")
    return styles


def _tooltip(live_L: Tensor) -> str:
    """Which blocks a character skipped."""
    skipped = [str(i + 1) for i, ran in enumerate(live_L.tolist()) if not ran]
    return f"skipped {', '.join(skipped)}" if skipped else "ran all"


def _kinds(pieces: list[str]) -> dict[str, Tensor]:
    """(n,) bool for each kind of character: which pieces are of it."""
    kinds = {
        "small letter": [p.islower() for p in pieces],
        "capital": [p.isupper() for p in pieces],
        "first letter of a word": [p.isalpha() and not before.isalpha() for before, p in zip([" ", *pieces], pieces)],
        "space": [p == " " for p in pieces],
        "line break": [p == "\n" for p in pieces],
        "other": [not p.isalpha() and not p.isspace() for p in pieces],
    }
    return {name: torch.tensor(mask) for name, mask in kinds.items()}
