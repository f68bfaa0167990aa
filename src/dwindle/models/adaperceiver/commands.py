"""`dwindle grid` and `dwindle policies`: an AdaPerceiver at every setting, and under every policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import DwindleError
from ...files import check_folder, write_text
from ...io.checkpoint import load_as
from ...io.datasets import limit as first
from ...io.images import preprocess_of
from ...io.opening import open_data
from ...io.sets import evaluation_images, splits_for
from ...runtime.dtypes import DTYPES, check_runs
from ...show.terminal import (
    Batch,
    Checkpoint,
    Data,
    Device,
    Limit,
    aside,
    at_least,
    device_for,
    finish,
    numbers,
    plain,
    progress_bar,
    show_table,
)
from . import figures
from . import grid as measured
from . import policies as rules
from .images import served
from .model import AdaPerceiver
from .policy_network import save_policy
from .settings import check_exits


def load_network(checkpoint: str, dense: bool = False) -> AdaPerceiver:
    """The AdaPerceiver of a checkpoint. dense: take also one that answers for each patch."""
    model = load_as(AdaPerceiver, checkpoint)
    if not (dense or model.outputs == "class"):
        raise DwindleError(f"{checkpoint} is no AdaPerceiver that classifies; train one (dwindle train ada_cifar100).")
    return model


def _components(model: Any, checkpoint: str, data: str, out: Path, count: int, place: str) -> None:
    """Draw Fig. 15-17 for the first images of a data set."""
    images = first(open_data(data, "test"), count)
    prepare = preprocess_of(model).eval_transform()
    model.eval().to(place)
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for i in range(len(images)):
        made.append(out / f"components_{i}.png")
        figures.components(model, prepare(images.image(i))[None].to(place), made[-1])
    finish({"checkpoint": checkpoint, "images": len(images), "figures": [str(path) for path in made]})


def grid(
    checkpoint: Checkpoint,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for grid.json and its figures.")] = Path("dwindle-grid"),
    between: Annotated[
        str | None, typer.Option(help="Token counts besides the trained ones, separated by commas: 8,24,48,192.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for measuring latencies.")] = 10.0,
    dtype: Annotated[str, typer.Option(help="Of the latencies: fp32, bf16 or fp16.")] = "fp32",
    batch: Batch = 128,
    limit: Limit = None,
    device: Device = None,
) -> None:
    """Every setting, measured."""
    place = device_for(device)
    check_runs(dtype, place)
    at_least(batch=(batch, 1), limit=(limit, 1), seconds=(seconds, 0))
    check_folder(out)
    model = load_network(checkpoint, dense=True)
    more = numbers("--between", between, int) if between else []
    model.check_tokens(more)
    if model.outputs == "dense":
        return _components(model, checkpoint, data, out, limit or 4, place)
    images = evaluation_images(model, data, limit)
    held = served(model, images, place)
    with progress_bar() as bar:
        task = bar.add_task("images", total=held.count)
        found = measured.grid(model, held(batch), device=place, progress=lambda n: bar.advance(task, n))
    rows = measured.rows(model, found)
    counts = sorted({*model.tokens, *more})
    along = measured.between(model, held(batch), counts, place) if more else []
    depths = sorted({max(1, round(model.depth * share / 4)) for share in range(1, 5)}, reverse=True)
    settings = [(t, d, model.width) for d in depths for t in reversed(model.tokens)]
    settings += [(model.tokens[-1], model.depth, w) for w in model.widths[:-1]]
    latency = measured.latencies(model, settings, batch, place, DTYPES[dtype], seconds)
    top1 = {(r["tokens"], r["depth"], r["width"]): r["top1"] for r in rows}
    latency = [r | {"top1": top1[r["tokens"], r["depth"], r["width"]]} for r in latency]
    result = {
        "checkpoint": checkpoint,
        **held.about,
        "falls": measured.falls(found),
        "lagging": measured.lagging(found),
        "rows": rows,
        "between": along,
        "latency": latency,
        "batch": batch,
        "dtype": dtype,
        "device": place,
    }
    write_text(out / "grid.json", json.dumps(result, indent=1) + "\n")
    _draw_grid(model, result, out)
    aside.print(plain(images.summary()), soft_wrap=True)
    _tell_grid(model, result, data)
    finish({k: v for k, v in result.items() if k != "rows"} | {"out": str(out)})


def _draw_grid(model: AdaPerceiver, result: dict[str, Any], out: Path) -> None:
    """Write the figures of `dwindle grid`."""
    figures.tradeoffs(result["rows"], out / "tradeoff.png")
    full_width = [row for row in result["latency"] if row["width"] == model.width]
    where = f"batch {result['batch']}, {result['dtype']}, {result['device']}"
    figures.tradeoffs(full_width, out / "latency.png", "ms", where)
    if result["between"]:
        figures.interpolation(result["between"], out / "interpolation.png")


def _tell_grid(model: AdaPerceiver, result: dict[str, Any], data: str) -> None:
    """Print the tables of `dwindle grid`, and how to retrain read-outs that lag."""
    checkpoint, full = result["checkpoint"], [row for row in result["rows"] if row["width"] == model.width]
    columns = ["depth", *[f"t = {t}" for t in model.tokens]]
    lines = [[d, *[f"{r['top1']:.2f}" for r in full if r["depth"] == d]] for d in range(1, model.depth + 1)]
    show_table(f"{checkpoint} on {data}: top-1 at full width", columns, lines)
    columns = ["tokens", "depth", "width", "top1", "gmacs", "ms", "speedup"]
    title = f"latency, batch {result['batch']}, {result['dtype']} on {result['device']}"
    show_table(title, columns, [[row[c] for c in columns] for row in result["latency"]])
    lagging = result["lagging"]
    if lagging and len(model.readouts) > 1:
        reinit_from = {late: max(d for d in range(1, late) if d not in lagging) for late in lagging}
        aside.print(
            f"Answers after block {' and '.join(map(str, lagging))} are worse than after the block before, at every "
            "setting: the read-out may have learned badly. What trains it anew: "
            + plain(f'--set weights={checkpoint} --set freeze_backbone=true --set "reinit_from={reinit_from}"'),
            soft_wrap=True,
        )


def policies(
    checkpoint: Checkpoint,
    data: Data,
    thresholds: Annotated[str, typer.Option(help="Confidences at which images leave.")] = "0.8,0.9,0.95",
    prices: Annotated[
        str, typer.Option(help="lambda of Eq. 14: for each, a policy of either kind is learned.")
    ] = "0.01,0.03,0.1",
    exits: Annotated[
        str | None, typer.Option(help="Early exit also after these blocks only: 5,7,9. Each read-out costs something.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images for each learned policy; 0: none.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for the table and the learned policies.")] = None,
    batch: Batch = 128,
    limit: Limit = None,
    device: Device = None,
) -> None:
    """Every policy, measured."""
    at_least(batch=(batch, 1), limit=(limit, 1), epochs=(epochs, 0))
    if out is not None:
        check_folder(out)
    model, place = load_network(checkpoint), device_for(device)
    taus, lambdas = numbers("--thresholds", thresholds, float), numbers("--prices", prices, float)
    exit_depths = numbers("--exits", exits, int) if exits else None
    if exit_depths:
        check_exits(model, exit_depths)
    if max(taus) > 1:
        raise DwindleError(f"--thresholds {thresholds}: they are confidences, in (0, 1].")
    learns = epochs > 0 and lambdas
    others, judging = splits_for(model, data)
    if limit is not None:
        others, judging = first(others, limit), first(judging, limit)
    held = served(model, judging, place)
    training = served(model, others, place) if learns else held
    with progress_bar() as bar:
        tasks = {"every setting": bar.add_task("every setting", total=held.count)}
        if learns:
            tasks["learned policies"] = bar.add_task("learned policies", total=epochs * training.count)
        rows, made = rules.evaluate_policies(
            model,
            lambda: held(batch),
            lambda epoch: training(batch, epoch),
            taus,
            lambdas,
            epochs,
            exit_depths=exit_depths,
            device=place,
            progress=lambda what, images: bar.advance(tasks[what], images),
        )
    aside.print(plain(judging.summary()), soft_wrap=True)
    show_table(f"{checkpoint} on {data}", rules.COLUMNS, [[row[c] for c in rules.COLUMNS] for row in rows])
    if out is not None:
        write_text(out / "policies.json", json.dumps(rows, indent=1) + "\n")
        for one in made:
            save_policy(one.policy, out / one.file)
    finish({"checkpoint": checkpoint, **held.about, "rows": rows})
