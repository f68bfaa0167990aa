"""Routers under the same conditions: train all, measure hard against soft, rob TSA of its choice; a table and figures.

A comparison goes on where it was: a result whose JSON exists is not made again, a training that was killed resumes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor

from ...experiments.results import Results, machine, read_result, slug
from ...files import write_text
from ...train.loop import Run
from ...train.state import STATE
from .bench import bench_lm, compilable
from .evaluate import calibrate, evaluate
from .execute import AdaptiveLM
from .load import load_lm
from .routing import Control
from .text import Text, open_text
from .train import LMRecipe

STATIC = "static"
LEAST = 0.01  # of token-layer operations; less saved is nothing to match
CONTROLS: tuple[Literal["mean", "layer", "overall"], ...] = ("mean", "layer", "overall")
INCIDENTAL = ("eval_every", "eval_windows", "compile")  # two results may differ in these and still be comparable


@dataclass(frozen=True)
class LMComparison:
    base: LMRecipe  # the conditions; its router is not used
    penalties: tuple[float, ...] = (0.0, 0.01)  # lambda of TSA; the others are matched to each
    seeds: tuple[int, ...] = (0, 1, 2)
    keys: str = "offered"
    options: dict[str, Any] = field(default_factory=dict)  # of TSA, beside these
    taus: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    allowed: float = 0.005  # of the soft loss: the tau compared is the highest that costs no more
    windows: int | None = None  # of the validation text; None: all
    batch: int = 32  # of the timing
    seconds: float = 4.0


class LMCompare(Results):
    """`results()` yields every result as it comes, those of earlier calls too."""

    part = "result"

    def __init__(
        self,
        name: str,
        comparison: LMComparison,
        out: str | os.PathLike,
        results: str | os.PathLike,
        *,
        device: str,
        only: Sequence[str] | None = None,
        tick: Callable[[str, int, int], None] | None = None,
        until: float | None = None,
    ) -> None:
        """only: names of results. until: seconds after which no further training is begun."""
        known = [STATIC, *(self._tsa(p) for p in comparison.penalties)]
        known += [f"{kind} as {self._tsa(p)}" for p in comparison.penalties for kind in ("early exit", "MoD", "random")]
        self.text: Text = open_text(comparison.base.data).to(torch.device(device))
        super().__init__(name, out, results, known, only, until)
        self.comparison, self.device, self.tick = comparison, device, tick

    @staticmethod
    def _tsa(penalty: float) -> str:
        return f"TSA {penalty:g}"

    def results(self) -> Iterator[dict[str, Any]]:
        for seed in self.comparison.seeds:
            yield from self._result(STATIC, seed, "Static", {})
            for penalty in self.comparison.penalties:
                options = {"penalty": penalty, "keys": self.comparison.keys, **self.comparison.options}
                yield from self._result(self._tsa(penalty), seed, "TSA", options, self._look_at_tsa)
            for penalty in self.comparison.penalties:
                path = self._path(self._tsa(penalty), seed)
                if path.exists() and (goal := read_result(path))["tlops_saved"] >= LEAST:
                    yield from self._matched(self._tsa(penalty), goal, seed)

    def _matched(self, tsa: str, goal: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
        """The others at the operations TSA saved."""
        saved, blocks = goal["tlops_saved"], self.comparison.base.blocks

        def turned(model: AdaptiveLM) -> dict[str, Any]:
            reached = calibrate(model, self._seen(), saved, **self._options())
            return self._measure(model) | {"reached_on_training_text": reached}

        yield from self._result(f"early exit as {tsa}", seed, "EarlyExit", {}, turned, folder=f"early_exit-s{seed}")
        every = 2 if saved * blocks <= (blocks // 2) * 0.9 else 1
        capacity = 1 - saved * blocks / (blocks // every)
        options = {"capacity": round(max(capacity, 0.05), 4), "every": every}
        yield from self._result(f"MoD as {tsa}", seed, "MoD", options, turned)
        rates = {"rates": tuple(round(rate, 4) for rate in goal["rates"]), "keys": self.comparison.keys}
        yield from self._result(f"random as {tsa}", seed, "Random", rates)

    def _options(self) -> dict[str, Any]:
        base = self.comparison.base
        gpu = self.device.startswith("cuda")  # where packed blocks wait for the host: few large batches
        options: dict[str, Any] = {"limit": self.comparison.windows, "device": self.device, "name": base.data}
        return options | {"batch": 512 if gpu else 64, "amp": base.amp and gpu}

    def _measure(self, model: AdaptiveLM, ids: Tensor | None = None, **options: Any) -> dict[str, Any]:
        return evaluate(model, self.text.val if ids is None else ids, **(self._options() | options))

    def _seen(self) -> Tensor:
        """Training text to set operating points on, as much as there is to validate."""
        return self.text.train[: len(self.text.val)]

    def _path(self, name: str, seed: int) -> Path:
        return self.folder / f"{slug(name)}-s{seed}.json"

    def _result(
        self,
        name: str,
        seed: int,
        router: str,
        options: dict[str, Any],
        look: Callable[[AdaptiveLM], dict[str, Any]] | None = None,
        folder: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The result by that name, made unless it is there. look: what is measured of the trained model."""
        path = self._path(name, seed)
        recipe = dataclasses.replace(self.comparison.base, method=router, method_options=options, seed=seed)
        given = dataclasses.asdict(recipe) | {"data": Path(recipe.data).name, "windows": self.comparison.windows}
        conditions = {k: v for k, v in given.items() if k not in INCIDENTAL}
        if not self.has(path, conditions, recipe):
            if name not in self.only or self.late:
                return
            model, trained = self._trained(recipe, self.out / (folder or f"{slug(name)}-s{seed}"), name)
            found = (look or self._measure)(model)
            if router == "TSA" and seed == self.comparison.seeds[0]:  # other seeds' rows take as long
                found["timing"] = self._timed(model)
            result = {"comparison": self.name, "name": name, "seed": seed, "router": router}
            result |= {"options": model.method.config, **found, **trained, "conditions": conditions}
            result["machine"] = machine(next(model.parameters()).device)
            write_text(path, json.dumps(result, indent=1) + "\n")
        yield read_result(path)

    def _trained(self, recipe: LMRecipe, folder: Path, name: str) -> tuple[AdaptiveLM, dict[str, Any]]:
        run = Run(recipe, None, folder, device=self.device, resume=(folder / STATE).exists(), opened=self.text)
        for _ in run.epochs(lambda step, steps, terms: self.tick(name, step, steps) if self.tick else None):
            pass
        run.learn.forget()  # its memory, before the next run takes its own
        speed = {"train_loss": run.history[-1]["task"], "train_tokens_per_s": run.history[-1]["train_tokens_per_s"]}
        return load_lm(folder).to(run.device), speed

    def _look_at_tsa(self, model: AdaptiveLM) -> dict[str, Any]:
        """Hard against soft, then the controls and the clock at the tau that costs no more than is allowed.

        That tau is chosen on training text, the sweep shown is of the validation text.
        """
        router: Any = model.method
        router.tau = 0.0
        soft, known = self._measure(model, layout="masked"), self._measure(model, self._seen(), layout="masked")
        sweep, fits = [], [0.0]
        for tau in self.comparison.taus:
            router.tau = tau
            hard = self._measure(model)
            sweep.append({"tau": tau} | {k: hard[k] for k in ("loss", "bpc", "tlops_saved", "macs_saved")})
            if self._measure(model, self._seen())["loss"] <= known["loss"] * (1 + self.comparison.allowed):
                fits.append(tau)
        router.tau = max(fits)
        hard = self._measure(model)
        rates, means = tuple(hard["rates"]), tuple(soft["means"])
        controls = {}
        for kind in CONTROLS:
            model.method = Control(router, kind, rates, means)
            controls[kind] = {k: v for k, v in self._measure(model).items() if k in ("loss", "tlops_saved")}
        model.method = router
        gated = soft["means"][1:]
        return hard | {
            "loss_soft": soft["loss"],
            "skip_soft": 1 - sum(gated) / len(gated),
            "tau": router.tau,
            "sweep": sweep,
            "controls": controls,
        }

    def _timed(self, model: AdaptiveLM) -> dict[str, Any]:
        return bench_lm(  # of a copy: compiling changes a model for good
            copy.deepcopy(model),
            [self.comparison.batch],
            [],
            self.device,
            "bf16" if self._options()["amp"] else "fp32",
            self.comparison.seconds,
            ids=self.text.val,
            compiled=compilable(self.device),
        )


