"""The command line. Every command ends with one line of JSON on stdout; what people read goes before it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DwindleError, unknown
from ..models.adaperceiver import commands
from ..show.terminal import (
    Checkpoint,
    Device,
    Dtype,
    OptionalData,
    SkipCorrupt,
    Tau,
    aside,
    console,
    device_for,
    evaluated,
    finish,
    needed,
    numbers,
    only_for,
    plain,
    progress_bar,
    show_table,
    tell_images,
)
from . import ship, train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Make a vision transformer stop computing tokens that are done. Start with [bold]dwindle demo[/bold].",
)


def main() -> None:
    """Errors a user can mend are one sentence on stderr and exit code 2."""
    try:
        app()
    except (DwindleError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        aside.print(f"[red]dwindle:[/red] {plain(str(error))}", soft_wrap=True)
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"dwindle {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("dwindle-demo"), device: Device = None
) -> None:
    """Classify the shipped photographs with the shipped model and draw where the compute went."""
    from ..show.demo import demo as run

    result = run(out, device_for(device))
    show_table(
        f"{result['model']} on {len(result['images'])} photographs",
        ["image", "label", "confidence", "mean depth", "GMACs", "of static"],
        [
            [
                i["image"],
                i["label"],
                f"{i['confidence']:.0%}",
                i["depth"],
                i["gmacs"],
                f"{i['gmacs'] / result['gmacs_static']:.0%}",
            ]
            for i in result["images"]
        ],
    )
    console.print(
        f"{result['gmacs']} GMACs per image against {result['gmacs_static']} static; {result['speedup']}x faster than "
        f"static on this machine (batch of {len(result['images'])}). Figures in {plain(str(out))}/"
    )
    finish(result)


@app.command(name="eval")
def evaluate(
    checkpoint: Checkpoint,
    data: OptionalData = None,
    layout: Annotated[str, typer.Option(help="packed (halted tokens are not computed) or masked.")] = "packed",
    threshold: Annotated[
        float | None, typer.Option(help="Turn the halting threshold; of AHT and A-ViT, higher costs more.")
    ] = None,
    tau: Tau = None,
    tokens: Annotated[int | None, typer.Option(help="Of an AdaPerceiver: how many; all by default.")] = None,
    depth: Annotated[int | None, typer.Option(help="Of an AdaPerceiver: blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Of an AdaPerceiver: of its FFNs.")] = None,
    exit: Annotated[
        float | None, typer.Option(help="Of an AdaPerceiver: images leave at this confidence, in (0, 1].")
    ] = None,
    exits: Annotated[str | None, typer.Option(help="With --exit: after these blocks only, such as 5,7,9.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Of an AdaPerceiver: tokens and depth as this file of dwindle policies chooses.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    limit: Annotated[int | None, typer.Option(help="Only the first N images.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that load images.")] = 2,
    holdout: Annotated[
        float | None,
        typer.Option(
            help="Of data without splits: the share to evaluate on, 0: all; by itself what training held out, or all."
        ),
    ] = None,
    skip_corrupt: SkipCorrupt = False,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Accuracy, cost and speed of a checkpoint on a data set."""
    from ..core.method import require
    from ..core.model import LAYOUTS
    from ..io.checkpoint import find, load_halting
    from ..io.sets import evaluation_images
    from ..models.adaperceiver import cli as perceiver
    from ..models.lm import cli as language
    from ..runtime.dtypes import converted

    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    require(batch >= 1, f"--batch {batch}", "it must be at least 1")
    require(limit is None or limit >= 1, f"--limit {limit}", "it must be at least 1")
    require(holdout is None or 0 <= holdout < 1, f"--holdout {holdout}", "it is a share, from 0 to below 1")
    find(checkpoint)  # one that does not exist is named before the options of its kind are
    setting = {"tokens": tokens, "depth": depth, "width": width}
    if perceiver.is_checkpoint(checkpoint):
        only_for("models whose tokens halt", threshold=threshold, layout=None if layout == "packed" else layout)
        only_for("language models", tau=tau)
        data = needed(data, "eval", "--data")
        for name in ("tokens", "depth"):
            given = setting[name]
            require(policy is None or given is None, f"--{name} {given}", "--policy chooses it, so leave it out")
        loading: dict[str, Any] = {"workers": workers, "holdout": holdout, "skip_corrupt": skip_corrupt}
        chosen: dict[str, Any] = {"exit": exit, "exits": exits, "policy": policy, **setting}
        return perceiver.evaluate(checkpoint, data, batch, limit, device=device, dtype=dtype, **loading, **chosen)
    only_for("an AdaPerceiver", exit=exit, exits=exits, policy=policy, **setting)
    if language.is_checkpoint(checkpoint):
        only_for("vision models", dtype=None if dtype == "fp32" else dtype)
        only_for("vision models", holdout=holdout, skip_corrupt=skip_corrupt or None)
        return language.evaluate(checkpoint, data, layout, threshold, tau, batch, limit, device)
    only_for("language models", tau=tau)
    data = needed(data, "eval", "--data")
    model = converted(load_halting(checkpoint), dtype, device_for(device))
    if threshold is not None:
        _turn_threshold(model, threshold)
    images = evaluation_images(model, data, limit, holdout=holdout)
    images.skip = skip_corrupt
    result = evaluated(model, images, batch, workers, device, layout=layout)
    if result is not None:
        show_table(f"{checkpoint} on {data} ({layout})", list(result), [list(result.values())])
        tell_images(images)
        finish(result | images.about())


