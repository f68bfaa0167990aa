"""A comparison of methods: what it makes, that it makes nothing twice, and its table and figure."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.core import processes as ranks
from dwindle.experiments.compare import Compare
from dwindle.experiments.results import read_results
from dwindle.files import lock, unlock, write_text
from dwindle.methods.avit import AViT
from dwindle.models.vit.compare import Comparison, Entry, markdown, summarised
from dwindle.recipes.vision import tiny_test
from dwindle.show.figures import tradeoff
from dwindle.train.loop import Run
from dwindle.train.recipe import Recipe
from shared.classes import write_classes

STAGES = {"stages": (2, 3)}
COMPARISON = Comparison(
    base=dataclasses.replace(tiny_test(), resident=True, label_weight=0.5, teacher_weight=0.5),
    entries=(
        Entry("TopK", "TopK", STAGES),
        Entry("Shallow", "Shallow", by_cost={0.8: {"depth": 4}, 0.6: {"depth": 3}}, changes={"lr": 2e-4}),
        Entry("A-ViT", "AViT", by_cost={0.8: {"target_depth": 4.0}, 0.6: {"target_depth": 3.0}}),
        Entry("Confidence", "Confidence", train="once"),
        Entry("ToMe", "ToMe", train="never", group="untrained"),
    ),
    costs=(0.8, 0.6),
    rivals=(),
)
NAMES = [entry.name for entry in COMPARISON.entries]
FILES = {"static-1.00-s0.json", *(f"{name}-{cost}-s0.json" for name in NAMES for cost in ("0.80", "0.60"))}


@pytest.fixture(scope="module", autouse=True)
def tiny_model():
    def tiny(recipe: Recipe, classes: int) -> VisionTransformer:
        return VisionTransformer(32, 8, embed_dim=16, depth=5, num_heads=2, num_classes=classes)

    with mock.patch("dwindle.train.vit.build_vit", tiny):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_classes(tmp_path_factory.mktemp("data"), train=8, val=3)


@pytest.fixture
def trained(monkeypatch) -> Counter:
    """How many epochs were trained into each folder."""
    train_epoch, count = Run._train_epoch, Counter()

    def counted(run: Run, tick):
        count[run.out.name] += 1
        return train_epoch(run, tick)

    monkeypatch.setattr(Run, "_train_epoch", counted)
    return count


ALL_TRAINED = {
    "static-1.00-s0": 2,
    "TopK-0.80-s0": 2,
    "TopK-0.60-s0": 2,
    "Shallow-0.80-s0": 2,
    "Shallow-0.60-s0": 2,
    "A-ViT-0.80-s0": 2,
    "A-ViT-0.60-s0": 2,
    "Confidence-s0": 2,
}


def comparing(data: str, root, comparison: Comparison = COMPARISON, **options) -> Compare:
    return Compare("tiny", comparison, data, root / "runs", root / "results", device="cpu", **options)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Made in one go: where, and what it said."""
    root = tmp_path_factory.mktemp("whole")
    return root, list(comparing(data, root).results())


def timeless(result: dict) -> dict:
    untimed = ("recipe", "teacher_asked")
    return {key: value for key, value in result.items() if "per_s" not in key and key not in untimed}


