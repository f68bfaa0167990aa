"""The figure of `dwindle speedup`: fidelity against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .drawing import canvas, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"top1": "top-1 (%)", "patch_cosine": "mean patch cosine to static"}
MARKERS = "osD^vP"


def frontier(rows: Sequence[dict[str, Any]], measured: str, title: str) -> Figure:
    """Fidelity against speed, a line for each method and one for smaller images. Rows that keep the goal are filled.

    rows: those of `evaluate.speedup.Row.about`. measured: the key of the fidelity, one of AXES.
    """
    figure = canvas(8.5, 5.5, title)
    axis = figure.add_subplot()
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(row["name"].split()[0] if row["kind"] == "adaptive" else "smaller image", []).append(row)
    for number, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row["speedup"])
        colour = "0.5" if name == "smaller image" else f"C{number % 10}"
        xs, ys = [row["speedup"] for row in points], [row[measured] for row in points]
        axis.plot(xs, ys, color=colour, linewidth=1.2, label=name)
        faces = [colour if row["kept"] else "white" for row in points]
        axis.scatter(xs, ys, marker=MARKERS[number % 6], edgecolors=colour, c=faces, zorder=3, s=40)
        for row, x, y in zip(points, xs, ys):
            share = row["name"].split()[-1]
            axis.annotate(share, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, parse_math=False)
    axis.axvline(1.0, color="0.6", linestyle=":", linewidth=1)
    axis.set(xlabel="times as fast as the static model at its best", ylabel=AXES[measured])
    axis.grid(axis="x", color="0.9")
    tidy(axis, "filled: keeps what was wished; labels: share of the static cost")
    if lines:
        axis.legend(fontsize=9, frameon=False)
    return figure
