"""Hugging Face's folders with a tokenizer of their own: read as they are, given gates, evaluated, continued."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import dwindle
from dwindle.errors import DwindleError
from dwindle.io.text import open_text
from dwindle.io.tokenizer import TOKENIZER, Tokenizer
from dwindle.models.lm.load import load_lm, vocabulary_of
from shared.command import refused, run

tokenizers = pytest.importorskip("tokenizers", reason="extra `hf` is not installed")
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

TEXT = "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to süffer\n" * 20
GPT2 = "GPT2LMHeadModel"


def trained_tokenizer():
    """A byte-level tokenizer of some 300 tokens, which sets <s> before a text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return made


def small(kind: str):
    """A model whose updates are large enough for skips to be seen in the loss."""
    torch.manual_seed(0)
    if kind == GPT2:
        sizes = {"vocab_size": 304, "n_positions": 40, "n_embd": 16, "n_layer": 3, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.3))
    sizes = {
        "initializer_range": 0.3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    sizes |= {"vocab_size": 304, "num_key_value_heads": 1, "max_position_embeddings": 40}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))


@pytest.fixture(scope="module", params=["LlamaForCausalLM", GPT2])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("hf") / "lm"
    small(request.param).save_pretrained(place)
    trained_tokenizer().save(str(place / TOKENIZER))
    (place.parent / "own.txt").write_text(TEXT * 5)
    return place


@pytest.fixture(scope="module")
def gates(folder):
    """Gates trained by one command on the frozen model of the folder."""
    out = folder.parent / "gates"
    line = "train tsa_gates --data {text} --out {out} --device cpu --set weights={folder} --set context=16"
    line += " --set steps=4 --set eval_every=4 --set warmup=1"
    return out, run(line, text=folder.parent / "own.txt", out=out, folder=folder).json


def test_a_tokenizer_there_and_back():
    made = trained_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=6)
    read = Tokenizer(made.to_str().encode())
    ids = read.encode(TEXT)
    assert len(read) == made.get_vocab_size() and 4 < len(ids) < len(TEXT) and 0 not in ids
    assert read.decode(ids) == TEXT and len(read.pieces(ids)) == len(ids)
    assert read.encode_prompt("To be").tolist() == [0, *read.encode("To be").tolist()]
    assert read.decode(read.encode_prompt("To be")) == "To be"
    with pytest.raises(DwindleError, match=r"tokenizer.json cannot be read"):
        Tokenizer(b"{}")
    with pytest.raises(DwindleError, match="The prompt is not UTF-8"):
        read.encode_prompt("a\udcff")


def test_the_same_text_is_held_out_as_for_characters(tmp_path):
    (tmp_path / "own.txt").write_text(TEXT)
    read = Tokenizer(trained_tokenizer().to_str().encode())
    tokens, characters = (open_text(str(tmp_path / "own.txt"), known) for known in (read, None))
    for part in ("train", "val", "test"):
        assert read.decode(getattr(tokens, part)) == characters.vocabulary.decode(getattr(characters, part))
    assert tokens.per_token == pytest.approx(len(TEXT) / sum(map(len, (tokens.train, tokens.val, tokens.test))))
    assert characters.per_token == 1


