"""Training of a language model with its router: the recipe, and the learner."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from ...core.method import require
from ...settings import AtLeast0, Batch, Depth, Size, Whole0, Whole1, Within
from ...tasks.language import Language
from ...train.learner import Learner
from ...train.recipe import Training, made
from ...train.schedule import cosine
from .difficulty import unskipped
from .evaluate import affordable, evaluate
from .execute import AdaptiveLM, adapt_lm
from .load import load_lm
from .model import CharLM, LMSize
from .routing import Router
from .tsa import TSA


@dataclass
class LMRecipe(Training):
    """What a training run depends on. The defaults are nanoGPT's for character models."""

    task: str = "language"
    data: str = "shakespeare"
    blocks: Depth = 6
    width: Size = 384
    heads: Size = 6
    context: Whole1 = 256
    dropout: Annotated[float, Within(0, 1, under=True)] = 0.2
    method: str = "TSA"
    weights: str | None = None  # a checkpoint whose language model, at its own sizes, gets a new router
    freeze_backbone: bool = False  # train the router alone

    steps: Whole1 = 5000
    batch: Batch = 64
    lr: AtLeast0 = 1e-3
    min_lr: AtLeast0 = 1e-4
    warmup: Whole0 = 100  # steps
    weight_decay: AtLeast0 = 0.1
    beta2: Annotated[float, Within(0, 1, under=True)] = 0.99
    compile: bool | None = None  # compile the blocks, and on a GPU record the step as a CUDA graph; None: only on a GPU
    eval_every: Whole1 = 500  # steps; a checkpoint is written as often
    eval_windows: Whole1 | None = None  # of the validation text; None: all
    # After training the operating point is set to the cheapest whose loss on training text is at most this share above
    # the loss with nothing skipped. None: the operating point stays as configured.
    allowed: Annotated[float, Within(0, 1, under=True)] | None = None

    def check(self) -> None:
        super().check()
        need = self.weights is not None or not self.freeze_backbone
        require(need, "freeze_backbone = True", "a language model that learns nothing must be given: weights=RUN")

    def learner(self) -> type[Learner]:
        return LMLearner

    def on(self, data: str | None) -> LMRecipe:
        return self if data is None else dataclasses.replace(self, data=data)

    def settings(self) -> dict[str, Any]:
        begun = None if self.weights is None else Path(self.weights).name
        return dataclasses.asdict(self) | {"data": Path(self.data).name, "weights": begun}

    def make_router(self) -> Router:
        trainable = {name: kind for name, kind in Router.registry.items() if name != "Control"}
        return made("router", self.method, trainable, self.method_options)

    def make_lm(self, vocabulary: int) -> CharLM:
        return CharLM(LMSize(vocabulary, self.blocks, self.width, self.heads, self.context, self.dropout))


class LMLearner(Learner):
    """Trains a language model with a router, or a router for a trained language model."""

    recipe: LMRecipe
    task: Language
    model: AdaptiveLM
    learns = ("text",)
    several = False
    what = "A language model"

    def __init__(self, recipe: LMRecipe, task: Language, device: torch.device) -> None:
        super().__init__(recipe, task, device)
        lm = recipe.make_lm(task.outputs) if recipe.weights is None else self._loaded_lm(recipe.weights)
        self.model = adapt_lm(lm.requires_grad_(not recipe.freeze_backbone), recipe.make_router()).to(device)
        self.model.tokenizer = getattr(task.text.vocabulary, "content", None)
        self.recording = device.type == "cuda" and recipe.compile is not False

    def _loaded_lm(self, weights: str) -> Any:
        """The language model of a checkpoint; refused unless it has the text's vocabulary and a long enough context."""
        loaded = load_lm(weights)
        shape, known = loaded.backbone.shape, self.task.outputs
        # Models often have more rows than their tokenizer has tokens, for speed.
        same = shape.vocabulary >= known if loaded.tokenizer is not None else shape.vocabulary == known
        for fits, name, own in (
            (same, "vocabulary", f"the text has {known}"),
            (shape.context >= self.recipe.context, "context", f"the recipe asks for {self.recipe.context}"),
        ):
            require(fits, f"weights = {weights}", f"its {name} is {getattr(shape, name)}, and {own}")
        return loaded.lm.train()

    @property
    def name(self) -> str:
        return type(self.model.method).__name__

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: weight decay for matrices, none for norms and biases."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": self.recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def worth_compiling(self) -> bool:
        return bool(self.recipe.compile) or (self.recording and importlib.util.find_spec("triton") is not None)

    def compile(self) -> None:
        super().compile()
        self.model.compile_training()

    def rate(self, step: int, group: dict[str, Any]) -> float:
        """The learning rate: linear warm-up, then a cosine to min_lr."""
        recipe = self.recipe
        if step < recipe.warmup:
            return recipe.lr * (step + 1) / recipe.warmup
        return cosine(step - recipe.warmup, recipe.steps - recipe.warmup, recipe.lr, recipe.min_lr)

    def terms(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.model.terms(self.model(inputs["x"]), inputs["y"])

    def finish(self, models: list[Any]) -> None:
        if self.recipe.allowed is not None:
            text = self.task.text
            for model in models:
                known = text.train[: len(text.val)]
                affordable(model, known, self.recipe.allowed, **self._eval_options())

    def _eval_options(self) -> dict[str, Any]:
        """Options of `evaluate.evaluate` that the recipe sets."""
        recipe, gpu = self.recipe, self.device.type == "cuda"
        options: dict[str, Any] = {
            "context": recipe.context,
            "limit": recipe.eval_windows,
            "device": self.device,
            "name": self.task.text.name,
            "per_token": self.task.text.per_token,
        }
        return options | {"batch": max(recipe.batch, 256 if gpu else 32), "amp": recipe.amp and gpu}

    def row(self, seconds: float, steps: int) -> dict[str, float]:
        return {"train_tokens_per_s": round(steps * self.recipe.batch * self.recipe.context / seconds)}

    def evaluate(self, model: AdaptiveLM, **options: Any) -> dict[str, float]:
        """Metrics on the validation text with skipping; `loss_soft`, of TSA, is the loss with every update computed."""
        text = self.task.text
        options |= self._eval_options()
        found = evaluate(model, text.val, **options)
        numbers = {name: found[name] for name in ("loss", "bpc", "tlops_saved", "macs_saved")}
        if isinstance(model.method, TSA):
            with unskipped(model):
                numbers["loss_soft"] = evaluate(model, text.val, layout="masked", **options)["loss"]
        return numbers
