"""One paper per file. Every module in this folder is imported once, which registers its Method classes."""

import importlib
import pkgutil

from .base import Method, Verdict

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Method", "Verdict"]
