"""`dwindle report`: one page that explains a trained run, from traces alone.

`report` measures the run over a data set, and `Page` turns the numbers into a page that needs no other file: pictures
are inside it, and nothing is fetched. L blocks, n images.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.method import require
from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..evaluate.analysis import (
    TURNED_IMAGES,
    Baseline,
    Measured,
    Progress,
    Stream,
    measure,
    measure_static,
    operating_points,
    sweep,
)
from ..files import check_folder, write_text
from ..io.checkpoint import family_at, find
from ..io.classes import class_names, known_classes
from ..io.config import read_config
from ..io.datasets import Images
from ..io.images import preprocess_of
from ..io.promise import promise_of, sentence
from ..io.sets import evaluation_images
from ..methods.static import Static
from ..tasks.classify import load_classifier
from . import figures as charts
from .drawing import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = 6  # easy images, and as many hard ones
RANKED = 10  # classes in each of the two tables


def report(
    run: str | Path,
    out: str | Path,
    *,
    data: str | None = None,
    compare_with: str | Path | Sequence[str | Path] | None = None,
    limit: int | None = None,
    device: str = "cpu",
    batch: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write `out`/index.html and the figures beside it. Returns the numbers and paths.

    run: the folder of a run or a checkpoint, or a shipped name. data: None takes the data the run was evaluated on.
    compare_with: other runs, overlaid in the training curves; classes are compared with the first static one.
    """
    out = Path(out)
    check_folder(out)
    require(batch >= 1, f"--batch {batch}", "it must be at least 1")
    single = isinstance(compare_with, (str, os.PathLike))
    others = [compare_with] if single else list(compare_with or [])  # type: ignore[arg-type]
    folders = [find(source) for source in (run, *others)]
    metrics = [charts.read_metrics(folder) for folder in folders]
    static = next((f for f in folders[1:] if read_config(f)["method"]["name"] == Static.__name__), None)
    if other := next((folder for folder in folders if family_at(folder) is not family_at(folders[0])), None):
        raise DwindleError(f"{other} is {family_at(other).one}, and {run} is none; lay runs of one kind side by side.")
    model = load_classifier(folders[0])
    rival = load_classifier(static) if static else model
    images = evaluation_images(model, data or _own_data(model, folders[0]), limit)
    if not len(images):
        raise DwindleError(f"'{images.name}' holds no images to report on; choose another --data.")
    ours, theirs = known_classes(model), known_classes(rival)
    if model.classes != rival.classes or (ours and theirs and ours != theirs):
        raise DwindleError(f"{static} does not have the classes of {folders[0]}; compare runs on the same data.")
    stream = Stream(images, batch, device, progress)
    measured = measure(model, stream)
    name = f"the static run {static.resolve().name}" if static else "the same weights with nothing halted"
    base = measure_static(rival, name, stream)
    names = class_names(model) or images.classes or []
    page = Page(out, model, measured, base)
    page.depths()
    page.examples(images, names, device)
    page.costs()
    page.classes(names)
    page.curves(dict(zip(_run_names(folders), metrics)))
    page.operating_point(stream)
    return page.write(folders[0].resolve().name, images)


def _own_data(model: AdaptiveViT, folder: Path) -> str:
    """The data that the run was evaluated on, as its checkpoint names it."""
    data = getattr(model, "extra", {}).get("data")
    name = (data.get("eval") or data.get("train")) if isinstance(data, dict) else None
    if not isinstance(name, str):
        raise DwindleError(f"{folder} does not say what it was evaluated on; name the data with --data.")
    return name


def _run_names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, or their whole paths where two names are equal."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


