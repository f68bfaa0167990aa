"""Language models whose tokens choose their blocks: `adapt_lm(lm, TSA())`."""

from .execute import AdaptiveLM, LMOutput, adapt_lm
from .family import LanguageModels
from .model import CharLM, LMSize
from .routing import EarlyExit, MoD, Random, Router, Static
from .tsa import TSA

__all__ = [
    "TSA",
    "AdaptiveLM",
    "CharLM",
    "EarlyExit",
    "LMOutput",
    "LMSize",
    "LanguageModels",
    "MoD",
    "Random",
    "Router",
    "Static",
    "adapt_lm",
]
