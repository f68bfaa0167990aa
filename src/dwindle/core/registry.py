"""How a room's files are found: each registers what it defines, and nobody names them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache


@cache
def discover(package: str) -> None:
    """Import every module of a package of ours once, so that what they define registers itself."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
