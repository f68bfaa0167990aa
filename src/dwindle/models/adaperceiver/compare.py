"""Comparison of one network for all settings with networks trained for one setting each, and of its policies."""

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
from ...io.sets import splits_for
from ...train.state import defaults, differing
from . import figures
from .grid import between, falls, grid, rows
from .images import served
from .model import AdaPerceiver
from .policies import COLUMNS as POLICY_COLUMNS
from .policies import evaluate_policies
from .policy_network import save_policy
from .recipe import AdaRecipe
from .settings import Setting

ADAPTIVE, POLICIES = "adaptive", "policies"
COLUMNS = ["tokens", "depth", "width", "adaptive", "gmacs", "static", "static_gmacs", "difference"]


@dataclass(frozen=True)
class AdaComparison(Plan):
    base: AdaRecipe  # of the adaptive network; `alone` derives the others' from it
    sizes: tuple[Setting, ...]  # a network is trained for each; together they get as many epochs as the adaptive one
    between: tuple[int, ...] = ()  # untrained numbers of tokens at which the adaptive network is measured as well
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    prices: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    policy_epochs: int = 1
    seeds: tuple[int, ...] = (0,)
    batch: int = 256  # of the measurements

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
            options = {name: getattr(self, name) for name in ("thresholds", "prices", "policy_epochs")}
            yield self._job(work, POLICIES, base, self._policies, **options)

    def _job(self, work: Compare, name: str, recipe: AdaRecipe, make: Callable[..., Any], **others: Any) -> Job:
        """A result that `make` computes. others: what it depends on besides the recipe."""
        conditions = work.conditions(recipe) | others
        if work.data is not None:
            conditions["eval_data"] = Path(work.eval_data or work.data).name
        conditions["weights"] = Path(recipe.weights).name if recipe.weights else None
        return Job(name, recipe, conditions, partial(make, work, recipe, work.out / stem(name, recipe.seed)))

    def line(self, row: dict[str, Any]) -> str:
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
        """The recipe of a network for one setting: nothing is random, and its FFN has only that width's neurons."""
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
        """The trained network, and the epochs and time of its training; None: an earlier call trained it."""
        run, model = work.trained(recipe, folder)
        return model, {"epochs": recipe.epochs, "seconds_per_epoch": round(run.seconds_per_epoch, 2) or None}

    def _served(self, work: Compare, model: AdaPerceiver) -> tuple[Any, Any]:
        """Training and evaluation images, as `served` gives them."""
        assert work.data is not None
        train, held = splits_for(model, work.data, work.eval_data or work.data)
        train.skip = held.skip = self.base.skip_corrupt
        if work.limit is not None:
            train, held = first(train, work.limit), first(held, work.limit)
        decoded, device = work.resident or {}, str(work.device)
        return tuple(
            served(model, images, device, decoded.get(part)) for part, images in (("train", train), ("eval", held))
        )

    def _every(self, work: Compare, recipe: AdaRecipe, folder: Path) -> dict[str, Any]:
        """The result of the adaptive network: a row per setting."""
        model, result = self._trained(work, recipe, folder)
        _, held = self._served(work, model)
        found = grid(model, held(self.batch), device=work.device, amp=recipe.amp)
        result |= {**held.about, "falls": falls(found), "rows": rows(model, found)}
        if self.between:
            counts = sorted({*model.tokens, *self.between})
            result["between"] = between(model, held(self.batch), counts, work.device, recipe.amp)
        return result

    def _one(self, work: Compare, recipe: AdaRecipe, folder: Path, size: Setting) -> dict[str, Any]:
        """The result of a network for one setting."""
        model, result = self._trained(work, recipe, folder)
        _, held = self._served(work, model)
        found = grid(model, held(self.batch), device=work.device, amp=recipe.amp)
        top1, gmacs = round(float(found.top1[-1, -1, -1]), 3), round(model.static_macs() / 1e9, 4)
        return result | {**held.about, "setting": size, "top1": top1, "gmacs": gmacs}

    def _policies(self, work: Compare, recipe: AdaRecipe, out: Path) -> dict[str, Any]:
        """The result of the policies: Table 6 for the adaptive network."""
        folder = work.out / stem(ADAPTIVE, recipe.seed)
        if not (folder / "config.json").exists():
            raise DwindleError(f"{folder} is missing: policies need the trained network; run '{ADAPTIVE}' first.")
        model = work.loaded(folder)
        _check_finished(model, recipe, folder)
        training, held = self._served(work, model)
        done = {"every setting": 0, "learned policies": 0}
        total = {"every setting": held.count, "learned policies": self.policy_epochs * training.count}

        def progress(what: str, images: int) -> None:
            done[what] += images
            if work.tick:
                work.tick(what, done[what], total[what])

        table, policies = evaluate_policies(
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
        for learned in policies:
            save_policy(learned.policy, out / learned.file)
        return {**held.about, "rows": table}


def static(size: Setting) -> str:
    """The name of the result of a network for one setting."""
    return "static " + "-".join(map(str, size))


def _check_finished(model: AdaPerceiver, recipe: AdaRecipe, folder: Path) -> None:
    """Raises unless the folder's checkpoint is at the end of the recipe's training: checkpoints are also written during
    a training, and may come from another one."""
    ours = {n: value for n, value in recipe.settings().items() if n not in INCIDENTAL or n == "weights"}
    theirs, done = model.extra.get("recipe", {}), model.extra.get("results", {}).get("epoch")
    others = differing(defaults(recipe) | theirs, ours)
    if others or done != recipe.epochs:
        what = f"was trained with {others}" if others else f"is at epoch {done} of {recipe.epochs}"
        raise DwindleError(f"{folder} {what}: policies need the trained network; run '{ADAPTIVE}' first.")


def summarised(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per setting that a network was trained for, beside the adaptive network there; means over seeds."""
    adaptive_rows = {
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
        pairs = [(adaptive_rows[r["seed"], size], r) for r in alone if (r["seed"], size) in adaptive_rows]
        # Of the seeds that both have; without any, of all seeds of the network for one setting.
        adaptives, statics = ([p[0] for p in pairs], [p[1] for p in pairs]) if pairs else ([], alone)
        gaps = [adaptive["top1"] - static["top1"] for adaptive, static in pairs]
        made.append(
            {
                **dict(zip(("tokens", "depth", "width"), size)),
                "static": round(mean(r["top1"] for r in statics), 2),
                "static_gmacs": statics[0]["gmacs"],
                "adaptive": round(mean(r["top1"] for r in adaptives), 2) if adaptives else None,
                "gmacs": adaptives[0]["gmacs"] if adaptives else None,
                "difference": round(mean(gaps), 2) if gaps else None,
                "spread": round(stdev(gaps), 2) if len(gaps) > 1 else None,
                "seeds": len(statics),
            }
        )
    return made


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """The rows of `summarised` as a table."""
    lines = ["| tokens, depth, width | adaptive | GMACs | static | GMACs | difference | seeds |", "|---" * 7 + "|"]
    for row in table:
        size = f"{row['tokens']}, {row['depth']}, {row['width']}"
        cells = [size, row["adaptive"], row["gmacs"], row["static"], row["static_gmacs"]]
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        cells += ["" if row["difference"] is None else f"{row['difference']:+.2f}{spread}", row["seeds"]]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"
