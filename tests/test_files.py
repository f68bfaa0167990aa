"""Files that are whole or not there, leftovers of the dead, and folders that one run writes to at a time."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import dwindle
from dwindle.errors import DwindleError
from dwindle.files import draft, lock, scratch, unlock, write_text
from dwindle.recipes.language import tsa_tiny_test
from dwindle.runtime.export import FORMS, export
from dwindle.train.loop import Run
from dwindle.train.state import BEGUN, STATE, Claim, write_metrics, write_state
from shared.tiny import METHODS, build


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def inside(place: Path) -> list[str]:
    return [place.name, *(f"{place.name}/{name}" for name in names(place))]


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def script(text: str, *args: object) -> subprocess.Popen:
    """Python, which says a line when it is where the test wants it."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_on_a_full_disk_nothing_half_written_remains(tmp_path):
    model, rows = build("vit", METHODS["AHT"]()), [{"epoch": 1, "top1": 1.0}] * 200
    for free in (0, 5000):
        for write in (
            lambda: dwindle.save(model, tmp_path / "run" / "ck"),
            lambda: write_state(tmp_path / "run", {"model": torch.zeros(100_000)}),
            lambda: write_text(tmp_path / "run" / "table.md", "x" * 10_000),
            lambda: write_metrics(tmp_path / "run", rows * 10),
        ):
            with full_disk(free), pytest.raises(DwindleError, match=r"could not be written \(.*\); make room"):
                write()
    assert names(tmp_path) == ["run"]
    folder = dwindle.save(model, tmp_path / "run" / "ck")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with full_disk(5000), pytest.raises(DwindleError, match="make room"):
        dwindle.save(build("registers", METHODS["TopK"]()), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    dwindle.load(folder)


def test_tensorboard_on_a_full_disk_says_it_once(tmp_path, capfd):
    with full_disk(100), pytest.raises(DwindleError, match="tensorboard' could not be written"):
        write_metrics(tmp_path, [{"epoch": 1, "top1": 1.0}] * 3)
    assert "Traceback" not in capfd.readouterr().err


KILLED = """
import sys
from pathlib import Path
from dwindle.files import scratch
with scratch(Path(sys.argv[1])) as place:
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"weights")
    print("there", flush=True)
    __import__("time").sleep(60)
"""


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    """And what a live one is writing stays."""
    dead = script(KILLED, tmp_path / "ck")
    assert dead.stdout.readline() == "there\n"
    (left,) = tmp_path.iterdir()
    assert (left / "new" / "model.safetensors").read_bytes() == b"weights"
    with scratch(tmp_path / "live") as place:
        place.write_text("work")
        write_text(tmp_path / "note", "x")
        assert left.is_dir() and place.read_text() == "work"
        dead.kill()
        dead.wait()
        (tmp_path / f".{'0' * 32}.tmp").mkdir()  # killed before it had its lock
        (tmp_path / ".mine.tmp").mkdir()
        write_text(tmp_path / "note", "y")
        assert place.read_text() == "work"
        assert names(tmp_path) == sorted([".mine.tmp", "note", *inside(place.parent)])
    dwindle.save(build("vit", METHODS["Static"]()), tmp_path / "ck")
    assert names(tmp_path) == [".mine.tmp", "ck", "ck/config.json", "ck/model.safetensors", "note"]


def test_a_draft_that_fails_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "note", "old")
    with pytest.raises(RuntimeError), draft(tmp_path / "note") as place:
        place.write_text("new")
        raise RuntimeError
    with pytest.raises(DwindleError, match="could not be written"), scratch(tmp_path / "note" / "under"):
        pass
    assert names(tmp_path) == ["note"] and (tmp_path / "note").read_text() == "old"
    dwindle.save(build("vit", METHODS["Static"]()), f"{tmp_path}/made/../named")
    assert names(tmp_path / "named") == ["config.json", "model.safetensors"]


def test_a_lock_is_one_process_s(tmp_path, monkeypatch):
    held = lock(tmp_path / "lock")
    assert held is not None and lock(tmp_path / "lock") is None
    child = os.fork()
    if not child:  # a worker inherits no lock, and its end gives none back
        os._exit(0)
    os.waitpid(child, 0)
    assert lock(tmp_path / "lock") is None
    unlock(held)
    again = lock(tmp_path / "lock")
    assert again is not None
    (tmp_path / "lock").unlink()
    other = lock(tmp_path / "lock")  # another file of the same name is another lock
    assert other is not None and not os.path.samestat(os.fstat(again), os.fstat(other))
    unlock(again)
    unlock(other)

    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    file = lock(tmp_path / "lock")
    assert file is not None and lock(tmp_path / "lock", trusting=False) is None
    unlock(file)
    with scratch(tmp_path / "a"), scratch(tmp_path / "b"):  # where nobody can be known to live nothing is removed
        assert len([name for name in names(tmp_path) if name.endswith(".tmp")]) == 2


RUN = """
import sys, time
from pathlib import Path
from dwindle.recipes.language import tsa_tiny_test
from dwindle.train.loop import Run
run = Run(tsa_tiny_test(), None, Path(sys.argv[1]), device="cpu")
for row in run.epochs(lambda step, steps, terms: (print("at work", flush=True), time.sleep(60)) if step == 2 else None):
    pass
"""


def test_two_runs_in_one_folder(tmp_path):
    """The second is refused, in another process and in this one; a killed one's folder is free."""
    out = tmp_path / "new" / "run"
    first = script(RUN, out)
    assert first.stdout.readline() == "at work\n"
    for resume in (False, True):
        with pytest.raises(DwindleError, match="Another run is at work in"):
            Run(tsa_tiny_test(), None, out, device="cpu", resume=resume)
    first.kill()
    first.wait()
    assert names(out) == [BEGUN]
    run, other = (Run(tsa_tiny_test(), None, out, device="cpu") for _ in range(2))
    rounds = run.epochs()
    next(rounds)
    with pytest.raises(DwindleError, match="Another run is at work in"):
        next(other.epochs())
    list(rounds)
    with pytest.raises(DwindleError, match="Another run wrote to"):
        next(other.epochs())
    assert BEGUN not in names(out) and STATE in names(out)
    assert not [name for name in names(out) if ".tmp" in name]


def test_a_folder_is_given_back_as_it_was(tmp_path):
    out = tmp_path / "a" / "b"
    with pytest.raises(DwindleError), Claim(out, resume=False):
        assert names(tmp_path) == ["a", "a/b", f"a/b/{BEGUN}"]
        raise DwindleError("refused later")
    assert names(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), Claim(out, resume=False):
        raise KeyboardInterrupt
    assert names(out) == [BEGUN]  # so that --resume knows it
    claim = Claim(out, resume=False)
    for _ in range(2):  # a run may go on
        with claim:
            write_text(out / STATE, str(time.time_ns()))
    assert names(out) == [STATE]


@pytest.mark.parametrize("to", ["torch-export", "onnx"])
def test_an_export_on_a_full_disk(to, tmp_path):
    """torch's own writer raises a RuntimeError."""
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="extra `onnx` is not installed")
    out = tmp_path / f"graph{FORMS[to]}"
    with full_disk(5000), pytest.raises(DwindleError, match="could not be written"):
        export(build("vit", METHODS["TopK"]()), to, out)
    assert names(tmp_path) == []
