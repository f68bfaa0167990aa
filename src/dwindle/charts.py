"""Figures over a whole data set, from numbers gathered out of many traces. view.py draws single traces, in one style.

L blocks, n images. Every function takes plain arrays and gives a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .view import Photo, _figure, _heat, _height, _pixels, _scale, _show, _ticks, _tidy, veil

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {"task": "task loss (training)", "top1": "top-1 (%)", "cost": "cost (% of static, training)"}
EDGE = {"edgecolor": "0.3", "linewidth": 0.5}


@dataclass
class Example:
    """One image as the model saw it, and how deep its patches (rows, columns) went."""

    photo: Photo
    patches: np.ndarray
    label: str


@dataclass
class CostGroup:
    """Images of like cost: what one of them cost, and how many of a hundred were right, adaptive and static."""

    gmacs: float
    images: int
    adaptive: float
    static: float


def depth_map(mean: np.ndarray, blocks: int, images: int) -> Figure:
    """Mean depth (rows, columns) of each position over the data set: A-ViT Fig. 4a."""
    figure = _figure(5.4, _height(mean, 4.2) + 0.5)
    text = f"mean depth over {images} image{'s' * (images > 1)}: {mean.min():.1f} to {mean.max():.1f}"
    _heat(figure.add_subplot(), mean, blocks, text, mean.shape)
    return figure


def score_boxes(scores: np.ndarray) -> Figure:
    """(L, n) mean halting score of each image's live tokens, NaN where it has none, as a box per block: A-ViT Fig. 4b."""
    blocks = len(scores)
    figure = _figure(7.0, 3.8)
    axis, layers = figure.add_subplot(), np.arange(1, blocks + 1)
    drawn = axis.boxplot(
        [row[~np.isnan(row)] for row in scores],
        positions=layers,
        widths=0.6,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        manage_ticks=False,
        medianprops={"color": "black"},
    )
    for box, colour in zip(drawn["boxes"], _scale(blocks).to_rgba(layers)):
        box.set(facecolor=colour, **EDGE)
    axis.set(xlabel="block", ylabel="mean score of an image's live tokens", xticks=_ticks(blocks, 24))
    axis.set(xlim=(0.4, blocks + 0.6), ylim=(-0.02, max(1.02, 1.05 * np.nanmax(scores))))
    _tidy(axis, "halting score in each block")
    return figure


def easy_and_hard(easy: Sequence[Example], hard: Sequence[Example], blocks: int) -> Figure:
    """Images that went least and most deep, each above itself with its halted patches veiled: A-ViT Fig. 5."""
    columns = max(len(easy), len(hard))
    height = _height(_pixels((*easy, *hard)[0].photo), 1.9)
    figure = _figure(1.9 * columns + 0.5, 4 * height + 2.0)
    top, bottom = figure.subfigures(2, 1)
    for part, examples, title in ((top, easy, "least compute"), (bottom, hard, "most compute")):
        part.suptitle(title, fontsize=13)
        axes = part.subplots(2, columns, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for column, example in enumerate(examples):
            pixels = _pixels(example.photo)
            _show(axes[0, column], pixels, f"{_short(example.label)}\ndepth {example.patches.mean():.1f}", size=10)
            axes[0, column].title.set_parse_math(False)  # a name may hold a '$'
            _show(axes[1, column], veil(pixels, example.patches, blocks), "")
    return figure


def training_curves(runs: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """{run: {column of metrics.csv: values per epoch}}: loss, accuracy and cost of all runs, overlaid: A-ViT Fig. 7."""
    shown = [name for name in CURVES if any(np.isfinite(run.get(name, [np.nan])).any() for run in runs.values())]
    figure = _figure(4.5 * len(shown), 3.8)
    handles = {}
    for axis, name in zip(figure.subplots(1, len(shown), squeeze=False).flat, shown):
        for index, (run, columns) in enumerate(runs.items()):
            values = columns.get(name, np.full(len(columns["epoch"]), np.nan)) * (100 if name == "cost" else 1)
            known = np.isfinite(values)  # not every epoch was evaluated
            many = known.sum() > 40
            style = {"color": f"C{index % 10}", "marker": None if many else "o", "markersize": 4}
            handles[run], *_ = axis.plot(columns["epoch"][known], values[known], **style)
        axis.set(xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axis, CURVES[name])
    if len(runs) > 1:
        names = [f" {name}" for name in handles]  # matplotlib hides a label that begins with '_'
        legend = figure.legend(list(handles.values()), names, loc="outside lower center", ncols=min(len(runs), 4))
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def exits(stops: np.ndarray) -> Figure:
    """(L,) how many tokens stopped after each block."""
    blocks, share = len(stops), 100 * stops / stops.sum()
    figure = _figure(7.0, 3.4)
    axis, layers = figure.add_subplot(), np.arange(1, blocks + 1)
    axis.bar(layers, share, color=_scale(blocks).to_rgba(layers), **EDGE)
    axis.set(xlabel="last block run", ylabel="tokens (%)", xlim=(0.4, blocks + 0.6), xticks=_ticks(blocks, 24))
    _tidy(axis, "where tokens stop")
    return figure


def accuracy_by_cost(groups: Sequence[CostGroup]) -> Figure:
    """Accuracy of images from the cheapest to the dearest fifth, adaptive and static, with its standard error."""
    figure = _figure(7.0, 3.8)
    axis, places = figure.add_subplot(), np.arange(len(groups))
    accuracy = np.array([group.adaptive for group in groups])
    error = np.sqrt(accuracy * (100 - accuracy) / [group.images for group in groups])
    axis.bar(places, accuracy, 0.7, yerr=error, capsize=3, color="C0", ecolor="0.3", label="adaptive", **EDGE)
    static = [group.static for group in groups]
    axis.plot(places, static, color="C1", marker="D", linestyle="none", label="static", markeredgecolor="0.3")
    axis.set_xticks(places, [f"{group.gmacs:.3g}" for group in groups])
    axis.set(xlabel="mean GMACs of the group: cheapest to dearest images", ylabel="top-1 (%)", ylim=(0, 105))
    _tidy(axis, "accuracy of images by what they cost")
    _legend_below(axis)
    return figure


def dial_curve(
    gmacs: Sequence[float], top1: Sequence[float], trained: tuple[float, float], static: tuple[float, float]
) -> Figure:
    """Accuracy against cost as the dial is turned after training; the setting as trained, and nothing halted."""
    figure = _figure(7.0, 4.2)
    axis = figure.add_subplot()
    order = np.argsort(gmacs)
    axis.plot(np.asarray(gmacs)[order], np.asarray(top1)[order], color="C0", marker="o", label="dial turned")
    axis.plot(*trained, color="C3", marker="*", markersize=15, linestyle="none", label="as trained")
    axis.plot(*static, color="C1", marker="D", linestyle="none", markeredgecolor="0.3", label="static")
    axis.set(xlabel="GMACs per image", ylabel="top-1 (%)")
    axis.set_xlim(left=0)
    _tidy(axis, "accuracy against cost, without training again")
    _legend_below(axis)
    return figure


def _legend_below(axis: Axes) -> None:
    """Where it covers no point."""
    axis.figure.legend(loc="outside lower center", ncols=3, frameon=False)  # type: ignore[call-arg]


def _short(label: str, most: int = 22) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"
