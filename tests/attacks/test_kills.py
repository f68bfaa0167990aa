"""Work that is killed at one of its operations on files, and begun again: it ends as if it had not been."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.evaluate.predict import predict
from dwindle.recipes.vision import tiny_test
from dwindle.train.loop import Run
from dwindle.train.state import STATE

fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["pytest", "pyarrow.parquet", "timm", "dwindle.recipes.vision", "dwindle.evaluate.predict"])
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate")
Work = Callable[[Path, Path], None]  # a folder with what is given, and one to write to


def _dying(work: Work, given: Path, out: Path, at: int, count: Path) -> None:
    """Do the work, and die at this one of its operations on files beside `out` and below it."""
    torch.set_num_threads(1)
    place, seen = str(out.parent), 0

    def watch(event: str, args: tuple) -> None:
        nonlocal seen
        if event not in EVENTS or place not in str(args) or (event == "open" and args[1] in ("r", "rb")):
            return
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    sys.addaudithook(watch)
    work(given, out)
    count.write_text(str(seen))


def done(work: Work, given: Path, out: Path, at: int = -1) -> int:
    """How its process ended."""
    process = fork.Process(target=_dying, args=(work, given, out, at, given / "count"))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def operations(work: Work, given: Path, out: Path) -> int:
    """How many the work consists of when nobody disturbs it."""
    assert done(work, given, out) == 0
    return int((given / "count").read_text())


def _train(given: Path, out: Path) -> None:
    recipe = tiny_test()
    recipe.model, recipe.image_size, recipe.resident = "test_vit", 32, True
    recipe.method_options = {"budget": 0.7, "stages": (2, 3)}
    there = (out / STATE).exists()
    for _ in Run(recipe, str(given / "images"), out, device="cpu", resume=there).epochs():
        pass


def _save(given: Path, out: Path) -> None:
    dwindle.save(tiny(1), out)


def _predict(given: Path, out: Path) -> None:
    predict(str(given / "model"), str(given / "images"), out / "p.parquet", batch=4, part=5)


def tiny(seed: int) -> dwindle.AdaptiveViT:
    torch.manual_seed(seed)
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=2)
    return dwindle.adapt(vit, dwindle.AViT(target_depth=1))


def end_of(kind: str, out: Path) -> object:
    """What the work leaves, but for what may differ from run to run."""
    if kind == "predict":
        return pq.read_table(out / "p.parquet").to_pylist()
    model = dwindle.load(out)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    folder, pixels = tmp_path_factory.mktemp("given"), np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 2)):
        for name in "ab":
            (folder / "images" / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(pixels.integers(0, 255, (32, 32, 3), dtype=np.uint8))
                image.save(folder / "images" / split / name / f"{i}.png")
    dwindle.save(tiny(0), folder / "model")
    return folder


@pytest.mark.parametrize("kind, work", [("train", _train), ("save", _save), ("predict", _predict)])
def test_killed_and_begun_again(kind, work, given, tmp_path, tally, many):
    whole = tmp_path / "undisturbed" / "whole"
    whole.parent.mkdir()
    there = operations(work, given, whole)
    wanted, names = end_of(kind, whole), {path.name for path in whole.rglob("*")}
    assert there > 3
    chosen = random.Random(0).sample(range(there), min(there, many(1, there)))
    for at in sorted(chosen):
        folder = tmp_path / f"out-{at}"
        folder.mkdir()
        out = folder / "whole"
        tally(done(work, given, out, at) == -signal.SIGKILL, f"{kind} at {at} did not come that far")
        if done(work, given, out):
            tally(False, f"{kind} killed at {at} cannot be begun again")
            continue
        tally(end_of(kind, out) == wanted, f"{kind} killed at {at} ends otherwise")
        left = {path.name for path in folder.rglob("*")} - {"whole"} - names
        left = {name for name in left if not name.startswith("events.out")}
        tally(not left, f"{kind} killed at {at} leaves {sorted(left)[:3]}")
        shutil.rmtree(folder)


def test_a_model_saved_over_another(given, tmp_path, tally, many):
    """What lies there after a kill is the old model, the new one, or refused."""
    old, new = tiny(0).state_dict(), tiny(1).state_dict()
    (tmp_path / "undisturbed").mkdir()
    dwindle.save(tiny(0), tmp_path / "undisturbed" / "it")
    there = operations(_save, given, tmp_path / "undisturbed" / "it")
    for at in random.Random(1).sample(range(there), min(there, many(3, there))):
        out = tmp_path / f"out-{at}" / "it"
        dwindle.save(tiny(0), out)
        done(_save, given, out, at)
        try:
            found = dwindle.load(out).state_dict()
        except dwindle.DwindleError:
            tally(True, "")
            continue
        tally(
            any(all(torch.equal(found[n], state[n]) for n in state) for state in (old, new)),
            f"killed at {at}: neither the old model nor the new one",
        )
