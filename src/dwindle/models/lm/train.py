"""Training a language model: its recipe, the text it learns, and what a batch teaches it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from ...errors import DwindleError
from ...settings import AtLeast0, Batch, Depth, Size, Whole0, Whole1, Within
from ...tasks.base import Source, Task
from ...train.learner import Learner
from ...train.recipe import Training, made
from ...train.schedule import cosine
from .evaluate import evaluate
from .execute import AdaptiveLM, adapt_lm
from .model import CharLM, LMSize
from .routing import Router
from .text import Text, check_long, open_text
from .tsa import TSA, softly


@dataclass
class LMRecipe(Training):
    """Defaults are nanoGPT's for a character model of the paper's kind."""

    task: str = "language"
    data: str = "shakespeare"
    blocks: Depth = 6
    width: Size = 384
    heads: Size = 6
    context: Whole1 = 256
    dropout: Annotated[float, Within(0, 1, under=True)] = 0.2
    method: str = "TSA"

    steps: Whole1 = 5000
    batch: Batch = 64
    lr: AtLeast0 = 1e-3
    min_lr: AtLeast0 = 1e-4
    warmup: Whole0 = 100  # steps
    weight_decay: AtLeast0 = 0.1
    beta2: Annotated[float, Within(0, 1, under=True)] = 0.99
    compile: bool | None = None  # compile the blocks; on a GPU also record the step as a CUDA graph. None: on a GPU
    eval_every: Whole1 = 500  # steps; a checkpoint is written with it, so it is what a kill may cost
    eval_windows: Whole1 | None = None  # of the validation text; None: all

    def learner(self) -> type[Learner]:
        return LMLearner

    def on(self, data: str | None) -> LMRecipe:
        return self if data is None else dataclasses.replace(self, data=data)

    def told(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"data": Path(self.data).name}

    def make_router(self) -> Router:
        trainable = {name: kind for name, kind in Router.registry.items() if name != "Control"}
        return made("router", self.method, trainable, self.method_options)

    def make_lm(self, vocabulary: int) -> CharLM:
        return CharLM(LMSize(vocabulary, self.blocks, self.width, self.heads, self.context, self.dropout))


class Language(Task, name="language"):
    """A text, whose sequences are drawn anew at every step. An epoch ends with an evaluation."""

    numbered_by = "step"
    needs_data = False
    shown = ("task", "depth", "loss", "bpc", "tlops_saved", "macs_saved", "loss_soft", "train_tokens_per_s")
    recipe: LMRecipe

    def __init__(self, recipe: LMRecipe, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        for name, given in (("eval-data", source.eval_data), ("limit", source.limit)):
            if given is not None:
                raise DwindleError(f"--{name} {given} is for images; leave it out for a text.")
        text = source.opened or open_text(recipe.data)
        self.text = text.to(device)  # all of it: a step waits for no copy
        for part in (self.text.train, self.text.val):
            check_long(part, recipe.context, self.text.name)
        self.batch, self.steps, self.steps_per_epoch = recipe.batch, recipe.steps, recipe.eval_every
        self.eval_every = self.save_every = 1
        self.places = self.text.places(recipe.batch, recipe.context, recipe.seed, recipe.steps)

    @property
    def shared(self) -> Text:  # type: ignore[override]
        return self.text

    def batches(self, train: bool, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        first = epoch * self.steps_per_epoch
        for places in self.places[first : first + self.steps_per_epoch]:
            yield self.text.cut(places, self.recipe.context)

    def extra(self) -> dict[str, Any]:
        return {"vocabulary": self.text.vocabulary.characters, "data": {"train": Path(self.text.name).name}}


class LMLearner(Learner):
    """A transformer from its recipe, and the router that says which tokens run which block."""

    recipe: LMRecipe
    task: Language
    model: AdaptiveLM
    several = False
    what = "A language model"

    def __init__(self, recipe: LMRecipe, task: Language, device: torch.device) -> None:
        super().__init__(recipe, task, device)
        self.model = adapt_lm(recipe.make_lm(len(task.text.vocabulary)), recipe.make_router()).to(device)
        self.recording = device.type == "cuda" and recipe.compile is not False

    @property
    def name(self) -> str:
        return type(self.model.method).__name__

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices decay; norms and biases do not."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": self.recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def worth_compiling(self) -> bool:
        return bool(self.recipe.compile) or (self.recording and importlib.util.find_spec("triton") is not None)

    def compile(self) -> None:
        super().compile()
        self.model.compile_training()

    def rate(self, step: int, group: dict[str, Any]) -> float:
        """Linear warm-up, then a cosine down to min_lr."""
        recipe = self.recipe
        if step < recipe.warmup:
            return recipe.lr * (step + 1) / recipe.warmup
        return cosine(step - recipe.warmup, recipe.steps - recipe.warmup, recipe.lr, recipe.min_lr)

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model.terms(self.model(inputs["x"]), inputs["y"])

    def row(self, seconds: float, steps: int) -> dict[str, float]:
        return {"train_tokens_per_s": round(steps * self.recipe.batch * self.recipe.context / seconds)}

    def evaluate(self, model: AdaptiveLM, **options: Any) -> dict[str, float]:
        """On the validation text, executed hard; `loss_soft` with every update computed, as in training."""
        recipe, text, gpu = self.recipe, self.task.text, self.device.type == "cuda"
        options |= {"limit": recipe.eval_windows, "device": self.device, "name": text.name}
        options |= {"batch": max(recipe.batch, 256 if gpu else 32), "amp": recipe.amp and gpu}
        found = evaluate(model, text.val, **options)
        numbers = {name: found[name] for name in ("loss", "bpc", "tlops_saved", "macs_saved")}
        if isinstance(model.method, TSA):
            with softly(model.method):
                numbers["loss_soft"] = evaluate(model, text.val, layout="masked", **options)["loss"]
        return numbers
