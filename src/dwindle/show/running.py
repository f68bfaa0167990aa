"""What commands that evaluate or train share: images to evaluate on, a bar over several processes, resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import processes as ranks
from ..evaluate.evaluate import evaluate
from ..io.batches import loader
from ..io.datasets import Images
from ..tasks.base import check_unused
from ..train.loop import Run
from ..train.state import BEGUN, STATE
from .terminal import aside, device_for, finish, plain, progress_bar, show_table, tell_images


def images_of(task: Any, model: Any, data: str, limit: int | None, holdout: float | None, skip_corrupt: bool) -> Images:
    """The images of --data that a task evaluates a model on, by the options of a command."""
    check_unused(task, holdout=holdout, skip_corrupt=skip_corrupt or None)
    images: Images = task.evaluation_data(model, data, limit, holdout=holdout)
    images.skip = skip_corrupt
    return images


def finish_evaluation(title: str, result: dict[str, Any], images: Images, **settings: Any) -> None:
    """Print the result of an evaluation and the images it is of. settings: of the model, for the line of JSON."""
    show_table(title, list(result), [list(result.values())])
    tell_images(images)
    finish(result | settings | images.about())


def evaluated(
    model: Any, images: Any, batch: int, workers: int, device: str | None, **options: Any
) -> dict[str, Any] | None:
    """The result of `evaluate.evaluate`, computed with a progress bar.

    Under torchrun each process takes its share of the images, and all but the first get None.
    """

    def measure(place: Any, progress: Callable[[int], None]) -> dict[str, Any]:
        batches = loader(images, batch, workers=workers, rank=ranks.rank(), world=ranks.world())
        found = evaluate(model, batches, device=place, progress=progress, **options)
        for corrupt in ranks.gathered(images.corrupt):
            images.corrupt |= corrupt
        return found

    return shared(measure, len(images), device)


def shared(
    measure: Callable[[Any, Callable[[int], None]], dict[str, Any]], total: int, device: str | None
) -> dict[str, Any] | None:
    """The result of `measure(device, progress)`, with a bar over `total`. Of several processes one gets it."""
    place = ranks.join(device_for(device)) or "cpu"
    rank, world = ranks.rank(), ranks.world()
    with progress_bar(rank == 0) as bar:
        task = bar.add_task("evaluating", total=total // world)
        result = measure(place, lambda n: bar.advance(task, n))
    ranks.leave()
    return result if rank == 0 else None


def resumes(resume: bool, out: Path) -> bool:
    """Whether a run goes on from a saved state. One that was killed before its first save starts again instead."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else {STATE}
    unsaved = STATE not in names and (BEGUN in names or not names)
    if resume and unsaved:
        aside.print(f"{plain(str(out))} holds nothing saved yet: from the start.", soft_wrap=True)
    return resume and not unsaved


def run_through(run: Run) -> bool:
    """Train to the end, with a bar and a line for each evaluation. Returns whether this process prints the result."""
    speaks = ranks.rank() == 0
    with progress_bar(speaks) as bar:
        task = bar.add_task("training", total=run.task.steps, completed=run.step)

        def tick(step: int, steps: int, terms: dict[str, Any]) -> None:
            description = f"epoch {run.epoch + 1}/{run.task.epochs}"
            if step % 20 == 0:  # reading a number off the GPU waits for it
                names = {"loss": "total", "cost": "cost"}
                shown = [f"{label} {float(terms[name]):.3f}" for label, name in names.items() if name in terms]
                bar.update(task, description="  ".join([description, *shown]))
            bar.update(task, completed=step)

        counted = run.task.numbered_by
        for metrics in run.epochs(tick):
            if speaks:
                if len(run.history) == 1 and run.task.evaluated_on():
                    aside.print(f"evaluated on {plain(run.task.evaluated_on() or '')}", soft_wrap=True)
                shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k in run.task.shown)
                aside.print(f"{counted} {int(metrics[counted])}  {shown}")
    ranks.leave()
    return speaks
