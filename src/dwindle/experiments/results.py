"""The results of a comparison, one JSON each: their names, reading them, and the machine they were made on."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..errors import DwindleError


def slug(name: str) -> str:
    """A name with only the characters that a file's name may have."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def machine(device: torch.device) -> dict[str, str]:
    """The device, torch's version and the commit, as a result records them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    commit = os.environ.get("DWINDLE_COMMIT")  # for a machine whose copy of the code has no git history
    if commit is None:
        try:
            done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
            commit = done.stdout.strip()
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
