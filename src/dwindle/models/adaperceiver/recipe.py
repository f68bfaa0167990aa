"""The recipe of a training run of AdaPerceiver."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ...errors import DwindleError
from ...settings import Above0, AtLeast0, Inside, Share, Whole0, Whole1, check_fields
from ...train.learner import Learner
from ...train.recipe import Recipe
from .train import AdaLearner

UNUSED = ("method", "method_lr", "layout", "parallel")  # settings of `Recipe` without effect here

Three = tuple[AtLeast0, AtLeast0, AtLeast0]  # a number for each stage
Attention = Literal["steps", "mask", "flex"]
Schedule = Literal["cosine", "poly", "constant"]  # after the warm-up


@dataclass
class AdaRecipe(Recipe):
    """`model` names a preset, `method.NAME` changes its settings, `weights` is None or a checkpoint to begin from.

    freeze_backbone: only the write head, the output token and the classifier learn (D.2).
    reinit_from: retrains a badly trained read-out, with freeze_backbone and a read-out for each depth; {9: 8}: only the
        ninth block's read-out learns, and it begins as the eighth's.
    task: 'classify'; 'segmentation' or 'depth', which make the network dense; 'features', a teacher's patches (D.1).
    """

    model: str = "small"
    weights: str | None = None
    method: str = "AdaPerceiver"
    stages: Three = (50 / 135, 65 / 135, 20 / 135)  # shares of the epochs: tokens, tokens and depths, widths too (D.1)
    stage_lr: Three = (1.0, 1.0, 0.5)  # of lr
    block_lr: AtLeast0 = 1.0  # share of lr for the blocks: a ViT's need a lower rate than new weights
    restart: bool = True  # each stage has a schedule of its own and begins from averaged weights; false: one schedule
    stage_ema: tuple[Inside, Inside, Inside] | None = None  # decay of the averaged weights in each, in place of `ema`
    schedule: Schedule | tuple[Schedule, Schedule, Schedule] = "cosine"  # of all stages, or of each
    poly_power: Above0 = 1.0  # of the schedule 'poly'; 1: a straight line
    warmup_steps: Whole0 = 0  # in place of `warmup_epochs`; 0: `warmup_epochs`
    min_lr: AtLeast0 = 1e-5  # the learning rate at which a schedule ends
    token_weight: AtLeast0 = 1.0
    depth_weight: AtLeast0 = 1.0
    depth_mean: Literal["blocks", "weights"] = "blocks"  # sum of l / L * loss_l over L, or over the sum of the weights
    largest_weight: AtLeast0 = 0.0  # of the loss with the most tokens, beside its share in the mean
    full_width: Share = 0.0  # share of the images whose random width is replaced by the full one
    mask_steps: Inside = 0.5  # probability that a training step's open mask has a step, for all but the last
    reinit_from: dict | None = None
    optimizer: Literal["adamw", "nadamw", "soap"] = "adamw"  # 'soap' is from pytorch-optimizer
    precondition_from: Whole0 = 500  # the step at which SOAP's preconditioners begin; before it steps as AdamW
    precondition_every: Whole1 = 100  # steps after which they are renewed
    attention: Attention | None = None  # None: the fastest for the device. An open mask trains by 'mask'

    def check(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in UNUSED and value != f.default:
                raise DwindleError(f"{f.name} = {value}: it has no effect on an AdaPerceiver; leave it out.")
        check_fields(self)
        _plain(self).check()
        if self.stage_ema is not None and self.ema:
            raise DwindleError(f"ema = {self.ema}: stage_ema says it for each stage; leave one of them out.")
        if self.distill == "token":
            raise DwindleError("distill = token: AdaPerceiver has no distillation token; take soft or hard.")
        opens = self.method_options.get("mask") == "open"
        if not opens and self.mask_steps != AdaRecipe.mask_steps:
            raise DwindleError(
                f"mask_steps = {self.mask_steps}: it is for an open mask; give method.mask=open as well."
            )
        if opens and self.attention not in (None, "mask"):
            raise DwindleError(f"attention = {self.attention}: an open mask trains by 'mask'; leave it out.")
        if not sum(self.stages):
            raise DwindleError(f"stages = {self.stages}: give three shares of the epochs, such as (0.4, 0.4, 0.2).")
        if self.reinit_from is not None:
            self._check_reinit()
        if self.freeze_backbone and self.weights is None:
            raise DwindleError(
                "freeze_backbone = True: there is nothing to keep; give the trained network, weights=RUN."
            )

    def _check_reinit(self) -> None:
        """Raises for a `reinit_from` that does not fit the other settings."""
        given = f"reinit_from = {self.reinit_from}"
        if not self.reinit_from or not all(type(depth) is int for pair in self.reinit_from.items() for depth in pair):
            raise DwindleError(f"{given}: name depths by whole numbers, such as {{9: 8}}, or leave it out.")
        for fits, wanted in (
            (self.freeze_backbone and self.weights is not None, "weights=RUN freeze_backbone=true"),
            (self.method_options.get("readouts") == "own", "method.readouts=own"),
            (not self.stages[0], "stages=(0,0,1)"),  # the first stage reads the last block only
            (self.depth_weight > 0, "depth_weight above 0"),
        ):
            if not fits:
                raise DwindleError(f"{given}: it needs {wanted} as well.")

    def learner(self) -> type[Learner]:
        return AdaLearner

    def ends(self, epochs: int) -> list[int]:
        """The epoch at which each stage of a run of so many epochs ends."""
        total = sum(self.stages)
        return [round(epochs * sum(self.stages[: i + 1]) / total) for i in range(3)]


def _plain(recipe: AdaRecipe) -> Recipe:
    """The recipe's settings that every `Recipe` has, to be checked as such."""
    return Recipe(**{f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)})
