"""Flipped bits: wherever one turns over in a checkpoint, it is refused, or the model answers as before to the bit."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dwindle
from dwindle.io.checkpoint import CONFIG, WEIGHTS, find, shipped
from dwindle.recipes.language import tsa_tiny_test
from dwindle.runtime.int8 import quantize
from dwindle.train.state import STATE, read_state, write_state
from shared.checkpoint import EXTRA, answer
from shared.tiny import METHODS, build

MADE = {
    "aht": lambda: build("vit", METHODS["AHT"]()),
    "half": lambda: build("registers", METHODS["TopK"]()),
    "int8": lambda: quantize(build("vit", METHODS["AHT"]())),
    "hf": lambda: build("hf_vit", METHODS["AViT"]()),
    "adaperceiver": lambda: dwindle.AdaPerceiver.preset("tiny", classes=3).eval(),
}


def state_of(model: Any) -> tuple[Any, ...]:
    method = getattr(model, "method", model)
    return answer(model).tolist(), method.config, model.extra


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("name", MADE)
def test_a_flipped_bit(name, file, tmp_path, tally, many):
    folder = dwindle.save(MADE[name](), tmp_path / name, extra=EXTRA, half=name == "half")
    whole, before, chance = (folder / file).read_bytes(), state_of(dwindle.load(folder)), random.Random(name + file)
    for _ in range(many(30, 3000)):
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        (folder / file).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        held = said(folder, file) or state_of(dwindle.load(folder)) == before
        tally(bool(held), f"bit {bit} of byte {at}, {whole[max(at - 20, 0) : at + 20]!r}")


def said(folder: Path, file: str) -> str:
    """How it was refused, by the file's name; '' where it was not."""
    try:
        dwindle.load(folder)
    except dwindle.DwindleError as error:
        return str(error) if file in str(error) else ""
    return ""


@pytest.mark.parametrize("name", shipped())
def test_those_that_ship_are_protected(name, tmp_path, tally):
    folder = tmp_path / name
    shutil.copytree(find(name), folder)
    assert {"weights_sha256", "config_sha256"} <= json.loads((folder / CONFIG).read_text()).keys()
    assert "id" not in json.loads((folder / CONFIG).read_text())
    dwindle.load(folder)
    whole = bytearray((folder / WEIGHTS).read_bytes())
    for at in (-1, len(whole) // 2):
        whole[at] ^= 1
        (folder / WEIGHTS).write_bytes(whole)
        tally(WEIGHTS in said(folder, WEIGHTS), f"byte {at}")
        whole[at] ^= 1


def test_the_state_of_a_run(tmp_path, tally, many):
    """torch reads past a flipped bit; a resumed run must not."""
    recipe = tsa_tiny_test()
    given = dataclasses.asdict(recipe)
    state = {"model": {"a": torch.randn(100, 100)}, "given": json.dumps(given), "optimizer": {}, "random": {}}
    state |= {"step": 3, "history": [{"loss": 0.5}]}
    write_state(tmp_path, state)
    whole, chance = (tmp_path / STATE).read_bytes(), random.Random(0)
    before = str(read_state(tmp_path, given, recipe))
    for _ in range(many(60, 3000)):
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        (tmp_path / STATE).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        try:
            found = read_state(tmp_path, given, recipe)
            same = torch.equal(found["model"]["a"], state["model"]["a"]) and str(found) == before
        except dwindle.DwindleError as error:
            same = STATE in str(error)
        tally(same, f"bit {bit} of byte {at}")


def test_cut_or_longer_files(tmp_path, tally):
    folder = dwindle.save(MADE["aht"](), tmp_path / "ck")
    for file in (CONFIG, WEIGHTS):
        whole = (folder / file).read_bytes()
        for other in (b"", whole[: len(whole) // 2], whole[:-2], whole + b"\0", bytes(len(whole))):
            (folder / file).write_bytes(other)
            tally(bool(said(folder, file)), f"{file} of {len(other)} bytes")
        (folder / file).write_bytes(whole)
    assert torch.equal(answer(dwindle.load(folder)), answer(MADE["aht"]()))
