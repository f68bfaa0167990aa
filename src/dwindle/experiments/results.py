"""One JSON per result of a comparison: where it lies, whether it is there, and on what machine it was made."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..core import processes as ranks
from ..errors import DwindleError, unknown
from ..files import check_folder
from ..train.state import defaults, differing


class Results:
    """A comparison's folders, and which of its results are to be made now."""

    part = "entry"  # what `only` names

    def __init__(
        self,
        name: str,
        out: str | os.PathLike,
        results: str | os.PathLike,
        known: Sequence[str],
        only: Sequence[str] | None,
        until: float | None,
    ) -> None:
        """known: names of all results; only: of those wanted. until: seconds after which no more training is begun."""
        if ranks.started() > 1:
            raise DwindleError("dwindle compare runs in one process; start it without torchrun.")
        for wanted in only or ():
            if wanted not in known:
                raise unknown(f"{self.part} of this comparison", wanted, known)
        self.name, self.out, self.folder = name, Path(out), Path(results) / name
        self.only = set(only or known)
        self.end = None if until is None else time.monotonic() + until
        check_folder(self.folder, "--results")

    @property
    def late(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def has(self, path: Path, conditions: dict[str, Any], recipe: Any) -> bool:
        """Whether the result is there. One made under other conditions is not it; settings that were not there yet
        count as what they are in a plain recipe of the same kind.
        """
        if not path.exists():
            return False
        if others := differing(defaults(recipe) | read_result(path).get("conditions", {}), conditions):
            raise DwindleError(f"{path} was made with {others}; choose another --results, or delete it.")
        return True


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    commit = os.environ.get("DWINDLE_COMMIT")  # for a machine that has a copy without its history
    if commit is None:
        try:
            asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
            commit = asked.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "unknown"
    return {"device": name, "torch": torch.__version__, "commit": commit}


def read_result(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DwindleError(f"{path} is no JSON ({error}); delete it, and the comparison makes it again.") from error


def read_results(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """Every result of a comparison's folder."""
    return [read_result(path) for path in sorted(Path(folder).glob("*.json"))]
