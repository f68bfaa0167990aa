"""The commands of AdaPerceivers: parse, call, print a table and one line of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ...core.method import require
from ...core.model import Output
from ...errors import DwindleError
from ...io.datasets import limit as first
from ...io.images import load_image, preprocess_of
from ...io.opening import open_data
from ...io.scenes import pixels, squeezed
from ...runtime.dtypes import DTYPES, converted
from ...show.drawing import file_stems
from ...show.running import evaluated, finish_evaluation, images_of
from ...show.terminal import (
    Batch,
    BatchSizes,
    Checkpoint,
    Data,
    Device,
    Dtype,
    FigureFolder,
    Holdout,
    ImageFiles,
    Limit,
    Seconds,
    SkipCorrupt,
    Workers,
    at_least,
    check_loading,
    device_and_dtype,
    device_for,
    finish,
    numbers,
    only_for,
    progress_bar,
    show_rows,
    show_table,
)
from ...tasks.base import task_of
from .commands import grid, load_network, policies
from .dense import map_task, predict
from .family import PRESET, AdaPerceivers
from .figures import certainty, class_name, maps
from .grid import exit_latencies, latencies
from .model import AdaPerceiver
from .policy_network import load_policy
from .settings import check

__all__ = ["bench", "evaluate", "grid", "policies", "view"]

LONGEST_SIDE = 1024  # pixels of a drawn map's longer side
TIMED_IMAGES = 64  # the least number of images that early exit is timed on, as images leave at different depths


def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    tokens: Annotated[int | None, typer.Option(help="How many; all by default.")] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Of its FFNs.")] = None,
    exit: Annotated[float | None, typer.Option(help="Images leave at this confidence, in (0, 1].")] = None,
    exits: Annotated[str | None, typer.Option(help="With --exit: after these blocks only, such as 5,7,9.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Tokens and depth as this file of dwindle policies chooses.")
    ] = None,
    batch: Batch = 64,
    limit: Limit = None,
    workers: Workers = 2,
    holdout: Holdout = None,
    skip_corrupt: SkipCorrupt = False,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """At one setting (the largest by default) or as a learned policy chooses; with images that leave where their
    confidence reaches `exit`."""
    check_loading(batch, limit, holdout)
    for name, value in (("tokens", tokens), ("depth", depth)):
        require(policy is None or value is None, f"--{name} {value}", "--policy chooses it, so leave it out")
    setting = {"tokens": tokens, "depth": depth, "width": width}
    model = converted(load_network(checkpoint, dense=True), dtype, device_for(device))
    task = map_task(model, checkpoint) if model.outputs == "dense" else task_of(model, checkpoint)
    if model.outputs == "dense":
        only_for("networks that classify", policy=policy, exit=exit, exits=exits)
    exit_depths = numbers("--exits", exits, int) if exits else None

    def answer(fast: Any, images: Tensor) -> Output:
        return fast(images, exit=exit, exits=exit_depths, **setting)

    if policy is not None:
        chooser = load_policy(model, policy)

        def answer(fast: Any, images: Tensor) -> Output:
            patches = fast.embed(images)
            chosen = chooser.to(images.device, images.dtype).choose(patches)
            return fast(images, *chosen, setting["width"], exit, exit_depths, patches)

    images = images_of(task, model, data, limit, holdout, skip_corrupt)
    result = evaluated(model, images, batch, workers, device, ask=answer, task=task)
    if result is None:
        return
    if policy is not None:
        result["gmacs"] = round(result["gmacs"] + chooser.macs / 1e9, 4)
    chosen = setting | {"exit": exit, "exits": exit_depths, "policy": policy and str(policy)}
    named = {name: value for name, value in chosen.items() if value is not None}
    finish_evaluation(f"{checkpoint} on {data} {named or '(largest setting)'}", result, images, **named)


def bench(
    model: Annotated[str, typer.Argument(help="adaperceiver_paper, _small or _tiny (untrained), or a checkpoint.")],
    batch: BatchSizes = "1,8,32",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    seconds: Seconds = 4.0,
    data: Annotated[str | None, typer.Option(help="Real images, of which some leave early.")] = None,
    exit: Annotated[
        str | None, typer.Option(help="With --data: confidences at which images leave, such as 0.9,0.8.")
    ] = None,
    exits: Annotated[
        str | None, typer.Option(help="With --exit: also leaving after these blocks only, such as 5,7,9.")
    ] = None,
    device: Device = None,
) -> None:
    """The largest setting against half its tokens, half its depth, both, and its least width; turn about. With `exit`
    against early exit on images of `data`."""
    place = device_and_dtype(device, dtype)
    at_least(seconds=(seconds, 0))
    batches, untrained = numbers("--batch", batch, int), model in AdaPerceivers().untrained()
    network = AdaPerceiver.preset(model.removeprefix(PRESET)) if untrained else load_network(model, dense=True)
    if exit is not None and data is not None:
        return _bench_exit(network, model, batches, dtype, seconds, place, data, exit, exits)
    if data is not None or exit is not None or exits is not None:
        raise DwindleError(
            "An AdaPerceiver is timed at several settings, or with images that leave early: give --exit, the "
            "confidence at which they do, and --data, real ones, both or none of them."
        )
    _bench_settings(network, model, batches, dtype, seconds, place)


def _bench_settings(
    model: AdaPerceiver, name: str, batches: Sequence[int], dtype: str, seconds: float, place: str
) -> None:
    """Time the largest setting and smaller ones."""
    tokens, depth, width = model.tokens[-1], model.depth, model.width
    fewer, shallower = max(1, tokens // 2), max(1, depth // 2)
    settings = [(tokens, depth, width), (fewer, depth, width), (tokens, shallower, width)]
    settings += [(fewer, shallower, width), (tokens, depth, model.widths[0])]
    settings = list(dict.fromkeys(settings))
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches))
        for batch in batches:
            timed = latencies(model, settings, batch, place, DTYPES[dtype], seconds * len(settings))
            rows += [{"batch": batch, **row} for row in timed]
            bar.advance(task)
    columns = ["batch", "tokens", "depth", "width", "gmacs", "ms", "speedup"]
    show_rows(f"{name} on {place}, {dtype}", columns, rows)
    finish({"model": name, "device": place, "dtype": dtype, "rows": rows})


def _bench_exit(
    model: AdaPerceiver,
    name: str,
    batches: Sequence[int],
    dtype: str,
    seconds: float,
    place: str,
    data: str,
    exit: str,
    exits: str | None,
) -> None:
    """Time early exit against the whole network, on the same images for every batch size and confidence."""
    exit_depths = numbers("--exits", exits, int) if exits else None
    depth_sets = (None, exit_depths) if exit_depths else (None,)
    conditions = [(tau, depths) for tau in numbers("--exit", exit, float) for depths in depth_sets]
    photos = first(open_data(data, "test"), max(TIMED_IMAGES, *batches), seed=0)
    prepare = preprocess_of(model).eval_transform()
    images = torch.stack([prepare(photos.image(i)) for i in range(len(photos))])
    for tau, depths in conditions:
        check(model, images, tau, depths)
    rows, seconds = [], seconds * (1 + len(conditions))
    with progress_bar() as bar:
        task = bar.add_task("timing", total=len(batches))
        for batch in batches:
            timed = exit_latencies(model, images, conditions, batch, place, DTYPES[dtype], seconds)
            rows += [{"batch": batch, **row} for row in timed]
            bar.advance(task)
    columns = ["batch", "exit", "exits", "gmacs", "promised", "ms", "speedup"]
    lines = [[_shown(row[column]) for column in columns] for row in rows]
    show_table(f"{name} on {place}, {dtype}: early exit on {len(images)} images of {data}", columns, lines)
    finish({"model": name, "device": place, "dtype": dtype, "data": data, "images": len(images), "rows": rows})


def _shown(value: Any) -> Any:
    """A cell of a table: '' for None, a list separated by commas."""
    return "" if value is None else ",".join(map(str, value)) if isinstance(value, list) else value


def view(
    checkpoint: Checkpoint,
    images: ImageFiles,
    out: FigureFolder = Path("dwindle-view"),
    device: Device = None,
) -> None:
    """For each image, how sure the network is of its answer at every depth and number of tokens."""
    if out.is_file():
        raise DwindleError(f"{out} is a file; --out is a folder for the figures.")
    model, place = load_network(checkpoint, dense=True), device_for(device)
    prepare, names = preprocess_of(model), model.extra.get("classes")
    task = map_task(model, checkpoint).name if model.outputs == "dense" else None
    model.eval().to(place)
    photos = [load_image(path) for path in images]
    out.mkdir(parents=True, exist_ok=True)
    if task is not None:
        return _view_dense(model, task, list(zip(images, photos)), out, place, checkpoint)
    rows: list[dict[str, Any]] = []
    figures = []
    for path, photo, stem in zip(images, photos, file_stems([path.stem for path in images])):
        p = model.every(prepare.eval_transform()(photo)[None].to(place))[:, :, 0].softmax(-1)  # (L, G, classes)
        confidence, best = p[-1, -1].max(-1).values.item(), int(p[-1, -1].argmax(-1))
        label = names[best] if names and best < len(names) else best
        sure = p[..., best].cpu()
        agreeing = int((p[:, -1].argmax(-1) == best).long().flip(0).cumprod(0).sum())  # last blocks that give `best`
        rows.append(
            {
                "image": path.name,
                "label": label,
                "confidence": round(confidence, 4),
                "depth": model.depth - agreeing + 1,  # from this block on the answer is the final one
                "gmacs": round(model.static_macs() / 1e9, 3),
            }
        )
        title = f"{label} ({confidence:.0%}), from block {rows[-1]['depth']} of {model.depth} on"
        figures.append(certainty(model, prepare.seen(photo), sure, out / f"{stem}.png", title))
    show_rows(checkpoint, ["image", "label", "confidence", "depth", "gmacs"], rows)
    finish({"images": rows, "figures": [str(figure) for figure in figures]})


def _view_dense(
    model: AdaPerceiver, task: str, photos: Sequence[tuple[Path, Any]], out: Path, place: str, checkpoint: str
) -> None:
    """Draw each photograph's maps for at most about four of the trained numbers of tokens."""
    rows: list[dict[str, Any]] = []
    figures = []
    counts, names = model.tokens[:: -(-len(model.tokens) // 4)], model.extra.get("classes")
    counts = (*[t for t in counts if t != model.tokens[-1]], model.tokens[-1])
    for (path, photo), stem in zip(photos, file_stems([path.stem for path, _ in photos])):
        x = squeezed(pixels(photo), model.image, preprocess_of(model))[None].to(place)
        size = tuple(max(1, round(side * min(1.0, LONGEST_SIDE / max(photo.size)))) for side in photo.size[::-1])
        drawn = {f"{t} tokens": predict(model, x, task, size, tokens=t)[0].cpu() for t in counts}
        last = drawn[f"{counts[-1]} tokens"]
        row: dict[str, Any] = {"image": path.name}
        if task == "segmentation":
            shares = last.flatten().bincount().double() / last.numel()
            most = shares.argsort(descending=True)[:3].tolist()
            row["classes"] = {class_name(names, c): round(float(shares[c]), 3) for c in most if shares[c]}
        else:
            row |= {"nearest_m": round(float(last.min()), 2), "farthest_m": round(float(last.max()), 2)}
        rows.append(row)
        title = f"{task.capitalize()} at the image's resolution, whatever the number of tokens"
        figures.append(maps(photo, {k: v.numpy() for k, v in drawn.items()}, task, names, out / f"{stem}.png", title))
    show_table(checkpoint, list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    finish({"images": rows, "figures": [str(figure) for figure in figures]})
