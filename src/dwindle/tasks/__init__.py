"""The tasks that models are trained for. A new task is one new file here, which registers itself."""

from ..core.registry import discover
from .base import Task

__all__ = ["Task"]

discover(__name__)