def test_every_entry_at_every_cost(whole):
    root, results = whole
    assert {path.name for path in (root / "results" / "tiny").iterdir()} == FILES
    assert [(r["name"], r["asked"]) for r in results] == [
        ("static", 1.0),
        *((name, cost) for name in NAMES for cost in (0.8, 0.6)),
    ]
    for result in results:
        assert (result["comparison"], result["seed"], result["images"]) == ("tiny", 0, 6)
        assert result["top1"] == result["top1_masked"] and 0 <= result["top1"] <= 100
        assert result["cost"] == pytest.approx(result["gmacs"] / result["gmacs_static"], abs=1e-4)
        assert result["images_per_s"] > 0 and result["images_per_s_masked"] > 0
        assert {"device", "torch", "commit"} <= result["machine"].keys()
        assert result["conditions"]["epochs"] == 2 and result["taught"] == (result["name"] not in ("static", "ToMe"))
        assert result["group"] == ("untrained" if result["name"] == "ToMe" else "methods")
        assert result["conditions"]["lr"] == (2e-4 if result["name"] == "Shallow" else 1e-4)
    by_name = {(r["name"], r["asked"]): r for r in results}
    assert by_name["static", 1.0]["method"] == "Static" and by_name["static", 1.0]["cost"] == 1
    assert by_name["static", 1.0]["conditions"]["label_weight"] == 1.0
    assert by_name["TopK", 0.8]["conditions"]["teacher"] == "static-1.00-s0"
    assert by_name["TopK", 0.8]["options"]["budget"] == 0.8
    assert [by_name["Shallow", cost]["options"]["depth"] for cost in (0.8, 0.6)] == [4, 3]
    assert by_name["Confidence", 0.8]["options"]["threshold"] > by_name["Confidence", 0.6]["options"]["threshold"]
    assert by_name["A-ViT", 0.8]["options"]["threshold"] != 0.99  # turned, where training alone would decide
    assert by_name["ToMe", 0.8]["options"]["r"] < by_name["ToMe", 0.6]["options"]["r"]
    assert by_name["ToMe", 0.8]["train_images_per_s"] is None
    assert by_name["TopK", 0.8]["train_images_per_s"] > 0


def test_the_checkpoint_is_the_one_measured(whole):
    root, results = whole
    (topk,) = [r for r in results if (r["name"], r["asked"]) == ("TopK", 0.6)]
    model = dwindle.load(root / "runs" / "TopK-0.60-s0")
    assert model.method.config == topk["options"]
    with torch.no_grad():
        cost = float(model.cost(model(torch.randn(4, 3, 32, 32)).trace))
    assert cost == pytest.approx(0.6, abs=0.02) and topk["cost"] == pytest.approx(cost, abs=0.13)  # by 0.0004 GMACs
    assert dwindle.load(root / "runs" / "static-1.00-s0").extra["classes"] == ["left", "right"]


def test_a_folder_without_splits_is_parted_alike_for_all(data, tmp_path):
    plan = Comparison(base=COMPARISON.base, entries=(Entry("ToMe", "ToMe", train="never"),), costs=(0.8,), rivals=())
    plain = f"{data}/train"
    results = list(comparing(plain, tmp_path, plan).results())
    told = f"10% held out of {plain} by seed 0: 2 images"
    assert [(r["name"], r["on"], r["images"]) for r in results] == [("static", told, 2), ("ToMe", told, 2)]
    saved = dwindle.load(tmp_path / "runs" / "static-1.00-s0").extra
    assert saved["results"]["on"] == told and saved["classes"] == ["left", "right"]
    assert results[0]["conditions"]["holdout"] == 0.1


def test_what_was_made_is_not_made_again(whole, data, trained):
    root, results = whole
    before = {path: path.stat().st_mtime_ns for path in (root / "results" / "tiny").iterdir()}
    assert list(comparing(data, root).results()) == results
    assert not trained and all(path.stat().st_mtime_ns == time for path, time in before.items())
    only = [(r["name"], r["asked"]) for r in comparing(data, root, only=["ToMe"]).results()]
    assert only == [("ToMe", 0.8), ("ToMe", 0.6)]


def killed_at(folder: str, at: int):
    def tick(name: str, step: int, steps: int, terms: dict) -> None:
        if name == folder and step == at:
            raise KeyboardInterrupt

    return tick


def test_a_killed_comparison_goes_on(whole, data, tmp_path, trained):
    """Killed in the second epoch of a training; then between a training's end and its result; then let go."""
    results = []
    with pytest.raises(KeyboardInterrupt):
        results.extend(comparing(data, tmp_path, tick=killed_at("TopK-0.60-s0", 3)).results())
    assert trained == {"static-1.00-s0": 2, "TopK-0.80-s0": 2, "TopK-0.60-s0": 2}  # the last one only begun
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "results" / "tiny").iterdir()}
    assert {path.name for path in made} == {"static-1.00-s0.json", "TopK-0.80-s0.json"}

    def fails(path, text):
        if path.name.startswith("Shallow-0.80"):
            raise KeyboardInterrupt
        return write_text(path, text)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dwindle.experiments.compare.write_text", fails)
        list(comparing(data, tmp_path).results())
    results = list(comparing(data, tmp_path).results())
    assert trained == ALL_TRAINED | {"TopK-0.60-s0": 3}  # only what was lost of its second epoch came again
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    assert [timeless(r) for r in results] == [timeless(r) for r in whole[1]]
    ones, others = (load_file(root / "runs" / "TopK-0.60-s0" / "model.safetensors") for root in (whole[0], tmp_path))
    assert all((ones[name] == others[name]).all() for name in ones)


