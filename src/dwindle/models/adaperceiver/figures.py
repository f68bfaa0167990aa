"""Figures of one network at many settings: trade-offs (Fig. 9), token counts (10), principal components (15-17)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DwindleError
from ...show.drawing import canvas, save_figure, show, tidy
from .model import AdaPerceiver


def tradeoffs(
    rows: Sequence[dict[str, Any]],
    path: Path,
    by: str = "gmacs",
    where: str = "",
    static: Sequence[tuple[float, float]] = (),
) -> Path:
    """Fig. 9: top-1 against GMACs, or against latency (by='ms'); a line per number of tokens, a point per depth.

    where: the batch, dtype and machine of the latency, for the label. static: (cost, top-1) of networks that were
    trained for one setting.
    """
    figure = canvas(8.5, 5.5, "Tokens, depths and widths of one network")
    axis = figure.add_subplot()
    widths, counts = sorted({r["width"] for r in rows}), sorted({r["tokens"] for r in rows})
    for i, tokens in enumerate(counts):
        for width in widths:
            points = sorted((r for r in rows if (r["tokens"], r["width"]) == (tokens, width)), key=lambda r: r["depth"])
            full = width == widths[-1]
            axis.plot(
                [p[by] for p in points],
                [p["top1"] for p in points],
                color=f"C{i % 10}",
                marker="o" if full else None,
                markersize=4,
                linewidth=1.8 if full else 0.8,
                alpha=1.0 if full else 0.5,
                label=f"{tokens} tokens" if full else None,
            )
    if static:
        cost, top1 = zip(*static)
        axis.scatter(cost, top1, marker="*", s=130, color="black", zorder=3, label="trained for one setting")
    label = {"gmacs": "GMACs per image", "ms": "milliseconds per batch"}[by] + (f" ({where})" if where else "")
    axis.set(xlabel=label, ylabel="top-1 (%)")
    thin = "" if len(widths) == 1 else f"; thin lines: widths {', '.join(map(str, widths[:-1]))}"
    depths = sorted({r["depth"] for r in rows})
    listed = depths if len(depths) <= 5 else [depths[0], "...", depths[-1]]
    tidy(axis, f"points: depths {', '.join(map(str, listed))}{thin}")
    axis.legend(fontsize=9, loc="lower right", frameon=False)
    return save_figure(figure, path)


def interpolation(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Fig. 10: top-1 against GMACs for token counts that were trained, between those, and beyond them."""
    trained = [r["tokens"] for r in rows if r["trained"]]
    kinds = {"trained": ("o", "C0"), "between": ("s", "C2"), "beyond": ("^", "C1")}

    def kind(row: dict[str, Any]) -> str:
        return "trained" if row["trained"] else "between" if trained[0] < row["tokens"] < trained[-1] else "beyond"

    figure = canvas(7.5, 4.5, "Token counts the network was not trained with")
    axis = figure.add_subplot()
    axis.plot([r["gmacs"] for r in rows], [r["top1"] for r in rows], color="0.8", zorder=1)
    for name, (marker, colour) in kinds.items():
        group = [r for r in rows if kind(r) == name]
        axis.scatter([r["gmacs"] for r in group], [r["top1"] for r in group], marker=marker, color=colour, label=name)
    for row in rows:
        at = row["gmacs"], row["top1"]
        axis.annotate(str(row["tokens"]), at, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axis.set(xlabel="GMACs per image", ylabel="top-1 (%)")
    tidy(axis, "labels: tokens; full depth and width")
    axis.legend(fontsize=9, loc="lower right", frameon=False)
    return save_figure(figure, path)


def principal(features: Tensor, grid: tuple[int, int], basis: Tensor | None = None) -> tuple[np.ndarray, Tensor]:
    """The patch features (P, D) projected to three components, as colours (rows, columns, 3) in [0, 1]; and the
    components (D, 3). basis: the components; None: the features' first three principal components."""
    x = (features - features.mean(0)).double()
    if basis is None:
        basis = torch.linalg.svd(x, full_matrices=False).Vh[:3].T
    projected = x @ basis
    low, high = projected.amin(0), projected.amax(0)
    return ((projected - low) / (high - low).clamp(min=1e-9)).view(*grid, 3).cpu().numpy(), basis


def certainty(model: AdaPerceiver, picture: Any, sure: Tensor, path: Path, title: str) -> Path:
    """An image beside the probability of its final answer at each depth and number of tokens, sure (L, G)."""
    figure = canvas(8.5, 4.2, title)
    photo, axis = figure.subplots(1, 2, width_ratios=(1, 1.25))
    photo.imshow(picture)
    photo.set_axis_off()
    shown = axis.imshow(sure.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
    axis.set_xticks(range(len(model.tokens)), [str(t) for t in model.tokens])
    axis.set_yticks(range(model.depth), [str(d + 1) if d % 2 or model.depth < 8 else "" for d in range(model.depth)])
    axis.set(xlabel="tokens", ylabel="blocks")
    figure.colorbar(shown, ax=axis, label="chance of the final answer")
    return save_figure(figure, path)


def class_name(names: Sequence[str] | None, number: int) -> str:
    """The name of a class, or its number where it has none."""
    named = names[number] if names and number < len(names) else ""
    return named or f"class {number}"


def maps(
    photo: Any, seen: dict[str, np.ndarray], task: str, names: Sequence[str] | None, path: Path, title: str
) -> Path:
    """A photograph beside its maps (H, W), `seen` by title, of classes or of metres."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    width, height = photo.size
    tall = min(max(2.6 * height / width, 1.3), 5.2)
    figure = canvas(2.6 * (len(seen) + 1), tall + 1.2, title)
    axes = figure.subplots(1, len(seen) + 1, squeeze=False)[0]
    show(axes[0], np.asarray(photo), "image")
    if task == "depth":
        low, high = min(float(m.min()) for m in seen.values()), max(float(m.max()) for m in seen.values())
        for axis, (name, values) in zip(axes[1:], seen.items()):
            show(axis, values, name, vmin=low, vmax=high, cmap="viridis_r")
        figure.colorbar(axes[-1].images[0], ax=axes[1:], label="metres", shrink=0.8)
        return save_figure(figure, path)
    # Only the classes that occur get colours, the most frequent first.
    classes, counts = np.unique(np.concatenate([m.ravel() for m in seen.values()]), return_counts=True)
    order = classes[np.argsort(-counts, kind="stable")]
    colours = ListedColormap([colormaps["tab20"](i % 20) for i in range(len(order))])
    rank = np.zeros(int(classes.max()) + 1, dtype=int)
    rank[order] = np.arange(len(order))
    for axis, (name, values) in zip(axes[1:], seen.items()):
        show(axis, rank[values], name, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, interpolation="nearest")
    labels = [class_name(names, c) for c in order[:8]]
    figure.legend(
        [Patch(color=colours(i)) for i in range(len(labels))],
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 4),
        frameon=False,
        fontsize=9,
    )
    return save_figure(figure, path)


@torch.no_grad()
def components(model: AdaPerceiver, image: Tensor, path: Path) -> Path:
    """Fig. 15-17: principal components of a dense network's output tokens for one image (1, 3, H, W), over
    width, tokens and depth.

    All settings are projected to the components of the largest, so that equal colours mean equal features.
    """
    if model.outputs != "dense":
        raise DwindleError("Principal components are of patch features; give a dense network (outputs='dense').")
    cells = model.grid((image.shape[-2], image.shape[-1]))
    if min(cells) < 2:
        raise DwindleError(
            f"An image of {cells[0]} x {cells[1]} patches is too small to show components of; give at least 2 x 2."
        )
    tokens = (*model.tokens, 2 * model.tokens[-1])
    depths = sorted({max(1, round(model.depth * share / 6)) for share in range(1, 7)})
    lines: list[tuple[str, list[dict[str, int]]]] = [
        ("width", [{"width": w} for w in model.widths]),
        ("tokens", [{"tokens": t} for t in tokens]),
        ("depth", [{"depth": d} for d in depths]),
    ]
    _, basis = principal(model(image).features[0], cells)
    most = max(len(settings) for _, settings in lines)
    figure = canvas(1.7 * (most + 1), 6.0, "First three principal components of the patch features")
    axes = figure.subplots(3, most + 1, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    low, high = image.amin(), image.amax()
    axes[0, 0].imshow(((image[0] - low) / (high - low).clamp(min=1e-9)).permute(1, 2, 0).float().cpu().numpy())
    axes[0, 0].set_title("image", fontsize=10)
    for line, (name, settings) in zip(axes, lines):
        for axis, setting in zip(line[1:], settings):
            picture, _ = principal(model(image, **setting).features[0], cells, basis)
            axis.imshow(picture)
            axis.set_title(f"{name} {setting[name]}", fontsize=10)
    return save_figure(figure, path)
