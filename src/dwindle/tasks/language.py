"""Language modelling: which character or token comes next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DwindleError
from ..io.checkpoint import find
from ..io.config import read_config
from ..io.text import Text, Vocabulary, check_long, open_text
from ..io.tokenizer import Tokenizer, vocabulary_beside
from .base import Source, Task


class Language(Task, name="language"):
    """A text, from which every step draws new sequences. Each epoch ends with an evaluation."""

    answers = "text"
    numbered_by = "step"
    needs_data = False
    shown = ("task", "depth", "loss", "bpc", "tlops_saved", "macs_saved", "loss_soft", "train_tokens_per_s")

    def __init__(self, recipe: Any, source: Source, device: torch.device) -> None:
        super().__init__(recipe, source, device)
        for name, value in (("eval-data", source.eval_data), ("limit", source.limit)):
            if value is not None:
                raise DwindleError(f"--{name} {value} is for images; leave it out for a text.")
        text = source.opened or open_text(recipe.data, self._vocabulary(recipe.weights))
        self.text = text.to(device)  # the whole text, so that no step waits for a copy
        for part in (self.text.train, self.text.val):
            check_long(part, recipe.context, self.text.name)
        self.batch, self.steps, self.steps_per_epoch = recipe.batch, recipe.steps, recipe.eval_every
        self.eval_every = self.save_every = 1
        self.places = self.text.places(recipe.batch, recipe.context, recipe.seed, recipe.steps)

    @staticmethod
    def _vocabulary(weights: str | None) -> Vocabulary | Tokenizer | None:
        """The vocabulary or tokenizer of the checkpoint that training begins from, if there is one."""
        if weights is None:
            return None
        folder = find(weights)
        return vocabulary_beside(folder, read_config(folder))

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return len(self.text.vocabulary)

    @property
    def shared(self) -> Text:  # type: ignore[override]
        return self.text

    def batches(self, train: bool, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        first = epoch * self.steps_per_epoch
        for places in self.places[first : first + self.steps_per_epoch]:
            yield self.text.cut(places, self.recipe.context)

    def extra(self) -> dict[str, Any]:
        known, data = self.text.vocabulary, {"data": {"train": Path(self.text.name).name}}
        # A tokenizer is a file beside the weights.
        return super().extra() | data | ({"vocabulary": known.characters} if isinstance(known, Vocabulary) else {})
