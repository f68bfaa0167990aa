"""Routers under the same conditions: train all, measure hard against soft, rob TSA of its choice."""

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
Look = Callable[["Measured"], dict[str, Any]]
STATIC = "static"
LEAST = 0.01  # of token-layer operations; less saved is nothing to match
CONTROLS: tuple[Literal["mean", "layer", "overall"], ...] = ("mean", "layer", "overall")
# Two results may differ in these and still be comparable.
INCIDENTAL = ("eval_every", "eval_windows", "compile")


@dataclass(frozen=True)
class LMComparison(Plan):
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

    def names(self) -> list[str]:
        matched = [f"{kind} as {_tsa(p)}" for p in self.penalties for kind in ("early exit", "MoD", "random")]
        return [STATIC, *map(_tsa, self.penalties), *matched]

    def jobs(self, work: Compare) -> Iterator[Job]:
        for seed in self.seeds:
            yield self._job(work, STATIC, seed, "Static", {})
            for penalty in self.penalties:
                options = {"penalty": penalty, "keys": self.keys, **self.options}
                yield self._job(work, _tsa(penalty), seed, "TSA", options, self._look_at_tsa)
            for penalty in self.penalties:
                path = work.folder / f"{stem(_tsa(penalty), seed)}.json"
                if path.exists() and (goal := read_result(path))["tlops_saved"] >= LEAST:
                    yield from self._matched(work, _tsa(penalty), goal, seed)

    def _matched(self, work: Compare, tsa: str, goal: dict[str, Any], seed: int) -> Iterator[Job]:
        """The others at the operations TSA saved."""
        saved, blocks = goal["tlops_saved"], self.base.blocks

        def turned(on: Measured) -> dict[str, Any]:
            # By its cost alone, on the text that is compared on: of training text it is up to 1.5 points off.
            calibrate(on.model, on.text.val, saved, steps=20, **on.options)
            found = on.measure()
            with unskipped(on.model):  # what training for exits, or for choosing, costs by itself
                return found | {"loss_full": on.measure()["loss"], "tlops_off": found["tlops_saved"] - saved}

        yield self._job(work, f"early exit as {tsa}", seed, "EarlyExit", {}, turned, folder=f"early_exit-s{seed}")
        every = 2 if saved * blocks <= (blocks // 2) * 0.9 else 1
        capacity = 1 - saved * blocks / (blocks // every)
        options = {"capacity": round(max(capacity, 0.05), 4), "every": every}
        yield self._job(work, f"MoD as {tsa}", seed, "MoD", options, turned)
        rates = {"rates": tuple(round(rate, 4) for rate in goal["rates"]), "keys": self.keys}
        yield self._job(work, f"random as {tsa}", seed, "Random", rates)

    def _job(
        self,
        work: Compare,
        name: str,
        seed: int,
        router: str,
        options: dict[str, Any],
        look: Look | None = None,
        folder: str | None = None,
    ) -> Job:
        """look: what is measured of the trained model."""
        recipe = dataclasses.replace(self.base, method=router, method_options=options, seed=seed)
        recipe = recipe.on(work.data)
        conditions = work.conditions(recipe, INCIDENTAL) | {"data": recipe.told()["data"], "windows": self.windows}
        place = work.out / (folder or stem(name, seed))
        return Job(name, recipe, conditions, partial(self._made, work, recipe, place, look))

    def _made(self, work: Compare, recipe: LMRecipe, folder: Path, look: Look | None) -> dict[str, Any]:
        run, model = work.trained(recipe, folder)
        on = Measured(self, model, run.task.text)
        found = on.measure() if look is None else look(on)
        if recipe.method == "TSA" and recipe.seed == self.seeds[0]:  # other seeds' rows take as long
            found["timing"] = on.timed()
        last = run.history[-1]
        speed = {"train_loss": last["task"], "train_tokens_per_s": last["train_tokens_per_s"]}
        return {"router": recipe.method, "options": model.method.config, **found, **speed}

    def _look_at_tsa(self, on: Measured) -> dict[str, Any]:
        """Hard against soft, then the controls and the clock at the tau that costs no more than is allowed.

        That tau is chosen on training text, the sweep shown is of the validation text.
        """
        router: Any = on.model.method
        router.tau = 0.0
        soft, known = on.measure(layout="masked"), on.measure(on.seen, layout="masked")
        sweep, fits = [], [0.0]
        for tau in self.taus:
            router.tau = tau
            hard = on.measure()
            sweep.append({"tau": tau} | {k: hard[k] for k in ("loss", "bpc", "tlops_saved", "macs_saved")})
            if on.measure(on.seen)["loss"] <= known["loss"] * (1 + self.allowed):
                fits.append(tau)
        router.tau = max(fits)
        hard = on.measure()
        rates, means = tuple(hard["rates"]), tuple(soft["means"])
        controls = {}
        for kind in CONTROLS:
            control = AdaptiveLM(on.model.lm, Control(router, kind, rates, means)).eval()
            found = evaluate(control, on.text.val, **on.options)
            controls[kind] = {name: found[name] for name in ("loss", "tlops_saved")}
        gated = soft["means"][1:]
        return hard | {
            "loss_soft": soft["loss"],
            "skip_soft": 1 - sum(gated) / len(gated),
            "tau": router.tau,
            "sweep": sweep,
            "controls": controls,
        }

    def told(self, row: dict[str, Any]) -> str:
        shown = {"loss": f"{row['loss']:.4f}", "saved": f"{row['tlops_saved']:.3f}"}
        return f"{row['name']}, seed {row['seed']}: " + ", ".join(f"{what} {value}" for what, value in shown.items())

    def report(self, name: str, found: Sequence[dict[str, Any]], folder: Path) -> Report:
        rows = summarised(found)
        lines = [["" if row.get(c) is None else row[c] for c in COLUMNS] for row in rows]
        drawn = figures(found, self.allowed, name.removesuffix("_compare")) if found else {}
        paths = [str(save_figure(figure, folder / f"{at}.png")) for at, figure in drawn.items()]
        return Report(rows, [(name, COLUMNS, lines)], markdown(rows), {"figures": paths})


class Measured:
    """A trained model on its text, under a comparison's conditions."""

    def __init__(self, plan: LMComparison, model: AdaptiveLM, text: Text) -> None:
        self.plan, self.model, self.text = plan, model, text
        device = next(model.parameters()).device
        gpu = device.type == "cuda"  # where packed blocks wait for the host: few large batches
        self.options: dict[str, Any] = {"limit": plan.windows, "device": device, "name": plan.base.data}
        self.options |= {"batch": 512 if gpu else 64, "amp": plan.base.amp and gpu}

    @property
    def seen(self) -> Tensor:
        """Training text to set operating points on, as much as there is to validate."""
        return self.text.train[: len(self.text.val)]

    def measure(self, ids: Tensor | None = None, **options: Any) -> dict[str, Any]:
        return evaluate(self.model, self.text.val if ids is None else ids, **(self.options | options))

    def timed(self) -> dict[str, Any]:
        device = str(self.options["device"])
        return bench_lm(  # of a copy: compiling changes a model for good
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
    """One row per name, means over seeds; `gap`: percent of the static loss of the same seed."""
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
    columns = ["name", "seeds", "loss", "spread", "gap", "bpc", "tlops_saved", "macs_saved", "loss_soft", "loss_full"]
    columns += ["skip_soft", "tau", *(f"control_{kind}" for kind in CONTROLS), "speedup", "reached"]
    shown = [c for c in columns if any(row.get(c) is not None for row in rows)]

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row.get(c)) for c in shown)} |" for row in rows)]) + "\n"
