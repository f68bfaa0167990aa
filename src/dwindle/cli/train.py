"""The commands that train: one recipe, several methods under the same conditions, or a search for settings."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import processes as ranks
from ..errors import DwindleError
from ..experiments.compare import Compare
from ..experiments.search import check_searchable, ranges, require_optuna
from ..experiments.search import search as run_search
from ..files import write_text
from ..recipes import build, find_comparison, find_recipe
from ..show.running import resumes, run_through
from ..show.terminal import (
    Data,
    Device,
    OptionalData,
    SkipCorrupt,
    aside,
    device_for,
    finish,
    needed,
    only_for,
    progress_bar,
    show_table,
    ticking,
)
from ..tasks.base import task_named
from ..train.loop import Run
from ..train.own import own_recipe
from ..train.recipe import changed

Preset = Annotated[
    str | None, typer.Option(help="A row of a paper's table, for recipes that have several: balanced, ...")
]


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe: aht_cifar100, avit_cifar100, ...; or give --model.")
    ] = None,
    data: OptionalData = None,
    preset: Preset = None,
    model: Annotated[
        str | None, typer.Option(help="Without a recipe: a timm name, a folder of Hugging Face's or a checkpoint.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Of --model; by itself AHT.")] = None,
    budget: Annotated[float | None, typer.Option(help="Of --model: the share of the static cost; 0.67.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of --model; by itself 50.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of a timm name: a file; by itself those timm fetches.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoint, metrics and the state to resume from.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Evaluate on this data instead of --data's test split.")] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="Change a setting: epochs=20, method.budget=0.5. Repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped run was.")] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N images.")] = None,
    holdout: Annotated[
        float | None,
        typer.Option(help="Share of the training images to evaluate on, where the data has no others: 0.1."),
    ] = None,
    skip_corrupt: SkipCorrupt = False,
    device: Device = None,
) -> None:
    """Train a recipe. A killed run loses what came after its last save (each epoch): go on with --resume."""
    of_model: dict[str, Any] = {"method": method, "budget": budget, "epochs": epochs, "weights": weights}
    if (recipe is None) == (model is None):
        both = f"Recipe {recipe} and --model {model}" if recipe else "Neither a recipe nor --model"
        raise DwindleError(f"{both}: give the name of a recipe, or --model for a model of your own without one.")
    if model is not None:
        only_for("recipes", "--model", preset=preset)
        base: Any = own_recipe(model, **{name: value for name, value in of_model.items() if value is not None})
    else:
        only_for("--model", f"the recipe {recipe}", **of_model)
        base = build(find_recipe(str(recipe)), data, preset=preset)
    settings = changed(base, set or [])
    images: dict[str, Any] = {"holdout": holdout, "skip_corrupt": skip_corrupt or None}
    for name, value in images.items():
        if value is not None and not hasattr(settings, name):
            only_for("vision models", "a text", **{name: value})
        settings = settings if value is None else changed(settings, [f"{name}={value}"])
    if task_named(settings.task).needs_data:
        data, out = needed(data, "train", "--data"), needed(out, "train", "--out")
    out = out or Path("runs") / str(recipe)
    resume = resumes(resume, out)
    run = Run(settings, data, out, eval_data=eval_data, device=device_for(device), resume=resume, limit=limit)
    if holdout and not run.task.holdout:
        raise DwindleError(f"--holdout {holdout}: '{eval_data or data}' has images to evaluate on; leave it out.")
    if run_through(run):
        metrics = run.history[-1] if run.history else {}
        finish({"out": str(out), **metrics, **run.task.about(), **run.task.extra_metrics()})


def compare(
    comparison: Annotated[
        str,
        typer.Argument(help="Name of a comparison: cifar100_deit_tiny, ada_cifar100_compare, tsa_shakespeare_compare."),
    ],
    data: OptionalData = None,
    preset: Preset = None,
    source: Annotated[
        str | None, typer.Option(help="Folder of another comparison, whose trainings this one begins with.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.")] = None,
    results: Annotated[Path, typer.Option(help="One JSON per result, the table and the plot go here.")] = Path(
        "benchmarks/results"
    ),
    eval_data: Annotated[str | None, typer.Option(help="Evaluate on this data instead of --data's test split.")] = None,
    only: Annotated[str | None, typer.Option(help="Names of methods, separated by commas.")] = None,
    set: Annotated[list[str] | None, typer.Option(help="Change a condition for all: epochs=20. Repeatable.")] = None,
    until: Annotated[float | None, typer.Option(help="Begin no further training after so many minutes.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N images.")] = None,
    device: Device = None,
) -> None:
    """Train and evaluate methods under the same conditions. A killed comparison goes on where it was: same command.

    Under torchrun each process makes other results, on a GPU of its own.
    """
    plan = build(find_comparison(comparison), data, preset=preset, source=source)
    for change in set or []:
        name = change.partition("=")[0].strip()
        if name in ("seed", "method") or name.startswith("method."):
            raise DwindleError(
                f"--set {change}: a comparison has methods and seeds of its own; change conditions that all share, as "
                "by epochs=20, or write a comparison with others."
            )
    plan = dataclasses.replace(plan, base=changed(plan.base, set or []))
    if task_named(plan.base.task).needs_data:
        data, out = needed(data, "compare", "--data"), needed(out, "compare", "--out")
    place, rank = ranks.detach_from_torchrun(device_for(device))
    with progress_bar(rank == 0) as bar:
        work = Compare(
            comparison,
            plan,
            data,
            out or Path("runs") / comparison,
            results,
            eval_data=eval_data,
            device=place,
            limit=limit,
            only=[name.strip() for name in only.split(",")] if only else None,
            tick=ticking(bar),
            until=None if until is None else 60 * until,
        )
        for row in work.results():
            aside.print(plan.line(row))
    if rank:
        return  # the first process prints the results of all
    report = work.report()
    for title, columns, rows in report.tables:
        show_table(title if data is None else f"{title} on {data}", columns, rows)
    table = work.folder / "table.md"
    write_text(table, report.markdown)
    finish({"results": report.results, "table": str(table), **report.files})


def search(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the trials and the study.")],
    preset: Preset = None,
    trials: Annotated[int, typer.Option(help="Settings to try, those of earlier calls counted.")] = 20,
    space: Annotated[
        list[str] | None,
        typer.Option(help="A setting and its range: method.gamma=0.5:8. Repeatable; else lambda_p and lambda_t."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="The share of the static cost to keep, where the method has none of its own: 0.67."),
    ] = None,
    holdout: Annotated[float, typer.Option(help="Share of the training images that judges.")] = 0.1,
    set: Annotated[list[str] | None, typer.Option(help="Change a setting of the recipe. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only N images, drawn at random.")] = None,
    device: Device = None,
) -> None:
    """Search lambda_p and lambda_t, or others, with Optuna, on held-out training images. A killed search goes on.

    Under torchrun each process runs other trials, on a GPU of its own.
    """
    settings: Any = changed(build(find_recipe(recipe), data, preset=preset), set or [])
    check_searchable(settings, recipe)
    require_optuna().logging.set_verbosity(logging.WARNING)  # the table says what its log would
    place, rank = ranks.detach_from_torchrun(device_for(device))
    with progress_bar(rank == 0) as bar:
        task = bar.add_task("trials", total=trials)
        result = run_search(
            settings,
            data,
            out,
            trials=trials,
            space=ranges(space) if space else None,
            budget=_number(budget),
            holdout=holdout,
            limit=limit,
            device=place,
            progress=lambda row: bar.update(task, completed=row["trial"] + 1),
        )
    if rank:
        return  # the first process prints the trials of all
    columns = ["trial", "value", "top1", "cost", "settings"]
    show_table(f"{recipe} on {data}", columns, [[row.get(c) for c in columns] for row in result["trials"]])
    finish(result)


def _number(budget: str | None) -> float | str | None:
    """The budget as a number where it is a share of the static cost; GMACs stay the text they are."""
    try:
        return None if budget is None else float(budget)
    except ValueError:
        return budget
