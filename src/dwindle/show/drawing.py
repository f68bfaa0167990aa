"""What figures share: the canvas, the colours of depths, images under a veil, and how a picture gets onto the disk.

Figures are built without pyplot, so that they can be drawn from any thread and without a display. Matplotlib is
imported where it is used: `import dwindle.show.drawing` costs nothing.
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

Photo = Image.Image | np.ndarray  # cropped to what the model saw; arrays (H, W), (H, W, 3) or (H, W, 4)

VEIL = np.array([0.95, 0.96, 0.98])
FAINTEST, STRONGEST = 0.45, 0.85  # opacity of the veil: from just short of the end to stopped after the first block


def canvas(width: float, height: float, title: str | None = None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    if title:  # a name may hold a '$', which is not the beginning of a formula
        lines = [textwrap.fill(line, int(9 * width)) for line in title.splitlines()]
        figure.suptitle("\n".join(lines), fontsize=13, parse_math=False)
    return figure


def panel_height(pixels: np.ndarray, width: float) -> float:
    """Inches for a panel of this width to keep the image's proportions, within what a page can bear."""
    return min(max(width * pixels.shape[0] / pixels.shape[1], width / 2), 2 * width)


def block_ticks(blocks: int, most: int) -> list[int]:
    return list(range(blocks, 0, -math.ceil(blocks / most)))[::-1]


def depth_colours(blocks: int) -> ScalarMappable:
    """The colours of depths, the same in every figure: perceptually uniform, safe for the colour-blind."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(1, max(blocks, 2)), colormaps["viridis"].with_extremes(bad="0.85"))


def show(axis: Axes, values: np.ndarray, title: str, size: float = 11, **options: Any) -> None:
    axis.set_title(title, fontsize=size)
    axis.set_axis_off()
    axis.imshow(values, **options)


def heatmap(axis: Axes, values: np.ndarray, blocks: int, title: str, shape: tuple[int, ...], bar: bool = True) -> None:
    """A map of depths laid out over `shape` (height, width): its patches look like those of the image."""
    (height, width), scale = shape, depth_colours(blocks)
    colours = scale.to_rgba(np.ma.masked_invalid(values))
    show(axis, colours, title, extent=(0, width, height, 0), interpolation="nearest")
    if bar:  # inside the axes' own frame: as tall as the map, whatever its proportions
        ticks = block_ticks(blocks, min(12, max(3, 12 * height // width)))
        axis.figure.colorbar(scale, cax=axis.inset_axes((1.04, 0, 0.06, 1)), label="blocks run", ticks=ticks)


def tidy(axis: Axes, title: str, along: str = "y") -> None:
    axis.set_title(title, fontsize=11)
    axis.grid(axis=along, color="0.9")  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def veil(image: Photo, patches: np.ndarray, blocks: int) -> np.ndarray:
    """(H, W, 3) in 0..1: the image, a veil over patches (rows, columns) that stopped early, thicker the earlier."""
    pixels = pixels_of(image)
    missed = (blocks - np.asarray(patches)) / max(blocks - 1, 1)  # 0 ran to the end, 1 stopped after the first block
    opacity = np.where(missed > 0, FAINTEST + (STRONGEST - FAINTEST) * missed, 0.0)
    (height, width), (rows, columns) = pixels.shape[:2], opacity.shape
    cover = opacity[np.arange(height) * rows // height][:, np.arange(width) * columns // width, None]
    return pixels + cover * (VEIL - pixels)


def pixels_of(image: Photo) -> np.ndarray:
    """(H, W, 3) floats in 0..1."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if pixels.ndim == 2:
        pixels = pixels[..., None].repeat(3, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
        raise DwindleError(f"An array of shape {pixels.shape} is no image; give (height, width, 3) or a PIL image.")
    if np.issubdtype(pixels.dtype, np.integer):
        pixels = pixels / np.iinfo(pixels.dtype).max
    return pixels[..., :3].astype(float).clip(0, 1)


def file_stems(names: Sequence[str]) -> list[str]:
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
