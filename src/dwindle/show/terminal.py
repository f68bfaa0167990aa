"""What every command shares: its arguments' types, what it prints for people, and the one line of JSON at its end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import DwindleError, unknown
from ..files import shown

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
Tau = Annotated[
    float | None, typer.Option(help="Of a language model: a token skips a block where its gate says less than this.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by itself a GPU where there is one.")]
SkipCorrupt = Annotated[
    bool, typer.Option("--skip-corrupt", help="Go on past images that cannot be read; they are counted and listed.")
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 (also on CPUs that multiply in it) or fp16.")]


def plain(text: str) -> str:
    """Text for rich to print as it is."""
    return escape(shown(text))


def finish(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def show_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(title=plain(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("image", "label", "name", "paper") else "right")
    for row in rows:
        table.add_row(*[plain(str(cell)) for cell in row])
    console.print(table)


def progress_bar(shown: bool = True) -> Progress:
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
    """tick(name, step, steps): a line of the bar for each name, until it is done."""
    tasks: dict[str, Any] = {}

    def tick(name: str, step: int, steps: int, *_: Any) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=steps)
        bar.update(tasks[name], completed=step, visible=step < steps)

    return tick


def device_for(given: str | None) -> str:
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", given):
        raise unknown("device", given, ["cpu", "cuda"])
    if given.startswith("cuda") and not torch.cuda.is_available():
        raise DwindleError("--device cuda: this machine has no CUDA GPU that torch can use; take --device cpu.")
    if given.startswith("cuda:") and int(given[5:]) >= (count := torch.cuda.device_count()):
        raise DwindleError(
            f"--device {given}: this machine has {count} (cuda:0 to cuda:{count - 1}); take one of them."
        )
    return given


def evaluated(
    model: Any, images: Any, batch: int, workers: int, device: str | None, **how: Any
) -> dict[str, Any] | None:
    """`train.evaluate.evaluate` with a bar. Under torchrun each process takes its share; all but one get None."""
    from ..core import processes as ranks
    from ..evaluate.evaluate import evaluate
    from ..io.batches import loader

    def measure(place: Any, progress: Callable[[int], None]) -> dict[str, Any]:
        batches = loader(images, batch, workers=workers, rank=ranks.rank(), world=ranks.world())
        found = evaluate(model, batches, device=place, progress=progress, **how)
        for corrupt in ranks.gathered(images.corrupt):
            images.corrupt |= corrupt
        return found

    return shared(measure, len(images), device)


def shared(
    measure: Callable[[Any, Callable[[int], None]], dict[str, Any]], total: int, device: str | None
) -> dict[str, Any] | None:
    """What `measure(device, progress)` finds, with a bar over `total`. Of several processes one gets it, and speaks."""
    from ..core import processes as ranks

    place = ranks.join(device_for(device)) or "cpu"
    rank, world = ranks.rank(), ranks.world()
    with progress_bar(rank == 0) as bar:
        task = bar.add_task("evaluating", total=total // world)
        result = measure(place, lambda n: bar.advance(task, n))
    ranks.leave()
    return result if rank == 0 else None


def tell_images(images: Any) -> None:
    """Which images a result is of, and which of them were skipped."""
    for name, why in images.corrupt_files():
        aside.print(f"skipped {plain(name)}: {plain(why)}", soft_wrap=True)
    console.print(plain(images.told()), soft_wrap=True)


def needed(given: Any, command: str, name: str) -> Any:
    """Language models bring their own; a vision model must be told."""
    if not given:
        raise DwindleError(f"dwindle {command} needs {name} for a vision model; see dwindle {command} --help.")
    return given


def only_for(kind: str, **given: Any) -> None:
    """Options that another kind of model takes."""
    for name, value in given.items():
        if value is not None:
            given_as = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise DwindleError(f"{given_as} is for {kind}; leave it out for this model.")


def resumes(asked: bool, out: Path) -> bool:
    """Whether there is something to go on with. A run killed before its first save begins again, to the same end."""
    from ..train.state import BEGUN, STATE

    there = {path.name for path in out.iterdir()} if out.is_dir() else {STATE}
    begun = STATE not in there and (BEGUN in there or not there)
    if asked and begun:
        aside.print(f"{plain(str(out))} holds nothing saved yet: from the start.", soft_wrap=True)
    return asked and not begun


def numbers(option: str, text: str, kind: Any) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        example = "1,8,32" if kind is int else "1.0,0.52"
        raise DwindleError(f"{option} {text}: expected numbers above 0, separated by commas, such as {example}.")
    return values