def summarised(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per name, means over seeds; `gap`: percent of the static loss of the same seed."""
    static = {r["seed"]: r["loss"] for r in results if r["name"] == STATIC}
    rows = []
    for name in dict.fromkeys(r["name"] for r in results):
        group = [r for r in results if r["name"] == name]
        gaps = [100 * (r["loss"] / static[r["seed"]] - 1) for r in group if r["seed"] in static]
        losses = [r["loss"] for r in group]
        row = {"name": name, "seeds": len(group), "loss": mean(losses)}
        row |= {"spread": stdev(losses) if len(losses) > 1 else None, "gap": mean(gaps) if gaps else None}
        for key in ("bpc", "tlops_saved", "macs_saved", "tokens_per_s", "loss_soft", "skip_soft", "tau"):
            row[key] = mean(r[key] for r in group) if all(r.get(key) is not None for r in group) else None
        if all("controls" in r for r in group):
            row |= {f"control_{kind}": mean(r["controls"][kind]["loss"] for r in group) for kind in CONTROLS}
            timed = [r["timing"]["rows"][0] for r in group if r.get("timing", {}).get("rows")]
            row |= {key: mean(t[key] for t in timed) for key in ("speedup", "reached") if timed}
        rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["name", "seeds", "loss", "spread", "gap", "bpc", "tlops_saved", "macs_saved", "loss_soft", "skip_soft"]
    columns += ["tau", *(f"control_{kind}" for kind in CONTROLS), "speedup", "reached"]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row.get(c)) for c in shown)} |" for row in rows)]) + "\n"
