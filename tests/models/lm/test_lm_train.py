"""Training a language model: it learns, resumes exactly, and comes back from its checkpoint."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch

import dwindle
from dwindle.errors import DwindleError
from dwindle.models.lm.load import load_lm, vocabulary_of
from dwindle.models.lm.train import LMRecipe
from dwindle.recipes import find_comparison, find_recipe
from dwindle.recipes.language import tsa_shakespeare_large, tsa_tiny_test
from dwindle.train.loop import Run
from dwindle.train.recipe import changed


def trained(out, recipe, **options):
    run = Run(recipe, None, out, device="cpu", **options)
    return run, list(run.epochs())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("lm") / "run"
    run, rows = trained(out, tsa_tiny_test())
    return run, rows, out


def test_it_learns_and_writes(done):
    _, rows, out = done
    assert [row["step"] for row in rows] == [10, 20] and rows[1]["loss"] < rows[0]["loss"] < 4.5
    assert rows[1]["bpc"] == pytest.approx(rows[1]["loss"] / 0.693147, rel=1e-5)
    assert {"loss_soft", "tlops_saved", "macs_saved", "depth", "task", "total"} <= rows[0].keys()
    with (out / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["10", "20"]
    assert "every token chooses" in " ".join((out / "README.md").read_text().split())
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]


@pytest.mark.usefixtures("bf16_on_cpu")
def test_bf16_on_a_cpu_learns_as_float32_does(done, tmp_path):
    _, rows, _ = done
    run, half = trained(tmp_path / "half", changed(tsa_tiny_test(), ["cpu_amp=true"]))
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert half[-1]["loss"] != rows[-1]["loss"]
    assert half[-1]["loss"] == pytest.approx(rows[-1]["loss"], rel=0.01)


def test_it_comes_back(done):
    run, _, out = done
    model = dwindle.load(out)
    assert vocabulary_of(model) == run.task.text.vocabulary and model.method.penalty == 0.05
    ids = run.task.text.val[None, :32].long()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, run.model.eval()(ids).logits, atol=0, rtol=0)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(done, tmp_path):
    whole, rows, _ = done
    first = Run(tsa_tiny_test(), None, tmp_path / "run", device="cpu")
    next(first.epochs())
    second, rest = trained(tmp_path / "run", tsa_tiny_test(), resume=True)
    assert [row["step"] for row in rest] == [20]
    same = ("task", "loss", "tlops_saved", "loss_soft")
    assert {k: rest[0][k] for k in same} == {k: rows[1][k] for k in same}
    for one, other in zip(whole.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)


def test_folders_that_cannot_be_used(done, tmp_path):
    _, _, out = done
    for recipe, options, said in (
        (tsa_tiny_test(), {}, "holds a run already"),
        (dataclasses.replace(tsa_tiny_test(), lr=1.0), {"resume": True}, "lr=0.003"),
    ):
        with pytest.raises(DwindleError, match=said):
            Run(recipe, None, out, device="cpu", **options)
    with pytest.raises(DwindleError, match="no run to resume"):
        Run(tsa_tiny_test(), None, tmp_path / "none", device="cpu", resume=True)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"steps": 0}, "steps = 0"),
        ({"beta2": 1.0}, "beta2"),
        ({"method": "TSB"}, "did you mean 'TSA'"),
        ({"method": "Control"}, "Unknown router"),
        ({"method_options": {"lambda": 1}}, "Unknown option of TSA"),
        ({"method_options": {"tau": "high"}}, "tau = 'high': it must be a number"),
        ({"method_options": {"tau": 2}}, r"\[0, 1\]"),
        ({"width": 30}, "even size"),
        ({"context": 10**7}, "a window needs"),
    ],
)
def test_settings_that_cannot_work(options, said, tmp_path):
    with pytest.raises(DwindleError, match=said):
        next(Run(dataclasses.replace(tsa_tiny_test(), **options), None, tmp_path / "run", device="cpu").epochs())


def test_a_run_that_diverges_says_so(tmp_path):
    recipe = dataclasses.replace(tsa_tiny_test(), lr=1e20, clip=0.0, warmup=0)
    with pytest.raises(DwindleError, match="lower lr"):
        trained(tmp_path / "run", recipe)


def test_checkpoints_that_are_damaged(done, tmp_path):
    _, _, out = done
    config = json.loads((out / "config.json").read_text())
    weights = (out / "model.safetensors").read_bytes()
    del config["config_sha256"]
    wider = config["backbone"]["options"] | {"width": 64}
    for i, (spoilt, cut, said) in enumerate(
        (
            ({}, 1000, "truncated"),
            ({"method": {"name": "TSB", "options": {}}}, None, "Unknown router"),
            ({"method": {"name": "TSA", "options": {"speed": 1}}}, None, "does not know"),
            ({"backbone": config["backbone"] | {"options": {"size": 1}}}, None, "cannot be built"),
            ({"backbone": config["backbone"] | {"options": wider}}, None, "fit"),
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | spoilt))
        (folder / "model.safetensors").write_bytes(weights[:cut])
        with pytest.raises(DwindleError, match=said):
            dwindle.load(folder)
    with pytest.raises(DwindleError, match="takes language models"):
        load_lm("aht_deit_tiny_imagenet")


@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD", "Random"])
def test_compiled_training_is_the_same(router, tmp_path, monkeypatch):
    """With dynamo tracing and no code made: what would break the graph shows here."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend="eager", fullgraph=True))
    recipe = dataclasses.replace(tsa_tiny_test(), steps=2, method=router, method_options={})
    plain, _ = trained(tmp_path / "plain", recipe)
    fast, _ = trained(tmp_path / "fast", dataclasses.replace(recipe, compile=True))
    for one, other in zip(plain.model.parameters(), fast.model.parameters()):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD", "Random", "Static"])
