"""The commands for encoders: how close features stay to the static model's, and at what cost. Labels are not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from ..core.model import AdaptiveViT
from ..errors import DwindleError
from ..evaluate.calibration import CERTAINTY, FidelityGoal, keep_promise
from ..evaluate.embed import embed as embed_all
from ..evaluate.evaluate import calibrate_or_refuse
from ..evaluate.fidelity import Agreement, agreement, static_twin
from ..evaluate.readers import compared_images, halves, tensors, unlabelled
from ..evaluate.speedup import BUDGETS
from ..evaluate.speedup import speedup as find_speedup
from ..files import check_folder
from ..io.card import write_card
from ..io.checkpoint import is_checkpoint, save
from ..io.datasets import Images
from ..io.encoders import adapted_encoder
from ..io.images import preprocess_of
from ..io.promise import sentence
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
    ProcessShare,
    Seconds,
    Workers,
    aside,
    at_least,
    check_loading,
    console,
    device_and_dtype,
    device_for,
    finish,
    numbers,
    percent,
    plain,
    progress_bar,
    show_table,
    tell_images,
    ticking,
    unread,
)
from ..train.fit import epochs_in, fit_recipe, fitted, with_epochs
from ..train.loop import Run

COMPARED = 64  # images that speedup compares on by default
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
    default_method: str = "ToMe.for_features",
) -> AdaptiveViT:
    """The model that a command names, on its device. A plain one is adapted by `method`, or else `default_method`."""
    model, adapted_here = adapted_encoder(source, weights, image_size, method, budget, default_method)
    if not adapted_here and budget is not None:
        calibrate_or_refuse(model, check_images(model), budget)
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
    """Compare the features with the static model's; and find the cheapest setting that keeps a promise of it."""
    check_loading(batch, limit)
    place = device_and_dtype(device, dtype)
    has_goal = patch_cosine is not None or class_cosine is not None
    if out is not None and not has_goal:
        raise DwindleError(f"--out {out}: only a promise is saved; give --patch-cosine or --class-cosine as well.")
    goal = FidelityGoal(patch_cosine, class_cosine, confidence, certainty) if has_goal else None
    # A checkpoint has its own weights and image size, so that the options then describe the model of --against.
    of_static = (weights, image_size) if against is not None and is_checkpoint(model) else (None, None)
    own = (None, None) if any(of_static) else (weights, image_size)
    adapted = opened(model, *own, method, budget, dtype, place)
    static = _static(adapted, model, against, of_static, dtype, place)
    images = unlabelled(adapted, data, limit)
    promise = None
    result: dict[str, Any] = {}
    with progress_bar() as bar:
        if goal is not None:
            calibration, images = halves(images)
            promise, result["tested"] = _calibrated(adapted, calibration, goal, static, batch, workers, bar)
        found = _compared(adapted, images, static, batch, workers, bar)
    summary = found.summary()
    show_agreement(f"{model} on {data}", summary)
    tell_images(images)
    if promise is not None and goal is not None:
        result["promise"] = _held_out(promise, goal, found)
        if out is not None:
            _save(adapted, out, {"preprocess": preprocess_of(adapted).to_dict(), "promise": result["promise"]})
            result["out"] = str(out)
    finish(summary | result | images.about())


