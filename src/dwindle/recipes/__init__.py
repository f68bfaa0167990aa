"""One function per experiment; its docstring has the exact command, the hardware and the number to expect.

A function of a module here that returns a recipe is what `dwindle train NAME` trains; one that returns a plan is what
`dwindle compare NAME` compares. It may take a `preset` (`--preset`) and the `data` set, as `--data` names it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import DwindleError, unknown
from ..experiments.compare import Plan
from ..train.recipe import Training

DATA_SETS = ("imagenet", "places365", "cifar100")


def find_recipe(name: str) -> Callable[..., Training]:
    """A recipe's function by its name."""
    return _find(name, "recipe", Training)


def find_comparison(name: str) -> Callable[..., Any]:
    """A comparison's function by its name."""
    return _find(name, "comparison", Plan)


def made(function: Callable[..., Any], data: str | None = None, **options: str | None) -> Any:
    """What the function gives for these options and this data, which it need not look at."""
    takes = inspect.signature(function).parameters
    for name, value in options.items():
        if value is not None and name not in takes:
            raise DwindleError(f"--{name} {value}: {function.__name__} has no {name}; leave it out.")
    given = {"data": None if data is None else data_set(data), **options}
    return function(**{name: value for name, value in given.items() if value is not None and name in takes})


def data_set(data: str) -> str:
    """Which data set lies there, of those that conditions depend on, by the place's name; ImageNet where none does."""
    place = Path(data).name.lower().replace("-", "")
    return next((name for name in DATA_SETS if name in place), DATA_SETS[0])


def _find(name: str, kind: str, returns: type) -> Callable[[], Any]:
    known: dict[str, Callable[[], Any]] = {}
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        for called, function in inspect.getmembers(module, inspect.isfunction):
            made = get_type_hints(function).get("return")
            here = function.__module__ == module.__name__ and not called.startswith("_")
            if here and inspect.isclass(made) and issubclass(made, returns):
                known[called] = function
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]
