"""Dwindle: a plain vision transformer in, one whose tokens stop being computed when they are done out."""

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

__version__ = "0.1.0"
__all__ = [
    "AHT",
    "AViT",
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
