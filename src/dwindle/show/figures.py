"""Figures of a whole data set, the groups of images and classes behind them, and the HTML of a report's page.

All functions take plain arrays. view.py draws single traces in the same style. L blocks, n images.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DwindleError
from .drawing import Photo, block_ticks, canvas, depth_colours, heatmap, panel_height, pixels_of, show, tidy, veil

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {"task": "task loss (training)", "top1": "top-1 (%)", "cost": "cost (% of static, training)"}
EDGE: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 0.5}


@dataclass
class Example:
    """One image as the model saw it, and the depth of each of its patches (rows, columns)."""

    photo: Photo
    patches: np.ndarray
    label: str
    depth: float  # mean over its tokens


@dataclass
class CostGroup:
    """Images of similar cost: their mean cost, and the accuracy of the adaptive and the static model in percent."""

    gmacs: float
    images: int
    adaptive: float
    static: float


def depth_map(mean: np.ndarray, blocks: int, images: int) -> Figure:
    """A map of the mean depth (rows, columns) of each position over the data set: A-ViT Fig. 4a."""
    figure = canvas(5.4, panel_height(mean, 4.2) + 0.5)
    text = f"mean depth over {images} image{'s' * (images > 1)}: {mean.min():.1f} to {mean.max():.1f}"
    heatmap(figure.add_subplot(), mean, blocks, text, mean.shape)
    return figure


def score_boxes(scores: np.ndarray) -> Figure:
    """A box per block of the scores: A-ViT Fig. 4b.

    scores: (L, n), the mean score of each image's live tokens, NaN where it has none.
    """
    blocks = len(scores)
    figure = canvas(7.0, 3.8)
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
    for box, colour in zip(drawn["boxes"], depth_colours(blocks).to_rgba(layers)):
        box.set(facecolor=colour, **EDGE)
    axis.set(xlabel="block", ylabel="mean score of an image's live tokens", xticks=block_ticks(blocks, 24))
    axis.set(xlim=(0.4, blocks + 0.6))
    tidy(axis, "score in each block")
    return figure


def easy_and_hard(easy: Sequence[Example], hard: Sequence[Example], blocks: int) -> Figure:
    """The images of least and of most depth, each above its copy with halted patches veiled: A-ViT Fig. 5."""
    columns = max(len(easy), len(hard))
    height = panel_height(pixels_of((*easy, *hard)[0].photo), 1.9)
    figure = canvas(1.9 * columns + 0.5, 4 * height + 2.0)
    rows = figure.add_gridspec(2, 1)
    for row, examples, title in ((0, easy, "least compute"), (1, hard, "most compute")):
        part = figure.add_subfigure(rows[row])
        part.suptitle(title, fontsize=13, x=0.01, ha="left")  # a phone shows the first columns only
        axes = part.subplots(2, columns, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for column, example in enumerate(examples):
            pixels = pixels_of(example.photo)
            show(axes[0, column], pixels, f"{_short(example.label)}\ndepth {example.depth:.1f}", size=10)
            axes[0, column].title.set_parse_math(False)  # a name may contain a '$'
            show(axes[1, column], veil(pixels, example.patches, blocks), "")
    return figure


def training_curves(runs: Mapping[str, Mapping[str, np.ndarray]]) -> Figure:
    """Loss, accuracy and cost of all runs, overlaid: A-ViT Fig. 7.

    runs: {run: {column of metrics.csv: values per epoch}}.
    """
    shown = [name for name in CURVES if any(np.isfinite(run.get(name, [np.nan])).any() for run in runs.values())]
    figure = canvas(4.5 * len(shown), 3.8)
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
        tidy(axis, CURVES[name])
    if len(runs) > 1:
        names = [f" {name}" for name in handles]  # matplotlib hides a label that begins with '_'
        legend = figure.legend(
            list(handles.values()), names, loc="outside lower left", ncols=min(len(runs), 4), frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def exits(stops: np.ndarray) -> Figure:
    """Bars of how many tokens stopped after each block. stops: (L,)."""
    blocks, share = len(stops), 100 * stops / stops.sum()
    figure = canvas(7.0, 3.4)
    axis, layers = figure.add_subplot(), np.arange(1, blocks + 1)
    axis.bar(layers, share, color=depth_colours(blocks).to_rgba(layers), **EDGE)
    axis.set(xlabel="last block run", ylabel="tokens (%)", xlim=(0.4, blocks + 0.6), xticks=block_ticks(blocks, 24))
    tidy(axis, "where tokens stop")
    return figure


def accuracy_by_cost(groups: Sequence[CostGroup]) -> Figure:
    """Accuracy of each group of images by cost, adaptive (with its standard error) and static."""
    figure = canvas(7.0, 3.8)
    axis, positions = figure.add_subplot(), np.arange(len(groups))
    accuracy = np.array([group.adaptive for group in groups])
    error = np.sqrt(accuracy * (100 - accuracy) / [group.images for group in groups])
    axis.bar(positions, accuracy, 0.7, yerr=error, capsize=3, color="C0", ecolor="0.3", label="adaptive", **EDGE)
    static = [group.static for group in groups]
    axis.plot(positions, static, color="C1", marker="D", linestyle="none", label="static", markeredgecolor="0.3")
    axis.set_xticks(positions, [f"{group.gmacs:.3g}" for group in groups])
    axis.set(xlabel="mean GMACs of the group: cheapest to dearest images", ylabel="top-1 (%)", ylim=(0, 105))
    tidy(axis, "accuracy of images by what they cost")
    _legend_below(axis)
    return figure


def operating_point_curve(
    gmacs: Sequence[float], top1: Sequence[float], trained: tuple[float, float], static: tuple[float, float]
) -> Figure:
    """Accuracy against cost at several operating points, with the trained one and the static model marked.

    trained, static: (GMACs, top-1).
    """
    figure = canvas(7.0, 4.2)
    axis = figure.add_subplot()
    order = np.argsort(gmacs)
    axis.plot(np.asarray(gmacs)[order], np.asarray(top1)[order], color="C0", marker="o", label="operating point turned")
    axis.plot(*trained, color="C3", marker="*", markersize=15, linestyle="none", label="as trained")
    axis.plot(*static, color="C1", marker="D", linestyle="none", markeredgecolor="0.3", label="static")
    axis.set(xlabel="GMACs per image", ylabel="top-1 (%)")
    axis.set_xlim(left=0)
    tidy(axis, "accuracy against cost, without training again")
    _legend_below(axis)
    return figure


def _legend_below(axis: Axes) -> None:
    """Put the legend below the axes, where it covers no point."""
    axis.figure.legend(loc="outside lower center", ncols=3, frameon=False)  # type: ignore[call-arg]


def _short(label: str, most: int = 22) -> str:
    """The label, cut to so many characters."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def easiest_and_hardest(right: np.ndarray, depth: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Among images classified right, the rows of the least deep and of the deepest; no image is in both."""
    order = np.flatnonzero(right)[np.argsort(depth[right], kind="stable")]
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


