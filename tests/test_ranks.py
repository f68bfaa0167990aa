"""Several processes train as one, and a run killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch._dynamo.utils import counters

import dwindle
from dwindle import ranks
from dwindle.methods.aht import _moments
from dwindle.recipes import tiny_test
from dwindle.train.evaluate import evaluate
from dwindle.train.loop import STATE, Run
from dwindle.train.recipe import Recipe
from dwindle.train.step import Step, shard

# Processes are forked from one that has imported everything, and used nothing of it yet.
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(
    [
        *["test_ranks", "dwindle.cli", "torch.utils.tensorboard"],
        *["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"],
    ]
)
METHODS = {
    "AHT": {"stages": (2, 3), "budget": 0.7},
    "AViT": {"target_depth": 4, "gamma": 2.0, "beta": -1.0},
    "Static": {},
}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def small(method: str = "AHT", **options) -> Recipe:
    settings = {"model": "test_vit", "image_size": 48, "lr": 1e-3, "epochs": 1, "resident": True}
    settings["teacher"] = "static" if method == "AHT" else None
    return dataclasses.replace(tiny_test(), method=method, method_options=METHODS[method], **{**settings, **options})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """26 images to train on, three batches of 8, and 7 to evaluate on."""
    root, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, counts in (("train", (13, 13)), ("val", (4, 3))):
        for name, count in zip(("left", "right"), counts):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (56, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return str(root)


def train(recipe: Recipe, data: str, out: Path, resume: bool = False) -> list[dict[str, float]]:
    """The terms of every step, then the numbers of every epoch."""
    augmented, steps = Run._augmented, []

    def tick(step: int, total: int, terms: dict[str, torch.Tensor]) -> None:
        steps.append({name: float(value) for name, value in terms.items()})

    with (
        # Adam makes a whole step of a gradient that is nothing but rounding, such as that of the keys' bias.
        mock.patch("torch.optim.AdamW", functools.partial(torch.optim.AdamW, eps=1e-4)),
        mock.patch.object(Run, "_augmented", lambda self, count: augmented(self, 16)),
    ):
        run = Run(recipe, data, out, device="cpu", resume=resume)
        for _ in run.epochs(tick):
            pass
    ranks.leave()
    return steps + [{name: value for name, value in row.items() if name != "images_per_s"} for row in run.history]


def _child(connection, environment: dict[str, str], work, args) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    connection.send(work(*args))


def start(world: int, work, *args) -> list:
    """(process, connection) for each of `world` processes that do `work(*args)`, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        here, there = fork.Pipe()
        process = fork.Process(target=_child, args=(there, {k: str(v) for k, v in names.items()}, work, args))
        process.start()
        there.close()
        started.append((process, here))
    return started


def processes(world: int, work, *args) -> list:
    """What `work(*args)` gives in each of them."""
    started = start(world, work, *args)
    try:
        assert all(here.poll(60) for _, here in started), "a process hangs"
        return [here.recv() for _, here in started]
    finally:
        for process, _ in started:
            process.join(5)
            process.kill()


def same(ones: list[dict[str, float]], others: list[dict[str, float]]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others):
        assert one == pytest.approx(other, abs=CLOSE["atol"], rel=CLOSE["rtol"])


