"""What commands that compute share: a bar over several processes, and where a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import processes as ranks
from ..evaluate.evaluate import evaluate
from ..io.batches import loader
from ..train.loop import Run
from ..train.state import BEGUN, STATE
from .terminal import aside, device_for, plain, progress_bar


def evaluated(
    model: Any, images: Any, batch: int, workers: int, device: str | None, **how: Any
) -> dict[str, Any] | None:
    """`evaluate.evaluate` with a bar. Under torchrun each process takes its share; all but one get None."""

    def measure(place: Any, progress: Callable[[int], None]) -> dict[str, Any]:
        batches = loader(images, batch, workers=workers, rank=ranks.rank(), world=ranks.world())
        found = evaluate(model, batches, device=place, progress=progress, **how)
        for corrupt in ranks.gathered(images.corrupt):
            images.corrupt |= corrupt
        return found

    return shared(measure, len(images), device)


def shared(
    measure: Callable[[Any, Callable[[int], None]], dict[str, Any]], total: int, device: str | None
) -> dict[str, Any] | None:
    """What `measure(device, progress)` finds, with a bar over `total`. Of several processes one gets it, and speaks."""
    place = ranks.join(device_for(device)) or "cpu"
    rank, world = ranks.rank(), ranks.world()
    with progress_bar(rank == 0) as bar:
        task = bar.add_task("evaluating", total=total // world)
        result = measure(place, lambda n: bar.advance(task, n))
    ranks.leave()
    return result if rank == 0 else None


def resumes(asked: bool, out: Path) -> bool:
    """Whether there is something to go on with. A run killed before its first save begins again, to the same end."""
    there = {path.name for path in out.iterdir()} if out.is_dir() else {STATE}
    begun = STATE not in there and (BEGUN in there or not there)
    if asked and begun:
        aside.print(f"{plain(str(out))} holds nothing saved yet: from the start.", soft_wrap=True)
    return asked and not begun


def run_through(run: Run) -> bool:
    """Train to the end, with a bar and a line for each evaluation. Whether this is the process that speaks."""
    speaks = ranks.rank() == 0  # of several processes one
    with progress_bar(speaks) as bar:
        task = bar.add_task("training", total=run.task.steps, completed=run.step)

        def tick(step: int, steps: int, terms: dict[str, Any]) -> None:
            description = f"epoch {run.epoch + 1}/{run.task.epochs}"
            if step % 20 == 0:  # reading a number off the GPU waits for it
                numbers = {"loss": "total", "cost": "cost"}
                shown = [f"{what} {float(terms[name]):.3f}" for what, name in numbers.items() if name in terms]
                bar.update(task, description="  ".join([description, *shown]))
            bar.update(task, completed=step)

        counted = run.task.numbered_by
        for numbers in run.epochs(tick):
            if speaks:
                if len(run.history) == 1 and run.task.told():
                    aside.print(f"evaluated on {plain(run.task.told() or '')}", soft_wrap=True)
                shown = "  ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k in run.task.shown)
                aside.print(f"{counted} {int(numbers[counted])}  {shown}")
    ranks.leave()
    return speaks
