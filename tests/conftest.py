"""Fixtures that every test may ask for, and what a whole run prints at its end."""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from dwindle.ops.half import cpu_multiplies_bf16
from dwindle.runtime.cuda import graph, recording
from shared.tally import many, tally  # noqa: F401  (fixtures)

torch.set_num_threads(1)  # two test processes share two cores, and the models are tiny


@pytest.fixture
def bf16_on_cpu():
    """Where a CPU multiplies in bf16; asked when a test runs, as it takes another process."""
    if not cpu_multiplies_bf16():
        pytest.skip("this CPU does not multiply in bf16")


@pytest.fixture
def place(monkeypatch):
    """Where recordings are tried: a GPU; where there is none, one is played by doing again what was recorded."""
    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setattr(recording, "captured", lambda call, pool=None: (call(), SimpleNamespace(replay=call))[1])
    monkeypatch.setattr(graph, "available", lambda images: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return "cpu"


def pytest_terminal_summary(terminalreporter) -> None:
    """Each attack of tests/attacks says how much it tried and what got through; teardown reports carry it."""
    reports = [
        report for group in terminalreporter.stats.values() for report in group if hasattr(report, "user_properties")
    ]
    told = {tuple(value) for report in reports for name, value in report.user_properties if name == "attack"}
    for name, tried, failed in sorted(told):
        terminalreporter.write_line(f"attack {name}: tried {tried}, failed {failed}")
