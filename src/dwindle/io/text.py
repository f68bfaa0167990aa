"""Text as numbers: a vocabulary, and a text split for training, validation and test."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DwindleError, unknown
from ..files import packaged
from .draws import mix

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

KNOWN = ("shakespeare", "enwik8")
ENWIK8_BYTES = 100_000_000
BYTES = "bytes:"


@dataclass(frozen=True)
class Vocabulary:
    """The characters of a model, in the order of their numbers; None: the 256 bytes of UTF-8."""

    characters: str | None
    unit = "characters"  # of which a text is made, in what is shown

    def __len__(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def encode(self, text: str | bytes, what: str = "The text") -> Tensor:
        """(N,) the text's numbers, uint8 or int32. what: the text's name in errors."""
        if self.characters is None:
            data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
            return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        text = text.decode() if isinstance(text, bytes) else text
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = np.frombuffer(self.characters.encode("utf-32-le", "surrogatepass"), np.uint32)  # ascending
        places = np.searchsorted(known, points).clip(max=len(known) - 1)
        if (outside := known[places] != points).any():
            at = int(outside.argmax())
            raise DwindleError(
                f"{what} holds {text[at]!r} at character {at}, which is none of the {len(known)} characters this model "
                "knows; replace it, or train a model on such text."
            )
        return torch.from_numpy(places.astype(np.uint8 if len(known) <= 256 else np.int32))

    def encode_prompt(self, text: str, what: str = "The prompt") -> Tensor:
        """`encode` of a text that is to be continued: the same here, a tokenizer may set a token before it."""
        return self.encode(text, what)

    def decode(self, ids: Any) -> str:
        """The text of these numbers; bytes that are no UTF-8 become replacement characters."""
        numbers = [int(i) for i in ids]
        if self.characters is None:
            return bytes(numbers).decode("utf-8", "replace")
        return "".join(self.characters[i] for i in numbers)

    def pieces(self, ids: Any) -> list[str]:
        """One string for each number; a byte beyond ASCII is written as its hexadecimal value."""
        if self.characters is not None:
            return [self.characters[int(i)] for i in ids]
        return [chr(int(i)) if int(i) < 128 else f"\\x{int(i):02x}" for i in ids]


@dataclass
class Text:
    """One text, split. `train`, `val` and `test` are (N,) numbers of its vocabulary."""

    name: str
    vocabulary: Vocabulary | Tokenizer
    train: Tensor
    val: Tensor
    test: Tensor
    per_token: float = 1.0  # characters of one token, on average

    def to(self, device: torch.device) -> Text:
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))

    def places(self, batch: int, context: int, seed: int, steps: int) -> Tensor:
        """(steps, B): where each step's sequences begin, as a function of the step and the seed."""
        last = len(self.train) - context
        drawn = [np.random.default_rng(mix(seed, step)).integers(0, last, batch) for step in range(steps)]
        return torch.from_numpy(np.stack(drawn)).to(self.train.device)

    def cut(self, places_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """(B, N) characters of the training text from these places on, and (B, N) the character after each."""
        return _cut(self.train, places_B, context)


def windows(
    ids: Tensor, context: int, batch: int, name: str, limit: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows (B, N), one after the other without overlap, and (B, N) the character after each; a last
    window that is incomplete is left out.

    Each of `world` processes passes its `rank`, and gets its share of the windows.
    """
    check_long(ids, context, name)
    count = (len(ids) - 1) // context
    count = count if limit is None else min(limit, count)
    for places in torch.arange(count, device=ids.device)[rank::world].split(batch):
        if len(places):
            yield _cut(ids, places * context, context)


def _cut(ids: Tensor, places_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = ids[places_B[:, None] + torch.arange(context + 1, device=ids.device)].long()
    return rows[:, :-1], rows[:, 1:]


def check_long(ids: Tensor, context: int, name: str) -> None:
    """Refuse a split that is too short for one window."""
    if len(ids) <= context:
        raise DwindleError(
            f"A split of '{name}' has {len(ids)} tokens, a window needs {context + 1}; give a longer text, or a "
            "shorter context."
        )


def open_text(name: str, vocabulary: Vocabulary | Tokenizer | None = None) -> Text:
    """Open a text: 'shakespeare' (ships with Dwindle), 'enwik8' (under $DWINDLE_DATA or ./data), a UTF-8 text file, or
    'bytes:FILE', any file byte by byte.

    vocabulary: a trained model's, or its tokenizer; None: the text's own characters, and bytes for enwik8.
    """
    raw, path = name.startswith(BYTES), Path(name.removeprefix(BYTES)).expanduser()
    if name == "shakespeare":
        shakespeare = packaged("assets", "text", "tinyshakespeare.txt")
        # The split of char-rnn and nanoGPT: the last tenth is for validation, and is the test split too.
        return _split(name, shakespeare.read_bytes(), vocabulary, (0.9, 0.1, 0.0))
    if name == "enwik8" or path.name in ("enwik8", "enwik8.gz"):
        return _enwik8(name, path, vocabulary)
    if not path.exists():
        hint = "give a text file's path"
        raise (
            DwindleError(f"There is no file '{name}'; {hint}.")
            if "." in name or "/" in name
            else unknown("text", name, KNOWN, hint)
        )
    if path.is_dir():
        raise DwindleError(f"'{name}' is a folder; give a text file.")
    return _split(name, path.read_bytes(), vocabulary or (Vocabulary(None) if raw else None), (0.9, 0.05, 0.05))


def _enwik8(name: str, given: Path, vocabulary: Vocabulary | Tokenizer | None) -> Text:
    """The text of the file `given`, or of enwik8 under the data folder if `name` is only 'enwik8'."""
    base = Path(os.environ.get("DWINDLE_DATA") or "data").expanduser()
    if name == "enwik8":
        folders = (base, base / "enwik8", Path(), Path("enwik8"))
        places = [folder / file for folder in folders for file in ("enwik8", "enwik8.gz")]
    else:
        places = [given]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise DwindleError(
            f"'{name}' was not found under '{base}'; set DWINDLE_DATA to the folder that holds enwik8 or enwik8.gz, or "
            "pass the file itself."
        )
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DwindleError(f"'{path}' cannot be unpacked ({error}); take another copy.") from error
    if len(data) != ENWIK8_BYTES:
        raise DwindleError(f"'{path}' has {len(data):,} bytes, enwik8 has {ENWIK8_BYTES:,}; take another copy.")
    return _split(name, data, vocabulary or Vocabulary(None), (0.9, 0.05, 0.05))  # 90M, 5M, 5M bytes


def _split(
    name: str, data: bytes, vocabulary: Vocabulary | Tokenizer | None, shares: tuple[float, float, float]
) -> Text:
    """The encoded text, split by these shares for training, validation and test (0: the same as validation)."""
    if not data.strip():
        raise DwindleError(f"'{name}' holds no text; give a file with some.")
    text: str | bytes = data
    if getattr(vocabulary, "characters", "") is not None:  # all but bytes
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DwindleError(
                f"'{name}' is not UTF-8 text (byte {error.start}); convert it, or train on {BYTES}{name}."
            ) from error
    vocabulary = vocabulary or Vocabulary("".join(sorted(set(text))))  # type: ignore[arg-type]
    ends = [round(len(text) * shares[0]), round(len(text) * (shares[0] + shares[1]))]
    places = (slice(ends[0]), slice(*ends), slice(ends[1], None))
    if isinstance(vocabulary, Vocabulary):
        ids = vocabulary.encode(text, f"'{name}'")
        train, val, test = (ids[place] for place in places)
    else:  # cut before it is encoded, so that the text held out is the same as for characters
        train, val, test = (vocabulary.encode(text[place], f"'{name}'") for place in places)
    count = len(train) + len(val) + len(test)
    return Text(name, vocabulary, train, val, test if shares[2] else val, len(text) / max(count, 1))