def _calibrated(
    model: AdaptiveViT,
    images: Images,
    goal: FidelityGoal,
    static: AdaptiveViT | None,
    batch: int,
    workers: int,
    bar: Progress,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Turn the model to the cheapest setting that keeps the goal. Returns the promise, and a row per setting tested."""
    task = bar.add_task("calibrating", total=None)
    batches = tensors(images, batch, workers)
    promise, tested = keep_promise(model, batches, goal, static=static, progress=lambda point: bar.advance(task))
    return promise, [{"setting": round(p.setting, 6), "cost": round(p.cost, 4), "below": p.below} for p in tested]


def _compared(
    model: AdaptiveViT, images: Images, static: AdaptiveViT | None, batch: int, workers: int, bar: Progress
) -> Agreement:
    """The agreement of the model's features with the static model's, on these images."""
    task = bar.add_task("comparing", total=len(images))
    return agreement(
        model,
        tensors(images, batch, workers),
        static,
        count=len(images),
        device=next(model.parameters()).device,
        progress=lambda n: bar.advance(task, n),
    )


def _held_out(promise: dict[str, Any], goal: FidelityGoal, found: Agreement) -> dict[str, Any]:
    """Print the promise and how often held-out images keep it; return it with that number."""
    images, kept = len(found.cost), float(goal.kept(found.class_cosine, found.patch_cosine).float().mean())
    console.print(
        plain(f"Promise: {sentence(promise)}; of {images} held-out images {kept:.4g} keep it."), soft_wrap=True
    )
    return promise | {"held_out": {"images": images, "kept": round(kept, 4)} | found.summary()}


def _save(model: AdaptiveViT, out: Path, extra: dict[str, Any]) -> None:
    """Write a checkpoint in fp32 with its card."""
    save(model.float().cpu(), out, extra=extra)
    write_card(out)


def _print_saved(out: Path) -> None:
    """Print where a checkpoint is, and the line of Python that loads it."""
    console.print(plain(f"Saved in {out}: dwindle.load({str(out)!r})"), soft_wrap=True)


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
    """Write the embeddings of all images into one parquet file. Under torchrun each process takes its share."""
    share = ProcessShare(workers, device)
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
        message = f"{result['rows']} embeddings of {result['width']} in {out}{unread(result)}"
        console.print(plain(message), soft_wrap=True)
        if result["promise"] is not None:
            console.print(plain(f"Promise: {sentence(result['promise'])}."), soft_wrap=True)
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
    """Time the model at several budgets, draw the frontier, and save the winner."""
    check_loading(batch, limit)
    at_least(seconds=(seconds, 0))
    place = device_and_dtype(device, dtype)
    check_folder(out)
    shares = numbers("--budgets", budgets, float)
    source = opened(model, weights, image_size, None, None, dtype, place, default_method="Static")
    images, labels, about = compared_images(source, data, limit)
    with progress_bar() as bar:
        result = find_speedup(
            source,
            images.to(dtype_of(source)),
            labels=labels,
            patch_cosine=patch_cosine,
            class_cosine=class_cosine,
            max_drop=None if max_drop is None else percent("--max-drop", max_drop),
            budgets=shares,
            batch=batch,
            seconds=seconds,
            progress=ticking(bar),
        )
    rows = [row.about for row in result.rows]
    columns = [name for name in SHOWN if any(name in row for row in rows)]
    lines = [[row.get(name, "") for name in columns] for row in rows]
    static = ", ".join(f"{name} {ms:.1f} ms" for name, ms in result.static.items())
    show_table(f"{model} on {data}, batch {batch}; static: {static}", columns, lines)
    for name, reason in result.left_out.items():
        aside.print(plain(f"left out {name}: {reason}"), soft_wrap=True)
    console.print(plain(result.message), soft_wrap=True)
    measured = "top1" if any("top1" in row for row in rows) else "patch_cosine"
    out.mkdir(parents=True, exist_ok=True)
    plot = save_figure(frontier(rows, measured, f"{model}: {result.message}"), out / "frontier.png")
    summary = result.about | {"plot": str(plot), "batch": batch, "dtype": dtype, "device": place, **about}
    if result.model is not None:
        extra = {"preprocess": preprocess_of(source).to_dict(), "speedup": summary}
        _save(result.model, out, getattr(source, "extra", {}) | extra)
        summary["out"] = str(out)
        _print_saved(out)
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
    """Train the model, then compare its features with the static model's."""
    place, folder = device_for(device), out or Path("runs") / "fit"
    if epochs is not None and minutes is not None:
        raise DwindleError(f"--epochs {epochs} and --minutes {minutes:g}: each sets how long it takes; give one.")
    options: dict[str, Any] = {"method": method, "learns": learns, "batch": batch, "settings": set or []}
    recipe = fit_recipe(model, budget, weights=weights, image_size=image_size, epochs=epochs or 10, **options)
    images: dict[str, Any] = {"eval_data": eval_data, "limit": limit}
    if minutes is not None:
        recipe = with_epochs(recipe, epochs_in(recipe, data, minutes, place, **images))
    run = Run(recipe, data, folder, device=place, resume=resumes(resume, folder), **images)
    if not run_through(run):
        return
    result = {"out": str(folder), "epochs": recipe.epochs, **fitted(run, batch)}
    show_agreement(f"{model} at {budget:g}, fitted on {data}", result)
    tell_images(run.task.eval_images)
    _print_saved(folder)
    finish(result | run.task.about() | run.task.extra_metrics())


def show_agreement(title: str, summary: dict[str, Any]) -> None:
    """Print how close features are to the static model's. summary: as `evaluate.fidelity` gives it."""
    rows = [["patches", "patch"], ["class token or pooled", "class"]]
    lines = [[label, *(summary[f"{name}_{part}"] for part in ("cosine", "q05", "least"))] for label, name in rows]
    show_table(f"{title}: cosine to static", ["name", "mean", "5% quantile", "least image"], lines)
    labels = {"cost": "cost", "neighbours": "% of nearest neighbours kept", "same_class": "% of classes kept"}
    console.print(plain(", ".join(f"{label} {summary[name]}" for name, label in labels.items() if name in summary)))


def _static(
    model: AdaptiveViT,
    name: str,
    against: str | None,
    opening: tuple[str | None, int | None],
    dtype: str,
    place: str,
) -> AdaptiveViT | None:
    """The static model to compare with; None stands for the model's own weights with nothing halted.

    against: the name of another model. opening: the weights and the image size it is opened with.
    """
    if against is not None:
        return static_twin(opened(against, *opening, None, None, dtype, place))
    recipe = getattr(model, "extra", {}).get("recipe", {})
    if recipe.get("task") == "features" and not recipe.get("freeze_backbone"):
        raise DwindleError(
            f"{name} was fitted, so that its own weights are not those of the model whose features it has; name that "
            "one by --against, such as a timm name with --weights."
        )
    return None