def _turn_threshold(model: Any, threshold: float) -> None:
    from ..core.method import require
    from ..evaluate.analysis import operating_points
    from ..evaluate.evaluate import turn

    given, method = f"--threshold {threshold}", type(model.method).__name__
    require(threshold > 0, given, "a token halts when its scores reach it, so it must be above 0")
    ranges = {name: sorted(ends) for name, *ends in operating_points(model)}
    require("threshold" in ranges, given, f"{method} has no threshold to turn, so leave it out")
    low, high = ranges["threshold"]
    sums = high == model.backbone.shape.blocks  # of scores: above the number of blocks nothing halts, as may be asked
    require(sums or threshold <= high, given, f"{method}'s lies between {low:g} and {high:g}")
    turn(model, threshold, "threshold")


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="A timm model name (random weights, AHT), or a checkpoint.")],
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    fraction: Annotated[
        str, typer.Option(help="Shares of token-blocks computed, by forced random exit depths.")
    ] = "1.0,0.67,0.52",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; int8 on a CPU.")] = "fp32",
    seconds: Annotated[float, typer.Option(help="Time for each row.")] = 4.0,
    static: Annotated[
        str | None, typer.Option(help="Static variants: eager; on a GPU also graph, compile. All by default.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Real images, on which a checkpoint decides by itself; no --fraction then. Language model: a text."
        ),
    ] = None,
    exit: Annotated[
        str | None, typer.Option(help="AdaPerceiver, with --data: confidences at which images leave, such as 0.9,0.8.")
    ] = None,
    exits: Annotated[
        str | None, typer.Option(help="With --exit: also leaving after these blocks only, such as 5,7,9.")
    ] = None,
    device: Device = None,
) -> None:
    """Time static against adaptive, turn about in one process; on a GPU against the best of static's variants. An
    AdaPerceiver (a checkpoint, or adaperceiver_paper, untrained) at several settings, or by --exit with early exit."""
    from ..core.method import require
    from ..evaluate.bench import INT8, model_to_bench, some_photos
    from ..evaluate.bench import bench as time_it
    from ..models.adaperceiver import cli as perceiver
    from ..models.lm import cli as language
    from ..runtime.dtypes import DTYPES, check_runs

    kinds = [*DTYPES] if language.is_checkpoint(model) else [*DTYPES, INT8]
    check_runs(dtype, device_for(device), kinds)
    require(seconds >= 0, f"--seconds {seconds}", "it must be at least 0")
    batches, fractions = numbers("--batch", batch, int), numbers("--fraction", fraction, float)
    if perceiver.is_checkpoint(model) or perceiver.is_preset(model):
        only_for("models whose tokens halt", static=static)
        return perceiver.bench(model, batches, dtype, seconds, device, data, exit, exits)
    only_for("an AdaPerceiver", exit=exit, exits=exits)
    if language.is_checkpoint(model):
        return language.bench(model, batches, fractions, dtype, seconds, device, static=static, data=data)
    place, adapted = device_for(device), model_to_bench(model)
    known = ("eager", "graph", "compile") if place.startswith("cuda") else ("eager",)
    variants = known if static is None else tuple(static.split(","))
    for variant in variants:
        if variant not in known:
            raise unknown(f"static variant on {place}", variant, known)
    photos = None if data is None else some_photos(adapted, data, max(batches))
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches) * (len(fractions) if photos is None else 1))
        result = time_it(
            adapted,
            batches,
            fractions,
            place,
            dtype,
            seconds,
            progress=lambda row: bar.advance(task),
            static=variants,
            photos=photos,
        )
    columns = ["batch", "fraction", "static_ms", "adaptive_ms", "speedup", "spread"]
    lines = [[_best_static(row) if c == "static_ms" else row[c] for c in columns] for row in result["rows"]]
    show_table(f"{model} on {result['device']}, {result['dtype']}", columns, lines)
    finish(result)


