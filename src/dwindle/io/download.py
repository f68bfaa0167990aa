"""What comes from the Hugging Face Hub, and how soon it is known that it cannot be asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from ..errors import DwindleError

PATIENCE = 5.0  # seconds in which the Hub says something, if it can be reached


def is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def fetched(name: str, revision: str | None, names: Sequence[str]) -> Path:
    """The folder of these files of a repository: from the Hub, or, where it does not answer, as fetched before."""
    from huggingface_hub import snapshot_download

    online = answers()
    fetch = snapshot_download if online else partial(snapshot_download, local_files_only=True)
    try:
        return Path(fetch(name, revision=revision, allow_patterns=list(names)))
    except Exception as error:
        why = type(error).__name__ if online else "it does not answer, and nothing was fetched before"
        raise DwindleError(
            f"'{name}' is no folder here and could not be fetched from the Hub ({why}); check the name, the network, "
            "or give a local folder."
        ) from error


@contextmanager
def no_waiting() -> Iterator[None]:
    """For what asks the Hub itself, as timm does: where it does not answer, only what was fetched before counts."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE or not answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def answers() -> bool:
    """Whether the Hub says anything within PATIENCE; without a network its own library goes on trying for a minute.

    True where it is told to stay offline (HF_HUB_OFFLINE): then it does not ask. In a thread, as looking up a host's
    name knows no time limit.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return True
    answers: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        heard = False
        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            heard = True
        answers.put(heard)

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE)
    except Empty:
        return False
