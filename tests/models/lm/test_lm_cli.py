"""Language models on the command line: the JSON each command ends with, and one sentence for each bad input."""

from __future__ import annotations

import json

import pytest
import torch

import dwindle
from dwindle.io import text
from dwindle.models.lm import Static, adapt_lm
from shared.command import refused, run

TEXT = "To be, or not to be: that is the question.\n"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("lm_cli")
    made = {"run": root / "run", "root": root, "own": root / "own.txt", "empty": root / "empty.txt"}
    made["own"].write_text(TEXT * 20)
    made["empty"].write_text("")
    done = run("train tsa_tiny_test --out {run} --device cpu", **made)
    (root / "train.json").write_text(json.dumps(done.json))
    yield made
    torch.set_num_threads(threads)


def test_train(places):
    result = json.loads((places["root"] / "train.json").read_text())
    assert result["step"] == 20 and result["out"] == str(places["run"])
    assert {"loss", "bpc", "tlops_saved", "macs_saved", "loss_soft"} <= result.keys()


def test_a_run_killed_before_its_first_save_begins_again(tmp_path):
    (tmp_path / "run").mkdir()
    done = run("train tsa_tiny_test --out {out} --resume --set steps=2 --device cpu", out=tmp_path / "run")
    assert done.json["step"] == 2 and "from the start" in done.err


def test_train_on_any_text_and_resume(places, tmp_path):
    line = "train tsa_tiny_test --data {own} --out {out} --set context=16 --device cpu"
    assert run(line, own=places["own"], out=tmp_path / "a").json["step"] == 20
    refused(run(line, own=places["own"], out=tmp_path / "a"), "--resume")
    assert run(line + " --resume", own=places["own"], out=tmp_path / "a").json["step"] == 20


@pytest.mark.parametrize("layout", ["packed", "masked"])
def test_eval(places, layout):
    line = "eval {run} --data shakespeare --limit 4 --device cpu --tau 0.87 --layout"
    result = run(f"{line} {layout}", **places).json
    assert list(result) == ["loss", "bpc", "tlops_saved", "macs_saved", "tau"]
    assert result["tau"] == 0.87 and 0 < result["tlops_saved"] < 1
    assert result["bpc"] == pytest.approx(result["loss"] / 0.693147, rel=1e-4)


def test_eval_of_what_ships():
    result = run("eval tsa_shakespeare --data shakespeare --limit 16 --device cpu").json
    assert list(result) == ["loss", "bpc", "tlops_saved", "macs_saved", "tau"]
    assert result["loss"] < 1.9 and result["tlops_saved"] > 0.1


def test_generate(places):
    line = "generate tsa_shakespeare --prompt ROMEO: --length 40 --seed 1 --device cpu"
    one, other = run(line).json, run(line).json
    assert one["text"] == other["text"] and one["text"].startswith("ROMEO:") and len(one["text"]) == 46
    assert {"tau", "tlops_saved", "tokens_per_s", "characters"} <= one.keys()


def test_view(places, tmp_path):
    result = run("view {run} {own} --tau 0.87 --out {out} --device cpu", **places, out=tmp_path / "page").json
    (page,) = result["pages"]
    html = (tmp_path / "page" / "index.html").read_text()
    assert page["characters"] == len(TEXT) * 20 and 0 < page["tlops_saved"] < 1
    assert html.count("<span") > page["characters"] and "skipped" in html
    assert "http" not in html.replace("http-equiv", "") and "<script" not in html
    result = run("view {run} --out {out} --device cpu", **places, out=tmp_path / "own").json
    assert result["pages"][0]["characters"] == 2000
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(TEXT)
    texts = {"one": tmp_path / "one" / "text.txt", "other": tmp_path / "other" / "text.txt"}
    result = run("view {run} {one} {other} --out {out} --device cpu", **places, **texts, out=tmp_path / "both").json
    assert len({page["page"] for page in result["pages"]}) == 2  # of the same name, a page each


def test_bench(places, monkeypatch):
    monkeypatch.setattr("dwindle.models.lm.bench.compilable", lambda device: False)
    result = run("bench {run} --batch 2 --fraction 1.0,0.67 --seconds 0.05 --device cpu", **places).json
    assert [row["decisions"] for row in result["rows"]] == ["forced", "forced", "own"]
    assert result["rows"][1]["promised"] == pytest.approx(1.5, abs=0.02)
    assert {"speedup", "reached", "tokens_per_s", "static_ms", "adaptive_ms"} <= result["rows"][0].keys()


