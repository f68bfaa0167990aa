"""AdaPerceiver's training as section D of its supplement prints it: one recipe for each of its tables.

    torchrun --nproc-per-node 8 -m dwindle train ada_logits --data DATA/imagenet12k --out runs/ada_logits

The batch is that of all processes together; `--set accumulate=16` cuts each process's share into micro-batches. The
rule for another batch is linear: `--set global_batch=1024` trains at a quarter of ada_logits' rate. SOAP is the extra
`soap`; `--set optimizer=adamw` does without. Smaller networks: `--set model=small --set method.patch=16`. None was run
by us as it stands: they need ImageNet-12K and machines with several GPUs. docs/methods/adaperceiver.md has all that is
printed beside what is here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..models.adaperceiver.recipe import AdaRecipe

TEACHER = "vit_huge_patch14_clip_224.laion2b_ft_in12k"  # timm's name


def ada_logits() -> AdaRecipe:
    """D.1: AdaPerceiver's three stages, distilled from the answers of a ViT-H/14 CLIP tuned on ImageNet-12K.

    torchrun --nproc-per-node 8 -m dwindle train ada_logits --data DATA/imagenet12k --out runs/ada_logits
    """
    return AdaRecipe(
        **_distilled(every=100),
        epochs=135,  # 50, 65 and 20
        stages=(50.0, 65.0, 20.0),
        lr=1e-3,
        stage_lr=(1.0, 1.0, 0.5),
        stage_ema=(0.999, 0.999, 0.9998),
        schedule=("cosine", "cosine", "constant"),
        label_weight=0.0,
        smoothing=0.0,
    )


def ada_features() -> AdaRecipe:
    """D.1: the same teacher's patch features, from the network of `ada_logits` (folder RUN).

    torchrun --nproc-per-node 8 -m dwindle train ada_features --data DATA/imagenet12k --out runs/ada_features \\
        --set weights=RUN
    """
    return AdaRecipe(**_distilled(every=30), task="features", epochs=20, lr=5e-4, ema=0.9995, **_AT_ONCE)


def ada_imagenet() -> AdaRecipe:
    """D.2: write head, output token and classifier for ImageNet-1K, from the network of `ada_logits` (folder RUN).

    torchrun --nproc-per-node 8 -m dwindle train ada_imagenet --data imagenet --out runs/ada_imagenet \\
        --set weights=RUN
    """
    return AdaRecipe(
        **_settings(batch=1024, start=250, every=30),
        **_AT_ONCE,
        freeze_backbone=True,
        epochs=70,
        lr=5e-4,
        weight_decay=0.003,
        ema=0.9995,
        warmup_steps=500,
        augment="rand-m20-n2",
        mixup=0.8,
        cutmix=0.5,
        erase=0.25,
        smoothing=0.0,
    )


def ada_segment() -> AdaRecipe:
    """D.3: write head, output tokens and a linear layer for ADE20K, from the network of `ada_features` (folder RUN).

    dwindle train ada_segment --data DATA/ade20k --out runs/ada_segment --set weights=RUN

    From a small one that classifies: --set model=small --set method.patch=16, and its method.tokens and method.mask.
    """
    return AdaRecipe(**_dense(), task="segmentation", steps=50_530, lr=5e-4)


def ada_depth() -> AdaRecipe:
    """D.4: the same for depth on NYUv2, in 256 bins up to 10 metres.

    dwindle train ada_depth --data DATA/nyuv2 --out runs/ada_depth --set weights=RUN

    Farther depths: --set method.classes=1, one number without bins.
    """
    dense = AdaRecipe(**_dense(), task="depth", steps=47_584, lr=1e-4)
    return dataclasses.replace(dense, optimizer="nadamw", method_options={**dense.method_options, "classes": 256})


_AT_ONCE: dict[str, Any] = {"stages": (0.0, 0.0, 1.0), "stage_lr": (1.0, 1.0, 1.0)}  # all axes vary from the first step


def _settings(batch: int, start: int = 500, every: int = 30) -> dict[str, Any]:
    """Settings of all tables. start, every: of SOAP's preconditioners."""
    return {
        "model": "paper",
        "method_options": {"patch": 14},
        "global_batch": batch,
        "lr_batch": batch,
        "clip": 3.0,
        "optimizer": "soap",
        "precondition_from": start,
        "precondition_every": every,
    }


def _distilled(every: int) -> dict[str, Any]:
    """Settings of both distillations (D.1)."""
    images = {"augment": "rand-m15-n2", "mixup": 1.0, "erase": 0.0}
    return {
        **_settings(batch=4096, every=every),
        **images,
        "teacher": TEACHER,
        "weight_decay": 0.003,
        "warmup_steps": 3000,
    }


def _dense() -> dict[str, Any]:
    """Settings of both dense tasks (D.3, D.4): the token loss alone."""
    schedule = {"schedule": "poly", "poly_power": 1.0, "warmup_steps": 1500, "min_lr": 1e-6}
    return {
        **_settings(batch=16),
        **schedule,
        "freeze_backbone": True,
        "stages": (1.0, 0.0, 0.0),
        "weight_decay": 0.1,
        "ema": 0.9995,
    }