@dataclass
class ClassChange:
    """The accuracy of one class under the adaptive and the static model, in percent."""

    label: int
    images: int
    static: float
    adaptive: float
    gained: int  # images that only the adaptive model classifies right
    lost: int  # images that only the static model classifies right

    @property
    def difference(self) -> float:
        return self.adaptive - self.static

    @property
    def beyond_chance(self) -> bool:
        """Whether the difference is above two standard errors. By chance, half of the images on which the two models
        differ would be gained, and half lost."""
        return abs(self.gained - self.lost) > 2 * (self.gained + self.lost) ** 0.5


def class_changes(labels: np.ndarray, adaptive: np.ndarray, static: np.ndarray) -> list[ClassChange]:
    """Every class that has images, sorted by difference, the largest loss first. Among equal differences, classes with
    more images are nearer to the ends."""
    changes = []
    for label in np.unique(labels):
        ours, base = adaptive[labels == label], static[labels == label]
        accuracy = 100 * float(base.mean()), 100 * float(ours.mean())
        flips = int((ours & ~base).sum()), int((~ours & base).sum())
        changes.append(ClassChange(int(label), len(ours), *accuracy, *flips))
    return sorted(changes, key=lambda c: (c.difference, c.images if c.difference > 0 else -c.images))


def cost_groups(gmacs: np.ndarray, adaptive: np.ndarray, static: np.ndarray, count: int = 5) -> list[CostGroup]:
    """Images in equal groups by their cost, the cheapest first."""
    parts = np.array_split(np.argsort(gmacs, kind="stable"), min(count, len(gmacs)))
    return [
        CostGroup(
            float(gmacs[rows].mean()), len(rows), 100 * float(adaptive[rows].mean()), 100 * float(static[rows].mean())
        )
        for rows in parts
    ]


