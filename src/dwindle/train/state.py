"""The files of a run: the state to resume from, and its metrics. A kill at any moment loses only what came after the
last save."""

from __future__ import annotations

import csv
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from ..core import processes as ranks
from ..errors import DwindleError
from ..files import check_folder, draft, lock, unlock, write_errors

STATE = "state.pt"
BEGUN = ".begun"  # a file in the folder of a run that has not ended


class Claim:
    """A lock on a run's folder, so that one run at a time writes to it: `with claim:` while it trains.

    It refuses a folder that holds another run, or none to resume, that cannot be written to, or that another run has
    locked. The file system releases the lock when the process ends in any way. The locked file stays after a kill: it
    distinguishes a run killed before its first save. Of several processes only the first one locks.
    """

    def __init__(self, out: Path, resume: bool) -> None:
        self.out, self.mark = out, out / BEGUN
        self.file: int | None = None
        self.state: tuple[int, int] | None = None
        _on_first_process(partial(self._check, resume))

    def __enter__(self) -> None:
        _on_first_process(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.file is not None:
            self.state = self._stamp()
            self._end(stopped=kind is not None and not issubclass(kind, DwindleError))

    def _check(self, resume: bool) -> None:
        check_folder(self.out)
        if self.mark.exists():
            self._lock()
            self._unlock()
        self.state = self._stamp()
        if not resume and self.state:
            raise DwindleError(f"{self.out} holds a run already; go on with --resume, or choose another --out.")
        if resume and not self.state:
            raise DwindleError(f"{self.out} holds no run to resume; leave --resume out to start one.")

    def _begin(self) -> None:
        self.made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        with write_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock()
        if self._stamp() != self.state:
            self._end()
            raise DwindleError(f"Another run wrote to {self.out} since this one was begun; choose another --out.")

    def _end(self, stopped: bool = False) -> None:
        """Unlock the folder. Unless the run was stopped, remove the locked file and the empty folders that it made."""
        if not stopped:
            self.mark.unlink(missing_ok=True)
        self._unlock()
        with suppress(OSError):
            for folder in () if stopped else self.made:
                folder.rmdir()

    def _lock(self) -> None:
        self.file = lock(self.mark)
        if self.file is None:
            raise DwindleError(f"Another run is at work in {self.out}; wait for its end, or choose another --out.")

    def _unlock(self) -> None:
        if self.file is not None:
            unlock(self.file)
        self.file = None

    def _stamp(self) -> tuple[int, int] | None:
        """An identifier of the state file, which changes when the file is written; None: there is none."""
        path = self.out / STATE
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _on_first_process(step: Callable[[], None]) -> None:
    """Call `step` on the first process. If it raises a DwindleError, all processes raise it."""
    refusal = None
    if ranks.rank() == 0:
        try:
            step()
        except DwindleError as error:
            refusal = str(error)
    if refusal := ranks.gathered(refusal)[0]:
        raise DwindleError(refusal)


def write_state(out: Path, state: dict[str, Any]) -> None:
    with draft(out / STATE) as place:
        try:
            torch.save(state, place)
        except RuntimeError as error:  # torch's error for a file that could not be written
            raise OSError(str(error).partition("\n")[0]) from error


def defaults(recipe: Any) -> dict[str, Any]:
    """The settings of a plain recipe of the same kind, as JSON has them."""
    return json.loads(json.dumps(dataclasses.asdict(type(recipe)())))


def differing(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings of `new` that differ from `old`, as text; empty if none does. old: as read from JSON."""
    new = json.loads(json.dumps(new))
    return ", ".join(f"{name}={old.get(name)} (now {value})" for name, value in new.items() if old.get(name) != value)


def read_state(out: Path, given: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """The state of a run. Refuses one that was started with other settings than `given`.

    The state holds its settings as JSON. Settings that did not exist then have the defaults of the recipe's class.
    """
    path = out / STATE
    try:
        with ZipFile(path) as file:  # torch writes checksums, but does not check them
            if part := file.testzip():
                raise BadZipFile(part)
        state = torch.load(path, map_location="cpu", weights_only=True)
        old = defaults(recipe) | json.loads(state["given"])
        if missing := {"step", "model", "optimizer", "history", "random"} - state.keys():
            raise KeyError(*missing)
    except Exception as error:
        raise DwindleError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged; start again with another --out."
        ) from error
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


def write_metrics(out: Path, history: list[dict[str, float]], logged: int = 0, by: str = "epoch") -> int:
    """Write metrics.csv, and add the rows from `logged` on to TensorBoard's file. Returns how many rows are in it."""
    names = list(dict.fromkeys(name for row in history for name in row))
    with draft(out / "metrics.csv") as place, place.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(history)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return logged
    with write_errors(out / "tensorboard"), _quiet_threads(), SummaryWriter(str(out / "tensorboard")) as board:
        for row in history[logged:]:
            for name, value in row.items():
                board.add_scalar(name, value, int(row[by]))
    return len(history)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Within, threads do not print their errors: that of TensorBoard's writing thread is raised here as well."""
    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        yield
    finally:
        threading.excepthook = before
