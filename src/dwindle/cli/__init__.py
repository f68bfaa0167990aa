"""The command line: thin commands that parse, call and print."""

from .main import app, main

__all__ = ["app", "main"]
