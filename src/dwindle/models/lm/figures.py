"""Figures of a comparison of routers, drawn from its results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ...show.drawing import canvas, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Sequence[dict[str, Any]]
KINDS = {  # colour and marker
    "static": ("0.3", "o"),
    "TSA": ("C0", "s"),
    "early exit": ("C1", "D"),
    "MoD": ("C2", "^"),
    "random": ("C3", "v"),
}
CONTROLS = {
    "hard": "hard, its own choice",
    "overall": "as many by chance, over all blocks",
    "layer": "as many by chance, per block",
    "mean": "none skips, p at its block's mean",
}


def figures(results: Results, allowed: float, title: str) -> dict[str, Figure]:
    """The figures by name. allowed: the share by which skipping may raise the soft loss."""
    drawn = {"tradeoff": tradeoff(results, title)}
    if any("sweep" in r for r in results):
        drawn |= {"hard_against_soft": hard_against_soft(results, allowed, title), "controls": controls(results, title)}
    return drawn


def _groups(results: Results) -> dict[str, Results]:
    """The results of all seeds under their common name, in order of appearance."""
    return {name: [r for r in results if r["name"] == name] for name in dict.fromkeys(r["name"] for r in results)}


def _swept(results: Results) -> dict[str, Results]:
    """The groups of TSA, named by lambda."""
    return {
        f"$\\lambda$ = {name.split()[-1]}": group for name, group in _groups(results).items() if "sweep" in group[0]
    }


def _means(group: Results, key: str) -> list[float]:
    """The mean over seeds of a metric at each tau of the sweep."""
    return [mean(r["sweep"][at][key] for r in group) for at in range(len(group[0]["sweep"]))]


def tradeoff(results: Results, title: str) -> Figure:
    """Loss against operations saved: a point where routers were matched, a curve for TSA at every tau."""
    figure = canvas(8, 5, title)
    axis = figure.add_subplot()
    groups = _groups(results)
    for kind, (colour, marker) in KINDS.items():
        points = [group for name, group in groups.items() if name.startswith(kind)]
        points.sort(key=lambda group: mean(r["tlops_saved"] for r in group))
        if points:
            axis.errorbar(
                [100 * mean(r["tlops_saved"] for r in group) for group in points],
                [mean(r["loss"] for r in group) for group in points],
                yerr=[stdev(r["loss"] for r in group) if len(group) > 1 else 0.0 for group in points],
                color=colour,
                marker=marker,
                linestyle="none",
                capsize=3,
                label=kind,
                zorder=3,
            )
    low, high = axis.get_ylim()  # limits from the points alone: curves leave them where skipping destroys the model
    right = 100 * max(mean(r["tlops_saved"] for r in group) for group in groups.values())
    for line, (name, group) in zip(("-", "--", ":", "-."), _swept(results).items()):
        saved, losses = [0.0, *_means(group, "tlops_saved")], [mean(r["loss_soft"] for r in group)]
        saved, losses = [100 * s for s in saved], losses + _means(group, "loss")
        axis.plot(saved, losses, color="C0", linestyle=line, linewidth=1.2, label=f"TSA, {name}, every tau")
        low = min(low, losses[0] - 0.05 * (high - low))
    if "static" in groups:
        axis.axhline(mean(r["loss"] for r in groups["static"]), color="0.6", linestyle=":", linewidth=1)
    axis.set(
        xlabel="TLOps saved (%)", ylabel="validation loss (nats)", ylim=(low, high), xlim=(-2, max(1.25 * right, 10))
    )
    seeds = sorted({len(group) for group in groups.values()})
    many = str(seeds[-1]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    tidy(axis, f"mean over {many} seeds; bars: standard deviation" if seeds[-1] > 1 else "one seed")
    axis.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def hard_against_soft(results: Results, allowed: float, title: str) -> Figure:
    """Two axes over tau: the loss above the soft loss in percent, and TLOps saved; rings mark the tau compared."""
    figure = canvas(10, 4.2, title)
    cost, saved = figure.subplots(1, 2)
    highest = 200 * allowed
    for i, (name, group) in enumerate(_swept(results).items()):
        taus = [point["tau"] for point in group[0]["sweep"]]
        soft = mean(r["loss_soft"] for r in group)
        above = [100 * (loss / soft - 1) for loss in _means(group, "loss")]
        highest = min(max(highest, *above), 1000 * allowed)  # beyond, skipping destroys the model
        for axis, values in ((cost, above), (saved, [100 * share for share in _means(group, "tlops_saved")])):
            axis.plot(taus, values, color=f"C{i}", marker="o", markersize=4, label=name)
        for r in group:
            point = (100 * (r["loss"] / r["loss_soft"] - 1), 100 * r["tlops_saved"])
            for axis, value in zip((cost, saved), point):
                axis.plot(r["tau"], value, color=f"C{i}", marker="o", markersize=9, fillstyle="none")
    cost.axhline(100 * allowed, color="0.4", linestyle=":", linewidth=1)
    cost.set(ylabel="loss above soft (%)", ylim=(-0.05 * highest, highest))
    saved.set(ylabel="TLOps saved (%)", ylim=(0, None))
    for axis in (cost, saved):
        axis.set(xlabel="tau", xscale="log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    tidy(cost, f"what hard costs; dotted: {100 * allowed:g}%")
    tidy(saved, "what hard saves; rings: the tau compared, each seed")
    cost.legend(fontsize=9, frameon=False)
    return figure


def controls(results: Results, title: str) -> Figure:
    """Bars of the loss of TSA at its tau and of its controls, in percent above the soft loss; dots are seeds."""
    swept = _swept(results)
    figure = canvas(9, 1.6 + 0.45 * len(CONTROLS) * len(swept), title)
    axes = figure.subplots(len(swept), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (name, group) in zip(axes, swept.items()):
        for at, kind in enumerate(CONTROLS):
            losses = [r["loss"] if kind == "hard" else r["controls"][kind]["loss"] for r in group]
            above = [100 * (loss / r["loss_soft"] - 1) for loss, r in zip(losses, group)]
            axis.barh(at, mean(above), color="C0" if kind == "hard" else "0.75", height=0.65)
            axis.plot(above, [at] * len(above), "k.", markersize=4)
            axis.annotate(
                f"{mean(above):.2f}", (max(above), at), (5, 0), textcoords="offset points", va="center", size=9
            )
        axis.set(yticks=range(len(CONTROLS)), yticklabels=list(CONTROLS.values()))
        axis.invert_yaxis()
        tidy(axis, f"{name}, {100 * mean(r['tlops_saved'] for r in group):.0f}% of TLOps saved", "x")
        axis.margins(x=0.08)
    axes[-1].set(xlabel="loss above soft (%)")
    return figure
