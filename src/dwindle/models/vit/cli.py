"""The commands of vision transformers: parse, call, print a table and one line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.method import require
from ...core.model import LAYOUTS, AdaptiveViT
from ...errors import unknown
from ...evaluate.analysis import operating_points
from ...evaluate.bench import INT8, model_to_bench, race, some_photos
from ...evaluate.bench import bench as time_model
from ...evaluate.evaluate import calibrate_or_refuse, set_operating_point
from ...evaluate.evaluate import evaluate as measure
from ...evaluate.predict import predict as predict_all
from ...io.batches import loader
from ...io.checkpoint import find, load_as, save
from ...io.sets import evaluation_images
from ...runtime.dtypes import DTYPES, converted
from ...runtime.export import check_images
from ...runtime.export import export as write_graph
from ...runtime.int8 import likeness, weight_bytes
from ...runtime.int8 import quantize as to_int8
from ...show.demo import classify_and_draw
from ...show.report import report as write_report
from ...show.running import evaluated, finish_evaluation, images_of
from ...show.terminal import (
    Batch,
    BatchSizes,
    Checkpoint,
    Data,
    Device,
    Dtype,
    FigureFolder,
    Fractions,
    Holdout,
    ImageFiles,
    Layout,
    Limit,
    OptionalData,
    PerCore,
    ProcessShare,
    Seconds,
    SkipCorrupt,
    Threshold,
    Workers,
    at_least,
    check_loading,
    console,
    device_and_dtype,
    device_for,
    finish,
    numbers,
    plain,
    progress_bar,
    show_rows,
    show_table,
    ticking,
    unread,
)
from ...tasks.base import task_of
from ...tasks.classify import load_classifier

Budget = Annotated[
    float | None, typer.Option(help="Turn the model to this share of the static cost first (on the shipped photos).")
]


def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    layout: Layout = "packed",
    threshold: Threshold = None,
    batch: Batch = 64,
    limit: Limit = None,
    workers: Workers = 2,
    holdout: Holdout = None,
    skip_corrupt: SkipCorrupt = False,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Evaluate the model and print its accuracy, cost and speed."""
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    check_loading(batch, limit, holdout)
    model = converted(load_as(AdaptiveViT, checkpoint), dtype, device_for(device))
    if threshold is not None:
        _turn_threshold(model, threshold)
    task = task_of(model, checkpoint)
    images = images_of(task, model, data, limit, holdout, skip_corrupt)
    result = evaluated(model, images, batch, workers, device, layout=layout, task=task)
    if result is not None:
        finish_evaluation(f"{checkpoint} on {data} ({layout})", result, images)


def _turn_threshold(model: Any, threshold: float) -> None:
    """Set the method's halting threshold to the value of --threshold."""
    option, method = f"--threshold {threshold}", type(model.method).__name__
    require(threshold > 0, option, "a token halts when its scores reach it, so it must be above 0")
    ranges = {name: sorted(ends) for name, *ends in operating_points(model)}
    require("threshold" in ranges, option, f"{method} has no threshold to turn, so leave it out")
    low, high = ranges["threshold"]
    # A threshold for sums of scores has no upper bound: above the number of blocks nothing halts, which is allowed.
    for_sums = high == model.backbone.shape.blocks
    require(for_sums or threshold <= high, option, f"{method}'s lies between {low:g} and {high:g}")
    set_operating_point(model, threshold, "threshold")