def read_metrics(folder: Path) -> dict[str, np.ndarray] | None:
    """The columns of a run's metrics.csv, NaN where an epoch has no value. None if there is nothing to draw."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return None
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        columns = {name: np.array([float(row[name] or "nan") for row in rows]) for name in (rows[0] if rows else {})}
    except (ValueError, TypeError) as error:
        raise DwindleError(f"{path} holds more than numbers ({error}); mend it, or remove it.") from error
    useful = "epoch" in columns and any(np.isfinite(columns[name]).any() for name in CURVES if name in columns)
    return columns if useful else None


STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5c6670; --page: #fff; --card: #f4f6f8; --line: #dde2e7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --page: #14171a; --card: #1f2429; --line: #343b42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
h3 { font-size: 1rem; margin: .75rem 0 .25rem; }
p { max-width: 44rem; margin: .25rem 0 .75rem; }
.soft, footer { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
dl div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
.scroll { overflow-x: auto; }
.picture { background: #fff; border: 1px solid var(--line); border-radius: .5rem; overflow-x: auto; }
.picture img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
@media (max-width: 45rem) { .picture img.wide { max-width: none; width: 46rem; } }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: min(100%, 24rem); }
.pair table { width: 100%; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th, td + td { white-space: nowrap; }
@media (max-width: 30rem) { th, td { padding: .3rem; font-size: .8rem; } }
th:first-child, td:first-child { text-align: left; overflow-wrap: break-word; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
footer { margin-top: 3rem; font-size: .85rem; }
"""
SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>{footer}</footer>
</body>
</html>
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in HTML."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


SHOWN = 15.0  # methods within so many points of the best accuracy are drawn


def tradeoff(rows: Sequence[dict[str, Any]], title: str, reference: str) -> Figure:
    """Accuracy against GMACs, a line per method (AHT-ViT Fig. 3). Points far below the others are listed, not drawn."""
    figure = canvas(8.5, 5.5, title)
    axis = figure.add_subplot()
    rows = [row for row in rows if row["group"] == "methods"]
    best = max((row["top1"] for row in rows), default=100.0)
    below = [row for row in rows if row["top1"] < best - SHOWN]
    names = list(dict.fromkeys(row["name"] for row in rows if row not in below))
    markers = "osD^vP*X<>hd"
    for i, name in enumerate(names):
        points = sorted((row for row in rows if row["name"] == name), key=lambda row: row["gmacs"])
        main = name.upper().startswith("AHT")
        style: dict[str, Any] = {"color": "black" if name == "static" else f"C{i % 10}", "marker": markers[i % 12]}
        axis.errorbar(
            [p["gmacs"] for p in points],
            [p["top1"] for p in points],
            yerr=[p["spread"] or 0.0 for p in points],
            label=name,
            linewidth=2.5 if main else 1.2,
            markersize=8 if main else 5,
            zorder=3 if main else 2,
            capsize=3,
            **style,
        )
    for row in rows:
        if row["name"] == reference:
            axis.axhline(row["top1"], color="0.6", linestyle=":", linewidth=1)
    axis.set(xlabel="GMACs per image", ylabel="top-1 (%)")
    axis.grid(axis="x", color="0.9")
    if below:
        axis.set_ylim(best - SHOWN, best + 1)
        omitted: dict[str, list[str]] = {}
        for row in below:
            omitted.setdefault(row["name"], []).append(f"{row['top1']:.0f} at {row['gmacs']:.2f}")
        lines = [f"{name}: {', '.join(points)}" for name, points in omitted.items()]
        text = "\n".join(["below:", *lines])
        axis.annotate(text, (0.5, 0.02), xycoords="axes fraction", fontsize=8, ha="center")
    tidy(axis, "mean over seeds; bars: standard deviation")
    if names:
        axis.legend(fontsize=9, loc="lower right", frameon=False)
    return figure
