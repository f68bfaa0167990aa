"""Comparing methods under the same conditions: every method at every cost, beside their static model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ...core.model import AdaptiveViT, adapt
from ...errors import DwindleError
from ...evaluate.evaluate import calibrate
from ...experiments.compare import Compare, Job, Plan, Report, stem
from ...experiments.search import search
from ...io.card import write_card
from ...io.checkpoint import load, save
from ...methods import Method
from ...show.drawing import save_figure
from ...show.figures import tradeoff
from ...train.loop import Run
from ...train.recipe import Recipe, changed
from ...train.state import STATE

STATIC = "static"
GROUNDED = "AHT, grounded"  # the label that tells it from the method as printed
COLUMNS = ["name", "asked", "cost", "gmacs", "top1", "spread", "gap", "seeds", "images_per_s"]


@dataclass(frozen=True)
class Entry:
    """One method of a comparison, at each of its costs."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    by_cost: dict[float, dict[str, Any]] = field(default_factory=dict)  # options for each cost, in place of `budget`
    # 'each': trained for every cost. 'once': trained once, its operating point turned to each cost. 'never': not
    # trained, but put on the static model.
    train: str = "each"
    costs: tuple[float, ...] | None = None  # None: those of the comparison
    seeds: tuple[int, ...] | None = None  # None: those of the comparison
    changes: dict[str, Any] = field(default_factory=dict)  # settings of the recipe that differ from the comparison's
    group: str = "methods"  # the group of rows of the table
    # Settings and their ranges, as `search` takes them. They are searched on held-out images before the training.
    tuned: dict[str, tuple[float, float]] = field(default_factory=dict)
    trials: int = 12  # of that search
    label: str | None = None  # the name in tables and figures; None: `name`, which `--only` takes


# Baselines that every comparison has beside its own entries.
RIVALS = (Entry("Resolution", "Resolution"), Entry("Random", "Random"), Entry("Shallow", "Shallow"))
# Settings of a recipe that change the network itself, and so its static cost.
OTHER_NETWORK = ("model", "heads", "image_size")


