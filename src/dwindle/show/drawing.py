"""What all figures share: the canvas, the colours of depths, images under a veil, and saving.

Figures are built without pyplot, so that they can be drawn from any thread and without a display. Matplotlib is
imported only inside the functions that use it, so that importing this module is fast.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..errors import DwindleError
from ..files import draft

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

Photo = Image.Image | np.ndarray  # an image cropped to what the model saw; arrays (H, W), (H, W, 3) or (H, W, 4)

VEIL = np.array([0.95, 0.96, 0.98])
FAINTEST, STRONGEST = 0.45, 0.85  # opacity of the veil for a patch that stopped just before the end, and at once


def canvas(width: float, height: float, title: str | None = None) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    if title:  # a name may contain a '$', which must not start a formula
        lines = [textwrap.fill(line, int(9 * width)) for line in title.splitlines()]
        figure.suptitle("\n".join(lines), fontsize=13, parse_math=False)
    return figure


def panel_height(pixels: np.ndarray, width: float) -> float:
    """The height in inches at which a panel of this width keeps the image's proportions: half to twice its width."""
    return min(max(width * pixels.shape[0] / pixels.shape[1], width / 2), 2 * width)


def block_ticks(blocks: int, most: int) -> list[int]:
    """At most so many block numbers for an axis, evenly spaced; the last block is one of them."""
    return list(range(blocks, 0, -math.ceil(blocks / most)))[::-1]


def depth_colours(blocks: int) -> ScalarMappable:
    """The colour map of depths, the same in every figure: perceptually uniform and safe for the colour-blind."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(1, max(blocks, 2)), colormaps["viridis"].with_extremes(bad="0.85"))


def show(axis: Axes, values: np.ndarray, title: str, size: float = 11, **options: Any) -> None:
    """Draw an image without its axes."""
    axis.set_title(title, fontsize=size)
    axis.set_axis_off()
    axis.imshow(values, **options)


def heatmap(axis: Axes, values: np.ndarray, blocks: int, title: str, shape: tuple[int, ...], bar: bool = True) -> None:
    """Draw a map of depths, stretched to `shape` (height, width) so that its patches have the image's proportions."""
    (height, width), scale = shape, depth_colours(blocks)
    colours = scale.to_rgba(np.ma.masked_invalid(values))
    show(axis, colours, title, extent=(0, width, height, 0), interpolation="nearest")
    if bar:  # placed relative to the axes, so that it is as tall as the map
        ticks = block_ticks(blocks, min(12, max(3, 12 * height // width)))
        axis.figure.colorbar(scale, cax=axis.inset_axes((1.04, 0, 0.06, 1)), label="blocks run", ticks=ticks)


def tidy(axis: Axes, title: str, along: str = "y") -> None:
    """Set the title, a grid for the axis `along`, and no frame at the top and the right."""
    axis.set_title(title, fontsize=11)
    axis.grid(axis=along, color="0.9")  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def veil(image: Photo, patches: np.ndarray, blocks: int) -> np.ndarray:
    """(H, W, 3) in 0..1: the image with a veil over the patches that stopped early, denser the earlier they stopped.

    patches: (rows, columns), the depth of each.
    """
    pixels = pixels_of(image)
    missed = (blocks - np.asarray(patches)) / max(blocks - 1, 1)  # 0 ran to the end, 1 stopped after the first block
    opacity = np.where(missed > 0, FAINTEST + (STRONGEST - FAINTEST) * missed, 0.0)
    (height, width), (rows, columns) = pixels.shape[:2], opacity.shape
    cover = opacity[np.arange(height) * rows // height][:, np.arange(width) * columns // width, None]
    return pixels + cover * (VEIL - pixels)


def pixels_of(image: Photo) -> np.ndarray:
    """(H, W, 3): the image as floats in 0..1, without an alpha channel."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if pixels.ndim == 2:
        pixels = pixels[..., None].repeat(3, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
        raise DwindleError(f"An array of shape {pixels.shape} is no image; give (height, width, 3) or a PIL image.")
    if np.issubdtype(pixels.dtype, np.integer):
        pixels = pixels / np.iinfo(pixels.dtype).max
    return pixels[..., :3].astype(float).clip(0, 1)


def file_stems(names: Sequence[str]) -> list[str]:
    """A file name for each image that is safe in a shell, a URL and on a disk that ignores case.

    No two images share one, and none is called as the summary.
    """
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
    """Write the figure as a PNG, and return its path."""
    with draft(path) as scratch:  # the file appears whole: a reader of the folder never finds half a picture
        figure.savefig(scratch, format="png")
    return path
