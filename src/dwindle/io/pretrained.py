"""Save and load adapted Hugging Face models in the format of transformers: config and weights under its own names, so
that transformers alone can read the static model. What Dwindle added is in a subfolder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from ..core.face import adaptive_part, place
from ..errors import DwindleError, brief
from ..ops.int8 import is_int8
from .checkpoint import ADDED, load, save
from .config import CONFIG, LARGEST, read_config
from .download import download, is_hub_id

BESIDE = "dwindle"  # the subfolder of what Dwindle added


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> Path:
    """Save an adapted Hugging Face model, or a larger one with an adaptive part, and return the folder's path.

    options: passed to the `save_pretrained` of transformers.
    """
    folder, part = Path(folder), adaptive_part(model)
    whole: Any = part.vit if part is model else model
    if not hasattr(whole, "save_pretrained"):
        raise DwindleError(
            f"{type(whole).__name__} is no Hugging Face model, and save_pretrained writes what transformers reads; "
            "save it with dwindle.save(model, folder)."
        )
    if is_int8(part):
        raise DwindleError("This model's weights are int8, which transformers does not read; use dwindle.save.")
    inside = next(name for name, module in model.named_modules() if module is part)
    added = tuple(f"{inside}.{name}" for name in ADDED) if inside else ()
    state = {name: value for name, value in whole.state_dict().items() if not name.startswith(added)}
    whole.save_pretrained(folder, state_dict=state, **options)
    save(part, folder / BESIDE, what="method", extra={"inside": inside})
    return folder


def from_pretrained(source: str | os.PathLike[str], *, revision: str | None = None, **options: Any) -> Any:
    """The model that `save_pretrained` wrote, in eval mode: from a folder, or a Hub id, whose code is never run.

    options: passed to the `from_pretrained` of transformers, such as dtype.
    """
    name = os.fspath(source)
    if not os.path.isdir(name) and is_hub_id(name):
        folder = download(name, revision, ["*.json", "*.safetensors", f"{BESIDE}/*"])
    else:
        folder = Path(name)
    if not (folder / BESIDE).is_dir():
        raise DwindleError(
            f"{name} holds no folder '{BESIDE}', which model.save_pretrained writes; load a static model with "
            "transformers and adapt it, and a checkpoint of dwindle.save with dwindle.load."
        )
    inside = read_config(folder / BESIDE).get("extra", {}).get("inside") or ""
    kind = _kind(folder / CONFIG)
    whole = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True, **options).eval()

    def make(part: nn.Module) -> Any:
        dtype = next(part.parameters()).dtype
        return load(folder / BESIDE, vit=part).to(dtype)

    return place(whole, inside, make) if inside else make(whole)


def _kind(path: Path) -> Any:
    """The class in transformers that a config names."""
    try:
        import transformers
    except ImportError as error:
        raise DwindleError('This reads a Hugging Face model; install it with: pip install "dwindle[hf]"') from error
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("it is too large for a config")
        name = json.loads(path.read_text())["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise DwindleError(f"{path} cannot be read ({type(error).__name__}: {error}); take another copy.") from error
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise DwindleError(f"{path} names {brief(name)}, which is no model of transformers {transformers.__version__}.")
    return kind