@dataclass(frozen=True)
class Comparison(Plan):
    """A plan: which methods are compared, at which costs and seeds, under which conditions."""

    base: Recipe  # the conditions; its method is not used
    entries: tuple[Entry, ...]
    costs: tuple[float, ...] = (0.83, 0.67, 0.52)
    seeds: tuple[int, ...] = (0,)
    static_seeds: tuple[int, ...] = (0,)
    taught: bool = True  # the static model of the same seed teaches all others
    adapted: bool = False  # all others begin from the static model's weights
    changes: dict[str, Any] = field(default_factory=dict)  # settings of the recipe, for all but the static model
    reference: str = STATIC  # the entry whose accuracy is subtracted from the others'
    pretrained_static: bool = False  # the static model is the weights as they are: nothing to train
    rivals: tuple[Entry, ...] = RIVALS  # compared too, unless `entries` have one of the same name

    part = "entry"
    independent = True

    def names(self) -> list[str]:
        return [STATIC, *(entry.name for entry in self.compared)]

    @property
    def compared(self) -> tuple[Entry, ...]:
        """All entries, the rivals included."""
        own = {entry.name for entry in self.entries}
        return (*self.entries, *(rival for rival in self.rivals if rival.name not in own))

    def jobs(self, work: Compare) -> Iterator[Job]:
        for seed in self.static_seeds:
            recipe = self._alone(seed)
            needs = _static_folder(work, seed) / "config.json"
            make = partial(self._static, work, recipe)
            yield Job(STATIC, recipe, self._conditions(work, recipe), make, 1.0, needs)
        for entry in self.compared:
            for seed in entry.seeds or self.seeds:
                for cost in entry.costs or self.costs:
                    recipe = self._recipe(work, entry, cost, seed)
                    make = partial(self._entry, work, entry, cost, recipe)
                    conditions = self._conditions(work, recipe)
                    if entry.tuned:
                        conditions |= {"tuned": json.loads(json.dumps(entry.tuned)), "trials": entry.trials}
                    folder = stem(entry.name, seed) if entry.train == "once" else None
                    yield Job(entry.name, recipe, conditions, make, cost, folder=folder)

    def line(self, row: dict[str, Any]) -> str:
        shown = f"{row['name']} at {row['asked']:.2f}, seed {row['seed']}"
        return f"{shown}: top-1 {row['top1']:.2f}, cost {row['cost']:.3f}"

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        rows, plot = summarised(found, self.reference), folder / "tradeoff.png"
        labels = {entry.name: entry.label for entry in self.compared if entry.label}
        labelled = [row | {"name": labels.get(row["name"], row["name"])} for row in rows]
        save_figure(tradeoff(labelled, name, self.reference), plot)
        lines = [["" if row[c] is None else row[c] for c in COLUMNS] for row in labelled]
        return Report(rows, [(name, COLUMNS, lines)], markdown(labelled, self.reference), {"plot": str(plot)})

    def _conditions(self, work: Compare, recipe: Recipe) -> dict[str, Any]:
        from_static = recipe.weights is not None and Path(recipe.weights).parent == work.out
        return work.conditions(recipe) | {"from_static": from_static}

    # The recipes.
    def _alone(self, seed: int) -> Recipe:
        """The recipe of the static model, which learns from the labels alone."""
        settings: dict[str, Any] = {"method": "Static", "method_options": {}, "teacher": None, "label_weight": 1.0}
        return dataclasses.replace(self.base, **settings, seed=seed)

    def _recipe(self, work: Compare, entry: Entry, cost: float, seed: int) -> Recipe:
        """The recipe of an entry at a cost."""
        if entry.train == "never":
            return self._alone(seed)
        options = entry.by_cost.get(cost, {"budget": cost}) if entry.train == "each" else {}
        settings: dict[str, Any] = {"method": entry.method, "method_options": {**entry.options, **options}}
        settings["teacher"] = str(_static_folder(work, seed)) if self.taught else None
        if self.adapted:
            settings["weights"] = str(_static_folder(work, seed))
        settings |= {"seed": seed, **self.changes, **entry.changes}
        return dataclasses.replace(self.base, **settings)

    # Making results.
    def _static(self, work: Compare, recipe: Recipe) -> dict[str, Any]:
        """The result of the static model: trained, loaded, or the pretrained weights as they are."""
        folder = _static_folder(work, recipe.seed)
        if (folder / "config.json").exists() and not (folder / STATE).exists():
            # The checkpoint is complete, here or from elsewhere, so that only the data is opened.
            run, model = work.open(recipe, work.out / f".{STATIC}-s{recipe.seed}"), work.loaded(folder)
        elif self.pretrained_static:
            run = work.open(recipe, folder)
            model, task = run.model, run.task
            save(model, folder, extra={"preprocess": task.preprocess.to_dict(), "classes": task.train_images.classes})
        else:
            run, model = work.trained(recipe, folder)
        return _measured(run, model, "methods")

    def _entry(self, work: Compare, entry: Entry, cost: float, recipe: Recipe) -> dict[str, Any]:
        """The result of an entry at a cost: of a model trained for it, or turned to it on training images."""
        static = _static_made(work, recipe.seed)
        if entry.train == "never":
            run = work.open(recipe, work.out / stem(entry.name, recipe.seed))
            vit: Any = load(static)
            model = adapt(vit.unwrap(), Method.registry[entry.method](**entry.options)).to(run.device)
            calibrate(model, run.task.typical(), cost)
            return _measured(run, model, entry.group)
        folder = work.out / stem(entry.name, recipe.seed, cost if entry.train == "each" else None)
        if entry.tuned:
            recipe = changed(recipe, self._searched(work, entry, cost, recipe, folder))
        run, model = work.trained(recipe, folder)
        point = model.method.operating_point
        set_by_recipe = point is None or {"budget", point[0]} & recipe.method_options.keys()
        if entry.train == "once" or not set_by_recipe:  # the training did not aim at this cost
            calibrate(model, run.task.typical(), cost)
        reference = work.loaded(static) if entry.changes.keys() & OTHER_NETWORK else None
        result = _measured(run, model, entry.group, reference)
        if entry.train == "each" and not set_by_recipe:  # saved first: a result that exists is not made again
            names = ("top1", "top5", "gmacs", "gmacs_static", "depth", "images", "images_per_s")
            save(model, folder, extra={"results": {n: result[n] for n in names} | run.task.about()})
            write_card(folder)
        return result

    def _searched(self, work: Compare, entry: Entry, cost: float, recipe: Recipe, folder: Path) -> list[str]:
        """The settings that were best on held-out training images."""
        assert work.data is not None
        trials, device = folder.with_name(f"{folder.name}-search"), str(work.device)
        options: dict[str, Any] = {"trials": entry.trials, "space": entry.tuned, "limit": work.limit}
        found = search(recipe, work.data, trials, budget=cost, device=device, **options)
        best: list[str] = found["settings"]
        return best


def _static_folder(work: Compare, seed: int) -> Path:
    return work.out / stem(STATIC, seed, 1.0)


def _static_made(work: Compare, seed: int) -> Path:
    folder = _static_folder(work, seed)
    if not (folder / "config.json").exists():
        raise DwindleError(f"{folder} is missing: the others build on the static model; run '{STATIC}' first.")
    return folder


def _measured(run: Run, model: AdaptiveViT, group: str, static: AdaptiveViT | None = None) -> dict[str, Any]:
    """The result of a model: accuracy, cost and speed, packed and masked.

    static: the model whose cost is the reference, where that is not the model itself with nothing halted.
    """
    packed, masked = run.evaluate(model=model), run.evaluate(model=model, layout="masked")
    seconds, teacher = run.seconds_per_epoch, run.learner.teacher
    if static is not None:
        packed["gmacs_static"] = round(static.static_macs() / 1e9, 4)
    speed = run.steps_per_epoch * run.task.batch / seconds if seconds else None
    return {
        "group": group,
        "method": type(model.method).__name__,
        "options": model.method.config,
        "cost": round(packed["gmacs"] / packed["gmacs_static"], 4),
        **packed,
        **run.task.about(),
        "top1_masked": masked["top1"],
        "images_per_s_masked": masked["images_per_s"],
        "train_images_per_s": speed and round(speed),
        "teacher_asked": teacher is not None and teacher.computed > 0,  # else its answers were cached, which is faster
        "taught": run.recipe.teacher is not None,
    }


def summarised(results: Sequence[dict[str, Any]], reference: str = STATIC) -> list[dict[str, Any]]:
    """One row per method and cost: means over seeds, and the gap to the reference of the same seeds."""
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
    """The rows as a table in Markdown."""
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