def same_weights(one: Path, other: Path, **tolerance: float) -> None:
    ones, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        torch.testing.assert_close(others[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """A run of one process: what its steps said, and its folder."""

    @functools.cache
    def run(method: str, resident: bool = True) -> tuple[list[dict[str, float]], Path]:
        out = tmp_path_factory.mktemp("alone") / "run"
        return train(small(method, resident=resident), data, out), out

    return run


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(method, resident, alone, data, tmp_path):
    steps, out = alone(method, resident)
    assert steps[-1]["images"] == 7
    for other in processes(2, train, small(method, resident=resident, batch=4), data, tmp_path / "two"):
        same(steps, other)
    same_weights(out, tmp_path / "two", **CLOSE)


@pytest.mark.parametrize("method", METHODS)
def test_sharded_weights_train_as_whole_ones(method, alone, data, tmp_path):
    steps, out = alone(method)
    for other in processes(2, train, small(method, batch=4, parallel="fsdp"), data, tmp_path / "two"):
        same(steps, other)
    same_weights(out, tmp_path / "two", **CLOSE)
    assert type(dwindle.load(tmp_path / "two").method).__name__ == method


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_add_up(world, alone, data, tmp_path):
    steps, out = alone("Static")
    recipe = small("Static", batch=8 // world, accumulate=2)
    parts = train(recipe, data, tmp_path / "parts") if world == 1 else processes(world, train, recipe, data, tmp_path / "parts")[0]
    same(steps, parts)
    same_weights(out, tmp_path / "parts", **CLOSE)


def _standardised() -> torch.Tensor:
    """The gradient of a loss over tokens standardised together, of which processes have unequal numbers."""
    ranks.join("cpu")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, 3, generator=generator, dtype=torch.float64)
    live = torch.rand(8, 5, generator=generator) < torch.linspace(0.2, 1, 8)[:, None]
    own = slice(ranks.rank() * 8 // ranks.world(), (ranks.rank() + 1) * 8 // ranks.world())
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = x[own] @ weight
    mean, deviation = _moments(values, live[own])
    loss = ranks.share((((values - mean) / deviation) ** 3 * live[own]).sum(), live[own].sum())
    loss.backward()
    assert weight.grad is not None
    return ranks.mean(weight.grad)


def test_standardising_together_gives_the_joint_gradient():
    expected = _standardised()
    for gradient in processes(2, _standardised):
        torch.testing.assert_close(gradient, expected)


def _evaluated(sizes: list[int], sharded: bool) -> dict[str, float]:
    ranks.join("cpu")
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    model = dwindle.adapt(vit, dwindle.AViT(target_depth=1, gamma=3.0, beta=0.0))
    if sharded and ranks.together():
        shard(model)
    batches = [(torch.randn(n, 3, 32, 32), torch.randint(3, (n,))) for n in sizes]
    own = batches[ranks.rank() :: ranks.world()]
    result = evaluate(model, own, layout="masked" if sharded else "packed", lockstep=sharded)
    return {name: value for name, value in result.items() if name != "images_per_s"}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", [[5], [4, 3, 2]])
def test_every_image_is_evaluated_once(sizes, sharded):
    expected = _evaluated(sizes, sharded)
    assert expected["images"] == sum(sizes) and 1 < expected["depth"] < 2
    assert processes(2, _evaluated, sizes, sharded) == [expected] * 2


def _killed_at(operation: int, recipe: Recipe, data: str, out: Path) -> None:
    """Train, and die at this one of the operations on files in or beside the run's folder."""
    seen = 0

    def watch(event: str, args: tuple) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir", "shutil.rmtree", "tempfile.mkdtemp") and str(out) in str(args):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(recipe, data, out, resume=(out / STATE).exists())


def test_a_run_killed_at_any_moment_resumes_to_the_same_weights(data, tmp_path):
    recipe = small(epochs=4, batch=16, ema=0.9)
    train(recipe, data, tmp_path / "whole")
    out, chance = tmp_path / "killed", random.Random(0)
    kills = 0
    for operation in range(1, 100):
        if kills % 3 == 2:  # at any moment
            ((process, _),) = start(1, train, recipe, data, out, (out / STATE).exists())
            process.join(chance.uniform(0.3, 1.5))
            process.kill()
        else:  # while it saves
            ((process, _),) = start(1, _killed_at, operation, recipe, data, out)
        process.join(60)
        if process.exitcode == 0:
            break
        kills += 1
    print(kills)
    same_weights(tmp_path / "whole", out, atol=0, rtol=0)
