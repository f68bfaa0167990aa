"""What a user did that cannot work, said in one sentence: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DwindleError(ValueError):
    """A mistake in the input. The command line prints its message and exits with code 2."""


def unknown(kind: str, given: str, known: Iterable[str], hint: str = "") -> DwindleError:
    """An unknown name, with the nearest known one suggested."""
    known, given = sorted(known), str(given)
    close = difflib.get_close_matches(given.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    guess = next((k for k in known if close and k.lower() == close[0]), None)
    nearest = f" (did you mean '{guess}'?)" if guess else ""
    listing = f"; known: {', '.join(known)}" if len(known) <= 40 else ""
    return DwindleError(f"Unknown {kind} '{given}'{nearest}{listing}{'; ' + hint if hint else ''}.")
