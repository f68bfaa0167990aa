"""Fixtures that every test may ask for, and what a whole run prints at its end."""

from __future__ import annotations

import gc
import os
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share two cores, and the models are tiny
os.environ.setdefault("DWINDLE_CACHE", os.path.join(tempfile.gettempdir(), f"dwindle-test-graphs-{os.getuid()}"))

import pytest
import torch

from shared.kernels import CUDA, import_interpreted
from shared.tally import many, tally  # noqa: F401  (fixtures)

import_interpreted()  # before anything of ours is imported, so no fixture's imports are above
torch.set_num_threads(1)


@pytest.fixture
def bf16_on_cpu():
    """Where a CPU multiplies in bf16; asked when a test runs, as it takes another process."""
    from dwindle.ops.half import cpu_multiplies_bf16

    if not cpu_multiplies_bf16():
        pytest.skip("this CPU does not multiply in bf16")


NO_GRAPHS = "a test without the mark `graphs`"


@pytest.fixture(scope="session", autouse=True)
def recorded_graphs():
    """Recording a graph for a CPU takes seconds: prepared models run packed, fixtures of whole files included. Gives
    the way back, for tests marked `graphs`."""
    from dwindle.runtime import cpu

    refusal = cpu.refusal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "refusal", lambda model: NO_GRAPHS)
        yield refusal


@pytest.fixture(autouse=True)
def few_graphs(request, monkeypatch, recorded_graphs):
    if request.node.get_closest_marker("graphs") is not None:
        pytest.importorskip("onnxruntime", reason="extra `onnx` is not installed")
        monkeypatch.setattr("dwindle.runtime.cpu.refusal", recorded_graphs)


@pytest.fixture
def place(monkeypatch):
    """Where recordings are tried: a GPU; where there is none, one is played by doing again what was recorded."""
    if CUDA:
        return "cuda"
    from dwindle.runtime.cuda import graph, recording

    monkeypatch.setattr(recording, "captured", lambda call, pool=None: (call(), SimpleNamespace(replay=call))[1])
    monkeypatch.setattr(graph, "available", lambda images: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return "cpu"


@pytest.fixture(scope="module")
def interpreter():
    """Where Triton's kernels run: a GPU, or its interpreter, also for what they choose by it."""
    if CUDA:
        yield
        return
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no GPU, one case of a file says so, and the file's others that need one are left out."""
    if CUDA:
        return
    told, kept, left_out = set(), [], []
    for item in items:
        needs = item.get_closest_marker("cuda") is not None
        (left_out if needs and item.path in told else kept).append(item)
        if needs and item.path not in told:
            told.add(item.path)
            item.add_marker(pytest.mark.skip(reason="no GPU here: what this file tests on one is left out"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported and collected by now stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # else libraries that count their objects at the end report them as leaked


def pytest_terminal_summary(terminalreporter) -> None:
    """Each attack of tests/attacks says how much it tried and what got through; teardown reports carry it."""
    reports = [
        report for group in terminalreporter.stats.values() for report in group if hasattr(report, "user_properties")
    ]
    told = {tuple(value) for report in reports for name, value in report.user_properties if name == "attack"}
    for name, tried, failed in sorted(told):
        terminalreporter.write_line(f"attack {name}: tried {tried}, failed {failed}")
