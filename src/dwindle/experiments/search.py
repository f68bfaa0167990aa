"""Search for the settings of a recipe that give the best accuracy at a given cost, on held-out training images.

AHT-ViT section 3.5 chooses its loss weights in this way by a grid; here Optuna's TPE sampler draws them. The test split
is never opened. A killed search continues when it is started again with the same arguments. Several processes with the
same folder share the trials, one trial at a time each.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core import processes as ranks
from ..core.cost import budget_share
from ..errors import DwindleError
from ..files import write_text
from ..io.datasets import Images, hold_out
from ..io.datasets import limit as draw
from ..io.sets import training_images
from ..train.loop import Run
from ..train.recipe import Recipe, Training, changed
from ..train.state import STATE, defaults
from .study import SharedStudy, Space

if TYPE_CHECKING:
    import optuna

SPACE: Space = {"method.lambda_p": (1e-4, 1e-1), "method.lambda_t": (1e-2, 2.0)}
RESULT = "search.json"


def search(
    recipe: Recipe,
    data: str,
    out: str | os.PathLike,
    *,
    trials: int = 20,
    space: Space | None = None,
    holdout: float = 0.1,
    budget: float | str | None = None,
    budget_weight: float = 1.0,
    device: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[dict[str, Any]], None] | None = None,
    tick: Callable[[int, int, dict[str, Tensor]], None] | None = None,
    patience: float = 2.0,
) -> dict[str, Any]:
    """The best `settings` as `--set` takes them, their `value`, and the table of all `trials`; also in out/search.json.

    trials: how many in all, those of an earlier start and of other processes counted in. The first is the recipe as it
        stands, if it lies in the space. Each is a run in out/trial-0000, -0001, ...; one whose loss diverges has no
        value.
    space: low and high of each setting, named as for --set, drawn log-uniformly, or uniformly from a range that is not
        above 0; by default lambda_p and lambda_t.
    holdout: share of the training images that is held out, class by class, and evaluated on.
    budget, budget_weight: a trial's value is its top-1, less `budget_weight` points for each percent of the static cost
        above the budget. None: the method's own budget; where it has none either, top-1 alone counts.
    limit: use that many of the training images, drawn at random.
    progress: called with the row of each trial that this process made. tick: as in `Run.epochs`.
    patience: seconds between two checks whether other processes have finished their trials.

    One process always draws the same settings. Of several the first ten trials are the same; a later one is drawn from
    the trials that are finished when it begins, and which these are depends on how long each takes.
    """
    require_optuna()
    space, folder = dict(SPACE if space is None else space), Path(out)
    _check(recipe, space, trials, budget_weight)
    images = training_images(data, recipe.holdout)[0]  # without what the model will be evaluated on
    parts = hold_out(images if limit is None else draw(images, limit, seed), holdout, seed)
    settings_given = dataclasses.asdict(recipe) | {"data": data, "space": space, "holdout": holdout, "budget": budget}
    settings_given |= {
        "kept for evaluation": recipe.holdout,
        "budget_weight": budget_weight,
        "limit": limit,
        "search seed": seed,
    }
    study = SharedStudy(folder, space, _present(recipe, space), seed, patience)
    study.agree(settings_given, defaults(recipe))
    while True:
        with study.next_trial(trials) as trial:
            if trial is None:
                return _result(study, folder)
            settings = trial.user_attrs["settings"]
            run = _run(changed(recipe, settings), data, folder / f"trial-{trial.number:04d}", device, parts)
            study.finish(trial, *_measured(run, budget, budget_weight, tick))
        if progress:
            progress(_row(study.trials[trial.number]))


def _measured(
    run: Run, budget: float | str | None, weight: float, tick: Callable[[int, int, dict[str, Tensor]], None] | None
) -> tuple[float | None, dict[str, Any]]:
    """Train the run. Returns the trial's value, and what its row of the table says; None: the loss diverged."""
    goal = getattr(run.model.method, "budget", None) if budget is None else budget
    share = math.inf if goal is None else budget_share(goal, run.model.backbone.shape)
    if not _converges(run, tick):
        return None, {}
    result = run.history[-1]
    cost = result["gmacs"] / result["gmacs_static"]
    about = {"top1": result["top1"], "gmacs": result["gmacs"], "cost": round(cost, 4)}
    return value(result["top1"], cost, share, weight), about