def test_recorded_training_is_the_same(router, tmp_path, monkeypatch):
    """A CUDA graph's stand-in: what is replayed reads the inputs where they lie, and gradients are written anew."""

    def record(backward, model, x, y, what):
        held = x.clone(), y.clone()

        def replay(x, y):
            held[0].copy_(x)
            held[1].copy_(y)
            model.zero_grad()
            return backward(*held)

        assert what == router
        return replay

    monkeypatch.setattr("dwindle.train.step.record", record)
    recipe = dataclasses.replace(tsa_tiny_test(), steps=6, eval_every=3, method=router, method_options={})
    plain, rows = trained(tmp_path / "plain", recipe)
    fast = Run(recipe, None, tmp_path / "fast", device="cpu")
    fast.learner.recording = True
    for one, other in zip(rows, fast.epochs(), strict=True):
        assert one["loss"] == other["loss"] and one["task"] == other["task"]
    for one, other in zip(plain.model.parameters(), fast.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("router", ["TSA", "EarlyExit", "MoD", "Random", "Static"])
def test_recorded_on_a_gpu(router, tmp_path):
    recipe = dataclasses.replace(tsa_tiny_test(), method=router, method_options={}, amp=False)
    losses = []
    for fast in (False, None):
        run = Run(dataclasses.replace(recipe, compile=fast), None, tmp_path / str(fast), device="cuda")
        losses.append([row["loss"] for row in run.epochs()])
        assert (run.learn.recorded is None) == (fast is False)
    if router != "Random":  # which draws other numbers
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_recipes_are_found_and_changed():
    recipe = changed(find_recipe("tsa_shakespeare")(), ["steps=7", "method.penalty=0.5"])
    assert isinstance(recipe, LMRecipe) and recipe.steps == 7 and recipe.method_options["penalty"] == 0.5
    assert find_comparison("tsa_shakespeare_compare")().base.width == tsa_shakespeare_large().width == 384
    with pytest.raises(DwindleError, match="did you mean 'tsa_shakespeare'"):
        find_recipe("tsa_shakespere")
    with pytest.raises(DwindleError, match="Unknown recipe setting 'epochs'"):
        changed(recipe, ["epochs=3"])