def test_a_dial_set_at_the_end_of_training_survives_a_kill(data, tmp_path, trained):
    """It may be a plain number, of which the state of a run knows nothing."""
    options = {"stages": (1,), "count": "image"}
    comparison = dataclasses.replace(COMPARISON, entries=(Entry("Own", "DynamicViT", options),), costs=(0.8,))
    seen = []

    def fails(path, text):
        if path.name.startswith("Own"):
            seen.append(json.loads(text)["options"]["threshold"])
            raise KeyboardInterrupt
        return write_text(path, text)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dwindle.experiments.compare.write_text", fails)
        list(comparing(data, tmp_path, comparison).results())
    result = list(comparing(data, tmp_path, comparison).results())[-1]
    assert seen != [0.5] and [result["options"]["threshold"]] == pytest.approx(seen)
    assert trained["Own-0.80-s0"] == 2


def test_a_checkpoint_turned_after_training_is_there_before_its_result(data, tmp_path, trained, monkeypatch):
    entry = Entry("Own", "AViT", by_cost={0.8: {"target_depth": 4.0}})
    comparison = dataclasses.replace(COMPARISON, entries=(entry,), costs=(0.8,))

    def fails(path, text):
        if path.name.startswith("Own"):
            raise KeyboardInterrupt
        return write_text(path, text)

    monkeypatch.setattr("dwindle.experiments.compare.write_text", fails)
    with pytest.raises(KeyboardInterrupt):
        list(comparing(data, tmp_path, comparison).results())
    turned = dwindle.load(tmp_path / "runs" / "Own-0.80-s0").method.threshold
    monkeypatch.undo()
    result = list(comparing(data, tmp_path, comparison).results())[-1]
    again = dwindle.load(tmp_path / "runs" / "Own-0.80-s0").method.threshold
    assert turned == pytest.approx(result["options"]["threshold"]) == pytest.approx(again) != AViT().threshold


def test_a_static_model_from_elsewhere_is_measured_not_trained(whole, data, tmp_path, trained):
    model = dwindle.load(whole[0] / "runs" / "static-1.00-s0")
    dwindle.save(model, tmp_path / "runs" / "static-1.00-s0")
    (static,) = comparing(data, tmp_path, only=["static"]).results()
    assert not trained and timeless(static) == timeless(whole[1][0])
    brought = dataclasses.replace(COMPARISON, pretrained_static=True)
    (static,) = comparing(data, tmp_path / "as_it_is", brought, only=["static"]).results()
    assert not trained and static["cost"] == 1
    assert dwindle.load(tmp_path / "as_it_is" / "runs" / "static-1.00-s0").extra["preprocess"]["size"] == 32


def test_methods_that_begin_from_the_static_model(whole, data, tmp_path):
    """With conditions of their own, which an entry may change again."""
    static = whole[0] / "runs" / "static-1.00-s0"
    dwindle.save(dwindle.load(static), tmp_path / "runs" / "static-1.00-s0")
    entries = (Entry("TopK", "TopK", STAGES), Entry("Slow", "TopK", STAGES, changes={"lr": 1e-6}))
    changes = {"lr": 1e-5, "epochs": 1}
    comparison = dataclasses.replace(COMPARISON, entries=entries, costs=(0.8,), adapted=True, changes=changes)
    build = mock.Mock(side_effect=lambda recipe, classes: dwindle.load(static).unwrap().train())
    with mock.patch("dwindle.train.vit.build_vit", build):
        results = list(comparing(data, tmp_path, comparison).results())
    seen = [(call.args[0].weights, call.args[0].lr, call.args[0].epochs) for call in build.call_args_list]
    folder = str(tmp_path / "runs" / "static-1.00-s0")
    assert seen == [(None, 1e-4, 2), (folder, 1e-5, 1), (folder, 1e-6, 1)]
    assert [r["conditions"]["from_static"] for r in results] == [False, True, True]