def ranges(given: Sequence[str]) -> Space:
    """The space of a search from settings with ranges, as in a command: method.gamma=0.5:8."""
    space: dict[str, tuple[float, float]] = {}
    for text in given:
        key, _, both = text.partition("=")
        low, _, high = both.partition(":")
        try:
            space[key] = float(low), float(high)
        except ValueError as error:
            raise DwindleError(f"--space {text}: expected a setting and its range, as method.gamma=0.5:8.") from error
    return space


def value(top1: float, cost: float, share: float, weight: float) -> float:
    """The value of a trial: its accuracy in percent, less `weight` points per percent of cost above `share`."""
    return top1 - weight * max(0.0, 100 * (cost - share))


def require_optuna() -> Any:
    """Optuna, which only a search needs."""
    try:
        import optuna
    except ImportError as error:
        raise DwindleError('A search needs Optuna, which is missing here: pip install "dwindle[search]".') from error
    return optuna


def check_searchable(recipe: Training, name: str) -> None:
    if not recipe.learner().searchable:
        raise DwindleError(
            f"{name} trains no method on a vision transformer, which is what dwindle search tunes; give one that does, "
            "such as aht_cifar100."
        )


def _check(recipe: Recipe, space: Space, trials: int, weight: float) -> None:
    """Refuse arguments that cannot work, before anything is read or written."""
    check_searchable(recipe, "The recipe")
    if trials < 1 or weight < 0:
        raise DwindleError(
            f"trials = {trials}, budget_weight = {weight}: expected at least one trial and no weight < 0."
        )
    if ranks.started() > 1:
        raise DwindleError(
            f"torchrun started {ranks.started()} processes, and each runs trials alone: call "
            "dwindle.core.processes.detach_from_torchrun before search(), as the command dwindle search does."
        )
    if not space:
        raise DwindleError(
            "The space of the search is empty; name a setting, such as method.lambda_p from 1e-4 to 0.1."
        )
    for key, (low, high) in space.items():
        if not -math.inf < low < high < math.inf:
            raise DwindleError(f"{key} from {low} to {high} is no range to draw from; give two numbers, low and high.")
        trial = changed(recipe, [f"{key}={float(low)!r}"])  # refuses settings that are no real numbers
        trial.check()
        trial.make_method()


def _present(recipe: Recipe, space: Space) -> dict[str, Any]:
    """What the recipe has for the settings of the space."""
    method = recipe.make_method()
    return {key: getattr(method if "." in key else recipe, key.removeprefix("method."), None) for key in space}


def _run(recipe: Recipe, data: str, out: Path, device: str | None, parts: tuple[Images, Images]) -> Run:
    resume = (out / STATE).exists()
    return Run(recipe, data, out, device=device, resume=resume, opened=parts)


def _converges(run: Run, tick: Callable[[int, int, dict[str, Tensor]], None] | None) -> bool:
    """Train the run. False: the loss diverged, which is due to the trial's settings. Other errors are raised."""
    last: dict[str, Tensor] = {}

    def keep_terms(step: int, steps: int, terms: dict[str, Tensor]) -> None:
        last.update(terms)
        if tick:
            tick(step, steps, terms)

    try:
        for _ in run.epochs(keep_terms):
            pass
    except DwindleError:
        if not last or last["total"].isfinite():
            raise
        return False
    return True


def _row(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """The trial as a row of the table."""
    attributes = {name: trial.user_attrs.get(name) for name in ("settings", "top1", "gmacs", "cost")}
    return {"trial": trial.number, "value": None if trial.value is None else round(trial.value, 3)} | attributes


def _result(study: SharedStudy, folder: Path) -> dict[str, Any]:
    """The best trial and the table of all trials, which are written to the folder too."""
    rows = [_row(trial) for trial in study.trials if trial.state.is_finished()]
    if all(row["value"] is None for row in rows):
        raise DwindleError(f"The loss diverged in all {len(rows)} trials; lower lr, or search a space of lower values.")
    result = {**_row(study.study.best_trial), "trials": rows}
    write_text(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result
