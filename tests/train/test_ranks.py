"""Several processes train as one, and a run killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
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
from dwindle.core import processes as ranks
from dwindle.core.backbone import _compiled_run
from dwindle.errors import DwindleError
from dwindle.evaluate.evaluate import evaluate
from dwindle.io.resident import _compiled_augment
from dwindle.methods.attended import moments
from dwindle.recipes.vision import ada_tiny_test, tiny_test
from dwindle.tasks.classify import Classify
from dwindle.train.loop import Run
from dwindle.train.recipe import Recipe
from dwindle.train.state import STATE, Claim
from dwindle.train.step import shard
from shared.scenes import write_scenes
from shared.tally import SLOW

# Processes are forked from one that has imported everything, and used nothing of it yet.
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(
    [
        *["pytest", "safetensors.torch", "timm.utils", "dwindle.cli.main", "dwindle.train.loop"],
        *["torch._dynamo.utils", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"],
        "torch.utils.tensorboard",
    ]
)
METHODS = {
    "AHT": {"stages": (2, 3), "budget": 0.7},
    "AViT": {"target_depth": 4, "gamma": 2.0, "beta": -1.0},
    "Static": {},
}
SEVERAL = METHODS if SLOW else ("AHT",)  # with whom several processes are tried; starting them takes seconds
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
    typical, steps = Classify.typical, []

    def tick(step: int, total: int, terms: dict[str, torch.Tensor]) -> None:
        steps.append({name: float(value) for name, value in terms.items()})

    with (
        # Adam makes a whole step of a gradient that is nothing but rounding, such as that of the keys' bias.
        mock.patch("torch.optim.AdamW", functools.partial(torch.optim.AdamW, eps=1e-4)),
        mock.patch.object(Classify, "typical", lambda self: typical(self, 16)),
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


@pytest.mark.parametrize("resident", [True, False] if SLOW else [False])
@pytest.mark.parametrize("method", SEVERAL)
def test_two_processes_train_as_one(method, resident, alone, data, tmp_path):
    steps, out = alone(method, resident)
    assert steps[-1]["images"] == 7
    for other in processes(2, train, small(method, resident=resident, batch=4), data, tmp_path / "two"):
        same(steps, other)
    same_weights(out, tmp_path / "two", **CLOSE)


@pytest.mark.parametrize("method", SEVERAL)
def test_sharded_weights_train_as_whole_ones(method, alone, data, tmp_path):
    steps, out = alone(method)
    for other in processes(2, train, small(method, batch=4, parallel="fsdp"), data, tmp_path / "two"):
        same(steps, other)
    same_weights(out, tmp_path / "two", **CLOSE)
    assert type(dwindle.load(tmp_path / "two").method).__name__ == method


@pytest.mark.parametrize("world", [1, 2] if SLOW else [2])
def test_micro_batches_add_up(world, alone, data, tmp_path):
    steps, out = alone("Static")
    same(steps, processes(world, train, small("Static", batch=8 // world, accumulate=2), data, tmp_path / "parts")[0])
    same_weights(out, tmp_path / "parts", **CLOSE)


@pytest.mark.parametrize("mask, readouts", [("blocks", "shared"), ("open", "own")])
def test_two_processes_train_an_adaperceiver_as_one(mask, readouts, data, tmp_path):
    """Through its three stages, whose graphs and optimisers differ; widths are drawn for the joint batch."""
    options = {"mask": mask, "readouts": readouts}  # of read-outs of their own the first stage trains but one
    given = {"method_options": options, "image_size": 32, "augment": None, "erase": 0.0, "resident": True}
    recipe = dataclasses.replace(ada_tiny_test(), ema=0.9, global_batch=8, **given)
    steps = train(recipe, data, tmp_path / "one")
    assert [row["stage"] for row in steps[-3:]] == [1.0, 2.0, 3.0] and steps[-1]["images"] == 7
    for other in processes(2, train, dataclasses.replace(recipe, accumulate=2), data, tmp_path / "two"):
        same(steps, other)
    same_weights(tmp_path / "one", tmp_path / "two", **CLOSE)


def test_two_processes_train_and_measure_maps_as_one(tmp_path):
    scenes = str(write_scenes(tmp_path / "scenes", 8, 5))
    given = {"task": "depth", "stages": (1.0, 0.0, 0.0), "method_options": {"classes": 16}}
    recipe = dataclasses.replace(ada_tiny_test(), global_batch=4, epochs=1, **given)
    ones = train(recipe, scenes, tmp_path / "one")
    assert ones[-1]["images"] == 5 and ones[-1]["rmse"] > 0
    for other in processes(2, train, recipe, scenes, tmp_path / "two"):
        assert other[-1] == pytest.approx(ones[-1], rel=1e-3)


def _standardised() -> list[float]:
    """The gradient of a loss over tokens standardised together, of which processes have unequal numbers."""
    ranks.join("cpu")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, 3, generator=generator, dtype=torch.float64)
    live = torch.rand(8, 5, generator=generator) < torch.linspace(0.2, 1, 8)[:, None]
    own = slice(ranks.rank() * 8 // ranks.world(), (ranks.rank() + 1) * 8 // ranks.world())
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = x[own] @ weight
    mean, deviation = moments(values, live[own])
    loss = ranks.ratio_over_ranks((((values - mean) / deviation) ** 3 * live[own]).sum(), live[own].sum())
    loss.backward()
    assert weight.grad is not None
    return ranks.mean(weight.grad).tolist()


def test_standardising_together_gives_the_joint_gradient():
    expected = _standardised()
    for gradient in processes(2, _standardised):
        assert gradient == pytest.approx(expected)


def _evaluated(sizes: list[int], sharded: bool) -> dict[str, float]:
    ranks.join("cpu")
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    model = dwindle.adapt(vit, dwindle.AViT(target_depth=1, threshold=0.5, beta=0.0))
    if sharded and ranks.is_distributed():
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


def _refused(out: Path) -> str:
    ranks.join("cpu")
    try:
        with Claim(out, resume=False):
            return "taken"
    except DwindleError as error:
        return str(error)


def test_a_folder_another_run_is_at_work_in_is_refused_to_every_process(tmp_path):
    with Claim(tmp_path / "run", resume=False):
        assert all("Another run is at work" in said for said in processes(2, _refused, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def _killed_at(save: int, operation: int, recipe: Recipe, data: str, out: Path) -> None:
    """Train, and die at this one of the operations on files that this save (from 0) consists of."""
    seen = saved = 0

    def watch(event: str, args: tuple) -> None:
        nonlocal seen, saved
        if event not in ("open", "os.rename", "os.mkdir") or out.name not in str(args):
            return
        seen += saved == save
        if seen == operation:
            os.kill(os.getpid(), signal.SIGKILL)
        saved += event == "os.rename" and str(args[1]).endswith(STATE)

    resume = (out / STATE).exists()
    sys.addaudithook(watch)
    train(recipe, data, out, resume)


def test_a_run_killed_at_any_moment_resumes_to_the_same_weights(data, tmp_path):
    recipe, out, chance = small(epochs=6, batch=16, ema=0.9), tmp_path / "killed", random.Random(0)
    train(recipe, data, tmp_path / "whole")
    for save, operation in ((0, 3), (1, 1), (1, 5), (1, 9), (1, 13)):
        ((process, _),) = start(1, _killed_at, save, operation, recipe, data, out)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    for _ in range(2):
        ((process, _),) = start(1, train, recipe, data, out, True)
        process.join(chance.uniform(0, 0.6))
        process.kill()
        process.join()
    processes(1, train, recipe, data, out, True)
    same_weights(tmp_path / "whole", out, atol=0, rtol=0)
    assert dwindle.load(out).extra["results"]["epoch"] == 6


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"] if SLOW else ["ddp"])
def test_two_processes_killed_resume_to_the_same_weights(parallel, data, tmp_path):
    recipe, out, chance = small("AViT", epochs=2, parallel=parallel), tmp_path / "killed", random.Random(0)
    processes(2, train, recipe, data, tmp_path / "whole")
    started = start(2, train, recipe, data, out)
    while not (out / STATE).exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.3))
    for process, _ in started:
        process.kill()
        process.join()
    processes(2, train, recipe, data, out, True)
    same_weights(tmp_path / "whole", out, atol=0, rtol=0)


def _commanded(line: list[str], said: Path) -> int:
    """`python -m dwindle ...`, what each process says in files of its own."""
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / f"{stream}{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["dwindle", *line]
    try:
        runpy.run_module("dwindle", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        sys.stdout.flush()
        return int(end.code or 0)
    return 0


def test_the_command_line_speaks_once(data, tmp_path):
    settings = "--set model=test_vit --set method.stages=(2,) --set batch=4 --set epochs=1"
    line = f"train tiny_test --data {data} --out {tmp_path}/run --device cpu {settings}".split()
    assert processes(2, _commanded, line, tmp_path) == [0, 0]
    assert json.loads((tmp_path / "out0").read_text().splitlines()[-1])["images"] == 7
    assert "epoch 1" in (tmp_path / "err0").read_text()
    assert (tmp_path / "out1").read_text() == "" == (tmp_path / "err1").read_text()
    assert processes(2, _commanded, line, tmp_path) == [2, 2]
    assert "holds a run already" in (tmp_path / "err1").read_text()
    line, said = f"eval {tmp_path}/run --data {data} --device cpu --workers 0".split(), tmp_path / "eval"
    said.mkdir()
    assert processes(2, _commanded, line, said) == [0, 0]
    assert json.loads((said / "out0").read_text().splitlines()[-1])["images"] == 7
    assert (said / "out1").read_text() == ""


@pytest.mark.parametrize("kind", ["language", "language, one window", "AdaPerceiver"])
def test_every_kind_of_model_shares_its_evaluation(kind, data, tmp_path):
    if kind == "AdaPerceiver":
        model = dwindle.AdaPerceiver.preset("tiny", classes=2).eval()
        dwindle.save(model, tmp_path / "ada")
        line = f"eval {tmp_path}/ada --data {data} --device cpu --workers 0 --batch 2 --depth 3".split()
    else:
        line = f"eval tsa_shakespeare --device cpu --batch 2 --limit {1 if 'one' in kind else 5}".split()
    said = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        assert processes(count, _commanded, line, folder) == [0] * count
        said[count] = json.loads((folder / "out0").read_text().splitlines()[-1])
        assert count == 1 or (folder / "out1").read_text() == "" == (folder / "err1").read_text()
    for result in said.values():
        result.pop("images_per_s", None)
    assert said[2] == pytest.approx(said[1], abs=2e-6) and said[1].get("images", 7) == 7


@contextlib.contextmanager
def _compiling(backend: str) -> Iterator[None]:
    """Compile with this backend, from nothing, on a model of five blocks."""

    def tiny(recipe: Recipe, classes: int) -> VisionTransformer:
        return VisionTransformer(48, 16, embed_dim=16, depth=5, num_heads=2, num_classes=classes)

    compile, made = torch.compile, (_compiled_run, _compiled_augment)
    for function in made:
        function.cache_clear()
    torch.compiler.reset()
    counters.clear()
    with (
        mock.patch("dwindle.train.vit.build_vit", tiny),
        mock.patch("torch.compile", lambda function, **options: compile(function, **options | {"backend": backend})),
    ):
        yield
    for function in made:
        function.cache_clear()


def _graphs(recipe: Recipe, data: str, tmp_path: Path) -> int:
    """An epoch, compiled and not, says the same. How many graphs it took."""
    steps = train(recipe, data, tmp_path / "eager")
    assert not counters["stats"]
    same(steps, train(dataclasses.replace(recipe, compile=True), data, tmp_path / "compiled"))
    same_weights(tmp_path / "eager", tmp_path / "compiled", **CLOSE)
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


COMPILED = {
    "AHT": (METHODS["AHT"], {"stages": (2, 3), "budget": 0.5}),
    "AViT": (METHODS["AViT"], {"target_depth": 3, "gamma": 1.0, "beta": -2.0}),
    "Static": ({}, {}),
    "Confidence": ({}, {"threshold": 0.5}),
    "TopK": ({"stages": (1, 3), "keep": 0.6}, {"stages": (1, 3), "budget": 0.7}),
    "ToMe": ({"r": 1}, {"r": 2}),
    "DynamicViT": ({"stages": (1, 3), "keep": 0.6}, {"stages": (1, 3), "budget": 0.7}),
}


@pytest.mark.parametrize("method", COMPILED if SLOW else ("AHT",))
def test_compiled_blocks_say_the_same_and_share_few_graphs(method, data, tmp_path):
    """As far as the graph of the gradients. Further steps, another seed and another budget need no new ones."""
    options, others = COMPILED[method]
    recipe = dataclasses.replace(small("Static"), method=method, method_options=options, teacher="static")
    with _compiling("aot_eager"):
        graphs = _graphs(recipe, data, tmp_path)
        assert graphs <= 5  # colours, the teacher, and at most three ways for tokens to come; not one per block
        train(dataclasses.replace(recipe, method_options=others, seed=1, compile=True), data, tmp_path / "again")
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(not SLOW, reason="takes minutes; set DWINDLE_SLOW=1")
@pytest.mark.parametrize("method", METHODS)
def test_machine_code_says_the_same(method, data, tmp_path):
    with _compiling("inductor"):
        _graphs(small(method), data, tmp_path)


def begun(recipe: Recipe, data: str, out: Path) -> None:
    """The first epoch, as if the run was killed after it."""
    with mock.patch("torch.optim.AdamW", functools.partial(torch.optim.AdamW, eps=1e-4)):  # as in `train`
        epochs = Run(recipe, data, out, device="cpu").epochs()
        next(epochs)
        epochs.close()
    ranks.leave()


def test_a_batch_of_all_goes_on_with_other_processes(data, tmp_path):
    """global_batch: two processes begin, one ends, at the weights of a run of one."""
    given = {"epochs": 2, "global_batch": 8, "lr_batch": 16, "batch": 3}
    recipe = small("AViT", **given)
    processes(2, begun, recipe, data, tmp_path / "two")
    train(recipe, data, tmp_path / "one")
    train(recipe, data, tmp_path / "two", resume=True)
    same_weights(tmp_path / "one", tmp_path / "two", **CLOSE)
    fixed = dataclasses.replace(recipe, global_batch=0)
    processes(2, begun, fixed, data, tmp_path / "fixed")
    with pytest.raises(DwindleError, match="was started by 2 processes; resume with as many"):
        train(fixed, data, tmp_path / "fixed", resume=True)