def test_results_made_under_other_conditions_are_not_taken(whole, data, tmp_path):
    other = dataclasses.replace(COMPARISON, base=dataclasses.replace(COMPARISON.base, epochs=3))
    with pytest.raises(dwindle.DwindleError, match=r"epochs=2 \(now 3\)"):
        list(comparing(data, whole[0], other).results())
    with pytest.raises(dwindle.DwindleError, match=r"limit=None \(now 4\)"):
        list(comparing(data, whole[0], limit=4).results())


def test_when_time_is_up_nothing_is_trained(whole, data, tmp_path, trained):
    assert not list(comparing(data, tmp_path, until=0).results())
    assert not trained and not (tmp_path / "runs").exists()
    assert list(comparing(data, whole[0], until=0).results()) == whole[1]


def test_bad_comparisons(whole, data, tmp_path):
    with pytest.raises(dwindle.DwindleError, match=r"'Topk2'.*'TopK'"):
        comparing(data, tmp_path, only=["Topk2"])
    for name in ("TopK", "ToMe"):
        with pytest.raises(dwindle.DwindleError, match=r"static-1.00-s0 is missing: .* run 'static' first"):
            list(comparing(data, tmp_path, only=[name]).results())
    folder = tmp_path / "results" / "tiny"
    folder.mkdir(parents=True)
    (folder / "static-1.00-s0.json").write_text('{"top1": 3')
    (tmp_path / "runs" / "static-1.00-s0").mkdir(parents=True)
    (tmp_path / "runs" / "static-1.00-s0" / "config.json").write_text("{}")
    for read in (lambda: list(comparing(data, tmp_path).results()), lambda: read_results(folder)):
        with pytest.raises(dwindle.DwindleError, match=r"s0.json.*JSON.*delete"):
            read()


def result(name: str, asked: float, seed: int, top1: float, group: str = "methods", **others) -> dict:
    values = {"cost": asked + 0.01 * seed, "gmacs": asked, "top1_masked": top1, "images_per_s": 1000 + seed}
    return {"name": name, "group": group, "asked": asked, "seed": seed, "top1": top1, **values, **others}


RESULTS = [
    result("Aux", 0.7, 0, 50.0, group="ablations"),
    result("B", 0.5, 0, 60.0),
    result("A", 0.5, 0, 61.0),
    result("A", 0.5, 1, 63.0),
    result("A", 0.7, 0, 70.5),
    result("A", 0.7, 5, 71.5),
    result("static", 1.0, 0, 72.0),
    result("static", 1.0, 1, 75.0),
]


def test_means_over_seeds_and_the_gap_to_static_of_the_same_seeds():
    rows = summarised(RESULTS)
    assert [(r["name"], r["asked"]) for r in rows] == [
        ("static", 1.0),
        ("A", 0.7),
        ("A", 0.5),
        ("B", 0.5),
        ("Aux", 0.7),
    ]
    static, high, low, single, aux = rows
    assert (static["top1"], static["gap"], static["seeds"]) == (73.5, 0.0, 2)
    assert (low["top1"], low["gap"], low["spread"]) == (62.0, -11.5, 1.41)  # (61 - 72 + 63 - 75) / 2
    assert (low["cost"], low["images_per_s"], low["top1_masked"]) == (0.505, 1000, 62.0)
    assert (high["top1"], high["gap"]) == (71.0, -1.5)  # seed 5 has no static model to be compared with
    assert single["spread"] is None and aux["group"] == "ablations"
    assert summarised(RESULTS[1:2])[0]["gap"] is None and summarised([]) == []


def test_the_figure_tells_of_what_lies_far_below():
    row = dict(summarised(RESULTS)[0])
    far = [row | {"name": "far", "top1": 3.0, "gmacs": g} for g in (0.5, 0.7)]
    (axis,) = tradeoff([row, *far], "tiny", "static").axes
    assert axis.get_legend_handles_labels()[1] == ["static"] and axis.get_ylim()[0] > 50
    assert axis.texts[0].get_text() == "below:\nfar: 3 at 0.50, 3 at 0.70"