def bench(
    model: Annotated[str, typer.Argument(help="A timm model name (random weights, AHT), or a checkpoint.")],
    batch: BatchSizes = "1,8,32",
    fraction: Fractions = "1.0,0.67,0.52",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; int8 on a CPU.")] = "fp32",
    seconds: Seconds = 4.0,
    static: Annotated[
        str | None,
        typer.Option(help="Of static: eager, compile; on a GPU graph; on a CPU onnxruntime, openvino."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Real images, on which a checkpoint decides by itself; no --fraction then."),
    ] = None,
    device: Device = None,
) -> None:
    """Time the static model against the adaptive one."""
    place = device_and_dtype(device, dtype, [*DTYPES, INT8])
    at_least(seconds=(seconds, 0))
    batches, fractions = numbers("--batch", batch, int), numbers("--fraction", fraction, float)
    adapted = model_to_bench(model)
    on_cpu = ("eager", "onnxruntime", "openvino", "compile")
    known = ("eager", "graph", "compile") if place.startswith("cuda") else on_cpu
    variants = None if static is None else tuple(static.split(","))
    for variant in variants or ():
        if variant not in known:
            raise unknown(f"static variant on {place}", variant, known)
    photos = None if data is None else some_photos(adapted, data, max(batches))
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches) * (len(fractions) if photos is None else 1))
        result = time_model(
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
    """The static model's milliseconds; of several variants those of the fastest, with its name."""
    static_ms = row["static_ms"]
    return f"{static_ms[row['best']]} ({row['best']})" if isinstance(static_ms, dict) else static_ms


def view(
    checkpoint: Checkpoint,
    images: ImageFiles,
    out: FigureFolder = Path("dwindle-view"),
    threshold: Threshold = None,
    device: Device = None,
) -> None:
    """Draw how deep each patch of the images was computed."""
    model = load_classifier(checkpoint)
    if threshold is not None:
        _turn_threshold(model, threshold)
    result = classify_and_draw(model, images, out, device_for(device))
    show_rows(checkpoint, ["image", "label", "confidence", "depth", "gmacs"], result["images"])
    finish(result)


def report(
    run: Annotated[str, typer.Argument(help="A run folder, a checkpoint, a shipped name, or a Hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for index.html and its figures.")] = Path("dwindle-report"),
    data: Annotated[
        str | None, typer.Option(help="Images to look at; by itself what the run was evaluated on.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Other runs to lay beside it, such as the static one. Repeatable.")
    ] = None,
    limit: Limit = None,
    batch: Batch = 64,
    device: Device = None,
) -> None:
    """Write the page, and print its headline numbers."""
    with progress_bar() as bar:
        result = write_report(
            run,
            out,
            data=data,
            compare_with=against,
            limit=limit,
            device=device_for(device),
            batch=batch,
            progress=ticking(bar),
        )
    headline = f"top-1 {result['top1']}, {result['gmacs']} of {result['gmacs_static']} GMACs"
    console.print(f"{plain(result['page'])}: {headline}")
    finish(result)


def export(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option(help="onnx, torch-export or aoti (compiled by AOTInductor for this CPU).")],
    out: Annotated[Path, typer.Option(help="The file to write: .onnx or .pt2.")],
    budget: Budget = None,
    seconds: Annotated[float, typer.Option(help="Time against the static model exported alike; 0: not.")] = 0.0,
) -> None:
    """Write the graph, and print how far its outputs differ from the model's."""
    at_least(seconds=(seconds, 0))
    model = load_as(AdaptiveViT, checkpoint)
    if budget is not None:
        calibrate_or_refuse(model, check_images(model), budget)
    result = write_graph(model, to, out, seconds=seconds)
    if rows := result.get("speed"):
        columns = ["batch", "cost", "static_ms", "adaptive_ms", "speedup", "threads"]
        show_rows(f"{checkpoint} as {to} on this CPU", columns, rows)
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
    batch: Batch = 64,
    seconds: Annotated[float, typer.Option(help="Time against float and against static; 0: not.")] = 0.0,
) -> None:
    """Write the int8 checkpoint, and print how far its outputs differ from the model's."""
    require(batch >= 1, f"--batch {batch}", "it must be at least 1")
    require(limit is None or limit >= 1, f"--limit {limit}", "it must be at least 1")
    at_least(seconds=(seconds, 0))
    require(not out.is_file(), f"--out {out}", "a checkpoint is a folder and this is a file")
    model = load_as(AdaptiveViT, checkpoint)
    photos = check_images(model)
    if budget is not None:
        calibrate_or_refuse(model, photos, budget)
    quantized = to_int8(model)
    result: dict[str, Any] = {"out": str(out), **likeness(model, quantized, photos)}
    if data is not None:
        with progress_bar() as bar:
            task = bar.add_task("evaluating", total=None)
            images = evaluation_images(model, data, limit)
            for name, variant in (("float", model), ("int8", quantized)):
                batches = loader(images, batch)
                result[name] = measure(variant, batches, progress=lambda n: bar.advance(task, n))
        rows = [{"name": name, **result[name]} for name in ("float", "int8")]
        show_rows(f"{checkpoint} on {data}", ["name", "top1", "top5", "gmacs", "images_per_s"], rows)
        console.print(plain(images.summary()), soft_wrap=True)
        result |= images.about()
    save(quantized, out)
    result |= {"bytes": weight_bytes(out), "bytes_float": weight_bytes(find(checkpoint))}
    if seconds:
        rows = result["speed"] = race(model, quantized, photos, seconds)
        show_rows(f"{checkpoint} in int8 on this CPU", list(rows[0]), rows)
    console.print(
        f"{plain(str(out))}: {result['bytes'] / 1e6:.1f} MB (was {result['bytes_float'] / 1e6:.1f}); on the shipped "
        f"photographs {result['same_answers']:.0%} of answers and {result['same_depths']:.1%} of depths are as before"
    )
    finish(result)


def predict(
    checkpoint: Checkpoint,
    data: Data,
    out: Annotated[Path, typer.Option(help="The parquet file to write.")],
    batch: Batch = 64,
    workers: PerCore = None,
    limit: Limit = None,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Classify all images into one parquet file. Under torchrun each process takes its share."""
    share = ProcessShare(workers, device)
    with progress_bar(share.rank == 0) as bar:
        task = bar.add_task("predicting", total=None)
        result = predict_all(
            str(checkpoint),
            data,
            out,
            batch=batch,
            workers=share.workers,
            device=share.place,
            dtype=dtype,
            rank=share.rank,
            world=share.world,
            limit=limit,
            progress=lambda part, rows: bar.advance(task, rows),
        )
    if share.rank == 0:
        right = f"; top-1 {result['top1']} of {result['labelled']} labelled" if "top1" in result else ""
        console.print(plain(f"{result['rows']} predictions in {out}{right}{unread(result)}"), soft_wrap=True)
        if reason := result.get("why"):
            console.print(plain(f"Their labels are left out: {reason}"), soft_wrap=True)
        finish(result)
