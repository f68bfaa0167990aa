"""The command line in this process: what a command said, and that it refused in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass

import pytest

from dwindle.cli.main import main

TINY = "--set model=test_vit --set method.stages=(2,4) --set epochs=2 --set batch=4 --device cpu"  # 6 blocks, 64 wide
ANOTHER_SENTENCE = re.compile(r"[.?!]['\")]* +['\"(]?[A-Z]")


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The last line of stdout, as strict JSON."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def run(line: str, **places: object) -> Done:
    """One command in this process. Places are filled in after splitting, so that they may hold spaces."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["dwindle", *(part.format(**places) for part in line.replace("{tiny}", TINY).split())]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = argv
    plain = (re.sub(r"\x1b\[[\d;]*m", "", text.getvalue()) for text in (out, err))
    return Done(int(end.value.code or 0), *plain)


def refused(done: Done, said: str) -> None:
    """Exit code 2 and exactly one sentence that names what is wrong."""
    assert done.code == 2 and done.out == "", done
    (message,) = done.err.strip().splitlines()
    assert message.startswith("dwindle: ") and message.endswith((".", "?"))
    assert said.lower() in message.lower()
    assert not ANOTHER_SENTENCE.search(message), f"more than one sentence: {message}"
