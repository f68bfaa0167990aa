"""What a run keeps in its folder: the state to resume from, and its numbers. A kill at any moment loses no more than
what came after the last save."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DwindleError
from ..files import check_folder, draft

STATE = "state.pt"


def claim_folder(out: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, or none to resume, or that nothing can be written to."""
    check_folder(out)
    if not resume and (out / STATE).exists():
        raise DwindleError(f"{out} holds a run already; go on with --resume, or choose another --out.")
    if resume and not (out / STATE).exists():
        raise DwindleError(f"{out} holds no run to resume; leave --resume out to start one.")


def write_state(out: Path, state: dict[str, Any]) -> None:
    with draft(out / STATE) as scratch:
        torch.save(state, scratch)


def defaults(recipe: Any) -> dict[str, Any]:
    """The settings of a plain recipe of the same kind, as JSON has them."""
    return json.loads(json.dumps(dataclasses.asdict(type(recipe)())))


def differing(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings of `new` that were others, for people; old: as JSON has them."""
    now = json.loads(json.dumps(new))
    return ", ".join(f"{name}={old.get(name)} (now {value})" for name, value in now.items() if old.get(name) != value)


def read_state(out: Path, given: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """The state of a run that was started with the same settings (`given`, kept in it as JSON). Settings that were not
    there yet count as what they are in a plain recipe of the same kind.
    """
    path = out / STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DwindleError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged; start again with another --out."
        ) from error
    old = defaults(recipe) | json.loads(state["given"])
    if others := differing(old, dict.fromkeys(old) | given):
        raise DwindleError(f"{out} was started with other settings: {others}; resume with the same ones.")
    return state


def random_state(device: torch.device) -> dict[str, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def write_metrics(out: Path, history: list[dict[str, float]], noted: int = 0, by: str = "epoch") -> int:
    """metrics.csv, and TensorBoard's file from row `noted` on; returns how many rows are noted now."""
    names = list(dict.fromkeys(name for row in history for name in row))
    with draft(out / "metrics.csv") as scratch, scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(history)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return noted
    with SummaryWriter(str(out / "tensorboard")) as board:
        for row in history[noted:]:
            for name, value in row.items():
                board.add_scalar(name, value, int(row[by]))
    return len(history)
