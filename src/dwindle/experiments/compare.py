"""Methods under the same conditions: train and evaluate all of them, then a table, a plot, and one JSON per result.

A comparison goes on where it was: a result whose JSON exists is not made again, a training that was killed resumes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..core.model import AdaptiveViT, adapt
from ..errors import DwindleError
from ..evaluate.evaluate import calibrate
from ..files import write_text
from ..io.card import write_card
from ..io.checkpoint import load, save
from ..methods import Method
from ..train.loop import Run
from ..train.recipe import Recipe
from ..train.state import STATE
from ..train.teacher import Answers, Room
from .results import Results, machine, read_result, slug

STATIC = "static"
# Settings that say where and how often, not what: two results may differ in them and still be comparable.
INCIDENTAL = ("weights", "save_every", "eval_every", "workers", "compile", "resident", "parallel", "layout")

# What a teacher's answers depend on, beside the data.
SOURCE = ("teacher", "model", "seed", "batch", "image_size", "amp", "cpu_amp", "compile")
BATCHES = (*SOURCE, "min_scale", "jitter", "augment", "erase", "mixup", "cutmix", "mix_prob", "views", "holdout")


@dataclass(frozen=True)
class Entry:
    """One method of a comparison, at every cost asked for."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    by_cost: dict[float, dict[str, Any]] = field(default_factory=dict)  # options for each cost, in place of `budget`
    train: str = (
        "each"  # 'each': for every cost; 'once': its operating point is turned to each; 'never': on the static model
    )
    costs: tuple[float, ...] | None = None  # None: the comparison's
    seeds: tuple[int, ...] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe; must be told beside the result
    group: str = "methods"  # rows of the table that belong together


@dataclass(frozen=True)
class Comparison:
    base: Recipe  # the conditions; its method is not used
    entries: tuple[Entry, ...]
    costs: tuple[float, ...] = (0.83, 0.67, 0.52)
    seeds: tuple[int, ...] = (0,)
    static_seeds: tuple[int, ...] = (0,)
    taught: bool = True  # the static model of the same seed teaches all others
    adapted: bool = False  # and they begin from its weights
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe, for all but the static model
    reference: str = STATIC  # the entry the others are measured against
    pretrained_static: bool = False  # the static model is the weights as they are: nothing to train