def test_bench_of_a_model_whose_text_is_elsewhere(places, tmp_path, monkeypatch):
    monkeypatch.setattr("dwindle.models.lm.bench.compilable", lambda device: False)
    monkeypatch.chdir(tmp_path)
    run("train tsa_tiny_test --data {own} --out {out} --device cpu --set steps=2", **places, out=tmp_path / "own")
    line = "bench {out} --batch 1 --fraction 1.0 --seconds 0 --device cpu"
    alone = run(line, out=tmp_path / "own")
    assert [row["decisions"] for row in alone.json["rows"]] == ["forced"] and "--data" in alone.err
    named = run(line + " --data {own}", **places, out=tmp_path / "own").json
    assert [row["decisions"] for row in named["rows"]] == ["forced", "own"]
    refused(run(line + " --data nothere.txt", out=tmp_path / "own"), "no file")


def test_bench_of_writing(places):
    line = "bench {run} --batch 1,3 --generate 4 --seconds 0.02 --device cpu"
    rows = run(line, **places).json["rows"]
    assert [row["batch"] for row in rows] == [1, 3]
    assert {"static_ms", "all_ms", "skipping_ms", "speedup", "against_static", "tlops_saved"} <= rows[0].keys()


def test_routing(places):
    found = run("routing {run} --data {own} --tau 0.87 --device cpu", **places).json
    assert found["tau"] == 0.87 and len(found["quartiles"]["entropy"]) == 4 and 1 <= found["blocks"] < 3
    assert {row["kind"] for row in found["kinds"]} >= {"space", "lower case"}
    assert set(found["spearman"]) == {"loss", "entropy"} == set(found["spearman_p"])


def test_calibrate(places, tmp_path):
    line = "calibrate {run} --data {own} --loss 5 --out {out} --device cpu"
    found = run(line, **places, out=tmp_path / "set").json
    assert found["loss"] <= 1.05 * found["loss_full"] and 0 < found["tau"] < 1
    assert run("eval {out} --data {own} --device cpu", **places, out=tmp_path / "set").json["tau"] == found["tau"]
    refused(run(line.replace("--loss 5", "--loss 100"), **places, out=tmp_path / "x"), "share of the loss")


@pytest.mark.parametrize("family", ["charlm", "gpt2"])
def test_gates_learn_on_a_frozen_model(places, tmp_path, family):
    """The language model stays to the bit, the gates do not; of a Hugging Face model too."""
    source = tmp_path / "begin"
    if family == "charlm":
        given = dwindle.load(places["run"])
    else:
        transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=65, n_positions=40, n_embd=16, n_layer=3, n_head=2)
        given = adapt_lm(transformers.GPT2LMHeadModel(config), Static())
    extra = {"vocabulary": dwindle.load("tsa_shakespeare").extra["vocabulary"], "data": {"train": "shakespeare"}}
    dwindle.save(given, source, extra=extra)
    line = (
        "train tsa_tiny_test --out {out} --device cpu --set weights={source} --set freeze_backbone=true --set steps=4"
    )
    result = run(line, out=tmp_path / "out", source=source).json
    after = dwindle.load(tmp_path / "out")
    assert result["step"] == 4 and type(after.method).__name__ == "TSA"
    for (name, one), two in zip(given.lm.state_dict().items(), after.lm.state_dict().values()):
        assert torch.equal(one, two), name
    assert after.method.gates[0][1:][1].bias.item() != 2.0
    assert run("eval {out} --limit 2 --device cpu", out=tmp_path / "out").json["loss"] > 0
    assert len(run("generate {out} --length 5 --seed 0 --device cpu", out=tmp_path / "out").json["text"]) == 6
    refused(run(line + " --set context=64", out=tmp_path / "long", source=source), "asks for 64")


def test_a_run_sets_its_operating_point(places, tmp_path):
    line = "train tsa_tiny_test --data {own} --out {out} --set allowed=0.05 --set steps=4 --device cpu"
    run(line, **places, out=tmp_path / "run")
    assert 0 < run("eval {out} --data {own} --device cpu", **places, out=tmp_path / "run").json["tau"] < 1


def test_what_is_generated_is_printed_as_it_is(places):
    done = run("generate {run} --prompt A:fire: --length 4 --seed 0 --temperature 1e-40 --device cpu", **places)
    assert done.out.startswith("A:fire:") and done.json["text"].startswith("A:fire:")


