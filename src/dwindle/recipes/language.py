"""Language models, one function per experiment: the docstring is the command, the hardware and the number to expect."""

import dataclasses
from typing import Any

from ..models.lm.compare import LMComparison
from ..models.lm.train import LMRecipe


def tsa_shakespeare() -> LMRecipe:
    """The checkpoint that ships: a small character model of Tiny-Shakespeare whose tokens choose their blocks.

    dwindle train tsa_shakespeare
    """
    return LMRecipe(
        blocks=6,
        width=128,
        heads=4,
        context=128,
        dropout=0.0,
        batch=16,
        steps=1500,
        lr=2e-3,
        min_lr=1e-4,
        warmup=100,
        eval_every=250,
        eval_windows=128,
        method_options={"penalty": 0.01, "tau": 0.1},
    )


def tsa_shakespeare_large() -> LMRecipe:
    """The size of nanoGPT's character model, at which the gates are the paper's 1.7% of parameters. For a GPU.

    dwindle train tsa_shakespeare_large
    """
    return LMRecipe(steps=2000, method_options={"tau": 0.2})


def tsa_enwik8() -> LMRecipe:
    """The same model on enwik8's bytes: 90M to train, 5M to validate, 5M to test. For a GPU.

    dwindle train tsa_enwik8 --data DATA/enwik8
    Another file is split in the same shares: --data bytes:FILE
    """
    return LMRecipe(
        data="enwik8",
        dropout=0.0,
        steps=5000,
        batch=128,
        weight_decay=0.05,
        eval_every=1000,
        eval_windows=2048,
        method_options={"tau": 0.2},
    )


def tsa_gates() -> LMRecipe:
    """Gates alone, for a language model that stays as it is: a folder of Hugging Face's with its tokenizer.json, or a
    checkpoint. SmolLM2-135M on shakespeare with cpu_amp=true, 3.4 minutes of one core of an EPYC: loss 3.55 (4 windows)
    with 6.4% of the TLOps saved.

    dwindle train tsa_gates --set weights=FOLDER --data TEXT --out runs/gates
    """
    return LMRecipe(
        freeze_backbone=True,
        context=128,
        batch=2,
        steps=150,
        lr=3e-3,
        min_lr=3e-4,
        warmup=10,
        weight_decay=0.0,
        eval_every=150,
        eval_windows=4,
        # Gates begin nearly open, p = 0.98, as the model never learnt to do with smaller updates.
        method_options={"penalty": 1.0, "tau": 0.3, "open": 4.0},
    )


def tsa_tiny_test() -> LMRecipe:
    """A few seconds on a CPU: does everything run here?

    dwindle train tsa_tiny_test --out runs/tsa_tiny
    """
    return LMRecipe(
        blocks=3,
        width=32,
        heads=2,
        context=32,
        dropout=0.0,
        batch=8,
        steps=20,
        lr=3e-3,
        warmup=2,
        eval_every=10,
        eval_windows=8,
        method_options={"penalty": 0.05},
    )


def tsa_shakespeare_compare() -> LMComparison:
    """Tests the paper's claims on Tiny-Shakespeare: every router under the same conditions, three seeds. For a GPU.

    dwindle compare tsa_shakespeare_compare --out runs/tsa_shakespeare --until 8
    The same command continues with the missing results; with --until 0 it only draws those that exist.
    """
    base = dataclasses.replace(tsa_shakespeare_large(), steps=900, batch=32, eval_every=450)
    return LMComparison(base, penalties=(0.0, 0.02))


def tsa_enwik8_compare() -> LMComparison:
    """The same comparison on enwik8, on 44 of its 90 million bytes. For a GPU.

    dwindle compare tsa_enwik8_compare --data DATA/enwik8 --out runs/tsa_enwik8
    """
    base = dataclasses.replace(tsa_enwik8(), steps=1350, eval_every=1350)
    return LMComparison(base, penalties=(0.0, 0.02), windows=2048)


def tsa_small_compare() -> LMComparison:
    """The comparison at a size that a CPU can train: 8 trainings per seed, each about 2 minutes on one core.

    dwindle compare tsa_small_compare --out runs/tsa_small
    """
    base = dataclasses.replace(tsa_shakespeare(), blocks=4, steps=500, eval_every=500)
    return LMComparison(base, penalties=(0.0, 0.02), seeds=(0,), windows=128)


def tsa_tiny_compare() -> LMComparison:
    """A minute on a CPU: does comparing run here?

    dwindle compare tsa_tiny_compare --out runs/tsa_tiny_compare
    """
    base = dataclasses.replace(tsa_tiny_test(), eval_every=20)
    # Gates begin half open and any loss is allowed, so that a few steps are enough for thresholds to differ.
    settings: dict[str, Any] = {"taus": (0.1, 0.5), "allowed": 1.0, "options": {"open": 0.0}}
    return LMComparison(base, penalties=(0.0, 0.5), seeds=(0, 1), windows=4, seconds=0.1, **settings)