class Compare(Results):
    """`results()` yields every result as it comes, those of earlier calls first."""

    def __init__(
        self,
        name: str,
        comparison: Comparison,
        data: str,
        out: str | os.PathLike,
        results: str | os.PathLike,
        *,
        eval_data: str | None = None,
        device: str | None = None,
        limit: int | None = None,
        only: Sequence[str] | None = None,
        tick: Callable[..., None] | None = None,
        until: float | None = None,
    ) -> None:
        """only: names of entries. until: seconds after which no further training is begun."""
        known = [STATIC, *(entry.name for entry in comparison.entries)]
        super().__init__(name, out, results, known, only, until)
        self.comparison, self.data, self.eval_data = comparison, data, eval_data
        self.device, self.limit, self.tick = device, limit, tick
        self.resident: Any = None  # decoded once for all runs
        self.answers: dict[str, Answers] = {}  # of each teacher, who is asked once for all runs on the same batches
        self.room = Room()

    def told(self, row: dict[str, Any]) -> str:
        shown = f"{row['name']} at {row['asked']:.2f}, seed {row['seed']}"
        return f"{shown}: top-1 {row['top1']:.2f}, cost {row['cost']:.3f}"

    def results(self) -> Iterator[dict[str, Any]]:
        for seed in self.comparison.static_seeds:
            if STATIC in self.only:
                yield from self._static(seed)
        for entry in self.comparison.entries:
            if entry.name in self.only:
                for seed in entry.seeds or self.comparison.seeds:
                    yield from self._entry(entry, seed)

    # Where things are.
    def _path(self, name: str, cost: float, seed: int) -> Path:
        return self.folder / f"{slug(name)}-{cost:.2f}-s{seed}.json"

    def _conditions(self, recipe: Recipe) -> dict[str, Any]:
        """What a result depends on, as it is kept beside it."""
        settings = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in INCIDENTAL}
        settings["teacher"] = Path(recipe.teacher).name if recipe.teacher else None
        settings["from_static"] = recipe.weights is not None and Path(recipe.weights).parent == self.out
        images = {"data": Path(self.data).name, "eval_data": Path(self.eval_data).name if self.eval_data else None}
        return images | {"limit": self.limit} | settings

    def _known(self, path: Path, recipe: Recipe) -> bool:
        return self.has(path, self._conditions(recipe), recipe)

    def _static_folder(self, seed: int) -> Path:
        return self.out / f"{STATIC}-1.00-s{seed}"

    def _static_made(self, seed: int) -> Path:
        folder = self._static_folder(seed)
        if not (folder / "config.json").exists():
            raise DwindleError(f"{folder} is missing: the others build on the static model; run '{STATIC}' first.")
        return folder

    # Making results.
    def _static(self, seed: int) -> Iterator[dict[str, Any]]:
        path, folder = self._path(STATIC, 1.0, seed), self._static_folder(seed)
        known = self._known(path, self._alone(seed))
        if not known and (folder / "config.json").exists() and not (folder / STATE).exists():
            # A checkpoint brought from elsewhere: only the data is opened.
            run = self._opened(self._alone(seed), self.out / f".{STATIC}-s{seed}")
            self._write(path, STATIC, "methods", run, load(folder).to(run.device), 1.0, seed, 0.0)
        if not path.exists() or not (folder / "config.json").exists():
            if self.late:
                return
            recipe = self._alone(seed)
            if self.comparison.pretrained_static:
                run, seconds = self._opened(recipe, folder), 0.0
                model = run.model
                save(
                    model,
                    folder,
                    extra={"preprocess": run.task.preprocess.to_dict(), "classes": run.task.train_images.classes},
                )
            else:
                run, model, seconds = self._trained(recipe, folder)
            self._write(path, STATIC, "methods", run, model, 1.0, seed, seconds)
        yield read_result(path)

    def _alone(self, seed: int) -> Recipe:
        """The static model learns from the labels alone."""
        settings: dict[str, Any] = {"method": "Static", "method_options": {}, "teacher": None, "label_weight": 1.0}
        return dataclasses.replace(self.comparison.base, **settings, seed=seed)

    def _entry(self, entry: Entry, seed: int) -> Iterator[dict[str, Any]]:
        costs = entry.costs or self.comparison.costs
        paths = {cost: self._path(entry.name, cost, seed) for cost in costs}
        missing = [cost for cost, path in paths.items() if not self._known(path, self._recipe(entry, cost, seed))]
        if missing and entry.train == "each":
            for cost in missing:
                if not self.late:
                    self._each(entry, cost, seed)
        elif missing and not self.late:
            self._turned(entry, missing, seed)
        for path in paths.values():
            if path.exists():
                yield read_result(path)

    def _recipe(self, entry: Entry, cost: float, seed: int) -> Recipe:
        if entry.train == "never":
            return self._alone(seed)
        options = entry.by_cost.get(cost, {"budget": cost}) if entry.train == "each" else {}
        settings: dict[str, Any] = {"method": entry.method, "method_options": {**entry.options, **options}}
        settings["teacher"] = str(self._static_folder(seed)) if self.comparison.taught else None
        if self.comparison.adapted:
            settings["weights"] = str(self._static_folder(seed))
        settings |= {"seed": seed, **self.comparison.changes, **entry.changes}
        return dataclasses.replace(self.comparison.base, **settings)

    def _each(self, entry: Entry, cost: float, seed: int) -> None:
        folder = self.out / f"{slug(entry.name)}-{cost:.2f}-s{seed}"
        recipe = self._recipe(entry, cost, seed)
        run, model, seconds = self._trained(recipe, folder)
        operating_point = model.method.operating_point
        turned = operating_point is not None and not {"budget", operating_point[0]} & recipe.method_options.keys()
        if turned:  # its cost followed from training alone
            calibrate(model, run.task.typical(), cost)
        path, turned_in = self._path(entry.name, cost, seed), folder if turned else None
        self._write(path, entry.name, entry.group, run, model, cost, seed, seconds, turned_in)

    def _turned(self, entry: Entry, costs: list[float], seed: int) -> None:
        """One model, its operating point turned to each cost on training images."""
        if entry.train == "once":
            recipe = self._recipe(entry, costs[0], seed)
            run, model, seconds = self._trained(recipe, self.out / f"{slug(entry.name)}-s{seed}")
        else:
            static = load(self._static_made(seed)).unwrap()
            run, seconds = self._opened(self._alone(seed), self.out / f"{slug(entry.name)}-s{seed}"), 0.0
            model = adapt(static, Method.registry[entry.method](**entry.options)).to(run.device)
        images = run.task.typical()
        for cost in costs:
            calibrate(model, images, cost)
            self._write(self._path(entry.name, cost, seed), entry.name, entry.group, run, model, cost, seed, seconds)

    def _opened(self, recipe: Recipe, folder: Path, resume: bool = False) -> Run:
        run = Run(
            recipe,
            self.data,
            folder,
            eval_data=self.eval_data,
            device=self.device,
            limit=self.limit,
            resume=resume,
            resident=self.resident,
            answers=self._answers(recipe),
        )
        self.resident = run.task.resident
        return run

    def _answers(self, recipe: Recipe) -> Answers | None:
        """Kept for runs that differ in nothing an image on its way to the teacher meets."""
        if recipe.teacher in (None, "static"):  # 'static': the run's own weights
            return None
        batches = json.dumps([getattr(recipe, name) for name in BATCHES])
        return self.answers.setdefault(batches, Answers(self.room))

    def _trained(self, recipe: Recipe, folder: Path) -> tuple[Run, AdaptiveViT, float]:
        """A finished run, its model as saved, and the seconds of its last epoch (in the first, things are compiled)."""
        if recipe.teacher or recipe.method != "Static":
            self._static_made(recipe.seed)
        run = self._opened(recipe, folder, resume=(folder / STATE).exists())
        for _ in run.epochs(self.tick and partial(self.tick, folder.name)):
            pass
        run.learn.forget()  # its memory, before the next run takes its own
        return run, load(folder).to(run.device), run.seconds_per_epoch

    def _write(
        self,
        path: Path,
        name: str,
        group: str,
        run: Run,
        model: AdaptiveViT,
        cost: float,
        seed: int,
        seconds: float,
        turned_in: Path | None = None,
    ) -> None:
        """turned_in: where the model's checkpoint lies, if it has changed since."""
        packed, masked = run.evaluate(model=model), run.evaluate(model=model, layout="masked")
        speed = run.steps_per_epoch * run.task.batch / seconds if seconds else None
        teacher = run.learner.teacher
        result = {
            "comparison": self.name,
            "name": name,
            "group": group,
            "method": type(model.method).__name__,
            "options": model.method.config,
            "asked": cost,
            "cost": round(packed["gmacs"] / packed["gmacs_static"], 4),
            "seed": seed,
            **packed,
            **run.task.about(),
            "top1_masked": masked["top1"],
            "images_per_s_masked": masked["images_per_s"],
            "train_images_per_s": speed and round(speed),
            "teacher_asked": teacher is not None and teacher.asked > 0,  # or its answers kept, which is faster
            "conditions": self._conditions(run.recipe),
            "taught": run.recipe.teacher is not None,
            "machine": machine(run.device),
        }
        if turned_in is not None:  # before the result, which once there is not made again
            save(model, turned_in, extra={"results": packed | run.task.about()})
            write_card(turned_in)
        write_text(path, json.dumps(result, indent=1) + "\n")


