"""One network for every setting against networks trained for one each, and under every policy: one JSON per result.

A comparison goes on where it was: a result whose JSON exists is not made again, a training that was killed resumes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from ...errors import DwindleError
from ...experiments.compare import INCIDENTAL
from ...experiments.results import Results, machine, read_result, slug
from ...files import write_text
from ...io.checkpoint import load
from ...io.datasets import limit as first
from ...io.sets import parts_for
from ...train.loop import Run
from ...train.state import STATE, defaults, differing
from ...train.teacher import Answers
from .grid import between, falls, grid, rows
from .images import served
from .model import AdaPerceiver
from .policies import judged, save_policy
from .recipe import AdaRecipe
from .settings import Setting

ADAPTIVE, POLICIES = "adaptive", "policies"


@dataclass(frozen=True)
class AdaComparison:
    base: AdaRecipe  # of the adaptive network; the others have what is left of it for one setting
    sizes: tuple[Setting, ...]  # each a network of its own; together they are trained for as many epochs as the one
    between: tuple[int, ...] = ()  # numbers of tokens besides the trained ones that the one network is asked for
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    prices: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    policy_epochs: int = 1
    seeds: tuple[int, ...] = (0,)
    batch: int = 256  # of what is measured


def static(size: Setting) -> str:
    return "static " + "-".join(map(str, size))


class AdaCompare(Results):
    """`results()` yields every result as it comes, those of earlier calls too."""

    part = "result"

    def __init__(
        self,
        name: str,
        comparison: AdaComparison,
        data: str,
        out: str | os.PathLike,
        results: str | os.PathLike,
        *,
        eval_data: str | None = None,
        device: str = "cpu",
        limit: int | None = None,
        only: Sequence[str] | None = None,
        tick: Callable[[str, int, int], None] = lambda name, step, steps: None,
        until: float | None = None,
    ) -> None:
        """only: names of results. until: seconds after which no further training is begun."""
        known = [ADAPTIVE, *map(static, comparison.sizes), POLICIES]
        super().__init__(name, out, results, known, only, until)
        self.comparison, self.data, self.eval_data = comparison, data, eval_data or data
        self.device, self.limit, self.tick = device, limit, tick
        self.resident: Any = None  # decoded once for all runs
        self.answers = Answers()  # of the teacher: all runs of a seed see the same batches
        base = comparison.base
        if base.reinit_from is not None:
            raise DwindleError(
                f"reinit_from = {base.reinit_from}: it mends a trained network, a comparison trains; leave it out."
            )
        with torch.device("meta"):
            self.whole = AdaPerceiver.preset(base.model, **base.method_options)
        for size in comparison.sizes:
            tokens, depth, width = size
            trained = tokens in self.whole.tokens and width in self.whole.widths
            if not (trained and 1 <= depth <= self.whole.depth):
                raise DwindleError(
                    f"A network for {size} has nothing to be compared with: the adaptive one is trained with tokens "
                    f"{self.whole.tokens}, widths {self.whole.widths} and up to {self.whole.depth} blocks."
                )

    def told(self, row: dict[str, Any]) -> str:
        found = f"{len(row['rows'])} rows" if "rows" in row else f"top-1 {row['top1']:.2f}"
        return f"{row['name']}, seed {row['seed']}: {found}"

    def results(self) -> Iterator[dict[str, Any]]:
        for seed in self.comparison.seeds:
            base, self.answers = dataclasses.replace(self.comparison.base, seed=seed), Answers()
            yield from self._result(ADAPTIVE, base, self._every)
            for size in self.comparison.sizes:
                yield from self._result(static(size), self._alone(base, size), partial(self._one, size=size))
            yield from self._result(POLICIES, base, self._policies)

    def _alone(self, base: AdaRecipe, size: Setting) -> AdaRecipe:
        """The recipe for one setting: nothing is drawn, and the FFN has only the neurons of that width."""
        tokens, depth, width = size
        share = {"tokens": (tokens,), "widths": (self.whole.width,), "depth": depth}
        share["ffn_ratio"] = self.whole.ffn_ratio * width / self.whole.width
        kept = {name: value for name, value in base.method_options.items() if name not in ("readouts", "mask")}
        return dataclasses.replace(
            base,
            method_options=kept | share,
            epochs=max(1, base.epochs // len(self.comparison.sizes)),
            stages=(1.0, 0.0, 0.0),
            largest_weight=0.0,
            full_width=0.0,
            mask_steps=AdaRecipe.mask_steps,
        )

    def _result(
        self, name: str, recipe: AdaRecipe, look: Callable[[AdaRecipe, str], dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        path = self.folder / f"{slug(name)}-s{recipe.seed}.json"
        given = {n: value for n, value in dataclasses.asdict(recipe).items() if n not in INCIDENTAL}
        given |= {"data": Path(self.data).name, "eval_data": Path(self.eval_data).name, "limit": self.limit}
        given["teacher"] = Path(recipe.teacher).name if recipe.teacher else None
        given["weights"] = Path(recipe.weights).name if recipe.weights else None
        given |= {"between": self.comparison.between} if name == ADAPTIVE else {}
        if name == POLICIES:
            given |= {n: getattr(self.comparison, n) for n in ("thresholds", "prices", "policy_epochs")}
        if not self.has(path, given, recipe):
            if name not in self.only or self.late:
                return
            result = {"comparison": self.name, "name": name, "seed": recipe.seed, **look(recipe, name)}
            result |= {"conditions": given, "machine": machine(torch.device(self.device))}
            write_text(path, json.dumps(result, indent=1) + "\n")
        yield read_result(path)

    def _folder(self, name: str, seed: int) -> Path:
        return self.out / f"{slug(name)}-s{seed}"

    def _trained(self, recipe: AdaRecipe, name: str) -> tuple[AdaPerceiver, dict[str, Any]]:
        folder = self._folder(name, recipe.seed)
        run = Run(
            recipe,
            self.data,
            folder,
            eval_data=self.eval_data,
            device=self.device,
            resume=(folder / STATE).exists(),
            limit=self.limit,
            resident=self.resident,
            answers=self.answers,
        )
        self.resident = run.task.resident
        for _ in run.epochs(lambda step, steps, terms: self.tick(name, step, steps)):
            pass
        run.learn.forget()  # its memory, before the next run takes its own
        # None: it was trained by an earlier call.
        told = {"epochs": recipe.epochs, "seconds_per_epoch": round(run.seconds_per_epoch, 2) or None}
        return self._loaded(folder), told

    def _loaded(self, folder: Path) -> AdaPerceiver:
        model: Any = load(folder)
        return model.eval().to(self.device)

    def _served(self, model: AdaPerceiver) -> tuple[Any, Any]:
        """Training and evaluation images as `served`."""
        train, held = parts_for(model, self.data, self.eval_data)
        train.skip = held.skip = self.comparison.base.skip_corrupt
        if self.limit is not None:
            train, held = first(train, self.limit), first(held, self.limit)
        decoded = self.resident or {}
        return tuple(
            served(model, images, self.device, decoded.get(part)) for part, images in (("train", train), ("eval", held))
        )

    def _every(self, recipe: AdaRecipe, name: str) -> dict[str, Any]:
        model, told = self._trained(recipe, name)
        _, held = self._served(model)
        found = grid(model, held(self.comparison.batch), device=self.device, amp=recipe.amp)
        told |= {**held.about, "falls": falls(found), "rows": rows(model, found)}
        if counts := self.comparison.between:
            asked = sorted({*model.tokens, *counts})
            told["between"] = between(model, held(self.comparison.batch), asked, self.device, recipe.amp)
        return told

    def _one(self, recipe: AdaRecipe, name: str, size: Setting) -> dict[str, Any]:
        model, told = self._trained(recipe, name)
        _, held = self._served(model)
        found = grid(model, held(self.comparison.batch), device=self.device, amp=recipe.amp)
        top1, gmacs = round(float(found.top1[-1, -1, -1]), 3), round(model.static_macs() / 1e9, 4)
        return told | {**held.about, "setting": size, "top1": top1, "gmacs": gmacs}

    def _check_finished(self, model: AdaPerceiver, recipe: AdaRecipe, folder: Path) -> None:
        """A checkpoint is written amid a training too, and may be of another one."""
        ours = {n: value for n, value in dataclasses.asdict(recipe).items() if n not in INCIDENTAL}
        ours["weights"] = Path(recipe.weights or "none").name  # as a checkpoint has it
        theirs, done = model.extra.get("recipe", {}), model.extra.get("results", {}).get("epoch")
        others = differing(defaults(recipe) | theirs, ours)
        if others or done != recipe.epochs:
            what = f"was trained with {others}" if others else f"is at epoch {done} of {recipe.epochs}"
            raise DwindleError(f"{folder} {what}: policies need the trained network; run '{ADAPTIVE}' first.")

    def _policies(self, recipe: AdaRecipe, name: str) -> dict[str, Any]:
        folder, plan = self._folder(ADAPTIVE, recipe.seed), self.comparison
        if not (folder / "config.json").exists():
            raise DwindleError(f"{folder} is missing: policies need the trained network; run '{ADAPTIVE}' first.")
        model = self._loaded(folder)
        self._check_finished(model, recipe, folder)
        training, held = self._served(model)
        seen = {"every setting": 0, "learned policies": 0}
        total = {"every setting": held.count, "learned policies": plan.policy_epochs * training.count}

        def progress(what: str, images: int) -> None:
            seen[what] += images
            self.tick(what, seen[what], total[what])

        table, made = judged(
            model,
            lambda: held(plan.batch),
            lambda epoch: training(plan.batch, epoch),
            plan.thresholds,
            plan.prices,
            plan.policy_epochs,
            amp=recipe.amp,
            device=self.device,
            progress=progress,
        )
        for one in made:
            save_policy(one.policy, self._folder(POLICIES, recipe.seed) / one.file)
        return {**held.about, "rows": table}


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
