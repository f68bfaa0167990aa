"""What a run keeps in its folder: the state to resume from, and its numbers. A kill at any moment loses no more than
what came after the last save."""

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
from ..files import check_folder, draft, lock, unlock, writing

STATE = "state.pt"
BEGUN = ".begun"  # in the folder of a run that has not ended


class Claim:
    """A run's folder, which one run at a time writes to: `with claim:` while it trains. Refused are a folder that holds
    another run, or none to resume, or that nothing can be written to, or in which another run is at work.

    The file system gives the folder back when the process ends, however it ends. The mark that is locked stays where a
    run was killed, so that --resume knows one that was killed before its first save. Of several processes one claims.
    """

    def __init__(self, out: Path, resume: bool) -> None:
        self.out, self.mark = out, out / BEGUN
        self.file: int | None = None
        self.state: tuple[int, int] | None = None
        _of_all(partial(self._look, resume))

    def __enter__(self) -> None:
        _of_all(self._begin)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.file is not None:
            self.state = self._stamp()
            self._end(stopped=kind is not None and not issubclass(kind, DwindleError))

    def _look(self, resume: bool) -> None:
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
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock()
        if self._stamp() != self.state:
            self._end()
            raise DwindleError(f"Another run wrote to {self.out} since this one was begun; choose another --out.")

    def _end(self, stopped: bool = False) -> None:
        """Take away what this run only held, unless it was stopped, to go on some day."""
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
        """Of the state: another file is another state."""
        path = self.out / STATE
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def _of_all(step: Callable[[], None]) -> None:
    """Done by one of several processes; what refuses it refuses all."""
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
        except RuntimeError as error:  # so torch says that a file could not be written
            raise OSError(str(error).partition("\n")[0]) from error


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
        with ZipFile(path) as file:  # torch writes the checksums of its parts, and reads past them
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


def write_metrics(out: Path, history: list[dict[str, float]], noted: int = 0, by: str = "epoch") -> int:
    """metrics.csv, and TensorBoard's file from row `noted` on; returns how many rows are noted now."""
    names = list(dict.fromkeys(name for row in history for name in row))
    with draft(out / "metrics.csv") as place, place.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(history)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return noted
    with writing(out / "tensorboard"), _quiet_threads(), SummaryWriter(str(out / "tensorboard")) as board:
        for row in history[noted:]:
            for name, value in row.items():
                board.add_scalar(name, value, int(row[by]))
    return len(history)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """TensorBoard writes in a thread, whose error is raised here as well: it is said once."""
    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        yield
    finally:
        threading.excepthook = before
