"""Text as numbers by a model's own tokenizer: Hugging Face's tokenizer.json, read by their library."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DwindleError, printable
from .config import LARGEST
from .text import Vocabulary

TOKENIZER = "tokenizer.json"
SUM = "tokenizer_sha256"  # the config's entry with the file's checksum


class Tokenizer:
    """The tokens of a model, as the tokenizer.json beside its weights has them."""

    unit = "tokens"

    def __init__(self, content: bytes, source: str = TOKENIZER) -> None:
        """content: of the file. source: its name, for errors."""
        self.content = content
        try:
            from tokenizers import Tokenizer as Read
        except ImportError as error:
            raise DwindleError(
                f'{source} is read by the package tokenizers; install it with: pip install "dwindle[hf]"'
            ) from error
        try:
            self._read: Any = Read.from_str(content.decode())
        except Exception as error:  # tokenizers raises the base class
            why = printable(str(error).partition("\n")[0])
            raise DwindleError(f"{source} cannot be read ({why}); take another copy.") from error
        # A saved tokenizer may cut or fill every text to one length, which a whole text must not be.
        self._read.no_truncation()
        self._read.no_padding()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and other.content == self.content

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _size(self) -> int:
        return max(self._read.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str | bytes, what: str = "The text") -> Tensor:
        """(N,) int32: the tokens of the text, none for its beginning or end. what: the text's name in errors."""
        return self._encoded(text, what, special=False)

    def encode_prompt(self, text: str, what: str = "The prompt") -> Tensor:
        """(N,) int32: the tokens of a text that is to be continued. It begins as the model's texts do, for many models
        with a token of its own; what the tokenizer sets behind a text is left out."""
        inner = self._encoded(text, what, special=False).tolist()
        around = self._encoded(text, what, special=True).tolist()
        begin = next((i for i in range(len(around)) if around[i : i + len(inner)] == inner), 0)
        return torch.tensor(around[:begin] + inner, dtype=torch.int32)

    def _encoded(self, text: str | bytes, what: str, special: bool) -> Tensor:
        text = text.decode() if isinstance(text, bytes) else text
        try:
            text.encode()  # tokenizers takes no lone surrogates, as of a terminal's odd bytes, and does not name them
        except UnicodeEncodeError as error:
            raise DwindleError(f"{what} is not UTF-8 text (character {error.start}); convert it first.") from error
        return torch.tensor(self._read.encode(text, add_special_tokens=special).ids, dtype=torch.int32)

    def decode(self, ids: Any) -> str:
        """The text of these tokens, without those that stand for its beginning or end."""
        return str(self._read.decode([int(i) for i in ids]))

    def pieces(self, ids: Any) -> list[str]:
        """One string for each token."""
        return [str(self._read.decode([int(i)], skip_special_tokens=False)) for i in ids]


def read_tokenizer(folder: Path, config: dict[str, Any]) -> bytes | None:
    """The content of the tokenizer.json beside a checkpoint's config, None where its tokens are characters or bytes, or
    are not known. One that the checkpoint was saved with must be there, and unchanged."""
    path = folder / TOKENIZER
    if SUM not in config and ("vocabulary" in config.get("extra", {}) or not path.is_file()):
        return None
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise DwindleError(f"{path} is missing or has more than {LARGEST} bytes; take another copy of the checkpoint.")
    content = path.read_bytes()
    if SUM in config and checksum(content) != config[SUM]:
        raise DwindleError(f"{path} is not the file that the checkpoint was saved with; take another copy.")
    return content


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def vocabulary_beside(folder: Path, config: dict[str, Any]) -> Vocabulary | Tokenizer | None:
    """What a checkpoint's tokens mean, by its folder and config; None: they do not say."""
    content = read_tokenizer(folder, config)
    if content is not None:
        return Tokenizer(content, str(folder / TOKENIZER))
    extra = config.get("extra", {})
    return Vocabulary(extra["vocabulary"]) if "vocabulary" in extra else None
