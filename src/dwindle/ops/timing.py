"""Timing of several calls in turn in one process, so that all of them see the same state of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

TURN = 4.0  # milliseconds: a short call is repeated this long before the next one's turn


def milliseconds(calls: Sequence[Callable[[], Any]], seconds: float, device: torch.device) -> list[list[float]]:
    """Time the calls in turn for about `seconds` in all (at least five rounds): one list of milliseconds per call.

    A call shorter than a turn is repeated for the whole turn and counts by its median there: right after another model
    its Python code would be cold, and users make one call after the other.
    """

    def once(call: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e3

    def turn(call: Callable[[], Any]) -> float:
        spent = [once(call)]
        while sum(spent) < TURN:
            spent.append(once(call))
        return statistics.median(spent)

    for call in calls:  # warm-up
        turn(call)
        once(call)
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for spent, call in zip(times, calls):
            spent.append(turn(call))
    return times
