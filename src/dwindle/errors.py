"""Errors that a user can mend. Each is one sentence: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 80, 80, 40


class DwindleError(ValueError):
    """A mistake in the input. The command line prints its message and exits with code 2."""


def brief(value: Any) -> str:
    """A short representation of any value, however large or deeply nested it is."""
    try:
        return _short.repr(value)
    except ValueError:  # an int with more digits than Python converts to text
        return f"one {type(value).__name__} of very many digits"


def unknown(kind: str, given: Any, known: Iterable[str], hint: str = "") -> DwindleError:
    """The error for an unknown name, which suggests the nearest known name. hint: what to do."""
    known, name = sorted(known), printable(str(given))
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    guess = next((k for k in known if close and k.lower() == close[0]), None)
    nearest = f" (did you mean '{guess}'?)" if guess else ""
    listing = f"; known: {', '.join(known)}" if len(known) <= 40 else ""
    return DwindleError(f"Unknown {kind} '{name}'{nearest}{listing}{'; ' + hint if hint else ''}.")


EXTRAS = {  # the extra in pyproject.toml that installs a package, by the package's import name
    **dict.fromkeys(("typer", "rich"), "cli"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"), "serve"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "onnx"),
    **dict.fromkeys(("huggingface_hub", "datasets"), "hub"),
    **{"matplotlib": "plots", "pyarrow": "data", "tensorboard": "train", "transformers": "hf", "optuna": "search"},
    **{"pytorch_optimizer": "soap", "ray": "ray"},
}


def missing(error: ImportError) -> DwindleError:
    """The error that names the extra to install for a missing package. If no extra has it, `error` itself is raised."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    return DwindleError(
        f'This needs the package {package}, which is not installed: pip install "dwindle[{EXTRAS[package]}]".'
    )


def printable(name: str, most: int = 200) -> str:
    """Text from any source as one line that can be printed and stored, cut to `most` characters."""
    cut = name if len(name) <= most else name[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def listed(words: Iterable[str], last: str = "or") -> str:
    """The words as a list in a sentence: 'a, b or c'."""
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end
