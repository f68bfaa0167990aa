"""Routers compared under the same conditions: TSA, hard and soft; the others at its cost; TSA without its choice."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from torch import Tensor

from ...experiments.compare import Compare, Job, Plan, Report, stem
from ...experiments.results import read_result
from ...io.text import Text
from ...show.drawing import save_figure
from .bench import bench_lm, compilable
from .difficulty import unskipped
from .evaluate import calibrate, evaluate
from .execute import AdaptiveLM
from .figures import figures
from .routing import Control
from .train import LMRecipe

COLUMNS = ["name", "seeds", "loss", "gap", "tlops_saved", "macs_saved", "loss_soft", "tau"]
Measure = Callable[["TrainedModel"], dict[str, Any]]
STATIC = "static"
LEAST_SAVED = 0.01  # share of token-layer operations that TSA must save for the others to be matched to it
CONTROLS: tuple[Literal["mean", "layer", "overall"], ...] = ("mean", "layer", "overall")
# Two results may differ in these and still be comparable.
INCIDENTAL = ("eval_every", "eval_windows", "compile")


@dataclass(frozen=True)
class LMComparison(Plan):
    base: LMRecipe  # the conditions; its router is replaced
    penalties: tuple[float, ...] = (0.0, 0.01)  # lambda of TSA; the other routers are matched to TSA at each
    seeds: tuple[int, ...] = (0, 1, 2)
    keys: str = "offered"
    options: dict[str, Any] = field(default_factory=dict)  # further options of TSA
    taus: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    allowed: float = 0.005  # share of the soft loss: TSA is compared at the highest tau that raises it by no more
    windows: int | None = None  # of the validation text; None: all
    batch: int = 32  # of the timing
    seconds: float = 4.0  # of the timing

    def names(self) -> list[str]:
        matched = [f"{kind} as {_tsa(p)}" for p in self.penalties for kind in ("early exit", "MoD", "random")]
        return [STATIC, *map(_tsa, self.penalties), *matched]

    def jobs(self, work: Compare) -> Iterator[Job]:
        for seed in self.seeds:
            yield self._job(work, STATIC, seed, "Static", {})
            for penalty in self.penalties:
                options = {"penalty": penalty, "keys": self.keys, **self.options}
                yield self._job(work, _tsa(penalty), seed, "TSA", options, self._measured_tsa)
            for penalty in self.penalties:
                path = work.folder / f"{stem(_tsa(penalty), seed)}.json"
                if path.exists() and (goal := read_result(path))["tlops_saved"] >= LEAST_SAVED:
                    yield from self._matched(work, _tsa(penalty), goal, seed)

    def _matched(self, work: Compare, tsa: str, goal: dict[str, Any], seed: int) -> Iterator[Job]:
        """The other routers, each matched to the share of operations that TSA saved. goal: TSA's result."""
        saved, blocks = goal["tlops_saved"], self.base.blocks

        def at_matched_cost(trained: TrainedModel) -> dict[str, Any]:
            # Matched on the validation text, by cost alone: matched on training text the cost is up to 1.5 points off.
            calibrate(trained.model, trained.text.val, saved, steps=20, **trained.options)
            found = trained.measure()
            with unskipped(trained.model):  # the loss that this way of training costs by itself
                return found | {"loss_full": trained.measure()["loss"], "tlops_off": found["tlops_saved"] - saved}

        yield self._job(
            work, f"early exit as {tsa}", seed, "EarlyExit", {}, at_matched_cost, folder=f"early_exit-s{seed}"
        )
        every = 2 if saved * blocks <= (blocks // 2) * 0.9 else 1
        capacity = 1 - saved * blocks / (blocks // every)
        options = {"capacity": round(max(capacity, 0.05), 4), "every": every}
        yield self._job(work, f"MoD as {tsa}", seed, "MoD", options, at_matched_cost)
        rates = {"rates": tuple(round(rate, 4) for rate in goal["rates"]), "keys": self.keys}
        yield self._job(work, f"random as {tsa}", seed, "Random", rates)

    def _job(
        self,
        work: Compare,
        name: str,
        seed: int,
        router: str,
        options: dict[str, Any],
        measure: Measure | None = None,
        folder: str | None = None,
    ) -> Job:
        """A router trained and measured. measure: what is measured; None: the metrics on the validation text."""
        recipe = dataclasses.replace(self.base, method=router, method_options=options, seed=seed)
        recipe = recipe.on(work.data)
        conditions = work.conditions(recipe, INCIDENTAL) | {"data": recipe.settings()["data"], "windows": self.windows}
        place = work.out / (folder or stem(name, seed))
        return Job(name, recipe, conditions, partial(self._made, work, recipe, place, measure))

    def _made(self, work: Compare, recipe: LMRecipe, folder: Path, measure: Measure | None) -> dict[str, Any]:
        run, model = work.trained(recipe, folder)
        trained = TrainedModel(self, model, run.task.text)
        found = trained.measure() if measure is None else measure(trained)
        if recipe.method == "TSA" and recipe.seed == self.seeds[0]:  # the time of other seeds is the same
            found["timing"] = trained.timed()
        last = run.history[-1]
        speed = {"train_loss": last["task"], "train_tokens_per_s": last["train_tokens_per_s"]}
        return {"router": recipe.method, "options": model.method.config, **found, **speed}

    def _measured_tsa(self, trained: TrainedModel) -> dict[str, Any]:
        """Metrics hard and soft, over all taus, and of the controls at the highest tau whose loss is allowed.

        That tau is chosen on training text; the sweep is on the validation text.
        """
        router: Any = trained.model.method
        router.tau = 0.0
        soft, known = trained.measure(layout="masked"), trained.measure(trained.seen, layout="masked")
        sweep, fits = [], [0.0]
        for tau in self.taus:
            router.tau = tau
            hard = trained.measure()
            sweep.append({"tau": tau} | {k: hard[k] for k in ("loss", "bpc", "tlops_saved", "macs_saved")})
            if trained.measure(trained.seen)["loss"] <= known["loss"] * (1 + self.allowed):
                fits.append(tau)
        router.tau = max(fits)
        hard = trained.measure()
        rates, means = tuple(hard["rates"]), tuple(soft["means"])
        controls = {}
        for kind in CONTROLS:
            control = AdaptiveLM(trained.model.lm, Control(router, kind, rates, means)).eval()
            found = evaluate(control, trained.text.val, **trained.options)
            controls[kind] = {name: found[name] for name in ("loss", "tlops_saved")}
        gated = soft["means"][1:]
        return hard | {
            "loss_soft": soft["loss"],
            "skip_soft": 1 - sum(gated) / len(gated),
            "tau": router.tau,
            "sweep": sweep,
            "controls": controls,
        }

    def line(self, row: dict[str, Any]) -> str:
        shown = {"loss": f"{row['loss']:.4f}", "saved": f"{row['tlops_saved']:.3f}"}
        return f"{row['name']}, seed {row['seed']}: " + ", ".join(f"{what} {value}" for what, value in shown.items())

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        rows = summarised(found)
        lines = [["" if row.get(c) is None else row[c] for c in COLUMNS] for row in rows]
        drawn = figures(found, self.allowed, name.removesuffix("_compare")) if found else {}
        paths = [str(save_figure(figure, folder / f"{at}.png")) for at, figure in drawn.items()]
        return Report(rows, [(name, COLUMNS, lines)], markdown(rows), {"figures": paths})


class TrainedModel:
    """A trained model and its text, measured under a comparison's conditions."""

    def __init__(self, plan: LMComparison, model: AdaptiveLM, text: Text) -> None:
        self.plan, self.model, self.text = plan, model, text
        device = next(model.parameters()).device
        gpu = device.type == "cuda"  # there packed blocks wait for the host, so large batches are faster
        self.options: dict[str, Any] = {"limit": plan.windows, "device": device, "name": plan.base.data}
        self.options |= {"batch": 512 if gpu else 64, "amp": plan.base.amp and gpu}

    @property
    def seen(self) -> Tensor:
        """Training text as long as the validation text, on which operating points are set."""
        return self.text.train[: len(self.text.val)]

    def measure(self, ids: Tensor | None = None, **options: Any) -> dict[str, Any]:
        """`evaluate` on the validation text, or on `ids`."""
        return evaluate(self.model, self.text.val if ids is None else ids, **(self.options | options))

    def timed(self) -> dict[str, Any]:
        """`bench_lm` with the router's own decisions."""
        device = str(self.options["device"])
        return bench_lm(
            # A copy, as compiling cannot be undone.
            copy.deepcopy(self.model),
            [self.plan.batch],
            [],
            device,
            "bf16" if self.options["amp"] else "fp32",
            self.plan.seconds,
            ids=self.text.val,
            compiled=compilable(device),
        )


def _tsa(penalty: float) -> str:
    return f"TSA {penalty:g}"


def summarised(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per name with means over seeds; `gap`: percent by which the loss exceeds the same seed's static loss."""
    static = {r["seed"]: r["loss"] for r in results if r["name"] == STATIC}
    rows = []
    for name in dict.fromkeys(r["name"] for r in results):
        group = [r for r in results if r["name"] == name]
        gaps = [100 * (r["loss"] / static[r["seed"]] - 1) for r in group if r["seed"] in static]
        losses = [r["loss"] for r in group]
        row = {"name": name, "seeds": len(group), "loss": mean(losses)}
        row |= {"spread": stdev(losses) if len(losses) > 1 else None, "gap": mean(gaps) if gaps else None}
        for key in ("bpc", "tlops_saved", "macs_saved", "tokens_per_s", "loss_soft", "loss_full", "skip_soft", "tau"):
            row[key] = mean(r[key] for r in group) if all(r.get(key) is not None for r in group) else None
        if all("controls" in r for r in group):
            row |= {f"control_{kind}": mean(r["controls"][kind]["loss"] for r in group) for kind in CONTROLS}
            timed = [r["timing"]["rows"][0] for r in group if r.get("timing", {}).get("rows")]
            row |= {key: mean(t[key] for t in timed) for key in ("speedup", "reached") if timed}
        rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `summarised` as a table, without columns that are empty."""
    columns = ["name", "seeds", "loss", "spread", "gap", "bpc", "tlops_saved", "macs_saved", "loss_soft", "loss_full"]
    columns += ["skip_soft", "tau", *(f"control_{kind}" for kind in CONTROLS), "speedup", "reached"]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row.get(c)) for c in shown)} |" for row in rows)]) + "\n"
