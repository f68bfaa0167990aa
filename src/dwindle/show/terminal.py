"""What all commands share: types and checks of options, output for people, and the line of JSON at the end."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..core import processes as ranks
from ..errors import DwindleError, printable, unknown
from ..files import shown
from ..runtime.dtypes import DTYPES, check_runs

MOST = 1 << 31  # the bound on any number on the command line: seconds, images at a time
console, aside = Console(highlight=False, emoji=False), Console(stderr=True, highlight=False, emoji=False)

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint folder, a shipped name, or a Hub id.")]
Data = Annotated[
    str, typer.Option(help="cifar100, imagenet, places365, a folder of class folders or parquet files, or a Hub id.")
]
OptionalData = Annotated[
    str | None,
    typer.Option(
        help="cifar100, imagenet, places365, a folder of class folders or parquet files, or a Hub id; for a language "
        "model shakespeare, enwik8 or a text file."
    ),
]
Threshold = Annotated[
    float | None, typer.Option(help="Turn the halting threshold; of AHT and A-ViT, higher costs more.")
]
ImageFiles = Annotated[list[Path], typer.Argument(help="Image files.")]
FigureFolder = Annotated[Path, typer.Option(help="Where the figures go.")]
Layout = Annotated[str, typer.Option(help="packed (halted tokens are not computed) or masked.")]
Batch = Annotated[int, typer.Option(help="Images at a time.")]
BatchSizes = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
Fractions = Annotated[str, typer.Option(help="Shares of token-blocks computed, by forced random exit depths.")]
Limit = Annotated[int | None, typer.Option(help="Only the first N images.")]
Workers = Annotated[int, typer.Option(help="Processes that load images.")]
PerCore = Annotated[int | None, typer.Option(help="Processes that load images; by itself one per core.")]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Of data without splits: the share to evaluate on, 0: all; by itself what training held out, or all."
    ),
]
Seconds = Annotated[float, typer.Option(help="Time for each row.")]
Tau = Annotated[float | None, typer.Option(help="A token skips a block where its gate says less than this.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by itself a GPU where there is one.")]
SkipCorrupt = Annotated[
    bool, typer.Option("--skip-corrupt", help="Go on past images that cannot be read; they are counted and listed.")
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 (also on CPUs that multiply in it) or fp16.")]


def plain(text: str) -> str:
    """Untrusted text escaped for rich: markup is printed as it is, control characters by their number."""
    return escape("\n".join(printable(line, len(line)) for line in shown(text).split("\n")))


def finish(result: dict[str, Any]) -> None:
    """Print the result as the last line of a command."""
    print(json.dumps(result), flush=True)


def show_table(title: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
    """Print a table. Columns of names are aligned left, all others right."""
    table = Table(title=plain(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("image", "label", "name", "paper") else "right")
    for row in rows:
        table.add_row(*[plain(str(cell)) for cell in row])
    console.print(table)


def show_rows(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print these columns of rows that are dictionaries."""
    show_table(title, columns, [[row[column] for column in columns] for row in rows])


def progress_bar(shown: bool = True) -> Progress:
    """A bar on stderr that disappears at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=aside,
        transient=True,
        disable=not shown,
    )


def ticking(bar: Progress) -> Callable[..., None]:
    """A function tick(name, step, steps) that keeps a line of the bar for each name, until its last step."""
    tasks: dict[str, Any] = {}

    def tick(name: str, step: int, steps: int, *_: Any) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=steps)
        bar.update(tasks[name], completed=step, visible=step < steps)

    return tick


def device_for(device: str | None) -> str:
    """The device of --device; without one a GPU where there is one, else the CPU."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
        raise unknown("device", device, ["cpu", "cuda"])
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DwindleError("--device cuda: this machine has no CUDA GPU that torch can use; take --device cpu.")
    if device.startswith("cuda:") and int(device[5:]) >= (count := torch.cuda.device_count()):
        raise DwindleError(
            f"--device {device}: this machine has {count} (cuda:0 to cuda:{count - 1}); take one of them."
        )
    return device


def device_and_dtype(device: str | None, dtype: str, known: Collection[str] = DTYPES) -> str:
    """The device of --device, on which a model can run in the format of --dtype."""
    place = device_for(device)
    check_runs(dtype, place, known)
    return place


class ProcessShare:
    """The share of one of several processes (torchrun): its rank, its device, and its processes that load images."""

    def __init__(self, workers: int | None, device: str | None) -> None:
        self.world, self.rank = ranks.started(), int(os.environ.get("RANK", "0"))
        self.place = device_for(device)
        if self.place == "cuda" and self.world > 1:
            self.place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        self.workers = workers if workers is not None else max((os.cpu_count() or 1) // self.world, 1)


def tell_images(images: Any) -> None:
    """Print which images were evaluated, and which were skipped."""
    for name, reason in images.corrupt_files():
        aside.print(f"skipped {plain(name)}: {plain(reason)}", soft_wrap=True)
    console.print(plain(images.summary()), soft_wrap=True)


def unread(result: dict[str, Any]) -> str:
    """The end of a message: how many images could not be read, and the file that lists them. Empty if none."""
    return f"; {result['failed']} could not be read, see {result['errors']}" if result["failed"] else ""


def needed(value: Any, command: str, name: str) -> Any:
    """The option's value, which vision models need. Language models bring their own."""
    if not value:
        raise DwindleError(f"dwindle {command} needs {name} for a vision model; see dwindle {command} --help.")
    return value


def only_for(kind: str, here: str = "this model", **options: Any) -> None:
    """Refuse options that only another kind of model takes. here: the kind that was named instead."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise DwindleError(f"{option} is for {kind}; leave it out for {here}.")


def at_least(**least: tuple[float | None, float]) -> None:
    """Check options by name, each as (value or None, smallest value allowed)."""
    for name, (value, low) in least.items():
        if value is not None and not low <= value < MOST:
            raise DwindleError(f"--{name} {value}: it must be at least {low}, and no more than {MOST}.")


def check_loading(batch: int, limit: int | None, holdout: float | None = None) -> None:
    """Check the options of commands that go through a data set."""
    at_least(batch=(batch, 1), limit=(limit, 1))
    if holdout is not None and not 0 <= holdout < 1:
        raise DwindleError(f"--holdout {holdout}: it is a share, from 0 to below 1.")


def percent(option: str, text: str) -> float:
    """The number of points in an option's text, '1%' or '1'."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise DwindleError(f"{option} {text}: expected points from 0 to 100, such as 1%.")
    return value


def numbers(option: str, text: str, kind: Any) -> list[Any]:
    """The numbers in an option's text, which commas separate. kind: int or float."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < MOST for value in values):
        example = "1,8,32" if kind is int else "1.0,0.52"
        raise DwindleError(f"{option} {text}: expected numbers above 0, separated by commas, such as {example}.")
    return values
