"""One network against those of one setting each: results, what is not made again, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dwindle
from dwindle.experiments.compare import Compare
from dwindle.models.adaperceiver.compare import AdaComparison, markdown, summarised
from dwindle.recipes import vision as recipes
from dwindle.train.recipe import changed
from shared.checkpoint import edit
from shared.command import refused, run


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("ada compare"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for c, colour in enumerate("rgb"):
            (root / "data" / split / colour).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 120, (32, 32, 3))
                pixels[..., c] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / "data" / split / colour / f"{i}.png")
    return {"data": root / "data", "out": root / "runs", "results": root / "results"}


LINE = "compare ada_tiny_compare --data {data} --out {out} --results {results} --device cpu"


def test_static_networks_are_trained_as_their_recipe_says(tmp_path):
    plan = recipes.ada_cifar100_compare()
    plan.check()
    for size, settings in {
        (32, 6, 96): ["method.tokens=(32,)", "method.depth=6", "method.ffn_ratio=2.0"],
        (64, 9, 144): ["method.tokens=(64,)", "method.depth=9", "method.ffn_ratio=3.0"],
        (96, 12, 192): ["method.depth=12", "method.ffn_ratio=4.0"],
    }.items():
        alone = plan.alone(plan.base, size)
        assert dataclasses.asdict(alone) == dataclasses.asdict(changed(recipes.ada_static_cifar100(), settings))
        alone.check()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dwindle.AdaPerceiver, "_start", lambda self: None)
            network = dwindle.AdaPerceiver.preset("small", **alone.method_options)
        assert network.hidden(network.width) == plan.whole.hidden(size[2]) and network.depth == size[1]


def test_the_comparison_for_a_cpu(tmp_path):
    plan = recipes.ada_cifar100_cpu_compare()
    plan.check()
    epochs = [plan.alone(plan.base, size).epochs for size in plan.sizes]
    assert sum(epochs) == plan.base.epochs and len(set(epochs)) == 1
    same = changed(recipes.ada_cifar100_cpu(), [f"epochs={plan.base.epochs}", "views=4", "compile=true"])
    assert dataclasses.asdict(plan.base) == dataclasses.asdict(same)


def test_a_comparison_mends_nothing(places):
    done = run(LINE + " --set reinit_from={{2:1}}", **places)
    assert done.code == 2 and "a comparison trains" in done.err


def test_everything_is_made_once(places, monkeypatch):
    done = run(LINE + " --only adaptive", **places)
    assert done.code == 0 and done.json["results"] == []
    done = run(LINE, **places)
    rows = done.json["results"]
    assert [(r["tokens"], r["depth"], r["width"]) for r in rows] == [(4, 2, 16), (16, 4, 32)]
    assert all(r["difference"] == round(r["adaptive"] - r["static"], 2) for r in rows)
    folder = places["results"] / "ada_tiny_compare"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("adaptive-s0.json", "policies-s0.json", "static_4-2-16-s0.json", "static_16-4-32-s0.json"),
        *("table.md", "tradeoff-s0.png", "interpolation-s0.png"),
    }
    adaptive = json.loads((folder / "adaptive-s0.json").read_text())
    assert len(adaptive["rows"]) == 36 and [row["tokens"] for row in adaptive["between"]] == [4, 6, 8, 16]
    policies = json.loads((folder / "policies-s0.json").read_text())
    assert len(policies["rows"]) == 3 + 3 + 2 * 2 + 1 and policies["images"] == 12
    kept = {path.name for path in (places["out"] / "policies-s0").iterdir()}
    assert kept == {"policy_tokens_0.05.safetensors", "policy_settings_0.05.safetensors"}
    small = json.loads((folder / "static_4-2-16-s0.json").read_text())
    network = dwindle.load(places["out"] / "static_4-2-16-s0")
    assert (network.tokens, network.depth, network.hidden(32)) == ((4,), 2, 41) and small["epochs"] == 1

    monkeypatch.setattr("dwindle.experiments.compare.Run", None)  # what is there is not made again
    monkeypatch.setattr("dwindle.models.adaperceiver.compare.evaluate_policies", None)
    assert run(LINE, **places).json == done.json
    refused(run(LINE + " --set epochs=4", **places), "was made with epochs=3 (now 4)")
    del adaptive["conditions"]["mask_steps"]  # as if made before there was such a setting
    (folder / "adaptive-s0.json").write_text(json.dumps(adaptive))
    assert run(LINE, **places).json == done.json
    monkeypatch.undo()
    config = places["out"] / "adaptive-s0" / "config.json"
    edit(config.parent, lambda known: known["extra"]["recipe"].pop("cpu_amp"))
    (folder / "policies-s0.json").unlink()
    assert run(LINE + " --only policies", **places).code == 0


def test_what_fails_at_once_leaves_nothing(places, tmp_path):
    here = places | {"data": tmp_path / "nowhere", "out": tmp_path / "runs", "results": tmp_path / "results"}
    refused(run(LINE, **here), "nowhere")
    assert not list(tmp_path.iterdir())
    (tmp_path / "results").write_text("")
    refused(run(LINE, **places | {"out": tmp_path / "runs", "results": tmp_path / "results"}), "another --results")


def test_a_killed_training_goes_on(places, tmp_path, monkeypatch):
    from dwindle.train.loop import Run

    here = places | {"out": tmp_path / "runs", "results": tmp_path / "results"}
    epochs = Run.epochs

    def killed(self, tick):
        for row in epochs(self, tick):
            yield row
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "epochs", killed)
    run(LINE + " --only adaptive", **here)
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr(Run, "epochs", epochs)
    refused(run(LINE + " --only policies", **here), "is at epoch 1 of 3")
    refused(run(LINE + " --only policies --set lr=0.1", **here), "was trained with lr=0.001 (now 0.1)")
    run(LINE + " --only adaptive", **here)
    whole = places | {"out": tmp_path / "whole", "results": tmp_path / "theirs"}
    run(LINE + " --only adaptive", **whole)
    path = ("ada_tiny_compare", "adaptive-s0.json")
    ours, theirs = (json.loads(place["results"].joinpath(*path).read_text()) for place in (here, whole))
    assert ours["rows"] == theirs["rows"]


def test_the_teacher_is_asked_once_for_all_networks(places, tmp_path, monkeypatch):
    from dwindle.train.teacher import Teacher

    torch.manual_seed(0)
    vit = timm.create_model("test_vit", num_classes=3, img_size=32)
    teacher = dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path / "teacher")
    asked, ask = [], Teacher.ask
    monkeypatch.setattr(Teacher, "ask", lambda self, x: asked.append(len(x)) or ask(self, x))
    here = places | {"out": tmp_path / "runs", "results": tmp_path / "results"}
    assert run(LINE + " --set teacher={teacher}", **here, teacher=teacher).code == 0
    assert len(asked) == 3 * 3  # the batches of the adaptive one's three epochs


@pytest.mark.parametrize(
    "more, said",
    [
        ("--only policies", "run 'adaptive' first"),
        ("--only everything", "known: adaptive, policies, static 16-4-32, static 4-2-16"),
        ("--set method.depth=2", "a comparison has methods and seeds of its own"),
        ("--set seed=1", "a comparison has methods and seeds of its own"),
    ],
)
def test_refused(places, tmp_path, more, said):
    refused(run(f"{LINE} {more}", **places | {"out": tmp_path / "runs", "results": tmp_path / "results"}), said)


@pytest.mark.parametrize("size", [(5, 2, 16), (4, 9, 16), (4, 2, 20), (4, 0, 16)])
def test_sizes_that_the_network_does_not_have(tmp_path, size):
    plan = AdaComparison(recipes.ada_tiny_compare().base, sizes=(size,))
    with pytest.raises(dwindle.DwindleError, match="has nothing to be compared with"):
        Compare("test", plan, "nowhere", tmp_path, tmp_path)


def test_means_over_seeds():
    def of(seed: int, one: float, alone: float) -> list[dict]:
        row = {"tokens": 4, "depth": 2, "width": 16, "top1": one, "gmacs": 0.5}
        static = {"name": "static 4-2-16", "seed": seed, "setting": [4, 2, 16], "top1": alone, "gmacs": 0.4}
        return [{"name": "adaptive", "seed": seed, "rows": [row]}, static]

    (row,) = summarised(of(0, 60.0, 58.0) + of(1, 61.0, 62.0))
    assert (row["adaptive"], row["static"], row["difference"], row["spread"]) == (60.5, 60.0, 0.5, 2.12)
    assert "| 4, 2, 16 | 60.5 | 0.5 | 60.0 | 0.4 | +0.50 ± 2.12 | 2 |" in markdown([row])
    (row,) = summarised(of(0, 60.0, 58.0) + of(1, 61.0, 62.0)[1:])  # of seed 1 only the static one
    assert (row["adaptive"], row["static"], row["difference"], row["seeds"]) == (60.0, 58.0, 2.0, 1)
    (row,) = summarised(of(0, 60.0, 58.0)[1:])  # the adaptive one is still to come
    assert row["adaptive"] is None and row["difference"] is None and markdown([row]).endswith("| 58.0 | 0.4 |  | 1 |\n")
