"""Pictures of a trace: where tokens stopped, in one image and over a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..core.trace import Trace
from ..errors import DwindleError
from ..files import shown
from .drawing import (
    Photo,
    block_ticks,
    canvas,
    depth_colours,
    file_stems,
    heatmap,
    panel_height,
    pixels_of,
    save_figure,
    show,
    tidy,
    veil,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 20  # the most images that get a bar of their own


def picture(image: Photo, trace: Trace, index: int, title: str | None = None) -> Figure:
    """One image: as it is, with halted patches veiled, its depth map, its plan if there is one, and its exits."""
    pixels, patches, plan = pixels_of(image), _array(trace.patches[index]), _plan(trace, index)
    panels, side = 3 + (plan is not None), panel_height(pixels, 3.0)
    figure = canvas(3.1 * panels + 0.6, side + 3.2, title)
    grid = figure.add_gridspec(2, panels, height_ratios=[side, 1.7])
    axes = [figure.add_subplot(grid[0, panel]) for panel in range(panels)]

    show(axes[0], pixels, "image")
    show(axes[1], veil(pixels, patches, trace.blocks), "halted patches veiled")
    heatmap(
        axes[2], patches, trace.blocks, f"executed: mean depth {patches.mean():.1f}", pixels.shape[:2], plan is None
    )
    if plan is not None:
        planned = plan[~np.isnan(plan)]
        text = f"planned: mean depth {planned.mean():.1f}" if planned.size else "planned"
        text += "\ngrey: halted before a plan" * (planned.size < plan.size)
        heatmap(axes[3], plan, trace.blocks, text, pixels.shape[:2])

    depth = _array(trace.depth[index])
    share = depth.sum() / (depth.size * trace.blocks)
    _exits(figure.add_subplot(grid[1, :]), depth, trace.blocks, f"{share:.0%} of token-blocks computed", 24)
    return figure


def walk(image: Photo, trace: Trace, index: int) -> Figure:
    """One small copy of the image per block, veiled where the block computes nothing."""
    pixels, live = pixels_of(image), _array(trace.live[:, index])  # (L, N)
    columns = min(trace.blocks, 6)
    rows = math.ceil(trace.blocks / columns)
    figure = canvas(2.0 * columns + 0.2, (panel_height(pixels, 2.0) + 0.4) * rows + 0.6, "live tokens in each block")
    for block, tokens in enumerate(live, 1):
        veiled = veil(pixels, tokens[trace.prefix :].reshape(trace.grid), blocks=1)
        text = f"block {block}: {tokens.sum():.0f} of {tokens.size}"
        show(figure.add_subplot(rows, columns, block), veiled, text, size=9)
    return figure


def summary(trace: Trace, names: Sequence[str] | None = None) -> Figure:
    """The whole batch: where tokens stopped, how many each block computed, and the mean depth of each image."""
    depth, images = _array(trace.depth), len(trace.depth)
    text = f"{images} image{'s' * (images > 1)}: {depth.mean() / trace.blocks:.0%} of token-blocks computed"
    figure = canvas(13.5, max(4.0, 1.4 + 0.2 * min(images, NAMED)), text)
    stops, shares, means = figure.subplots(1, 3)

    _exits(stops, depth, trace.blocks, "where tokens stop", 12)
    layers, share = np.arange(1, trace.blocks + 1), 100 * _array(trace.counts).mean(1) / depth.shape[1]
    shares.fill_between(layers, share, color="C0", alpha=0.25, linewidth=0)
    shares.plot(layers, share, color="C0", marker="o", markersize=4)
    shares.set(xlabel="block", ylabel="live tokens (%)", ylim=(0, 105), xticks=block_ticks(trace.blocks, 12))
    tidy(shares, "mean share of live tokens")

    mean = depth.mean(1)
    if images <= NAMED:
        texts = [str(name) for name in names or range(images)]
        # Long names are cut in the middle: file names often differ only at the end.
        labels = [text if len(text) <= 24 else f"{text[:11]}…{text[-12:]}" for text in texts]
        means.barh(
            np.arange(images), mean, color=depth_colours(trace.blocks).to_rgba(mean), edgecolor="0.3", linewidth=0.5
        )
        means.set_yticks(np.arange(images), labels, parse_math=False)
        means.set(xlabel="mean depth", xlim=(0, trace.blocks), ylim=(images - 0.4, -0.6))
        tidy(means, "mean depth of each image", along="x")
    else:
        means.hist(mean, bins=30, range=(1, max(trace.blocks, 2)), color="C0", edgecolor="0.3", linewidth=0.5)
        means.set(xlabel="mean depth", ylabel="images")
        tidy(means, "mean depth of the images")
    return figure


def draw(
    images: Iterable[Photo],
    trace: Trace,
    out: str | Path,
    names: Sequence[str],
    titles: Sequence[str | None] | None = None,
) -> list[Path]:
    """Write `<name>.png` and `<name>_layers.png` of every image, and `summary.png`, into a folder; return the paths."""
    folder, images, names = Path(out), list(images), [shown(str(name)) for name in names]
    titles = names if titles is None else titles
    if not len(images) == len(names) == len(titles) == len(trace.depth):
        raise DwindleError(
            f"The trace is of {len(trace.depth)} images, but {len(images)} images, {len(names)} names and "
            f"{len(titles)} titles were given; give one of each per image."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DwindleError(f"'{folder}' cannot be a folder, there is a file of that name; choose another.") from None

    paths = []
    for index, (image, stem, title) in enumerate(zip(images, file_stems(names), titles)):
        paths.append(save_figure(picture(image, trace, index, title), folder / f"{stem}.png"))
        paths.append(save_figure(walk(image, trace, index), folder / f"{stem}_layers.png"))
    return [*paths, save_figure(summary(trace, names), folder / "summary.png")]


def _array(values: Tensor) -> np.ndarray:
    """The tensor as floats of NumPy."""
    return values.detach().float().cpu().numpy()


def _plan(trace: Trace, index: int) -> np.ndarray | None:
    """(rows, columns): the latest plan of each patch, NaN if it halted before the first plan. None without plans."""
    if not trace.plans:
        return None
    latest = np.full(trace.depth.shape[1], np.nan)
    for stage in sorted(trace.plans):
        plan = _array(trace.plans[stage][index])
        latest = np.where(np.isnan(plan), latest, plan)
    return latest[trace.prefix :].reshape(trace.grid)


def _exits(axis: Axes, depth: np.ndarray, blocks: int, title: str, ticks: int) -> None:
    """Draw bars of how many tokens stopped after each block."""
    stops = np.bincount(depth.astype(int).ravel(), minlength=blocks + 1)[1:]
    layers = np.arange(1, blocks + 1)
    axis.bar(layers, stops, color=depth_colours(blocks).to_rgba(layers), edgecolor="0.3", linewidth=0.5)
    axis.set(xlabel="last block run", ylabel="tokens", xlim=(0.4, blocks + 0.6), xticks=block_ticks(blocks, ticks))
    tidy(axis, title)