@dataclass
class Page:
    """The page as it grows, a section at a time: a heading, a sentence on what one sees, and a figure or tables."""

    out: Path
    model: AdaptiveViT
    seen: Measured
    base: Baseline
    parts: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, title: str, text: str, html: str = "") -> None:
        """Append a section."""
        self.parts.append(f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n{html}\n</section>")

    def skip(self, title: str, reason: str) -> None:
        """Append a section that only says why it has nothing to show."""
        self.left_out[title] = reason
        self.add(title, reason)

    def picture(self, figure: Figure, name: str, alt: str, wide: bool = False) -> str:
        """Save a figure, and return the HTML that contains it."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = save_figure(figure, self.out / f"{name}.png")
        self.figures.append(str(path))
        source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        css_class = ' class="wide"' if wide else ""
        return f'<div class="picture"><img{css_class} alt="{escape(alt)}" src="{source}"></div>'

    @property
    def blocks(self) -> int:
        return len(self.seen.stops)

    def depths(self) -> None:
        """Add the mean depth by position, the exits and the scores: A-ViT Fig. 4."""
        seen, low, high = self.seen, self.seen.patches.min(), self.seen.patches.max()
        text = (
            f"Over {len(seen.labels)} images a position runs through {low:.1f} to {high:.1f} of {self.blocks} blocks on"
            " average; the bright ones are where the model expects to find what it needs."
        )
        figure = charts.depth_map(seen.patches, self.blocks, len(seen.labels))
        title = "How deep each position goes"
        self.add(title, text, self.picture(figure, "depth_map", f"Map of mean depth by position. {text}"))

        share, peak = 100 * seen.stops / seen.stops.sum(), int(seen.stops.argmax()) + 1
        text = (
            f"{share[-1]:.0f}% of the tokens run to the last block; the most common place to stop is after block {peak}"
            f" ({share.max():.0f}%). Tokens spread over many blocks mean that depth is chosen token by token."
        )
        html = self.picture(charts.exits(seen.stops), "exits", f"Bars of how many tokens stop where. {text}")
        self.add("Where tokens stop", text, html)

        title, method = "Scores", type(self.model.method).__name__
        if seen.scores is None:
            return self.skip(title, f"{method} decides without scores, so there are none to show.")
        text = (
            f"The score by which {method} decides, as the mean over an image's live tokens. The box is the middle half "
            "of the images, the line their median, the whiskers reach from 5% to 95%: the taller, the more images "
            "differ in that block."
        )
        medians = [f"{np.median(row[~np.isnan(row)]):.2f}" if (~np.isnan(row)).any() else "none" for row in seen.scores]
        alt = f"Box plot of scores; medians from block 1 to {self.blocks}: {', '.join(medians)}."
        return self.add(title, text, self.picture(charts.score_boxes(seen.scores), "scores", alt))

    @torch.inference_mode()
    def examples(self, images: Images, names: Sequence[str], device: str) -> None:
        """Add the easiest and the hardest images: A-ViT Fig. 5."""
        title = "Easy and hard images"
        easy, hard = charts.easiest_and_hardest(self.seen.top1, self.seen.depth, EXAMPLES)
        if not len(easy):
            return self.skip(title, "Fewer than two images were classified right, so none can be called easy or hard.")
        if np.ptp(self.seen.depth[self.seen.top1]) == 0:
            return self.skip(
                title, "All images classified right go equally deep: to this model none is easier than another."
            )
        rows, pre = [*easy, *hard], preprocess_of(self.model)
        photos = [pre.seen(images.image(int(row))) for row in rows]
        transform = pre.eval_transform()
        batch = torch.stack([transform(images.image(int(row))) for row in rows]).to(device)
        patches = self.model(batch).trace.patches.cpu().numpy()
        labels = [_name(names, int(self.seen.labels[row])) for row in rows]
        shown = [charts.Example(*example) for example in zip(photos, patches, labels, self.seen.depth[rows])]
        text = (
            "Of the images classified right, those that took the fewest and the most blocks per token; the veil covers "
            "patches that stopped early, thicker the earlier. Plain scenes should be easy, cluttered ones hard."
        )
        alt = f"Least compute: {', '.join(labels[: len(easy)])}. Most compute: {', '.join(labels[len(easy) :])}."
        figure = charts.easy_and_hard(shown[: len(easy)], shown[len(easy) :], self.blocks)
        self.numbers["easy"], self.numbers["hard"] = [int(row) for row in easy], [int(row) for row in hard]
        return self.add(title, text, self.picture(figure, "easy_and_hard", alt, wide=True))

    def costs(self) -> None:
        """Add the accuracy of images by their cost."""
        title, seen = "Do hard images get more compute?", self.seen
        if np.ptp(seen.gmacs) == 0:
            return self.skip(title, "All images cost the same under this model.")
        groups = charts.cost_groups(seen.gmacs, seen.top1, self.base.top1)
        low, high = groups[0], groups[-1]
        text = (
            f"Images in {len(groups)} equal groups by what they cost: the cheapest take {low.gmacs:.3g} GMACs and are "
            f"{low.adaptive:.0f}% right, the dearest {high.gmacs:.3g} and {high.adaptive:.0f}%. Where static accuracy "
            "falls to the right, the compute goes to images that are hard for anyone."
        )
        html = self.picture(charts.accuracy_by_cost(groups), "accuracy_by_cost", f"Bars of accuracy by cost. {text}")
        self.numbers["by_cost"] = [vars(group) for group in groups]
        return self.add(title, text, html)

    def classes(self, names: Sequence[str]) -> None:
        """Add the classes most helped and hurt: A-ViT Table 1."""
        title = "Classes most helped and hurt"
        if np.array_equal(self.seen.top1, self.base.top1):
            return self.skip(title, f"The model and {self.base.name} are right about exactly the same images.")
        changes = charts.class_changes(self.seen.labels, self.seen.top1, self.base.top1)
        hurt = [change for change in changes if change.difference < 0][:RANKED]
        helped = [change for change in changes[::-1] if change.difference > 0][:RANKED]
        typical = float(np.median([change.images for change in changes]))
        sure = sum(change.beyond_chance for change in changes)
        text = (
            f"Top-1 of each class against {self.base.name}. With {typical:g} image{'s' * (typical != 1)} in a typical "
            f"class one image is worth {100 / typical:.3g} points: {sure} of {len(changes)} classes change by more than"
            " two standard errors, and about one in twenty would by chance."
        )
        if sure <= len(changes) / 20:
            text += " So read this ranking as noise, unless more images say the same."
        both = (("Helped", helped), ("Hurt", hurt))
        html = "".join(f"<div><h3>{head}</h3>{_class_table(part, names)}</div>" for head, part in both)
        for head, part in both:
            self.numbers[head.lower()] = [{"class": _name(names, c.label), **vars(c)} for c in part]
        return self.add(title, text, f'<div class="pair">{html}</div>')

    def curves(self, runs: dict[str, dict[str, np.ndarray] | None]) -> None:
        """Add the training curves of all runs: A-ViT Fig. 7."""
        title = "Training"
        known = {name: columns for name, columns in runs.items() if columns}
        missing = [name for name in runs if name not in known]
        if not known:
            return self.skip(
                title, "There is no metrics.csv of a training beside the checkpoint, so there are no curves."
            )
        text = (
            "Task loss, accuracy and cost after each epoch: a sound run gives up cost early and wins accuracy back "
            "while the cost holds."
        )
        if missing:
            text += f" Without a metrics.csv, so not shown: {', '.join(missing)}."
        alt = f"Training curves of {', '.join(known)}."
        return self.add(title, text, self.picture(charts.training_curves(known), "training", alt, wide=True))

    def operating_point(self, stream: Stream) -> None:
        """Add a curve of accuracy against cost for each setting that can be turned after training."""
        title, method = "Turning the operating point after training", type(self.model.method).__name__
        rows = np.random.default_rng(0).permutation(len(stream.images))[
            :TURNED_IMAGES
        ]  # the data may be sorted by class
        turned = operating_points(self.model)
        if not turned:
            return self.skip(title, f"{method} has nothing to turn after training, so it has one cost only.")
        for i, operating_point in enumerate(turned):
            name = operating_point[0]
            heading = title if i == 0 else f"Turning the {name} after training"
            trained, *points = sweep(self.model, stream, rows, operating_point)
            if len(points) < 2:
                self.skip(heading, f"Turning {method}'s {name} does not change what images cost.")
                continue
            gmacs, top1 = ([point[key] for point in points] for key in ("gmacs", "top1"))
            text = (
                f"The same weights at {len(points)} settings of {method}'s {name}, on {len(rows)} images drawn at "
                f"random: from {min(gmacs):.3g} GMACs at {top1[int(np.argmin(gmacs))]:.1f}% to {max(gmacs):.3g} at "
                f"{top1[int(np.argmax(gmacs))]:.1f}%. Where the curve is flat, compute can be saved for nothing, "
                "without training again."
            )
            static = self.base.gmacs, 100 * float(self.base.top1[rows].mean())
            figure = charts.operating_point_curve(gmacs, top1, (trained["gmacs"], trained["top1"]), static)
            key = "operating_point" if i == 0 else name
            self.numbers[key] = {"name": name, "trained": trained, "points": points}
            self.add(heading, text, self.picture(figure, key, f"Curve of accuracy against cost. {text}"))

    def write(self, run: str, images: Images) -> dict[str, Any]:
        """Write the page with the headline numbers at its top and the settings at its end. Returns all numbers."""
        seen, method = self.seen, self.model.method
        numbers = {
            "images": len(seen.labels),
            "top1": round(100 * float(seen.top1.mean()), 3),
            "top5": round(100 * float(seen.top5.mean()), 3),
            "top1_static": round(100 * float(self.base.top1.mean()), 3),
            "gmacs": round(float(seen.gmacs.mean()), 4),
            "gmacs_static": round(seen.gmacs_static, 4),
            "depth": round(float(seen.depth.mean()), 3),
            "blocks": self.blocks,
        }
        error = (numbers["top1"] * (100 - numbers["top1"]) / numbers["images"]) ** 0.5
        cards = [
            ("top-1", f"{numbers['top1']:.1f}%", f"± {error:.1f}; static {numbers['top1_static']:.1f}%"),
            ("top-5", f"{numbers['top5']:.1f}%", ""),
            ("GMACs per image", f"{numbers['gmacs']:.3g}", f"static {numbers['gmacs_static']:.3g}"),
            ("cost", f"{seen.gmacs.mean() / seen.gmacs_static:.0%}", "of the static model"),
            ("mean depth", f"{numbers['depth']:.2f}", f"of {self.blocks} blocks"),
            ("images", f"{numbers['images']}", ""),
        ]
        head = "".join(f"<div><dt>{t}</dt><dd>{v}<small>{note}</small></dd></div>" for t, v, note in cards)
        intro = f"{type(method).__name__} on {images.summary()} Static: {self.base.name}."
        rows = [[name, value] for name, value in method.config.items()]
        if (promise := promise_of(self.model)) is not None:
            self.add("What it promises", f"{sentence(promise)[0].upper()}{sentence(promise)[1:]}.")
        self.add(f"Settings of {type(method).__name__}", f"{method.paper}.", charts.table(["setting", "value"], rows))
        html = charts.SHELL.format(
            title=escape(f"Where {run} spends its compute"),
            style=charts.STYLE,
            body="\n".join([f'<p class="soft">{escape(intro)}</p>', f"<dl>{head}</dl>", *self.parts]),
            footer="Made by dwindle report, from traces alone. GMACs count linear layers, attention and the method.",
        )
        self.out.mkdir(parents=True, exist_ok=True)
        path = write_text(self.out / "index.html", html)
        about = {"run": run, "data": images.name, **images.about(), "page": str(path), "figures": self.figures}
        return {**about, **numbers, **self.numbers, "left_out": self.left_out}


def _name(names: Sequence[str], label: int) -> str:
    """The name of a class, or its number where it has none."""
    return str(names[label]) if label < len(names) else f"class {label}"


def _class_table(changes: Sequence[charts.ClassChange], names: Sequence[str]) -> str:
    """The table of class changes in HTML."""
    if not changes:
        return "<p>None.</p>"
    rows = [
        [_name(names, c.label), c.images, f"{c.static:.0f}%", f"{c.adaptive:.0f}%", f"{c.difference:+.1f}"]
        for c in changes
    ]
    return charts.table(["class", "images", "static", "adaptive", "points"], rows)
