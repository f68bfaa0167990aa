"""The commands for encoders, whose features count: how true they stay, and what that costs. No labels are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..evaluate.calibration import CERTAINTY, Wish, keep_promise
from ..evaluate.embed import embed as embed_all
from ..evaluate.evaluate import meet
from ..evaluate.fidelity import agreement, static_twin
from ..evaluate.readers import compared_images, halves, tensors, unlabelled
from ..evaluate.speedup import BUDGETS
from ..evaluate.speedup import speedup as look_for
from ..files import check_folder
from ..io.card import write_card
from ..io.checkpoint import is_checkpoint, save
from ..io.encoders import adapted_encoder
from ..io.images import preprocess_of
from ..io.promise import told
from ..runtime.dtypes import check_runs, converted, dtype_of
from ..runtime.export import check_images
from ..show.drawing import save_figure
from ..show.frontier import frontier
from ..show.running import resumes, run_through
from ..show.terminal import (
    Batch,
    Device,
    Dtype,
    Limit,
    PerCore,
    Seconds,
    Share,
    Workers,
    aside,
    at_least,
    check_loading,
    console,
    device_for,
    finish,
    numbers,
    percent,
    plain,
    progress_bar,
    show_table,
    tell_images,
    ticking,
)
from ..train.fit import epochs_in, fit_recipe, fitted, with_epochs
from ..train.loop import Run

COMPARED = 64
SHOWN = ("name", "cost", "patch_cosine", "class_cosine", "neighbours", "top1", "drop", "ms", "speedup", "kept")
Encoder = Annotated[str, typer.Argument(help="A timm name, a folder of Hugging Face's or a checkpoint.")]
Photos = Annotated[str, typer.Option("--data", help="A folder of images, with or without classes; or what eval takes.")]
Weights = Annotated[
    str | None, typer.Option(help="Of a timm name: a .safetensors or .pth file, or a folder; by itself timm's own.")
]
ImageSize = Annotated[int | None, typer.Option(help="Of a timm name: the side of its images; by itself its own.")]
MethodName = Annotated[str | None, typer.Option(help="Of a plain model: one that needs no training, such as ToMe.")]
Budget = Annotated[float | None, typer.Option(help="The share of the static cost; of a plain model by itself 0.5.")]
PatchCosine = Annotated[
    float | None, typer.Option(help="Promise: the mean cosine of an image's patches to the static model's is this.")
]
ClassCosine = Annotated[
    float | None, typer.Option(help="Promise: the cosine of the class token (or pooled embedding) is this.")
]


def opened(
    source: str,
    weights: str | None,
    image_size: int | None,
    method: str | None,
    budget: float | None,
    dtype: str,
    device: str,
    plain_ones: str = "ToMe.for_features",
) -> AdaptiveViT:
    """The model that a command names, on its device; adapted by `method`, by itself `plain_ones`, if it was not."""
    model, fresh = adapted_encoder(source, weights, image_size, method, budget, plain_ones)
    if not fresh and budget is not None:
        meet(model, check_images(model), budget)
    return converted(model, dtype, device).to(device).eval()


def fidelity(
    model: Encoder,
    data: Photos,
    patch_cosine: PatchCosine = None,
    class_cosine: ClassCosine = None,
    confidence: Annotated[float, typer.Option(help="Share of images that shall keep the promise.")] = 0.95,
    certainty: Annotated[
        float, typer.Option(help="Of the calibration: over draws of its images, how often the promise must be true.")
    ] = CERTAINTY,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the model, turned to the setting that keeps the promise.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="The model to agree with, as MODEL; by itself the same weights with nothing halted."),
    ] = None,
    weights: Weights = None,
    image_size: ImageSize = None,
    method: MethodName = None,
    budget: Budget = None,
    batch: Batch = 16,
    limit: Limit = None,
    workers: Workers = 0,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Agreement with the static model, and a promise of it."""
    check_loading(batch, limit)
    place = device_for(device)
    check_runs(dtype, place)
    wish = None
    if patch_cosine is not None or class_cosine is not None:
        wish = Wish(patch_cosine, class_cosine, confidence, certainty)
    elif out is not None:
        raise DwindleError(f"--out {out}: only a promise is saved; give --patch-cosine or --class-cosine as well.")
    # Of a checkpoint there are none to give, so they are those of the model to agree with.
    of_the_other = (weights, image_size) if against is not None and is_checkpoint(model) else (None, None)
    own = (None, None) if any(of_the_other) else (weights, image_size)
    adapted = opened(model, *own, method, budget, dtype, place)
    static = _static(adapted, model, against, of_the_other, dtype, place)
    images = unlabelled(adapted, data, limit)
    promise, rest = None, images
    result: dict[str, Any] = {}
    with progress_bar() as bar:
        if wish is not None:
            calibrating, rest = halves(images)
            task = bar.add_task("calibrating", total=None)
            promise, tested = keep_promise(
                adapted,
                tensors(calibrating, batch, workers),
                wish,
                static=static,
                progress=lambda point: bar.advance(task),
            )
            result["tested"] = [
                {"setting": round(p.setting, 6), "cost": round(p.cost, 4), "below": p.below} for p in tested
            ]
        task = bar.add_task("comparing", total=len(rest))
        found = agreement(
            adapted,
            tensors(rest, batch, workers),
            static,
            count=len(rest),
            device=place,
            progress=lambda n: bar.advance(task, n),
        )
    summary = found.summary()
    show_agreement(f"{model} on {data}", summary)
    tell_images(rest)
    if promise is not None and wish is not None:
        kept = float(wish.kept(found.class_cosine, found.patch_cosine).float().mean())
        promise["held_out"] = {"images": len(found.cost), "kept": round(kept, 4)} | summary
        console.print(
            plain(f"Promise: {told(promise)}; of {len(found.cost)} held-out images {kept:.4g} keep it."), soft_wrap=True
        )
        result["promise"] = promise
        if out is not None:
            extra = {"preprocess": preprocess_of(adapted).to_dict(), "promise": promise}
            save(adapted.float().cpu(), out, extra=extra)
            write_card(out)
            result["out"] = str(out)
    finish(summary | result | rest.about())


