"""One network for every setting against networks trained for one each, and under every policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from ...errors import DwindleError
from ...experiments.compare import INCIDENTAL, Compare, Job, Plan, Report, stem
from ...io.datasets import limit as first
from ...io.sets import parts_for
from ...train.state import defaults, differing
from . import figures
from .grid import between, falls, grid, rows
from .images import served
from .model import AdaPerceiver
from .policies import evaluate_policies
from .policy_network import save_policy
from .recipe import AdaRecipe
from .settings import Setting

ADAPTIVE, POLICIES = "adaptive", "policies"
COLUMNS = ["tokens", "depth", "width", "adaptive", "gmacs", "static", "static_gmacs", "difference"]
POLICY_COLUMNS = ["policy", "top1", "gmacs", "fixed_top1", "best_fixed_top1"]


@dataclass(frozen=True)
class AdaComparison(Plan):
    base: AdaRecipe  # of the adaptive network; the others have what is left of it for one setting
    sizes: tuple[Setting, ...]  # each a network of its own; together they are trained for as many epochs as the one
    between: tuple[int, ...] = ()  # numbers of tokens besides the trained ones that the one network is asked for
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    prices: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    policy_epochs: int = 1
    seeds: tuple[int, ...] = (0,)
    batch: int = 256  # of what is measured

    def names(self) -> list[str]:
        return [ADAPTIVE, *map(static, self.sizes), POLICIES]

    @cached_property
    def whole(self) -> AdaPerceiver:
        """The adaptive network without its weights."""
        with torch.device("meta"):
            return AdaPerceiver.preset(self.base.model, **self.base.method_options)

    def check(self) -> None:
        if self.base.reinit_from is not None:
            raise DwindleError(
                f"reinit_from = {self.base.reinit_from}: it mends a trained network, a comparison trains; leave it out."
            )
        for size in self.sizes:
            tokens, depth, width = size
            trained = tokens in self.whole.tokens and width in self.whole.widths
            if not (trained and 1 <= depth <= self.whole.depth):
                raise DwindleError(
                    f"A network for {size} has nothing to be compared with: the adaptive one is trained with tokens "
                    f"{self.whole.tokens}, widths {self.whole.widths} and up to {self.whole.depth} blocks."
                )

    def jobs(self, work: Compare) -> Iterator[Job]:
        for seed in self.seeds:
            base = dataclasses.replace(self.base, seed=seed)
            yield self._job(work, ADAPTIVE, base, self._every, between=self.between)
            for size in self.sizes:
                yield self._job(work, static(size), self.alone(base, size), partial(self._one, size=size))
            asked = {name: getattr(self, name) for name in ("thresholds", "prices", "policy_epochs")}
            yield self._job(work, POLICIES, base, self._policies, **asked)

    def _job(self, work: Compare, name: str, recipe: AdaRecipe, make: Callable[..., Any], **others: Any) -> Job:
        given = work.conditions(recipe) | others
        if work.data is not None:
            given["eval_data"] = Path(work.eval_data or work.data).name
        given["weights"] = Path(recipe.weights).name if recipe.weights else None
        return Job(name, recipe, given, partial(make, work, recipe, work.out / stem(name, recipe.seed)))

    def told(self, row: dict[str, Any]) -> str:
        found = f"{len(row['rows'])} rows" if "rows" in row else f"top-1 {row['top1']:.2f}"
        return f"{row['name']}, seed {row['seed']}: {found}"

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        table = summarised(found)
        tables = [(name, COLUMNS, [["" if row[c] is None else row[c] for c in COLUMNS] for row in table])]
        alone = [(row["static_gmacs"], row["static"]) for row in table]
        drawn = []
        for result in found:
            if result["name"] == POLICIES:
                lines = [[row[c] for c in POLICY_COLUMNS] for row in result["rows"]]
                tables.append((f"policies, seed {result['seed']}", POLICY_COLUMNS, lines))
            if "falls" in result:
                at = f"s{result['seed']}.png"
                drawn.append(figures.tradeoffs(result["rows"], folder / f"tradeoff-{at}", static=alone))
                if "between" in result:
                    drawn.append(figures.interpolation(result["between"], folder / f"interpolation-{at}"))
        return Report(table, tables, markdown(table), {"figures": [str(path) for path in drawn]})

    def alone(self, base: AdaRecipe, size: Setting) -> AdaRecipe:
        """The recipe for one setting: nothing is drawn, and the FFN has only the neurons of that width."""
        tokens, depth, width = size
        share = {"tokens": (tokens,), "widths": (self.whole.width,), "depth": depth}
        share["ffn_ratio"] = self.whole.ffn_ratio * width / self.whole.width
        kept = {name: value for name, value in base.method_options.items() if name not in ("readouts", "mask")}
        return dataclasses.replace(
            base,
            method_options=kept | share,
            epochs=max(1, base.epochs // len(self.sizes)),
            stages=(1.0, 0.0, 0.0),
            largest_weight=0.0,
            full_width=0.0,
            mask_steps=AdaRecipe.mask_steps,
        )

    def _trained(self, work: Compare, recipe: AdaRecipe, folder: Path) -> tuple[AdaPerceiver, dict[str, Any]]:
        run, model = work.trained(recipe, folder)
        # None: it was trained by an earlier call.
        return model, {"epochs": recipe.epochs, "seconds_per_epoch": round(run.seconds_per_epoch, 2) or None}

    def _served(self, work: Compare, model: AdaPerceiver) -> tuple[Any, Any]:
        """Training and evaluation images as `served`."""
        assert work.data is not None
        train, held = parts_for(model, work.data, work.eval_data or work.data)
        train.skip = held.skip = self.base.skip_corrupt
        if work.limit is not None:
            train, held = first(train, work.limit), first(held, work.limit)
        decoded, device = work.resident or {}, str(work.device)
        return tuple(
            served(model, images, device, decoded.get(part)) for part, images in (("train", train), ("eval", held))
        )

    def _every(self, work: Compare, recipe: AdaRecipe, folder: Path) -> dict[str, Any]:
        model, told = self._trained(work, recipe, folder)
        _, held = self._served(work, model)
        found = grid(model, held(self.batch), device=work.device, amp=recipe.amp)
        told |= {**held.about, "falls": falls(found), "rows": rows(model, found)}
        if self.between:
            asked = sorted({*model.tokens, *self.between})
            told["between"] = between(model, held(self.batch), asked, work.device, recipe.amp)
        return told

    def _one(self, work: Compare, recipe: AdaRecipe, folder: Path, size: Setting) -> dict[str, Any]:
        model, told = self._trained(work, recipe, folder)
        _, held = self._served(work, model)
        found = grid(model, held(self.batch), device=work.device, amp=recipe.amp)
        top1, gmacs = round(float(found.top1[-1, -1, -1]), 3), round(model.static_macs() / 1e9, 4)
        return told | {**held.about, "setting": size, "top1": top1, "gmacs": gmacs}

    def _policies(self, work: Compare, recipe: AdaRecipe, out: Path) -> dict[str, Any]:
        folder = work.out / stem(ADAPTIVE, recipe.seed)
        if not (folder / "config.json").exists():
            raise DwindleError(f"{folder} is missing: policies need the trained network; run '{ADAPTIVE}' first.")
        model = work.loaded(folder)
        _check_finished(model, recipe, folder)
        training, held = self._served(work, model)
        seen = {"every setting": 0, "learned policies": 0}
        total = {"every setting": held.count, "learned policies": self.policy_epochs * training.count}

        def progress(what: str, images: int) -> None:
            seen[what] += images
            if work.tick:
                work.tick(what, seen[what], total[what])

        table, made = evaluate_policies(
            model,
            lambda: held(self.batch),
            lambda epoch: training(self.batch, epoch),
            self.thresholds,
            self.prices,
            self.policy_epochs,
            amp=recipe.amp,
            device=work.device,
            progress=progress,
        )
        for one in made:
            save_policy(one.policy, out / one.file)
        return {**held.about, "rows": table}


def static(size: Setting) -> str:
    return "static " + "-".join(map(str, size))


def _check_finished(model: AdaPerceiver, recipe: AdaRecipe, folder: Path) -> None:
    """A checkpoint is written amid a training too, and may be of another one."""
    ours = {n: value for n, value in recipe.told().items() if n not in INCIDENTAL or n == "weights"}
    theirs, done = model.extra.get("recipe", {}), model.extra.get("results", {}).get("epoch")
    others = differing(defaults(recipe) | theirs, ours)
    if others or done != recipe.epochs:
        what = f"was trained with {others}" if others else f"is at epoch {done} of {recipe.epochs}"
        raise DwindleError(f"{folder} {what}: policies need the trained network; run '{ADAPTIVE}' first.")


def summarised(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per setting that a network was trained for: it, and the adaptive network there; means over seeds."""
    one = {
        (result["seed"], (row["tokens"], row["depth"], row["width"])): row
        for result in results
        if result["name"] == ADAPTIVE
        for row in result["rows"]
    }
    groups: dict[Setting, list[dict[str, Any]]] = {}
    for result in results:
        if "setting" in result:
            groups.setdefault(tuple(result["setting"]), []).append(result)
    made = []
    for size, alone in groups.items():
        pairs = [(one[r["seed"], size], r) for r in alone if (r["seed"], size) in one]
        here, there = ([p[0] for p in pairs], [p[1] for p in pairs]) if pairs else ([], alone)  # of seeds both have
        gaps = [adaptive["top1"] - static["top1"] for adaptive, static in pairs]
        made.append(
            {
                **dict(zip(("tokens", "depth", "width"), size)),
                "static": round(mean(r["top1"] for r in there), 2),
                "static_gmacs": there[0]["gmacs"],
                "adaptive": round(mean(r["top1"] for r in here), 2) if here else None,
                "gmacs": here[0]["gmacs"] if here else None,
                "difference": round(mean(gaps), 2) if gaps else None,
                "spread": round(stdev(gaps), 2) if len(gaps) > 1 else None,
                "seeds": len(there),
            }
        )
    return made


def markdown(table: Sequence[dict[str, Any]]) -> str:
    lines = ["| tokens, depth, width | adaptive | GMACs | static | GMACs | difference | seeds |", "|---" * 7 + "|"]
    for row in table:
        size = f"{row['tokens']}, {row['depth']}, {row['width']}"
        cells = [size, row["adaptive"], row["gmacs"], row["static"], row["static_gmacs"]]
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        cells += ["" if row["difference"] is None else f"{row['difference']:+.2f}{spread}", row["seeds"]]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"
