"""One paper per file. Every module in this folder is imported once, which registers its Method classes."""

from ..core.method import Method, Verdict
from ..core.registry import discover

discover(__name__)


def __getattr__(name: str) -> type[Method]:
    """A registered method by its class name, such as `dwindle.methods.TopK`."""
    if name in Method.registry:
        return Method.registry[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Method", "Verdict"]
