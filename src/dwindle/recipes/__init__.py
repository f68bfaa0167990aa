"""One function per experiment; its docstring has the exact command, the hardware and the number to expect.

A function of a module here that returns a recipe is what `dwindle train NAME` trains; one that returns a plan is what
`dwindle compare NAME` compares.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, get_type_hints

from ..errors import unknown
from ..experiments.compare import Plan
from ..train.recipe import Training


def find_recipe(name: str) -> Callable[[], Training]:
    """A recipe's function by its name."""
    return _find(name, "recipe", Training)


def find_comparison(name: str) -> Callable[[], Any]:
    """A comparison's function by its name."""
    return _find(name, "comparison", Plan)


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