def _best_static(row: dict[str, Any]) -> Any:
    spent = row["static_ms"]
    return f"{spent[row['best']]} ({row['best']})" if isinstance(spent, dict) else spent


@app.command()
def view(
    checkpoint: Checkpoint,
    images: Annotated[list[Path] | None, typer.Argument(help="Image files; text files for a language model.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("dwindle-view"),
    threshold: Annotated[
        float | None, typer.Option(help="Turn the halting threshold; of AHT and A-ViT, higher costs more.")
    ] = None,
    tau: Tau = None,
    device: Device = None,
) -> None:
    """Draw for each image which patches were computed how far, the plan beside the execution, and the exits; of an
    AdaPerceiver how sure it is at every depth and number of tokens."""
    from ..io.checkpoint import find, load_halting
    from ..models.adaperceiver import cli as perceiver
    from ..models.lm import cli as language
    from ..show.demo import look

    find(checkpoint)  # as in eval
    if perceiver.is_checkpoint(checkpoint):
        only_for("models whose tokens halt", threshold=threshold)
        only_for("language models", tau=tau)
        return perceiver.view(checkpoint, needed(images, "view", "images"), out, device)
    if language.is_checkpoint(checkpoint):
        return language.view(checkpoint, images, out, threshold, tau, device)
    only_for("language models", tau=tau)
    images = needed(images, "view", "images")
    model = load_halting(checkpoint)
    if threshold is not None:
        _turn_threshold(model, threshold)
    result = look(model, images, out, device_for(device))
    columns = ["image", "label", "confidence", "depth", "gmacs"]
    show_table(checkpoint, columns, [[row[c] for c in columns] for row in result["images"]])
    finish(result)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "\n",
    length: Annotated[int, typer.Option(help="Characters to write.")] = 500,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest character.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only among the K likeliest characters.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same text every time.")] = None,
    tau: Tau = None,
    device: Device = None,
) -> None:
    """Write text with a language model, skipping blocks token by token."""
    from ..models.lm import cli as language

    language.generate(checkpoint, prompt, length, temperature, top_k, seed, tau, device)


@app.command()
def methods() -> None:
    """List the methods and their settings."""
    import inspect

    from ..methods import Method

    rows: list[dict[str, Any]] = []
    for name, kind in sorted(Method.registry.items()):
        settings = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
        rows.append({"name": name, "paper": kind.paper, "about": inspect.getdoc(kind), "settings": settings})
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold]  {plain(row['paper'])}\n  {plain(row['about'])}")
        console.print("  " + plain(", ".join(f"{n}={v}" for n, v in row["settings"].items())) + "\n", style="dim")
    finish({"methods": rows})


for others in (train, ship, commands):
    others.register(app)
