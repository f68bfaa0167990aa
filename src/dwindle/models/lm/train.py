"""Training a language model: a recipe, and a run that can be killed and resumed exactly."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ...core import processes as ranks
from ...errors import DwindleError
from ...io.card import write_card
from ...io.checkpoint import save
from ...ops.half import autocast, halves
from ...runtime.memory import kept_pages
from ...settings import AtLeast0, Batch, Depth, Seed, Size, Whole0, Whole1, Within, check_fields
from ...train.recipe import made
from ...train.record import Recorded, record
from ...train.state import Claim, random_state, read_state, restore_random, write_metrics, write_state
from .evaluate import evaluate
from .execute import AdaptiveLM, adapt_lm
from .model import CharLM, LMSize
from .routing import Router
from .text import Text, check_long, open_text
from .tsa import TSA, softly


@dataclass
class LMRecipe:
    """Defaults are nanoGPT's for a character model of the paper's kind."""

    data: str = "shakespeare"
    blocks: Depth = 6
    width: Size = 384
    heads: Size = 6
    context: Whole1 = 256
    dropout: Annotated[float, Within(0, 1, under=True)] = 0.2
    method: str = "TSA"
    method_options: dict[str, Any] = field(default_factory=dict)

    steps: Whole1 = 5000
    batch: Batch = 64
    lr: AtLeast0 = 1e-3
    min_lr: AtLeast0 = 1e-4
    warmup: Whole0 = 100  # steps
    weight_decay: AtLeast0 = 0.1
    beta2: Annotated[float, Within(0, 1, under=True)] = 0.99
    clip: AtLeast0 = 1.0
    amp: bool = True  # bf16 autocast on a GPU
    cpu_amp: bool = False  # the same on a CPU, one that multiplies in bf16 (AMD since Zen 4, Intel since Cooper Lake)
    compile: bool | None = None  # compile the blocks; on a GPU also record the step as a CUDA graph. None: on a GPU
    seed: Seed = 0
    eval_every: Whole1 = 500  # steps; a checkpoint is written with it, so it is what a kill may cost
    eval_windows: Whole1 | None = None  # of the validation text; None: all

    def check(self) -> None:
        check_fields(self)

    def make_router(self) -> Router:
        trainable = {name: kind for name, kind in Router.registry.items() if name != "Control"}
        return made("router", self.method, trainable, self.method_options)

    def make_lm(self, vocabulary: int) -> CharLM:
        return CharLM(LMSize(vocabulary, self.blocks, self.width, self.heads, self.context, self.dropout))


class LMRun:
    """A recipe on a text, writing to a folder. `rounds()` yields the numbers at every evaluation."""

    def __init__(
        self,
        recipe: LMRecipe,
        out: str | os.PathLike,
        *,
        device: str | None = None,
        resume: bool = False,
        text: Text | None = None,
    ) -> None:
        """text: the recipe's, opened by an earlier run."""
        recipe.check()
        if ranks.started() > 1:
            raise DwindleError("A language model is trained in one process; start it without torchrun.")
        self.recipe, self.out = recipe, Path(out)
        self.given = json.loads(json.dumps(dataclasses.asdict(recipe)))
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.halves = halves(self.device, recipe.amp, recipe.cpu_amp)
        self.claim = Claim(self.out, resume)
        self.text = (text or open_text(recipe.data)).to(self.device)  # all of it: a step waits for no copy
        check_long(self.text.train, recipe.context, self.text.name)
        check_long(self.text.val, recipe.context, self.text.name)
        torch.manual_seed(recipe.seed)
        self.model = adapt_lm(recipe.make_lm(len(self.text.vocabulary)), recipe.make_router()).to(self.device)
        self.optimizer = torch.optim.AdamW(
            _groups(self.model, recipe.weight_decay), lr=recipe.lr, betas=(0.9, recipe.beta2), fused=self._gpu
        )
        self.places = self.text.places(recipe.batch, recipe.context, recipe.seed, recipe.steps)
        self.recorded: Recorded | None = None
        self.recording = self._gpu and recipe.compile is not False
        if recipe.compile or (self.recording and importlib.util.find_spec("triton") is not None):
            self.model.compile_training()
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.noted = 0
        if resume:
            self._restore()

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"

    def _backward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with autocast(self.device, self.halves):
            terms = self.model.terms(self.model(x), y)
        terms["total"].backward()
        return {name: value.detach() for name, value in terms.items()}

    def rounds(self, tick: Callable[[int, dict[str, Tensor]], None] | None = None) -> Iterator[dict[str, float]]:
        """Train what is left to train. `tick(step, terms)` is called after every step."""
        with self.claim:
            yield from self._rounds(tick)

    def _rounds(self, tick: Callable[[int, dict[str, Tensor]], None] | None) -> Iterator[dict[str, float]]:
        recipe, since = self.recipe, self.step
        sums: dict[str, Tensor] = {}
        begin = time.perf_counter()
        with kept_pages(self.device.type == "cpu"):
            while self.step < recipe.steps:
                terms = self._learn()
                for name, value in terms.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value
                if tick:
                    tick(self.step, terms)
                last = self.step == recipe.steps
                if last or self.step % recipe.eval_every == 0:
                    numbers: dict[str, float] = {
                        name: float(value) / (self.step - since) for name, value in sums.items()
                    }
                    if not math.isfinite(numbers["total"]):
                        raise DwindleError(f"The loss became {numbers['total']} by step {self.step}; lower lr.")
                    speed = (self.step - since) * recipe.batch * recipe.context / (time.perf_counter() - begin)
                    row = {"step": self.step, **numbers, **self.evaluate(), "train_tokens_per_s": round(speed)}
                    self.history.append(row)
                    self._save()
                    yield row
                    sums, since, begin = {}, self.step, time.perf_counter()

    def _learn(self) -> dict[str, Tensor]:
        recipe, model = self.recipe, self.model
        model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(self.step)
        x, y = self.text.cut(self.places[self.step], recipe.context)
        if self.recording:
            self.recorded = self.recorded or record(self._backward, model, x, y, what=type(model.method).__name__)
            terms = self.recorded(x, y)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            terms = self._backward(x, y)
        if recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        self.optimizer.step()
        self.step += 1
        return terms

    def _lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to min_lr."""
        recipe = self.recipe
        if step < recipe.warmup:
            return recipe.lr * (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
        return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * done)) / 2

    def evaluate(self) -> dict[str, float]:
        """On the validation text, executed hard; `loss_soft` with every update computed, as in training."""
        recipe = self.recipe
        options: dict[str, Any] = {"limit": recipe.eval_windows, "device": self.device, "name": self.text.name}
        options |= {"batch": max(recipe.batch, 256 if self._gpu else 32), "amp": recipe.amp and self._gpu}
        found = evaluate(self.model, self.text.val, **options)
        numbers = {name: found[name] for name in ("loss", "bpc", "tlops_saved", "macs_saved")}
        if isinstance(self.model.method, TSA):
            with softly(self.model.method):
                numbers["loss_soft"] = evaluate(self.model, self.text.val, layout="masked", **options)["loss"]
        return numbers

    def _save(self) -> None:
        """The model first, then the state that vouches for it."""
        recipe = self.given | {"data": Path(self.recipe.data).name}
        extra = {
            "vocabulary": self.text.vocabulary.characters,
            "data": {"train": Path(self.text.name).name},
            "recipe": recipe,
            "results": self.history[-1] if self.history else {},
        }
        save(self.model, self.out, extra=extra)
        write_card(self.out)
        self.noted = write_metrics(self.out, self.history, self.noted, by="step")
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "given": json.dumps(self.given),
            "random": random_state(self.device),
        }
        write_state(self.out, state)

    def _restore(self) -> None:
        state = read_state(self.out, self.given, self.recipe)
        self.step, self.history = state["step"], state["history"]
        self.noted = len(self.history)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_random(state["random"], self.device)


def _groups(model: AdaptiveLM, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
