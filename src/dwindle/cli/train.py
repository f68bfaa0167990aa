"""The commands that train: one recipe, several under the same conditions, or many in search of the best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DwindleError
from ..show.running import resumes
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
    plain,
    progress_bar,
    show_table,
    ticking,
)


def register(app: typer.Typer) -> None:
    for command in (train, compare, search):
        app.command()(command)


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe: aht_cifar100, avit_cifar100, ...")],
    data: OptionalData = None,
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
    from ..core import processes as ranks
    from ..models.lm import cli as language
    from ..train.loop import Run
    from ..train.recipe import changed, find_recipe

    settings = changed(find_recipe(recipe)(), set or [])
    if language.is_recipe(settings):
        only_for("vision models", holdout=holdout, skip_corrupt=skip_corrupt or None)
        return language.train(recipe, settings, data, out, resume, device, eval_data=eval_data, limit=limit)
    data, out = needed(data, "train", "--data"), needed(out, "train", "--out")
    if holdout is not None:
        settings = changed(settings, [f"holdout={holdout}"])
    if skip_corrupt:
        settings = changed(settings, ["skip_corrupt=true"])
    resume = resumes(resume, out)
    run = Run(settings, data, out, eval_data=eval_data, device=device_for(device), resume=resume, limit=limit)
    if holdout and not run.task.holdout:
        raise DwindleError(f"--holdout {holdout}: '{eval_data or data}' has images to evaluate on; leave it out.")
    speaks = ranks.rank() == 0  # of several processes one
    with progress_bar(speaks) as bar:
        task = bar.add_task("training", total=run.task.steps, completed=run.step)

        def tick(step: int, steps: int, terms: dict[str, Any]) -> None:
            description = f"epoch {run.epoch + 1}/{settings.epochs}"
            if step % 20 == 0:  # reading a number off the GPU waits for it
                description += f"  loss {float(terms['total']):.3f}  cost {float(terms['cost']):.2f}"
                bar.update(task, description=description)
            bar.update(task, completed=step)

        for numbers in run.epochs(tick):
            shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k in ("total", "cost", "top1", "gmacs"))
            if speaks:
                if numbers["epoch"] == 1:
                    aside.print(f"evaluated on {plain(run.task.eval_images.told())}", soft_wrap=True)
                aside.print(f"epoch {int(numbers['epoch'])}  {shown}")
    ranks.leave()
    if speaks:
        skipped = {"corrupt_training": len(run.task.train_images.corrupt)} if run.task.train_images.corrupt else {}
        about = run.task.about() | skipped
        finish({"out": str(out), **(run.history[-1] if run.history else {}), **about})


def compare(
    comparison: Annotated[
        str,
        typer.Argument(help="Name of a comparison: cifar100_deit_tiny, ada_cifar100_compare, tsa_shakespeare_compare."),
    ],
    data: OptionalData = None,
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
    """Train and evaluate methods under the same conditions. A killed comparison goes on where it was: same command."""
    import dataclasses

    from ..experiments.compare import Compare, markdown, summarised
    from ..experiments.results import read_results
    from ..files import write_text
    from ..models.adaperceiver import cli as perceiver
    from ..models.adaperceiver.compare import AdaCompare, AdaComparison
    from ..models.lm import cli as language
    from ..show.drawing import save_figure
    from ..show.figures import tradeoff
    from ..train.recipe import changed, find_comparison

    plan = find_comparison(comparison)()
    for change in set or []:
        name = change.partition("=")[0].strip()
        if name in ("seed", "method") or name.startswith("method."):
            raise DwindleError(
                f"--set {change}: a comparison has methods and seeds of its own; change conditions that all share, as "
                "by epochs=20, or write a comparison with others."
            )
    plan = dataclasses.replace(plan, base=changed(plan.base, set or []))
    names = [name.strip() for name in only.split(",")] if only else None
    if language.is_recipe(plan.base):
        return language.compare(comparison, plan, data, out, results, names, until, device, eval_data, limit)
    data, out = needed(data, "compare", "--data"), needed(out, "compare", "--out")
    ada = isinstance(plan, AdaComparison)
    found: list[dict[str, Any]] = []
    with progress_bar() as bar:
        work = (AdaCompare if ada else Compare)(
            comparison,
            plan,
            data,
            out,
            results,
            eval_data=eval_data,
            device=device_for(device),
            limit=limit,
            only=names,
            tick=ticking(bar),
            until=None if until is None else 60 * until,
        )
        for row in work.results():
            found.append(row)
            aside.print(work.told(row))
    if ada:
        return perceiver.compared(f"{comparison} on {data}", found, work.folder)
    rows = summarised(read_results(work.folder), plan.reference)
    columns = ["name", "asked", "cost", "gmacs", "top1", "spread", "gap", "seeds", "images_per_s"]
    show_table(
        f"{comparison} on {data}", columns, [["" if row[c] is None else row[c] for c in columns] for row in rows]
    )
    table, plot = work.folder / "table.md", work.folder / "tradeoff.png"
    write_text(table, markdown(rows, plan.reference))
    save_figure(tradeoff(rows, comparison, plan.reference), plot)
    finish({"results": rows, "table": str(table), "plot": str(plot)})


def search(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the trials and the study.")],
    trials: Annotated[int, typer.Option(help="Settings to try, those of earlier calls counted.")] = 20,
    holdout: Annotated[float, typer.Option(help="Share of the training images that judges.")] = 0.1,
    set: Annotated[list[str] | None, typer.Option(help="Change a setting of the recipe. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only N images, drawn at random.")] = None,
    device: Device = None,
) -> None:
    """Search lambda_p and lambda_t with Optuna, judged on held-out training images. A killed search goes on."""
    from ..experiments.search import search as look
    from ..train.recipe import Recipe, changed, find_recipe

    settings = changed(find_recipe(recipe)(), set or [])
    if type(settings) is not Recipe:
        raise DwindleError(
            f"{recipe} trains no method on a vision transformer, which is what dwindle search tunes; give one that "
            "does, such as aht_cifar100."
        )
    with progress_bar() as bar:
        task = bar.add_task("trials", total=trials)
        result = look(
            settings,
            data,
            out,
            trials=trials,
            holdout=holdout,
            limit=limit,
            device=device_for(device),
            progress=lambda row: bar.advance(task),
        )
    columns = ["trial", "value", "top1", "cost", "settings"]
    show_table(f"{recipe} on {data}", columns, [[row.get(c) for c in columns] for row in result["trials"]])
    finish(result)
