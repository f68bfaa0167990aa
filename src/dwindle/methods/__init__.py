"""One paper per file. Every module in this folder is imported once, which registers its Method classes."""

import importlib
import pkgutil

from ..core.method import Method, Verdict

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> type[Method]:
    """`dwindle.methods.TopK`: every registered method by its class name."""
    if name in Method.registry:
        return Method.registry[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Method", "Verdict"]