def test_the_table():
    lines = markdown(summarised(RESULTS)).splitlines()
    assert len(lines) == 2 + 5 and len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| static | 1.00 | 1.005 | 1.000 | 73.50 ± 2.12 | +0.00 | 2 | 1,000 |"
    assert lines[5] == "| B | 0.50 | 0.500 | 0.500 | 60.00 | -12.00 | 1 | 1,000 |"
    assert "|  |" in markdown(summarised(RESULTS[1:2]))  # nothing to compare with


def test_the_figure_has_a_line_for_each_method(tmp_path):
    figure = tradeoff(summarised(RESULTS), "tiny", "static")
    (axis,) = figure.axes
    handles, labels = axis.get_legend_handles_labels()
    assert labels == ["static", "A", "B"]
    assert handles[1].lines[0].get_xydata().tolist() == [[0.5, 62.0], [0.7, 71.0]]
    assert "GMACs" in axis.get_xlabel() and "top-1" in axis.get_ylabel()
    figure.savefig(tmp_path / "tradeoff.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tradeoff([], "nothing finished yet", "static")


def test_results_are_read_back(whole):
    root, results = whole
    read = read_results(root / "results" / "tiny")
    key = json.dumps
    assert sorted(map(key, read)) == sorted(map(key, results))
    assert len(summarised(read)) == 11


def test_what_anybody_would_try_first_is_compared(data, tmp_path):
    """A smaller image, patches dropped at random and fewer blocks stand beside the entries, unless these have them."""
    assert Comparison(COMPARISON.base, ()).names() == ["static", "Resolution", "Random", "Shallow"]
    entries = (
        Entry("Random", "Random", STAGES),
        Entry("Static too", "Static", by_cost={0.6: {}}, changes={"heads": 1}),
    )
    plan = Comparison(COMPARISON.base, entries, costs=(0.6,))
    assert plan.names() == ["static", "Random", "Static too", "Resolution", "Shallow"]
    work = comparing(data, tmp_path, plan, only=["static", "Static too", "Resolution"])
    by_name = {row["name"]: row for row in work.results()}
    found = by_name["Resolution"]
    assert found["depth"] == 5 and 0.4 < found["cost"] < 0.8  # of 0.0004 GMACs, rounded
    assert found["top1"] == found["top1_masked"]
    model = dwindle.load(tmp_path / "runs" / "Resolution-0.60-s0")
    assert model.method.size((32, 32), model.method.scale) == (24, 24) and model.static_macs() / 1e9 == pytest.approx(
        found["gmacs_static"], abs=1e-4
    )
    # Where a change makes another network of it, cost is the share of the static model's all the same.
    assert by_name["Static too"]["gmacs_static"] == by_name["static"]["gmacs_static"]


def test_processes_share_the_work(data, tmp_path, trained):
    """Each makes what no other is at; what the others made is told too. One that died leaves its work to others."""
    plan = dataclasses.replace(COMPARISON, entries=COMPARISON.entries[:2], costs=(0.8,))
    first, second = comparing(data, tmp_path, plan, patience=0.01), comparing(data, tmp_path, plan, patience=0.01)
    ours = first.results()
    assert next(ours)["name"] == "static"
    held = lock(tmp_path / "runs" / ".TopK-0.80-s0.made")  # as if `first` was at work on it
    theirs = second.results()
    assert [next(theirs)["name"], next(theirs)["name"]] == ["static", "Shallow"]  # it goes past what is being made
    unlock(held)  # and dies
    assert [row["name"] for row in theirs] == ["TopK"]
    assert [row["name"] for row in ours] == ["TopK", "Shallow"]
    assert trained == {"static-1.00-s0": 2, "Shallow-0.80-s0": 2, "TopK-0.80-s0": 2}
    assert not list((tmp_path / "runs").glob("*.made"))


def test_a_process_of_torchrun_works_alone(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(dwindle.DwindleError, match="process 2 on a machine with 1 GPUs"):
        ranks.detach_from_torchrun("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.detach_from_torchrun("cuda") == ("cuda:1", 3) and ranks.started() == 1
    assert ranks.detach_from_torchrun("cpu") == ("cpu", 0)
