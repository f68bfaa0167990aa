"""Upload to the Hugging Face Hub: the checkpoint folder that `save` writes, and a model card with its results."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from torch import nn

from ..errors import DwindleError
from .card import write_card
from .checkpoint import WEIGHTS, save
from .config import CONFIG


def push_to_hub(
    model: nn.Module,
    repo: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload a Dwindle checkpoint",
) -> str:
    """Upload config.json, model.safetensors and README.md; `dwindle.load(repo)` reads them back. Returns the address.

    token: None: the one that `hf auth login` stored.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise DwindleError(f"'{repo}' is no Hub id; give owner/name.")
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        hub_folder(model, folder, repo)
        try:
            api = HfApi(token=token)
            address = str(api.create_repo(repo, private=private, exist_ok=True))
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        except Exception as error:
            raise DwindleError(
                f"'{repo}' could not be written on the Hub ({type(error).__name__}: {str(error).splitlines()[0]}); "
                "check the name, the network, and that you are logged in (hf auth login)."
            ) from error
    return address


def hub_folder(model: nn.Module, folder: str | os.PathLike, repo: str) -> Path:
    """Write the repository's files into a folder, and return its path. repo: the Hub id, for the card."""
    path = save(model, folder)
    write_card(path, repo)
    assert all((path / name).is_file() for name in (CONFIG, WEIGHTS))
    return path
