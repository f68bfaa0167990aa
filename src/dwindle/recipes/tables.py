"""The papers' tables as comparisons. `--data` says on which data set: imagenet, places365 or cifar100.

    torchrun --nproc-per-node 8 -m dwindle compare aht_table3 --data imagenet --out runs/aht_table3

trains entries side by side, one per process and GPU. After a kill the same command continues, with any number of
processes. Conditions are those of `recipes/papers.py`; "as printed" and "grounded" are never the same row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..methods.aht_settings import PRESETS
from ..models.vit.compare import RIVALS, Comparison, Entry, stem
from .papers import _avit, _conditions, grounded, printed

COSTS = {preset: settings["budget"] for preset, settings in PRESETS.items()}  # as Table 3 reports them
SHORT = {"high_accuracy": "high accuracy", "balanced": "balanced", "high_efficiency": "high efficiency"}
ALONE = {"teacher": None}  # the papers' own methods learn from the labels alone
# The grounded method has the static model as teacher, which its paper does not have. So its rivals get it too.
AGAIN = Entry("static again", "Static", by_cost={1.0: {}}, costs=(1.0,))


def aht_table2(data: str = "imagenet") -> Comparison:
    """AHT-ViT's Table 2: its three configurations, as printed and grounded, beside the static model.

    torchrun --nproc-per-node 8 -m dwindle compare aht_table2 --data imagenet --out runs/aht_table2
    """
    return Comparison(
        base=_conditions(data), entries=(*_presets(_as_printed), *_presets(_as_grounded), AGAIN), rivals=()
    )


def aht_table3(data: str = "imagenet") -> Comparison:
    """AHT-ViT's Table 3 and Fig. 3: Table 2's rows, DynamicViT and A-ViT under the same conditions, and rivals.

    torchrun --nproc-per-node 8 -m dwindle compare aht_table3 --data imagenet --out runs/aht_table3

    Printed: DeiT-S 79.9, DynamicViT 79.3 at 0.63 of its cost, A-ViT-S 78.6 at 0.78, AHT 79.8, 79.4 and 78.5
    at 0.83, 0.67 and 0.52.
    """
    dynamic, avit = {0.63: {"keep": 0.7}}, {0.78: {"target_depth": 9.0, "threshold": 0.99}}
    entries = (
        *_presets(_as_printed),
        *_presets(_as_grounded),
        Entry("DynamicViT", "DynamicViT", by_cost=dynamic, costs=(0.63,), changes={"teacher_weight": 0.5}),
        Entry("A-ViT-S", "AViT", by_cost=avit, costs=(0.78,), changes=ALONE),
        AGAIN,
        # DeiT-S with four of its six heads, and so with two thirds of all channels.
        Entry("narrower", "Static", by_cost={0.46: {}}, costs=(0.46,), changes={"heads": 4}),
    )
    return Comparison(base=_conditions(data), entries=entries)


def aht_table4(data: str = "cifar100", source: str = "runs/aht_table3") -> Comparison:
    """AHT-ViT's Table 4: the balanced configuration, trained on ImageNet, on another data set; beside the static model.

    dwindle compare aht_table4 --data cifar100 --source runs/aht_table3 --out runs/aht_table4

    source: folder of `aht_table3` (or 2) on ImageNet. Printed: Places365 80.2 (static 81.6), CIFAR-100 89.6 (90.1).
    """
    entries = []
    for entry in (_as_printed("balanced"), _as_grounded("balanced")):
        trained = Path(source) / stem(entry.name, 0, 0.67)
        changes = {**entry.changes, "weights": str(trained), "keep_method": True}
        entries.append(dataclasses.replace(entry, changes=changes))
    return Comparison(base=_conditions(data), entries=(*entries, AGAIN))


def aht_table5(data: str = "imagenet") -> Comparison:
    """AHT-ViT's Table 5 and the ablations its conclusion calls for: as printed with and without the KL, lambda_p tuned
    for each on held-out training images; then T, sigma and lambda_t varied one at a time.

    torchrun --nproc-per-node 8 -m dwindle compare aht_table5 --data imagenet --out runs/aht_table5

    Printed: 79.4 at 3.1 GFLOPs with the KL, 78.8 at 3.4 without. gamma and beta are not printed, so that these are
    A-ViT's (docs/methods/aht.md has the search).
    """
    tuned = {"method.lambda_p": (1e-4, 1.0)}
    ablations = [("T", "threshold", (0.9, 1.1)), ("sigma", "sigma", (0.5, 2.0)), ("lambda_t", "lambda_t", (0.2, 1.0))]
    entries = (
        dataclasses.replace(_as_printed("balanced"), name="as printed lambda_p tuned", tuned=tuned),
        dataclasses.replace(_as_printed("balanced", lambda_t=0.0), name="no KL lambda_p tuned", tuned=tuned),
        _as_printed("balanced"),
        *(
            dataclasses.replace(_as_printed("balanced", **{option: value}), name=f"{label} = {value}", group="ablation")
            for label, option, values in ablations
            for value in values
        ),
    )
    return Comparison(base=_conditions(data), entries=entries, rivals=())


def avit_ablations(data: str = "imagenet") -> Comparison:
    """A-ViT's ablations (section 4.3, Fig. 7): the ponder loss alone, the prior alone, both, and a two-layer halting
    network; beside a DeiT-T of eight blocks.

    torchrun --nproc-per-node 8 -m dwindle compare avit_ablations --data imagenet --out runs/avit_ablations

    Printed: both losses 71.0; the prior alone more than 2 points less; without the prior 6.4 less; the network +0.06.
    """
    both = {"target_depth": 9.0, "threshold": 0.99}
    variants = {
        "A-ViT-T": both,
        "ponder only": {**both, "alpha_d": 0.0},
        "prior only": {**both, "alpha_p": 0.0},
        "two-layer network": {**both, "network": 96},
    }
    entries = [
        Entry(name, "AViT", by_cost={0.64: options}, costs=(0.64,), changes=ALONE) for name, options in variants.items()
    ]
    shallow = Entry("8 blocks", "Shallow", by_cost={0.67: {"depth": 8}}, costs=(0.67,), changes=ALONE)
    return Comparison(base=_avit("deit_tiny_patch16_224", data), entries=(*entries, shallow), rivals=RIVALS[:2])


def _presets(entry_of: Callable[[str], Entry]) -> tuple[Entry, ...]:
    """An entry for each configuration of Table 2."""
    return tuple(entry_of(preset) for preset in COSTS)


def _as_printed(preset: str, **options: Any) -> Entry:
    """AHT as printed. Its cost follows from training and nothing is turned; the cost of the entry is Table 3's."""
    cost = COSTS[preset]
    by_cost = {cost: {**printed(preset), **options}}
    changes = {**ALONE, "method_lr": 1e-4}
    return Entry(f"AHT as printed {SHORT[preset]}", "AHT", by_cost=by_cost, costs=(cost,), changes=changes)


def _as_grounded(preset: str) -> Entry:
    """The grounded AHT, held to the cost of Table 3."""
    cost = COSTS[preset]
    name = f"AHT grounded {SHORT[preset]}"
    return Entry(name, "AHT", by_cost={cost: grounded(preset)}, costs=(cost,), label=f"AHT, grounded, {SHORT[preset]}")
