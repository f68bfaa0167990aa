"""The papers' settings: a recipe for each row of their tables. `--data` names the data set, `--preset` the row.

AHT-ViT section 3.5: DeiT-S, 50 epochs, AdamW, learning rate 1e-4 with cosine decay, weight decay 0.05, RandAugment. Not
printed, and chosen here: the batch (1,024 images, as DeiT's, whatever the number of processes) and the warm-up. The
rule for another batch is linear: `--set global_batch=256` trains at a quarter of the learning rate. Numbers called
"printed" are the papers': the runs need all of ImageNet-1K or Places365, and a machine with several GPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..methods.aht import AHT
from ..methods.aht_settings import PRESETS, PRINTED
from ..train.recipe import Recipe

BATCH = 1024  # images of a step, of all processes together


def aht_printed(preset: str = "balanced", data: str = "imagenet") -> Recipe:
    """AHT-ViT as printed (Listing 1.1, Eq. 1-3), a configuration of Table 2: high_accuracy, balanced, high_efficiency.

    torchrun --nproc-per-node 8 -m dwindle train aht_printed --preset balanced --data imagenet --out runs/aht_printed

    Table 3 prints 79.4 at 3.1 GFLOPs for balanced, 79.8 at 3.8 and 78.5 at 2.4 for the others.
    """
    return dataclasses.replace(_conditions(data), method_options=printed(preset), method_lr=1e-4)


def aht_grounded(preset: str = "balanced", data: str = "imagenet") -> Recipe:
    """The grounded AHT-ViT at the cost that Table 3 reports for a configuration: 0.83, 0.67 or 0.52.

    torchrun --nproc-per-node 8 -m dwindle train aht_grounded --preset balanced --data imagenet --out runs/aht_grounded

    Its teacher is the model it begins from. On other data that model does not know the classes: begin from a static
    model trained there (folder STATIC), with --set weights=STATIC --set teacher=STATIC.
    """
    return dataclasses.replace(_conditions(data), method_options=grounded(preset), **_taught(data))


def aht_printed_transfer(preset: str = "balanced", data: str = "cifar100") -> Recipe:
    """Table 4: a trained AHT-ViT (folder RUN) on another data set. It keeps planners, gamma and beta; its head is new.

    dwindle train aht_printed_transfer --data places365 --set weights=RUN --out runs/aht_places365

    Printed: 80.2 at 2.8 GFLOPs on Places365 (static 81.6), 89.6 at 3.7 on CIFAR-100 (static 90.1).
    """
    return dataclasses.replace(aht_printed(preset, data), keep_method=True)


def aht_grounded_transfer(preset: str = "balanced", data: str = "cifar100") -> Recipe:
    """The same for a grounded AHT-ViT, which also keeps its halting bar. It learns from the labels alone, because the
    static model's head does not know the classes.

    dwindle train aht_grounded_transfer --data cifar100 --set weights=RUN --out runs/aht_cifar100
    """
    return dataclasses.replace(aht_grounded(preset, data), keep_method=True, teacher=None)


def static_deit_small(data: str = "imagenet") -> Recipe:
    """Table 3's baseline: DeiT-S with nothing halted, under the same conditions.

    torchrun --nproc-per-node 8 -m dwindle train static_deit_small --data imagenet --out runs/static_deit_small

    Printed: 79.9 at 4.6 GFLOPs.
    """
    return dataclasses.replace(_conditions(data), method="Static")


def dynamicvit_deit_small(data: str = "imagenet") -> Recipe:
    """Table 3's DynamicViT, rho = 0.7, under the same conditions; its teacher is the model it begins from.

    torchrun --nproc-per-node 8 -m dwindle train dynamicvit_deit_small --data imagenet --out runs/dynamicvit_deit_small

    Printed: 79.3 at 2.9 GFLOPs.
    """
    options = {"method_options": {"keep": 0.7}, "teacher_weight": 0.5, **_taught(data)}
    return dataclasses.replace(_conditions(data), method="DynamicViT", **options)


def avit_deit_small(data: str = "imagenet") -> Recipe:
    """A-ViT-S with its own paper's settings: 100 epochs at 1.5e-3, no mixup, no distillation.

    torchrun --nproc-per-node 8 -m dwindle train avit_deit_small --data imagenet --out runs/avit_deit_small

    A-ViT's Table 3 prints 78.6 at 3.6 GFLOPs.
    """
    return _avit("deit_small_patch16_224", data)


def avit_deit_tiny(data: str = "imagenet") -> Recipe:
    """A-ViT-T with its own paper's settings.

    torchrun --nproc-per-node 8 -m dwindle train avit_deit_tiny --data imagenet --out runs/avit_deit_tiny

    A-ViT's Tables 2 and 3 print 71.0 at 0.8 GFLOPs, tokens stopping after 7.23 of 12 blocks on average.
    """
    return _avit("deit_tiny_patch16_224", data)


def printed(preset: str) -> dict[str, Any]:
    """Settings of the method as printed, for a configuration of Table 2."""
    AHT.preset(preset)  # raises for an unknown name
    return {**PRESETS[preset], **PRINTED}


def grounded(preset: str) -> dict[str, Any]:
    """Settings of the grounded method at the cost that Table 3 reports for a configuration."""
    AHT.preset(preset)
    return grounded_at(PRESETS[preset]["budget"])


def grounded_at(budget: float, **options: Any) -> dict[str, Any]:
    """Settings of the grounded method for a budget: the lower it is, the earlier planners start (docs/methods/aht.md).

    The budget limits the cost and the teacher's answers tell what tokens are worth, so that no ponder cost is needed.
    """
    stages = (4, 6, 8) if budget > 0.6 else (2, 4, 6, 8, 10)
    return {"budget": budget, "stages": stages, "merge": "nearest", "lambda_p": 0.0, **options}


def _conditions(data: str) -> Recipe:
    """The conditions of all rows of Table 3. CIFAR-100's images are too small to crop a twelfth (0.08) of one."""
    return Recipe(
        epochs=50,
        global_batch=BATCH,
        lr_batch=BATCH,
        warmup_epochs=5.0,
        min_scale=0.5 if data == "cifar100" else 0.08,
    )


def _taught(data: str) -> dict[str, Any]:
    """Settings of the teacher: the static model on ImageNet; none elsewhere, where its head is new."""
    return {"teacher": "static"} if data == "imagenet" else {}


def _avit(model: str, data: str) -> Recipe:
    """A-ViT with its own paper's settings, on this backbone."""
    return dataclasses.replace(_conditions(data), model=model, method="AViT", epochs=100, lr=1.5e-3, method_lr=1.5e-3)
