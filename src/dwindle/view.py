"""Pictures of a Trace: who stopped where, in one image and over a batch.

Figures are built without pyplot, so that they can be drawn from any thread and without a display. Matplotlib is
imported where it is used: `import dwindle.view` costs nothing.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from .errors import DwindleError
from .files import draft
from .trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

Photo = Image.Image | np.ndarray  # cropped to what the model saw; arrays (H, W), (H, W, 3) or (H, W, 4)

VEIL = np.array([0.95, 0.96, 0.98])
FAINTEST, STRONGEST = 0.45, 0.85  # opacity of the veil: from just short of the end to stopped after the first block
NAMED = 20  # the most images that get a bar of their own


def veil(image: Photo, patches: np.ndarray, blocks: int) -> np.ndarray:
    """(H, W, 3) in 0..1: the image, a veil over patches (rows, columns) that stopped early, thicker the earlier."""
    pixels = _pixels(image)
    missed = (blocks - np.asarray(patches)) / max(blocks - 1, 1)  # 0 ran to the end, 1 stopped after the first block
    opacity = np.where(missed > 0, FAINTEST + (STRONGEST - FAINTEST) * missed, 0.0)
    (height, width), (rows, columns) = pixels.shape[:2], opacity.shape
    cover = opacity[np.arange(height) * rows // height][:, np.arange(width) * columns // width, None]
    return pixels + cover * (VEIL - pixels)


def picture(image: Photo, trace: Trace, index: int, title: str | None = None) -> Figure:
    """One image: as it is, with halted patches veiled, its depth map, the plan beside it, and where tokens stopped."""
    pixels, patches, plan = _pixels(image), _array(trace.patches[index]), _plan(trace, index)
    panels, side = 3 + (plan is not None), _height(pixels, 3.0)
    figure = _figure(3.1 * panels + 0.6, side + 3.2, title)
    grid = figure.add_gridspec(2, panels, height_ratios=[side, 1.7])
    axes = [figure.add_subplot(grid[0, panel]) for panel in range(panels)]

    _show(axes[0], pixels, "image")
    _show(axes[1], veil(pixels, patches, trace.blocks), "halted patches veiled")
    _heat(axes[2], patches, trace.blocks, f"executed: mean depth {patches.mean():.1f}", pixels.shape[:2], plan is None)
    if plan is not None:
        planned = plan[~np.isnan(plan)]
        text = f"planned: mean depth {planned.mean():.1f}" if planned.size else "planned"
        text += "\ngrey: halted before a plan" * (planned.size < plan.size)
        _heat(axes[3], plan, trace.blocks, text, pixels.shape[:2])

    depth = _array(trace.depth[index])
    share = depth.sum() / (depth.size * trace.blocks)
    _exits(figure.add_subplot(grid[1, :]), depth, trace.blocks, f"{share:.0%} of token-blocks computed", 24)
    return figure


def walk(image: Photo, trace: Trace, index: int) -> Figure:
    """One small image per block, veiled where the block computes nothing."""
    pixels, live = _pixels(image), _array(trace.live[:, index])  # (L, N)
    columns = min(trace.blocks, 6)
    rows = math.ceil(trace.blocks / columns)
    figure = _figure(2.0 * columns + 0.2, (_height(pixels, 2.0) + 0.4) * rows + 0.6, "live tokens in each block")
    for block, tokens in enumerate(live, 1):
        veiled = veil(pixels, tokens[trace.prefix :].reshape(trace.grid), blocks=1)
        text = f"block {block}: {tokens.sum():.0f} of {tokens.size}"
        _show(figure.add_subplot(rows, columns, block), veiled, text, size=9)
    return figure


def summary(trace: Trace, names: Sequence[str] | None = None) -> Figure:
    """The whole batch: where tokens stopped, how many each block computed, how deep each image went."""
    depth, images = _array(trace.depth), len(trace.depth)
    text = f"{images} image{'s' * (images > 1)}: {depth.mean() / trace.blocks:.0%} of token-blocks computed"
    figure = _figure(13.5, max(4.0, 1.4 + 0.2 * min(images, NAMED)), text)
    stops, shares, means = figure.subplots(1, 3)

    _exits(stops, depth, trace.blocks, "where tokens stop", 12)
    layers, share = np.arange(1, trace.blocks + 1), 100 * _array(trace.counts).mean(1) / depth.shape[1]
    shares.fill_between(layers, share, color="C0", alpha=0.25, linewidth=0)
    shares.plot(layers, share, color="C0", marker="o", markersize=4)
    shares.set(xlabel="block", ylabel="live tokens (%)", ylim=(0, 105), xticks=_ticks(trace.blocks, 12))
    _tidy(shares, "mean share of live tokens")

    mean = depth.mean(1)
    if images <= NAMED:
        texts = [str(name) for name in names or range(images)]
        labels = [text if len(text) <= 24 else f"{text[:11]}…{text[-12:]}" for text in texts]  # file names differ late
        means.barh(np.arange(images), mean, color=_scale(trace.blocks).to_rgba(mean), edgecolor="0.3", linewidth=0.5)
        means.set_yticks(np.arange(images), labels, parse_math=False)
        means.set(xlabel="mean depth", xlim=(0, trace.blocks), ylim=(images - 0.4, -0.6))
        _tidy(means, "mean depth of each image", along="x")
    else:
        means.hist(mean, bins=30, range=(1, max(trace.blocks, 2)), color="C0", edgecolor="0.3", linewidth=0.5)
        means.set(xlabel="mean depth", ylabel="images")
        _tidy(means, "mean depth of the images")
    return figure


def average_depth(trace: Trace) -> Figure:
    """Mean depth of each position over the batch: what the model takes to be worth a look before it looks."""
    patches = _array(trace.patches).mean(0)
    figure, images = _figure(4.8, _height(patches, 4.0) + 0.4), len(trace.depth)
    text = f"mean depth over {images} image{'s' * (images > 1)}: {patches.min():.1f} to {patches.max():.1f}"
    _heat(figure.add_subplot(), patches, trace.blocks, text, patches.shape)
    return figure


def draw(
    images: Iterable[Photo],
    trace: Trace,
    out: str | Path,
    names: Sequence[str],
    titles: Sequence[str | None] | None = None,
) -> list[Path]:
    """Write `<name>.png` and `<name>_layers.png` of every image, and `summary.png`, into the folder `out`."""
    folder, images, titles = Path(out), list(images), names if titles is None else titles
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
    for index, (image, stem, title) in enumerate(zip(images, _stems(names), titles)):
        paths.append(save_figure(picture(image, trace, index, title), folder / f"{stem}.png"))
        paths.append(save_figure(walk(image, trace, index), folder / f"{stem}_layers.png"))
    return [*paths, save_figure(summary(trace, names), folder / "summary.png")]


def _array(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def _pixels(image: Photo) -> np.ndarray:
    """(H, W, 3) floats in 0..1."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if pixels.ndim == 2:
        pixels = pixels[..., None].repeat(3, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
        raise DwindleError(f"An array of shape {pixels.shape} is no image; give (height, width, 3) or a PIL image.")
    if np.issubdtype(pixels.dtype, np.integer):
        pixels = pixels / np.iinfo(pixels.dtype).max
    return pixels[..., :3].astype(float).clip(0, 1)


def _plan(trace: Trace, index: int) -> np.ndarray | None:
    """(rows, columns): each patch's latest plan, NaN if it halted before the first; None for a method without plans."""
    if not trace.plans:
        return None
    latest = np.full(trace.depth.shape[1], np.nan)
    for stage in sorted(trace.plans):
        plan = _array(trace.plans[stage][index])
        latest = np.where(np.isnan(plan), latest, plan)
    return latest[trace.prefix :].reshape(trace.grid)


def _stems(names: Sequence[str]) -> list[str]:
    """File names safe in a shell, a URL and on a disk that ignores case; no two images, nor the summary, share one."""
    taken, stems = {"summary"}, []
    for name in names:
        base = stem = re.sub(r"[^A-Za-z0-9._-]+", "_", str(name)).strip("._-")[:100] or "image"
        count = 1
        while not taken.isdisjoint({stem.lower(), f"{stem}_layers".lower()}):
            stem = f"{base}-{(count := count + 1)}"
        taken |= {stem.lower(), f"{stem}_layers".lower()}
        stems.append(stem)
    return stems


def save_figure(figure: Figure, path: Path) -> Path:
    with draft(path) as scratch:  # whoever watches the folder never meets half a picture
        figure.savefig(scratch, format="png")
    return path


def _figure(width: float, height: float, title: str | None = None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    if title:  # a name may hold a '$', which is not the beginning of a formula
        lines = [textwrap.fill(line, int(9 * width)) for line in title.splitlines()]
        figure.suptitle("\n".join(lines), fontsize=13, parse_math=False)
    return figure


def _height(pixels: np.ndarray, width: float) -> float:
    """Inches for a panel of this width to keep the image's proportions, within what a page can bear."""
    return min(max(width * pixels.shape[0] / pixels.shape[1], width / 2), 2 * width)


def _ticks(blocks: int, most: int) -> list[int]:
    return list(range(blocks, 0, -math.ceil(blocks / most)))[::-1]


def _scale(blocks: int) -> ScalarMappable:
    """The colours of depths, the same in every figure: perceptually uniform, safe for the colour-blind."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(1, max(blocks, 2)), colormaps["viridis"].with_extremes(bad="0.85"))


def _show(axis: Axes, values: np.ndarray, title: str, size: float = 11, **options: Any) -> None:
    axis.set_title(title, fontsize=size)
    axis.set_axis_off()
    axis.imshow(values, **options)


def _heat(axis: Axes, values: np.ndarray, blocks: int, title: str, shape: tuple[int, ...], bar: bool = True) -> None:
    """A map of depths laid out over `shape` (height, width): its patches look like those of the image."""
    (height, width), scale = shape, _scale(blocks)
    colours = scale.to_rgba(np.ma.masked_invalid(values))
    _show(axis, colours, title, extent=(0, width, height, 0), interpolation="nearest")
    if bar:  # inside the axes' own frame: as tall as the map, whatever its proportions
        ticks = _ticks(blocks, min(12, max(3, 12 * height // width)))
        axis.figure.colorbar(scale, cax=axis.inset_axes((1.04, 0, 0.06, 1)), label="blocks run", ticks=ticks)


def _exits(axis: Axes, depth: np.ndarray, blocks: int, title: str, ticks: int) -> None:
    stops = np.bincount(depth.astype(int).ravel(), minlength=blocks + 1)[1:]
    layers = np.arange(1, blocks + 1)
    axis.bar(layers, stops, color=_scale(blocks).to_rgba(layers), edgecolor="0.3", linewidth=0.5)
    axis.set(xlabel="last block run", ylabel="tokens", xlim=(0.4, blocks + 0.6), xticks=_ticks(blocks, ticks))
    _tidy(axis, title)


def _tidy(axis: Axes, title: str, along: str = "y") -> None:
    axis.set_title(title, fontsize=11)
    axis.grid(axis=along, color="0.9")  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