def test_a_folder_is_read_as_it_is(folder):
    model = load_lm(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(34)[None] * 7 % 300
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-4)
    read = vocabulary_of(model)
    assert isinstance(read, Tokenizer) and len(read) <= 304
    text = open_text(str(folder.parent / "own.txt"), read)
    found = run("eval {folder} --data {text} --context 16 --device cpu", folder=folder, text=text.name).json
    x = text.test[:-1][: 16 * ((len(text.test) - 1) // 16)].long()
    with torch.no_grad():
        logits = theirs(x.view(-1, 16)).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, text.test[1 : len(x) + 1].long()).item()
    assert found["loss"] == pytest.approx(loss, abs=1e-4) and found["tlops_saved"] == 0
    assert found["bpc"] == pytest.approx(loss / 0.693147 / text.per_token, rel=1e-4)


def test_gates_learn_and_the_model_stays(folder, gates):
    out, result = gates
    assert result["step"] == 4
    model = dwindle.load(out)
    before = load_lm(folder)
    for (name, one), two in zip(before.lm.state_dict().items(), model.lm.state_dict().values()):
        assert torch.equal(one, two), name
    assert model.method.gates[0][2].bias.item() != 4.0 and model.method.open == 4.0
    assert vocabulary_of(model) == vocabulary_of(before)
    assert (out / TOKENIZER).read_bytes() == (folder / TOKENIZER).read_bytes()
    card = (out / "README.md").read_text()
    assert (
        "token-level" in card and "nats per token" in card and len(json.loads((out / "config.json").read_text())) < 20
    )


def test_eval_with_rivals(folder, gates):
    text = folder.parent / "own.txt"
    model = dwindle.load(gates[0])
    ids = open_text(str(text), vocabulary_of(model)).test[:48].view(3, 16).long()
    with torch.no_grad():
        tau = model(ids, "masked").trace.values[1]["p"].median().item()  # of the second block: half of the tokens skip
    line = "eval {out} --data {text} --limit 3 --device cpu --rivals --tau {tau}"
    found = run(line, out=gates[0], text=text, tau=tau).json
    plain = run("eval {folder} --data {text} --limit 3 --context 16 --device cpu", folder=folder, text=text).json
    static, random, control = (found[name] for name in ("static", "random", "control"))
    assert static["loss"] == pytest.approx(plain["loss"], abs=1e-5) and static["tlops_saved"] == 0
    assert 0.1 < found["tlops_saved"] < 0.6 and random["tlops_saved"] == pytest.approx(found["tlops_saved"], abs=0.15)
    assert control["tlops_saved"] == pytest.approx(found["tlops_saved"], abs=0.15)
    assert len({found["loss"], static["loss"], random["loss"], control["loss"]}) == 4
    assert run(line, out=gates[0], text=text, tau=tau).json == found  # what is drawn is the same every time


def test_generate(folder, gates):
    for place in (folder, gates[0]):
        line = "generate {place} --prompt To --length 6 --temperature 0 --device cpu"
        done = run(line, place=place).json
        assert done["text"].startswith("To") and done["tokens"] == 6
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    read = Tokenizer((folder / TOKENIZER).read_bytes())
    ids = read.encode_prompt("To").long()[None]
    ids = theirs.generate(
        ids,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        attention_mask=ids.new_ones(ids.shape),
    )
    assert run("generate {f} --prompt To --length 6 --temperature 0 --device cpu", f=folder).json[
        "text"
    ] == read.decode(ids[0])


def test_the_other_commands_take_it(folder, gates, tmp_path):
    names = {"out": gates[0], "text": folder.parent / "own.txt", "to": tmp_path / "set", "page": tmp_path / "page"}
    set_to = run("calibrate {out} --data {text} --loss 20 --out {to} --device cpu", **names).json
    assert run("eval {to} --data {text} --device cpu", **names).json["tau"] == set_to["tau"]
    found = run("routing {out} --data {text} --device cpu", **names).json
    assert {row["kind"] for row in found["kinds"]} >= {"lower case"}
    assert run("view {out} {text} --out {page} --device cpu", **names).json["pages"][0]["characters"] > 100


def test_what_does_not_fit(folder, gates, tmp_path):
    text = folder.parent / "own.txt"
    for name in ("none", "other", "large"):
        shutil.copytree(folder if name != "other" else gates[0], tmp_path / name)
    (tmp_path / "none" / TOKENIZER).unlink()
    refused(run("generate {f} --prompt x", f=tmp_path / "none"), f"put its {TOKENIZER} beside")
    (tmp_path / "other" / TOKENIZER).write_text("{}")
    refused(run("generate {f} --prompt x", f=tmp_path / "other"), "is not the file that the checkpoint was saved with")
    large = json.loads((folder / TOKENIZER).read_text())
    large["model"]["vocab"]["zzz"] = 400
    (tmp_path / "large" / TOKENIZER).write_text(json.dumps(large))
    refused(run("generate {f} --prompt x", f=tmp_path / "large"), "has 401 tokens, and its model knows 304")
    line = "train tsa_gates --data {text} --out {out} --device cpu --set context=16 --set weights={f}"
    refused(run(line, text=text, out=tmp_path / "a", f=tmp_path / "large"), "its vocabulary is 304")
    refused(run("eval {f} --data {text} --context 41", text=text, f=folder), "--context 41")
    refused(run("train tsa_gates --data {text} --out {out}", text=text, out=tmp_path / "b"), "weights=RUN")
    with pytest.raises(DwindleError, match="load it without another"):
        load_lm(folder, lm=small(GPT2))
