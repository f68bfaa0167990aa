"""Search for the settings of a recipe that give the best accuracy at a given cost, on held-out training images.

AHT-ViT section 3.5 chooses its loss weights in this way by a grid; here Optuna's TPE sampler draws them. The test split
is never opened. A killed search continues when it is started again with the same arguments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core import processes as ranks
from ..core.cost import budget_share
from ..errors import DwindleError
from ..files import check_folder, write_text
from ..io.datasets import Images, hold_out
from ..io.datasets import limit as draw
from ..io.draws import mix
from ..io.sets import training_images
from ..train.loop import Run
from ..train.recipe import Recipe, Training, changed
from ..train.state import STATE, defaults, differing

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, tuple[float, float]]
SPACE: Space = {"method.lambda_p": (1e-4, 1e-1), "method.lambda_t": (1e-2, 2.0)}
STUDY, RESULT = "study.db", "search.json"


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
) -> dict[str, Any]:
    """The best `settings` as `--set` takes them, their `value`, and the table of all `trials`; also in out/search.json.

    trials: how many in all, those of an earlier start counted in. The first is the recipe as it stands, if it lies in
        the space. Each is a run in out/trial-0000, -0001, ...; one whose loss diverges has no value.
    space: low and high of each setting, named as for --set, drawn log-uniformly, or uniformly from a range that is not
        above 0; by default lambda_p and lambda_t.
    holdout: share of the training images that is held out, class by class, and evaluated on.
    budget, budget_weight: a trial's value is its top-1, less `budget_weight` points for each percent of the static cost
        above the budget. None: the method's own budget; where it has none either, top-1 alone counts.
    limit: use that many of the training images, drawn at random.
    progress: called with each trial's row of the table. tick: as in `Run.epochs`.
    """
    optuna = _optuna()
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
    study = _study(folder, settings_given, recipe)
    while sum(trial.state.is_finished() for trial in study.trials) < trials:
        trial = _next_trial(study, recipe, space, seed)
        settings = [f"{key}={trial.suggest_float(key, *space[key], log=space[key][0] > 0):.3g}" for key in space]
        trial.set_user_attr("settings", settings)
        run = _run(changed(recipe, settings), data, folder / f"trial-{trial.number:04d}", device, parts)
        goal = getattr(run.model.method, "budget", None) if budget is None else budget
        share = math.inf if goal is None else budget_share(goal, run.model.backbone.shape)
        if _converges(run, tick):
            result = run.history[-1]
            cost = result["gmacs"] / result["gmacs_static"]
            for name, number in (("top1", result["top1"]), ("gmacs", result["gmacs"]), ("cost", round(cost, 4))):
                trial.set_user_attr(name, number)
            study.tell(trial, value(result["top1"], cost, share, budget_weight))
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if progress:
            progress(_row(study.trials[trial.number]))
    return _result(study, folder)


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


def _optuna() -> Any:
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
        raise DwindleError("A search runs its trials one after another in one process; start it without torchrun.")
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


def _study(folder: Path, given: dict[str, Any], recipe: Recipe) -> optuna.Study:
    """The study in the folder, new or begun earlier with the same arguments (`given`).

    Settings that did not exist then have the defaults of the recipe's class.
    """
    import optuna

    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}", study_name="dwindle", direction="maximize", load_if_exists=True
        )
    except Exception as error:  # an error of sqlite, SQLAlchemy or Optuna, depending on the fault in the file
        raise DwindleError(f"{path} cannot be read ({type(error).__name__}); choose another --out.") from error
    old = study.user_attrs.get("given")
    if old is None:
        study.set_user_attr("given", json.loads(json.dumps(given)))
    elif others := differing(defaults(recipe) | old, given):
        raise DwindleError(f"{folder} holds a search with other settings: {others}; choose another --out.")
    return study


def _next_trial(study: optuna.Study, recipe: Recipe, space: Space, seed: int) -> optuna.Trial:
    """The trial that a kill interrupted; else a new one. The first trial is the recipe itself if it is in the space."""
    import optuna

    number = len(study.trials)
    # Each trial has its own seed, so that a resumed search draws the same settings as an uninterrupted one.
    study.sampler = optuna.samplers.TPESampler(seed=mix(seed, number))
    if running := study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        return optuna.Trial(study, running[0]._trial_id)
    if not number:
        method = recipe.make_method()
        present = {k: getattr(method if "." in k else recipe, k.removeprefix("method."), None) for k in space}
        if all(isinstance(now, float | int) and space[k][0] <= now <= space[k][1] for k, now in present.items()):
            study.enqueue_trial(present)
    return study.ask()


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


def _result(study: optuna.Study, folder: Path) -> dict[str, Any]:
    """The best trial and the table of all trials, which are written to the folder too."""
    rows = [_row(trial) for trial in study.trials if trial.state.is_finished()]
    if all(row["value"] is None for row in rows):
        raise DwindleError(f"The loss diverged in all {len(rows)} trials; lower lr, or search a space of lower values.")
    result = {**_row(study.best_trial), "trials": rows}
    write_text(folder / RESULT, json.dumps(result, indent=2) + "\n")
    return result