def test_compare(places, tmp_path, monkeypatch):
    monkeypatch.setattr("dwindle.models.lm.compare.compilable", lambda device: False)
    line = "compare tsa_tiny_compare --out {out}/runs --results {out}/results --device cpu --set steps=10"
    folder = tmp_path / "results" / "tsa_tiny_compare"
    nothing = run(line + " --until 0", out=tmp_path).json
    assert nothing["results"] == [] and not list(folder.glob("*.json"))
    done = run(line, out=tmp_path)
    result, made = done.json, list(folder.glob("*.json"))
    assert len(made) == done.err.count(", seed ") > 8
    assert {"seed", "loss", "tlops_saved"} <= json.loads(made[0].read_text()).keys()
    names = [row["name"] for row in result["results"]]
    assert names[:3] == ["static", "TSA 0", "TSA 0.5"]
    assert {"early exit as TSA 0.5", "MoD as TSA 0.5", "random as TSA 0.5"} <= set(names)
    rows = {row["name"]: row for row in result["results"]}
    tsa = rows["TSA 0.5"]
    assert all(row["seeds"] >= 1 for row in rows.values())
    assert {"control_mean", "control_layer", "control_overall", "speedup", "reached", "skip_soft"} <= tsa.keys()
    exits = rows["early exit as TSA 0.5"]
    assert abs(exits["tlops_saved"] - tsa["tlops_saved"]) < 0.02 and exits["loss_full"] is not None
    assert (folder / "table.md").read_text().startswith("| name |") and (folder / "tradeoff.png").stat().st_size > 5000
    assert (folder / "hard_against_soft.png").exists() and (folder / "controls.png").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    (folder / "static-s1.json").unlink()
    assert run(line, out=tmp_path).json["results"][0]["seeds"] == 2
    assert all(p.stat().st_mtime_ns == t for p, t in before.items() if p.name != "static-s1.json")
    assert run(line + " --until 0", out=tmp_path).json == run(line, out=tmp_path).json  # drawn from the JSONs alone
    refused(run(line + " --set lr=0.1", out=tmp_path), "was made with lr=0.003")
    refused(run(line + " --only nobody", out=tmp_path), "unknown result")


@pytest.mark.parametrize(
    "line, said",
    [
        ("eval {run} --data {empty}", "holds no text"),
        ("eval {run} --data shakespeare --tau 1.5", "--tau = 1.5"),
        ("eval {run} --data shakespeare --tau -0.1", "--tau = -0.1"),
        ("eval {run} --data shakespeare --threshold 0.5", "--threshold 0.5 is for vision transformers"),
        ("eval {run} --data nothere.txt", "no file"),
        ("eval {run} --data shakespeer", "did you mean"),
        ("eval {run} --data {run}", "is a folder"),
        ("generate {run} --prompt ß", "'ß' at character 0"),
        ("generate {run} --prompt " + "x" * 33, "33 tokens"),
        ("generate {run} --prompt x --tau 7", "--tau = 7"),
        ("generate {run} --prompt x --length 0", "length = 0"),
        ("generate {run} --prompt x --temperature -1", "temperature = -1"),
        ("generate {run} --prompt x --seed 99999999999999999999999", "seed = 9999"),
        ("train tsa_tiny_test --set seed=99999999999 --out {root}/x", "seed = 9999"),
        ("train tsa_tiny_test --set eval_windows=0 --out {root}/x", "eval_windows = 0"),
        ("train tsa_tiny_test --set blocks=1 --out {root}/x", "blocks = 1"),
        ("train tsa_tiny_test --out {root}/x --set freeze_backbone=true", "weights=RUN"),
        ("compare tsa_tiny_compare --set seed=7 --out {root}/x", "--set seed=7"),
        ("compare tsa_tiny_compare --set method.tau=0.9 --out {root}/x", "--set method.tau=0.9"),
        ("generate aht_deit_tiny_imagenet --prompt x", "is a vision transformer"),
        ("generate nowhere --prompt x", "unknown checkpoint"),
        ("view {run} {empty}", "is empty"),
        ("view {run} nothere.txt", "no file"),
        ("view {run} {own} --out {own}", "is a file; choose another"),
        ("train tsa_tiny_test --data {empty} --out {root}/x", "holds no text"),
        ("train tsa_tiny_test --limit 3 --out {root}/x", "is for images"),
        ("train tsa_tiny_test --set method.tau=2 --out {root}/x", "tau = 2"),
        ("report {run} --data {root}", "calibrate or generate"),
        ("train aht_cifar100 --out {root}/x", "needs --data"),
        ("compare cifar100_deit_tiny --data {root}", "needs --out"),
    ],
)
def test_bad_input(line, said, places):
    refused(run(line, **places), said)


def test_enwik8_by_name(places, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "ENWIK8_BYTES", 4000)
    monkeypatch.setenv("DWINDLE_DATA", str(tmp_path))
    (tmp_path / "enwik8").write_bytes(b"<page>\xc3\xa9</page>\n" * 250)
    small = {"blocks": 2, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 4, "eval_every": 4}
    line = "train tsa_enwik8 --out {out} --device cpu" + "".join(f" --set {k}={v}" for k, v in small.items())
    assert run(line, out=tmp_path / "run").json["step"] == 4
    assert run(line + " --data bytes:{text}", out=tmp_path / "b", text=tmp_path / "enwik8").json["step"] == 4
    result = run("eval {out} --data enwik8 --device cpu", out=tmp_path / "run").json
    assert 0 < result["bpc"] < 8
