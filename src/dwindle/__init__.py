"""Dwindle makes a plain vision transformer adaptive: tokens stop being computed when they are done."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.face import adaptive_part, unwrap
from .core.model import AdaptiveViT, Output, adapt
from .core.tokens import Tokens
from .core.trace import Trace
from .errors import DwindleError
from .evaluate.evaluate import calibrate
from .evaluate.speedup import speedup
from .io.checkpoint import load, save
from .methods import Method, Verdict
from .methods.aht import AHT
from .methods.avit import AViT
from .methods.static import Static
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .models.adaperceiver import AdaPerceiver

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
    "adaptive_part",
    "calibrate",
    "load",
    "save",
    "speedup",
    "unwrap",
]


def __getattr__(name: str) -> Any:
    """Import AdaPerceiver, a network of its own, when it is first used."""
    if name == "AdaPerceiver":
        return import_module(".models.adaperceiver", __name__).AdaPerceiver
    raise AttributeError(f"module 'dwindle' has no attribute '{name}'")
