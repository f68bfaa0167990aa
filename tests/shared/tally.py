"""What the attacks share: a tally of what was tried and what got through, told at the end of the run.

pytest tests/attacks                    every attack, small: a minute on two cores
DWINDLE_SLOW=1 pytest tests/attacks     the same attacks, long
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

SLOW = "DWINDLE_SLOW" in os.environ


@dataclass
class Tally:
    """One attack's tries. An attack that tried nothing has failed."""

    tried: int = 0
    failed: list[str] = field(default_factory=list)

    def __call__(self, held: bool, what: str) -> None:
        """One try: whether the product held, and what was tried, so that a failure can be done again."""
        self.tried += 1
        if not held:
            self.failed.append(what)


@pytest.fixture
def tally(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    counted = Tally()
    yield counted
    record_property("attack", (request.node.name, counted.tried, len(counted.failed)))
    assert counted.tried, "this attack tried nothing"
    shown = "\n  ".join(counted.failed[:20])
    assert not counted.failed, f"{len(counted.failed)} of {counted.tried} tries got through:\n  {shown}"


@pytest.fixture
def many() -> Callable[[int, int], int]:
    """How often to try: `many(small, long)`."""
    return lambda small, long: long if SLOW else small
