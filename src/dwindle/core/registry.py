"""Who is there: files that register what they define, and families of models.

A folder in `models/` defines a `Family`. Saving, loading, cards, `model.prepare()` and the commands go through it, so
no line outside that folder asks which family a model is of. Rooms above reach rooms below by it.
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
    """Import every module of a package of ours once, so that what they define registers itself."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


class Family:
    """What one family of models says of itself. Defining a subclass registers it; `models/vit` is the plainest."""

    known: ClassVar[list[Family]] = []

    one: str  # in sentences: 'a language model'
    many: str  # 'language models'
    model: type[nn.Module]  # the class of its models
    commands: Mapping[str, str]  # `dwindle NAME`, and what it says there of this family
    cli: str  # the module that holds a function for each of them, imported when one is called

    def __init_subclass__(cls) -> None:
        Family.known.append(cls())

    @property
    def backbones(self) -> Collection[str]:
        """What the config of its checkpoints may call the backbone's family."""
        raise NotImplementedError

    def foreign(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Of a config.json that another library wrote: as ours would say it, if it is of this family."""
        return None

    def describe(self, model: Any) -> dict[str, Any]:
        """The config's 'backbone' and 'method', from which `load` builds the model again."""
        raise NotImplementedError

    def load(self, folder: Path, config: dict[str, Any], inner: nn.Module | None) -> nn.Module:
        """The model of a checkpoint. inner: the network to put the weights into, instead of building one."""
        raise NotImplementedError

    def card(self, config: dict[str, Any], name: str) -> str:
        """The model card of a checkpoint, from its config alone."""
        raise NotImplementedError

    def preprocess(self, model: Any) -> dict[str, Any]:
        """Settings of `io.images.Preprocess` that a model wants its images by, where no checkpoint says."""
        return {}

    def prepare(self, model: Any, **options: Any) -> Any:
        """A copy for weights that stay, which answers as this machine computes fastest. options: the family's own."""
        raise DwindleError(f"There is no faster copy of {self.one} to prepare; call the model itself.")

    def push_to_hub(self, model: Any, repo: str, **options: Any) -> str:
        """Upload it as a checkpoint."""
        raise DwindleError(f"To upload {self.one} call dwindle.io.hub.push_to_hub(model, repo).")

    def save_pretrained(self, model: Any, folder: Any, **options: Any) -> Path:
        """Write it as transformers keeps models."""
        raise DwindleError(f"{self.one} is saved by dwindle.save(model, folder).".capitalize())

    def from_pretrained(self, source: Any, **options: Any) -> Any:
        """Read what `save_pretrained` wrote."""
        raise DwindleError(f"{self.one} is read by dwindle.load(folder).".capitalize())

    def untrained(self) -> Collection[str]:
        """Names by which it builds a model that was not trained, as `dwindle bench` takes them."""
        return ()

    def builds(self, name: str) -> bool:
        return name in self.untrained()


def families() -> list[Family]:
    """Those of the folders in models/, and what was defined elsewhere; the one with the most commands first."""
    discover("dwindle.models")
    return sorted(Family.known, key=lambda family: -len(family.commands))


def family_of(model: object) -> Family:
    """A model's, compiled or not."""
    plain = getattr(model, "_orig_mod", model)
    for family in families():
        if isinstance(plain, family.model):
            return family
    known = ", ".join(family.model.__name__ for family in families())
    raise DwindleError(f"A {type(model).__name__} is no model of Dwindle's ({known}); adapt it first: dwindle.adapt.")


def family_named(backbone: str) -> Family:
    """That of checkpoints whose config names a backbone of this family."""
    for family in families():
        if backbone in family.backbones:
            return family
    raise unknown("backbone family", backbone, [name for family in families() for name in family.backbones])
