"""One function per experiment; its docstring has the exact command, the hardware and the number to expect.

`dwindle train NAME` trains the recipe that the function of this name returns, and `dwindle compare NAME` compares what
the plan says that it returns. A function may take a `preset` (`--preset`) and the `data` set that `--data` names.
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
    """The function of this name that returns a recipe."""
    return _find(name, "recipe", Training)


def find_comparison(name: str) -> Callable[..., Any]:
    """The function of this name that returns a plan of a comparison."""
    return _find(name, "comparison", Plan)


def build(function: Callable[..., Any], data: str | None = None, **options: str | None) -> Any:
    """The recipe or plan that the function returns for these options, and for the data set if it takes one."""
    takes = inspect.signature(function).parameters
    for name, value in options.items():
        if value is not None and name not in takes:
            raise DwindleError(f"--{name} {value}: {function.__name__} has no {name}; leave it out.")
    options = {"data": None if data is None else data_set(data), **options}
    return function(**{name: value for name, value in options.items() if value is not None and name in takes})


def data_set(data: str) -> str:
    """The data set that the name of this folder or Hub id tells, of those that conditions depend on; else ImageNet."""
    folder = Path(data).name.lower().replace("-", "")
    return next((name for name in DATA_SETS if name in folder), DATA_SETS[0])


def _find(name: str, kind: str, returns: type) -> Callable[[], Any]:
    """The public function of this name, in any module here, that returns this type. kind: the word for errors."""
    known: dict[str, Callable[[], Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for key, function in inspect.getmembers(module, inspect.isfunction):
            returned = get_type_hints(function).get("return")
            public = function.__module__ == module.__name__ and not key.startswith("_")
            if public and inspect.isclass(returned) and issubclass(returned, returns):
                known[key] = function
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]
