"""Downloads from the Hugging Face Hub, and a quick check of whether the Hub can be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from ..errors import DwindleError

PATIENCE = 5.0  # seconds within which the Hub answers, if it can be reached


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hub id, owner/name."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def download(name: str, revision: str | None, names: Sequence[str]) -> Path:
    """The local folder of these files of a Hub repository, from the cache where the Hub does not answer."""
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
def offline_if_unreachable() -> Iterator[None]:
    """A context for libraries that ask the Hub themselves, such as timm: they use their cache if it does not answer."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE or not answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def answers() -> bool:
    """Whether the Hub answers within PATIENCE. (Without a network its own library retries for a minute.)

    With HF_HUB_OFFLINE set the result is True, because then its library does not ask the Hub. The request runs in a
    thread, because looking up a host's name has no time limit.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return True
    result: SimpleQueue[bool] = SimpleQueue()

    def ask() -> None:
        answered = False
        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            answered = True
        result.put(answered)

    Thread(target=ask, daemon=True).start()
    try:
        return result.get(timeout=PATIENCE)
    except Empty:
        return False