def embed(
    model: Encoder,
    data: Photos,
    out: Annotated[Path, typer.Option(help="The parquet file to write.")],
    patches: Annotated[bool, typer.Option("--patches", help="Patch features too, in float16.")] = False,
    weights: Weights = None,
    image_size: ImageSize = None,
    method: MethodName = None,
    budget: Budget = None,
    batch: Batch = 64,
    workers: PerCore = None,
    limit: Limit = None,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """Under torchrun each process takes its share."""
    share = Share(workers, device)
    check_runs(dtype, share.place)
    adapted = opened(model, weights, image_size, method, budget, dtype, share.place)
    with progress_bar(share.rank == 0) as bar:
        task = bar.add_task("embedding", total=None)
        result = embed_all(
            adapted,
            data,
            out,
            patches=patches,
            device=share.place,
            dtype=dtype,
            batch=batch,
            workers=share.workers,
            rank=share.rank,
            world=share.world,
            limit=limit,
            progress=lambda part, rows: bar.advance(task, rows),
        )
    if share.rank == 0:
        failed = f"; {result['failed']} could not be read, see {result['errors']}" if result["failed"] else ""
        console.print(plain(f"{result['rows']} embeddings of {result['width']} in {out}{failed}"), soft_wrap=True)
        if result["promise"] is not None:
            console.print(plain(f"Promise: {told(result['promise'])}."), soft_wrap=True)
        finish(result)


def speedup(
    model: Encoder,
    data: Photos,
    max_drop: Annotated[
        str | None, typer.Option(help="Points of accuracy that may go, 1%; without labels, of images' classes.")
    ] = None,
    patch_cosine: Annotated[float | None, typer.Option(help="Least mean cosine of patches to the static ones.")] = None,
    class_cosine: Annotated[float | None, typer.Option(help="The same of the class token or pooled embedding.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the winner's checkpoint, the table and the plot.")] = Path(
        "dwindle-speedup"
    ),
    budgets: Annotated[str, typer.Option(help="Shares of the static cost to try.")] = ",".join(map(str, BUDGETS)),
    batch: Annotated[int, typer.Option(help="Images of what is timed.")] = 1,
    limit: Annotated[int, typer.Option(help="Images to compare on, drawn at random.")] = COMPARED,
    seconds: Seconds = 10.0,
    weights: Weights = None,
    image_size: ImageSize = None,
    device: Device = None,
    dtype: Dtype = "fp32",
) -> None:
    """The frontier, and the winner."""
    check_loading(batch, limit)
    at_least(seconds=(seconds, 0))
    place = device_for(device)
    check_runs(dtype, place)
    check_folder(out)
    tried = numbers("--budgets", budgets, float)
    source = opened(model, weights, image_size, None, None, dtype, place, plain_ones="Static")
    images, labels, about = compared_images(source, data, limit)
    with progress_bar() as bar:
        result = look_for(
            source,
            images.to(dtype_of(source)),
            labels=labels,
            patch_cosine=patch_cosine,
            class_cosine=class_cosine,
            max_drop=None if max_drop is None else percent("--max-drop", max_drop),
            budgets=tried,
            batch=batch,
            seconds=seconds,
            progress=ticking(bar),
        )
    rows = [row.about for row in result.rows]
    columns = [name for name in SHOWN if any(name in row for row in rows)]
    lines = [[row.get(name, "") for name in columns] for row in rows]
    ways = ", ".join(f"{name} {ms:.1f} ms" for name, ms in result.static.items())
    show_table(f"{model} on {data}, batch {batch}; static: {ways}", columns, lines)
    for what, why in result.left_out.items():
        aside.print(plain(f"left out {what}: {why}"), soft_wrap=True)
    console.print(plain(result.said), soft_wrap=True)
    measured = "top1" if any("top1" in row for row in rows) else "patch_cosine"
    out.mkdir(parents=True, exist_ok=True)
    plot = save_figure(frontier(rows, measured, f"{model}: {result.said}"), out / "frontier.png")
    summary = result.about | {"plot": str(plot), "batch": batch, "dtype": dtype, "device": place, **about}
    if result.model is not None:
        extra = {"preprocess": preprocess_of(source).to_dict(), "speedup": summary}
        kept = getattr(source, "extra", {}) | extra
        save(result.model.float().cpu(), out, extra=kept)
        write_card(out)
        summary["out"] = str(out)
        console.print(plain(f"Saved in {out}: dwindle.load({str(out)!r})"), soft_wrap=True)
    finish(summary)


def fit(
    model: Encoder,
    data: Photos,
    budget: Annotated[float, typer.Option(help="The share of the static cost that the model may have.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="Folder for the checkpoint; by itself runs/fit.")] = None,
    method: Annotated[str, typer.Option(help="ToMe.for_features, TopK, AHT, ...: what says which tokens stop.")] = (
        "ToMe.for_features"
    ),
    learns: Annotated[
        str, typer.Option(help="return: what stopped tokens get back (and planners); small: norms too; all.")
    ] = "small",
    epochs: Annotated[int | None, typer.Option(help="Times through the images; by itself 10.")] = None,
    minutes: Annotated[float | None, typer.Option(help="In place of epochs: about so long.")] = None,
    eval_data: Annotated[str | None, typer.Option(help="Images to compare on; by itself a tenth is held out.")] = None,
    weights: Weights = None,
    image_size: ImageSize = None,
    batch: Annotated[int, typer.Option(help="Images of a step.")] = 32,
    set: Annotated[list[str] | None, typer.Option(help="Change a setting of the recipe. Repeatable.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped run was.")] = False,
    limit: Limit = None,
    device: Device = None,
) -> None:
    """Train, then compare with the static model."""
    place, folder = device_for(device), out or Path("runs") / "fit"
    if epochs is not None and minutes is not None:
        raise DwindleError(f"--epochs {epochs} and --minutes {minutes:g}: each sets how long it takes; give one.")
    given: dict[str, Any] = {"method": method, "learns": learns, "batch": batch, "settings": set or []}
    recipe = fit_recipe(model, budget, weights=weights, image_size=image_size, epochs=epochs or 10, **given)
    where: dict[str, Any] = {"eval_data": eval_data, "limit": limit}
    if minutes is not None:
        recipe = with_epochs(recipe, epochs_in(recipe, data, minutes, place, **where))
    run = Run(recipe, data, folder, device=place, resume=resumes(resume, folder), **where)
    if not run_through(run):
        return
    result = {"out": str(folder), "epochs": recipe.epochs, **fitted(run, batch)}
    show_agreement(f"{model} at {budget:g}, fitted on {data}", result)
    tell_images(run.task.eval_images)
    console.print(plain(f"Saved in {folder}: dwindle.load({str(folder)!r})"), soft_wrap=True)
    finish(result | run.task.about() | run.task.noticed())


def show_agreement(title: str, summary: dict[str, Any]) -> None:
    rows = [["patches", "patch"], ["class token or pooled", "class"]]
    lines = [[what, *(summary[f"{name}_{part}"] for part in ("cosine", "q05", "least"))] for what, name in rows]
    show_table(f"{title}: cosine to static", ["name", "mean", "5% quantile", "least image"], lines)
    told_of = {"cost": "cost", "neighbours": "% of nearest neighbours kept", "same_class": "% of classes kept"}
    console.print(plain(", ".join(f"{what} {summary[name]}" for name, what in told_of.items() if name in summary)))


def _static(
    model: AdaptiveViT, name: str, against: str | None, of_it: tuple[str | None, int | None], dtype: str, place: str
) -> AdaptiveViT | None:
    """What to agree with, nothing halted in it; None: the model's own weights. of_it: its weights and image size."""
    if against is not None:
        return static_twin(opened(against, *of_it, None, None, dtype, place))
    recipe = getattr(model, "extra", {}).get("recipe", {})
    if recipe.get("task") == "features" and not recipe.get("freeze_backbone"):
        raise DwindleError(
            f"{name} was fitted, so that its own weights are not those of the model whose features it has; name that "
            "one by --against, such as a timm name with --weights."
        )
    return None