def summarised(results: Sequence[dict[str, Any]], reference: str = STATIC) -> list[dict[str, Any]]:
    """One row per method and cost: means over seeds, and the distance to static, of the same seeds."""
    static = {r["seed"]: r["top1"] for r in results if r["name"] == reference}
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["group"], result["name"], result["asked"]), []).append(result)
    rows = []
    for (group, name, asked), members in groups.items():
        top1 = [m["top1"] for m in members]
        gaps = [m["top1"] - static[m["seed"]] for m in members if m["seed"] in static]
        rows.append(
            {
                "group": group,
                "name": name,
                "asked": asked,
                "cost": round(mean(m["cost"] for m in members), 4),
                "gmacs": round(mean(m["gmacs"] for m in members), 4),
                "top1": round(mean(top1), 2),
                "spread": round(stdev(top1), 2) if len(top1) > 1 else None,
                "seeds": len(members),
                "gap": round(mean(gaps), 2) if gaps else None,
                "top1_masked": round(mean(m["top1_masked"] for m in members), 2),
                "images_per_s": round(mean(m["images_per_s"] for m in members)),
            }
        )
    return sorted(
        rows, key=lambda r: (r["group"] != "methods", r["group"], r["name"] != STATIC, r["name"], -r["asked"])
    )


def markdown(rows: Sequence[dict[str, Any]], reference: str = STATIC) -> str:
    """The table, for a README."""
    lines = [
        f"| method | asked | cost | GMACs | top-1 | vs {reference} | seeds | packed images/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ± {row['spread']:.2f}" if row["spread"] is not None else ""
        gap = "" if row["gap"] is None else f"{row['gap']:+.2f}"
        lines.append(
            f"| {row['name']} | {row['asked']:.2f} | {row['cost']:.3f} | {row['gmacs']:.3f} | "
            f"{row['top1']:.2f}{spread} | {gap} | {row['seeds']} | {row['images_per_s']:,} |"
        )
    return "\n".join(lines) + "\n"
