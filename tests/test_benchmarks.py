"""The programs in benchmarks/ run as their first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.tally import SLOW

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_fuzz_is_up_to_date():
    """What it imports of ours is there; what it does is run with DWINDLE_SLOW=1."""
    for package in ("fastapi", "httpx", "schemathesis"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    ended = subprocess.run([sys.executable, str(BENCHMARKS / "fuzz.py"), "--help"], capture_output=True, text=True)
    assert ended.returncode == 0 and "--requests" in ended.stdout, ended.stderr[-2000:]


@pytest.mark.skipif(not SLOW, reason="starts a server and asks it for half a minute; set DWINDLE_SLOW=1")
def test_fuzz():
    """A server of its own, hostile requests by hand and by its own description, one line of JSON, 0 if it held."""
    for package in ("fastapi", "httpx", "schemathesis"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    line = [sys.executable, str(BENCHMARKS / "fuzz.py"), "--requests", "24", "--clients", "2"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["healthz"] == 200 and set(told["statuses"]) == {"/v1/classify", "/v1/batch", "/v1/explain"}
    assert sum(sum(counts.values()) for counts in told["statuses"].values()) >= 24
