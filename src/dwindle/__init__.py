"""Dwindle: a plain vision transformer in, one whose tokens stop being computed when they are done out."""

from typing import TYPE_CHECKING, Any

from .checkpoint import load, save
from .errors import DwindleError
from .methods import Method, Verdict
from .methods.aht import AHT
from .methods.avit import AViT
from .methods.static import Static
from .model import AdaptiveViT, Output, adapt
from .tokens import Tokens
from .trace import Trace
from .train.evaluate import calibrate

if TYPE_CHECKING:
    from .adaperceiver import AdaPerceiver

__version__ = "0.1.0"
__all__ = [
    "AHT",
    "AViT",
    "AdaPerceiver",
    "AdaptiveViT",
    "DwindleError",
    "Method",
    "Output",
    "Static",
    "Tokens",
    "Trace",
    "Verdict",
    "adapt",
    "calibrate",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    """A network of its own is imported when first asked for."""
    if name == "AdaPerceiver":
        from .adaperceiver import AdaPerceiver

        return AdaPerceiver
    raise AttributeError(f"module 'dwindle' has no attribute '{name}'")
