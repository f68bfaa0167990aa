"""The commands that take a model out of the laboratory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..show.terminal import (
    Checkpoint,
    Data,
    Device,
    Dtype,
    OptionalData,
    console,
    device_for,
    finish,
    plain,
    progress_bar,
    show_table,
)

Budget = Annotated[
    float | None, typer.Option(help="Turn the model to this share of the static cost first (on the shipped photos).")
]


def register(app: typer.Typer) -> None:
    for command in (report, export, quantize, predict, serve):
        app.command()(command)


def report(
    run: Annotated[str, typer.Argument(help="A run folder, a checkpoint, a shipped name, or a Hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for index.html and its figures.")] = Path("dwindle-report"),
    data: Annotated[
        str | None, typer.Option(help="Images to look at; by itself what the run was evaluated on.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Other runs to lay beside it, such as the static one. Repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N images.")] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    device: Device = None,
) -> None:
    """One page that explains a trained model: where, when and for which images its tokens stop."""
    from ..show.report import report as write

    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        result = write(
            run,
            out,
            data=data,
            compare_with=against,
            limit=limit,
            device=device_for(device),
            batch=batch,
            progress=progress,
        )
    numbers = f"top-1 {result['top1']}, {result['gmacs']} of {result['gmacs_static']} GMACs"
    console.print(f"{plain(result['page'])}: {numbers}")
    finish(result)


def export(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option(help="onnx, torch-export or aoti (compiled by AOTInductor for this CPU).")],
    out: Annotated[Path, typer.Option(help="The file to write: .onnx or .pt2.")],
    budget: Budget = None,
    seconds: Annotated[float, typer.Option(help="Time against the static model exported alike; 0: not.")] = 0.0,
) -> None:
    """Write a model as one graph from which halted tokens are gone; checked against the model before it is named."""
    from ..core.method import require
    from ..evaluate.evaluate import meet
    from ..io.checkpoint import load_halting
    from ..runtime.export import check_images
    from ..runtime.export import export as write

    require(seconds >= 0, f"--seconds {seconds}", "it must be at least 0")
    model = load_halting(checkpoint)
    if budget is not None:
        meet(model, check_images(model), budget)
    result = write(model, to, out, seconds=seconds)
    if rows := result.get("speed"):
        columns = ["batch", "cost", "static_ms", "adaptive_ms", "speedup", "threads"]
        show_table(f"{checkpoint} as {to} on this CPU", columns, [[row[c] for c in columns] for row in rows])
    console.print(
        f"{plain(str(out))}: {result['bytes'] / 1e6:.1f} MB, logits within {result['difference']:.1g}, "
        f"{result['decisions']:.2%} of decisions equal"
    )
    finish(result)


def quantize(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="Folder of the int8 checkpoint.")],
    data: OptionalData = None,
    budget: Budget = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N images of --data.")] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    seconds: Annotated[float, typer.Option(help="Time against float and against static; 0: not.")] = 0.0,
) -> None:
    """Write a model in int8, for CPUs: a checkpoint like others. With --data both are evaluated."""
    from ..core.method import require
    from ..evaluate.bench import race
    from ..evaluate.evaluate import evaluate, meet
    from ..io.batches import loader
    from ..io.checkpoint import find, load_halting, save
    from ..io.sets import evaluation_images
    from ..runtime.export import check_images
    from ..runtime.int8 import likeness, weight_bytes
    from ..runtime.int8 import quantize as make

    require(batch >= 1, f"--batch {batch}", "it must be at least 1")
    require(limit is None or limit >= 1, f"--limit {limit}", "it must be at least 1")
    require(seconds >= 0, f"--seconds {seconds}", "it must be at least 0")
    require(not out.is_file(), f"--out {out}", "a checkpoint is a folder and this is a file")
    model = load_halting(checkpoint)
    photos = check_images(model)
    if budget is not None:
        meet(model, photos, budget)
    small = make(model)
    result: dict[str, Any] = {"out": str(out), **likeness(model, small, photos)}
    if data is not None:
        with progress_bar() as bar:
            task = bar.add_task("evaluating", total=None)
            images = evaluation_images(model, data, limit)
            for name, which in (("float", model), ("int8", small)):
                batches = loader(images, batch)
                result[name] = evaluate(which, batches, progress=lambda n: bar.advance(task, n))
        columns = ["top1", "top5", "gmacs", "images_per_s"]
        lines = [[name, *[result[name][c] for c in columns]] for name in ("float", "int8")]
        show_table(f"{checkpoint} on {data}", ["name", *columns], lines)
        console.print(plain(images.told()), soft_wrap=True)
        result |= images.about()
    save(small, out)
    result |= {"bytes": weight_bytes(out), "bytes_float": weight_bytes(find(checkpoint))}
    if seconds:
        rows = result["speed"] = race(model, small, photos, seconds)
        show_table(f"{checkpoint} in int8 on this CPU", list(rows[0]), [list(row.values()) for row in rows])
    console.print(
        f"{plain(str(out))}: {result['bytes'] / 1e6:.1f} MB (was {result['bytes_float'] / 1e6:.1f}); on the shipped "
        f"photographs {result['same_answers']:.0%} of answers and {result['same_depths']:.1%} of depths are as before"
    )
    finish(result)


def predict(
    checkpoint: Checkpoint,
    data: Data,
    out: Annotated[Path, typer.Option(help="The parquet file to write.")],
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    workers: Annotated[int | None, typer.Option(help="Processes that load images; by itself one per core.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N images.")] = None,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Classify millions of images into one parquet file. A killed run goes on where it was: same command."""
    import os

    from ..core import processes as ranks
    from ..evaluate.predict import predict as run

    world, rank, local = ranks.started(), int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    place = device_for(device)
    if place == "cuda" and world > 1:
        place = f"cuda:{local}"
    loading = workers if workers is not None else max((os.cpu_count() or 1) // world, 1)
    with progress_bar(rank == 0) as bar:
        task = bar.add_task("predicting", total=None)
        result = run(
            str(checkpoint),
            data,
            out,
            batch=batch,
            workers=loading,
            device=place,
            dtype=dtype,
            rank=rank,
            world=world,
            limit=limit,
            progress=lambda part, rows: bar.advance(task, rows),
        )
    if rank == 0:
        failed = f"; {result['failed']} could not be read, see {result['errors']}" if result["failed"] else ""
        right = f"; top-1 {result['top1']} of {result['labelled']} labelled" if "top1" in result else ""
        console.print(plain(f"{result['rows']} predictions in {out}{right}{failed}"), soft_wrap=True)
        if why := result.get("why"):
            console.print(plain(f"Their labels are left out: {why}"), soft_wrap=True)
        finish(result)


def serve(
    checkpoint: Annotated[
        list[str] | None, typer.Argument(help="Checkpoints to serve, the first by default; by itself the demo's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for the whole network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8000,
    device: Device = None,
    dtype: Dtype = "fp32",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name it is reached under, as behind a proxy; again for each, * for any."),
    ] = None,
) -> None:
    """A web page that shows where the compute goes, and an API. $DWINDLE_TOKEN: a bearer token to ask for."""
    from ..serve.run import serve as run

    def say(text: str) -> None:
        console.print(plain(text))

    run(checkpoint or [], host, port, device_for(device), dtype, say, finish, allow_host or [])
