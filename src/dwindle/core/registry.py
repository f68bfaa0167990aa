"""The registry of families of models, and the import of files that register what they define.

A folder in `models/` defines a `Family`. Saving, loading, cards, `model.prepare()` and the commands go through it, so
no line outside that folder asks which family a model belongs to. Through it rooms above call code of rooms below.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ..errors import DwindleError, unknown


@cache
def discover(package: str) -> None:
    """Import every module of a package once, so that the classes defined there register themselves."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


class Family:
    """A family of models. Defining a subclass registers it; `models/vit` is the simplest example."""

    known: ClassVar[list[Family]] = []

    one: str  # in sentences: 'a language model'
    many: str  # 'language models'
    model: type[nn.Module]  # the class of its models
    commands: Mapping[str, str]  # names of commands (`dwindle NAME`), and this family's help text of each
    cli: str  # the module with a function for each command, imported when one is called

    def __init_subclass__(cls) -> None:
        Family.known.append(cls())

    @property
    def backbones(self) -> Collection[str]:
        """The names of backbones that configs of this family's checkpoints may have."""
        raise NotImplementedError

    def foreign(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Our config for a config.json that another library wrote; None if that model is not of this family."""
        return None

    def describe(self, model: Any) -> dict[str, Any]:
        """The entries 'backbone' and 'method' of a checkpoint's config, from which `load` builds the model again."""
        raise NotImplementedError

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> nn.Module:
        """The model of a checkpoint. inner: a network to load the weights into; None: build one from the config."""
        raise NotImplementedError

    def card(self, config: dict[str, Any], name: str) -> str:
        """The model card of a checkpoint, from its config alone."""
        raise NotImplementedError

    def preprocess(self, model: Any) -> dict[str, Any]:
        """Settings of `io.images.Preprocess` for a model whose checkpoint holds none."""
        return {}

    def prepare(self, model: Any, **options: Any) -> Any:
        """A copy for inference, in the fastest form for this machine. options: the family's own."""
        raise DwindleError(f"There is no faster copy of {self.one} to prepare; call the model itself.")

    def push_to_hub(self, model: Any, repo: str, **options: Any) -> str:
        """Upload a model as a checkpoint. Returns its address."""
        raise DwindleError(f"To upload {self.one} call dwindle.io.hub.push_to_hub(model, repo).")

    def save_pretrained(self, model: Any, folder: Any, **options: Any) -> Path:
        """Write a model in transformers' format. Returns the folder."""
        raise DwindleError(f"{self.one} is saved by dwindle.save(model, folder).".capitalize())

    def from_pretrained(self, source: Any, **options: Any) -> Any:
        """Load what `save_pretrained` wrote."""
        raise DwindleError(f"{self.one} is read by dwindle.load(folder).".capitalize())

    def untrained(self) -> Collection[str]:
        """The names of models that the family can build without training, which `dwindle bench` takes."""
        return ()

    def builds(self, name: str) -> bool:
        """Whether the family can build a model of this name without training."""
        return name in self.untrained()


def families() -> list[Family]:
    """All families: those of the folders in models/ and any defined elsewhere. The one with most commands is first."""
    discover("dwindle.models")
    return sorted(Family.known, key=lambda family: -len(family.commands))


def family_of(model: object) -> Family:
    """The family of a model, compiled or not."""
    plain = getattr(model, "_orig_mod", model)
    for family in families():
        if isinstance(plain, family.model):
            return family
    known = ", ".join(family.model.__name__ for family in families())
    raise DwindleError(f"A {type(model).__name__} is no model of Dwindle's ({known}); adapt it first: dwindle.adapt.")


def family_named(backbone: str) -> Family:
    """The family whose checkpoints' configs may have this name of a backbone."""
    for family in families():
        if backbone in family.backbones:
            return family
    raise unknown("backbone family", backbone, [name for family in families() for name in family.backbones])
