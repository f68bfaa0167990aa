"""Text: vocabularies, splits, windows, and one sentence for what cannot work."""

from __future__ import annotations

import gzip

import pytest
import torch

from dwindle.errors import DwindleError
from dwindle.io import text
from dwindle.io.text import Vocabulary, open_text, windows


def test_shakespeare_ships():
    shakespeare = open_text("shakespeare")
    assert len(shakespeare.vocabulary) == 65
    assert len(shakespeare.train) + len(shakespeare.val) == 1_115_394
    assert shakespeare.vocabulary.decode(shakespeare.train[:14]) == "First Citizen:"
    assert shakespeare.test is shakespeare.val and len(shakespeare.train) == round(0.9 * 1_115_394)


@pytest.mark.parametrize("characters", ["\n abcé𝄞", None])
def test_vocabulary_there_and_back(characters):
    vocabulary = Vocabulary(characters)
    ids = vocabulary.encode("abba é\n𝄞")
    assert vocabulary.decode(ids) == "abba é\n𝄞"
    assert len(vocabulary.pieces(ids)) == len(ids)
    assert int(ids.max()) < len(vocabulary)


def test_unseen_characters_are_named():
    with pytest.raises(DwindleError, match="'ß' at character 2, which is none of the 3"):
        Vocabulary("abc").encode("abß")
    with pytest.raises(DwindleError, match="The prompt holds 'Z'"):
        Vocabulary("abc").encode("Z", "The prompt")


def test_enwik8_is_cut_90_5_5(tmp_path, monkeypatch):
    data = bytes(range(256)) * 8
    monkeypatch.setattr(text, "ENWIK8_BYTES", len(data))
    monkeypatch.setenv("DWINDLE_DATA", str(tmp_path))
    with pytest.raises(DwindleError, match="DWINDLE_DATA"):
        open_text("enwik8")
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(data))
    for name in ("enwik8", str(tmp_path / "enwik8.gz")):
        opened = open_text(name)
        assert [len(part) for part in (opened.train, opened.val, opened.test)] == [1843, 103, 102]
        assert torch.cat([opened.train, opened.val, opened.test]).tolist() == list(data)
        assert opened.vocabulary.characters is None and len(opened.vocabulary) == 256
    (tmp_path / "enwik8").write_bytes(data[:-1])
    with pytest.raises(DwindleError, match=r"2,047 bytes, enwik8 has 2,048"):
        open_text("enwik8")
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(data)[:-20])
    with pytest.raises(DwindleError, match="cannot be unpacked"):
        open_text(str(tmp_path / "enwik8.gz"))


def test_any_file_byte_by_byte(tmp_path):
    data = bytes(range(255, -1, -1)) * 4
    (tmp_path / "own.bin").write_bytes(data)
    opened = open_text(f"bytes:{tmp_path / 'own.bin'}")
    assert [len(part) for part in (opened.train, opened.val, opened.test)] == [922, 51, 51]
    assert torch.cat([opened.train, opened.val, opened.test]).tolist() == list(data)
    assert torch.equal(open_text(str(tmp_path / "own.bin"), opened.vocabulary).val, opened.val)
    with pytest.raises(DwindleError, match="train on bytes:"):
        open_text(str(tmp_path / "own.bin"))
    with pytest.raises(DwindleError, match="There is no file 'bytes:"):
        open_text(f"bytes:{tmp_path / 'none'}")


def test_any_text_file(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("hello world, " * 100)
    opened = open_text(str(path))
    assert opened.vocabulary.characters == " ,dehlorw" and len(opened.train) == 1170
    assert len(opened.val) == len(opened.test) == 65
    with pytest.raises(DwindleError, match="none of the 3"):
        open_text(str(path), Vocabulary("abc"))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DwindleError, match="not UTF-8"):
        open_text(str(path))
    for nothing in ("", " \n"):
        path.write_text(nothing)
        with pytest.raises(DwindleError, match="holds no text"):
            open_text(str(path))
    with pytest.raises(DwindleError, match="is a folder"):
        open_text(str(tmp_path))
    with pytest.raises(DwindleError, match="There is no file"):
        open_text(str(tmp_path / "none.txt"))
    with pytest.raises(DwindleError, match="did you mean 'shakespeare'"):
        open_text("shakespear")


def test_windows_hold_every_character_once():
    ids = torch.arange(101)
    cuts = list(windows(ids, 10, 3, "x"))
    assert [len(x) for x, _ in cuts] == [3, 3, 3, 1]
    assert torch.cat([x.flatten() for x, _ in cuts]).tolist() == list(range(100))
    assert torch.cat([y.flatten() for _, y in cuts]).tolist() == list(range(1, 101))
    assert sum(len(x) for x, _ in windows(ids, 10, 3, "x", limit=4)) == 4
    shared = [row for rank in range(3) for x, _ in windows(ids, 10, 2, "x", rank=rank, world=3) for row in x.tolist()]
    assert sorted(shared) == sorted(row for x, _ in cuts for row in x.tolist())
    assert not list(windows(ids, 10, 3, "x", limit=1, rank=2, world=3))  # fewer windows than processes
    with pytest.raises(DwindleError, match="has 10 tokens, a window needs 11"):
        next(windows(ids[:10], 10, 3, "x"))


def test_batches_are_a_function_of_seed_and_step():
    shakespeare = open_text("shakespeare")
    short, long, other = (shakespeare.places(4, 16, seed, steps) for seed, steps in ((0, 3), (0, 6), (1, 3)))
    assert torch.equal(short, long[:3]) and not torch.equal(short, other) and not torch.equal(long[0], long[1])
    x, y = shakespeare.cut(long[5], 16)
    assert x.shape == (4, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert x[2].tolist() == shakespeare.train[long[5, 2] :][:16].tolist()
