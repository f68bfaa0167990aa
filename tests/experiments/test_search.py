"""The search: it never sees the test split, a killed one goes on to the same result, and bad ones are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from dwindle.errors import DwindleError
from dwindle.experiments import search as search_module
from dwindle.experiments.search import search, value
from dwindle.experiments.study import JOURNAL, SharedStudy
from dwindle.io.sets import training_images
from dwindle.recipes.vision import tiny_test
from dwindle.train.recipe import Recipe, changed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two classes, and no test split: to open it would be an error."""
    root, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for side, name in enumerate(("left", "right")):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for i in range(12):
            pixels = generator.integers(0, 60, (32, 32, 3))
            pixels[:, side * 16 : side * 16 + 16] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return str(root)


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    import timm
    from timm.models.vision_transformer import VisionTransformer

    def create_model(name, pretrained=False, num_classes=1000, **options):
        return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=num_classes)

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(timm, "is_model", lambda name: True)


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="extra `search` is not installed")


def small(**options) -> Recipe:
    settings = {"method_options": {"stages": (2, 3), "budget": 0.8}, "image_size": None, "epochs": 1, "augment": None}
    return dataclasses.replace(tiny_test(), **{**settings, **options})


def test_value_is_accuracy_less_what_is_over_budget():
    assert value(80.0, 0.60, 0.67, 1.0) == 80.0
    assert value(80.0, 0.69, 0.67, 1.0) == pytest.approx(78.0)
    assert value(80.0, 0.69, 0.67, 0.5) == pytest.approx(79.0)
    assert value(80.0, 1.01, float("inf"), 1.0) == 80.0


def test_search_finds_settings_and_keeps_a_table(optuna, data, tmp_path):
    rows, steps = [], []
    result = search(
        small(), data, tmp_path / "s", trials=3, holdout=0.25, device="cpu", progress=rows.append,
        tick=lambda step, total, terms: steps.append((step, total)),
    )  # fmt: skip
    assert result == json.loads((tmp_path / "s" / "search.json").read_text())
    assert result["trials"] == rows and [row["trial"] for row in rows] == [0, 1, 2]
    assert len(steps) == 3 * steps[-1][1]
    assert rows[0]["settings"] == ["method.lambda_p=0.05", "method.lambda_t=0.05"]  # the recipe as it stands
    assert result["value"] == max(row["value"] for row in rows)
    best = changed(small(), result["settings"])
    assert 1e-4 <= best.method_options["lambda_p"] <= 0.1 and 1e-2 <= best.method_options["lambda_t"] <= 2
    for row in rows:
        saved = json.loads((tmp_path / "s" / f"trial-{row['trial']:04d}" / "config.json").read_text())
        assert saved["extra"]["results"]["images"] == 6  # of 24, a quarter
        assert saved["extra"]["results"]["top1"] == row["top1"]
    more = search(small(), data, tmp_path / "s", trials=4, holdout=0.25, device="cpu")
    assert more["trials"][:3] == rows and len(more["trials"]) == 4


def test_what_will_be_evaluated_on_is_kept_from_the_search(optuna, data, tmp_path):
    search(small(), data, tmp_path / "s", trials=1, holdout=0.25, device="cpu")
    told = json.loads((tmp_path / "s" / "trial-0000" / "config.json").read_text())["extra"]["results"]
    rest = len(training_images(data, 0.1)[0])
    assert rest == 22 and told["images"] == round(0.25 * rest)
    assert told["on"] == f"25% held out of the rest of split train of {data} by seed 0: {told['images']} images"


def test_a_killed_search_goes_on_to_the_same_result(optuna, data, tmp_path):
    recipe = small(epochs=2)

    def run(out, **options):
        return search(recipe, data, tmp_path / out, trials=3, holdout=0.25, device="cpu", **options)

    whole = run("whole")
    steps = []

    def kill(step, total, terms):
        steps.append(step)
        if len(steps) == total + total // 2 + 1:  # the second epoch of the second trial
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("killed", tick=kill)
    assert (tmp_path / "killed" / "trial-0001" / "state.pt").exists()
    torch.manual_seed(123)
    assert run("killed") == whole
    assert run("killed") == whole  # nothing left to do
    journal = tmp_path / "killed" / JOURNAL
    given = journal.read_text()
    assert given.count('"cpu_amp":false,') == 1
    journal.write_text(given.replace('"cpu_amp":false,', ""))  # as if begun before there was such a setting
    assert run("killed") == whole


class Killed(BaseException):
    """What ends a search in the middle of a trial, as the end of its process would."""


def test_processes_share_a_search_and_others_finish_it(optuna, data, tmp_path, monkeypatch):
    """Each runs trials that no other is at, and waits for the last ones; the table is that of one process."""

    def run(out, count, **options):
        return search(small(), data, tmp_path / out, trials=count, holdout=0.25, device="cpu", **options)

    def waits(seconds):
        raise Killed

    whole = run("whole", 3)
    monkeypatch.setattr("dwindle.experiments.study.time.sleep", waits)
    first, second, third = [], [], []

    def third_is_killed(step, total, terms):
        raise Killed

    def others_work(step, total, terms):
        if second:
            return
        with torch.random.fork_rng():
            with pytest.raises(Killed):  # it has nothing left to do while this process is at trial 0
                run("shared", 2, progress=second.append)
            with pytest.raises(Killed):
                run("shared", 3, progress=third.append, tick=third_is_killed)

    assert run("shared", 3, progress=first.append, tick=others_work) == whole
    assert [row["trial"] for row in first] == [0, 2] and [row["trial"] for row in second] == [1] and not third
    assert json.loads((tmp_path / "shared" / "search.json").read_text()) == whole
    assert not list((tmp_path / "shared").glob("*.made"))


@pytest.fixture
def shared(tmp_path):
    """A process's view of a study that others share, with a space in which nothing needs to be trained."""
    pytest.importorskip("optuna", reason="extra `search` is not installed")
    space = {"lr": (1e-4, 1e-1), "clip": (-1.0, 1.0)}
    return lambda folder="s": SharedStudy(tmp_path / folder, space, {"lr": 0.01, "clip": 2}, 0, 0.01)


def measured(trial):
    return -((np.log10(trial.params["lr"]) + 2.5) ** 2) - trial.params["clip"] ** 2


def test_many_processes_draw_what_one_draws_until_there_are_values_enough(shared):
    one, many = shared("one"), [shared("many") for _ in range(4)]
    for _ in range(12):
        with one.next_trial(12) as trial:
            one.finish(trial, measured(trial), {})
    for _ in range(3):  # all four are at work at a time, and the last to begin finishes first
        with contextlib.ExitStack() as at_work:
            taken = [(each, at_work.enter_context(each.next_trial(12))) for each in many]
            assert len({trial.number for _, trial in taken}) == 4
            for each, trial in reversed(taken):
                each.finish(trial, measured(trial), {})
    drawn = [[trial.params for trial in study.trials] for study in (one, many[0])]
    assert drawn[0][:10] == drawn[1][:10]
    assert drawn[0][10:] != drawn[1][10:]  # these are drawn from eight values by the four, from ten by the one
    with one.next_trial(12) as none, many[3].next_trial(12) as none_either:
        assert none is none_either is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_trial_of_a_killed_process_is_taken_by_another(shared):
    ours, (reads, writes) = shared(), os.pipe()
    child = os.fork()
    if not child:
        try:
            with shared().next_trial(2) as trial:
                os.write(writes, bytes([trial.number]))
                time.sleep(60)
        finally:
            os._exit(1)  # and never go on as a second pytest
    try:
        os.close(writes)
        assert os.read(reads, 1) == b"\0"
        with ours.next_trial(2) as trial:
            assert trial.number == 1  # it does not take what the other is at
            ours.finish(trial, 1.0, {})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
    before = ours.trials[0].params
    with ours.next_trial(2) as trial:
        assert trial.number == 0 and trial.params == before
        ours.finish(trial, None, {})
    assert [trial.value for trial in ours.trials] == [None, 1.0]


def test_half_a_line_of_a_power_failure_is_dropped(shared):
    study = shared()
    with study.next_trial(2) as trial:
        study.finish(trial, 1.0, {})
    journal = study.folder / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole.splitlines()[-1][:20])
    again = shared()
    assert journal.read_bytes().startswith(whole) and all(map(json.loads, journal.read_text().splitlines()))
    with again.next_trial(2) as trial:
        again.finish(trial, 2.0, {})
    assert [trial.value for trial in shared().trials] == [1.0, 2.0]


def test_no_budget_counts_accuracy_alone_unless_one_is_given(optuna, data, tmp_path):
    recipe = small(method="AViT", method_options={"target_depth": 3})
    options = {"trials": 1, "space": {"method.alpha_p": (1e-4, 1e-2)}, "holdout": 0.25, "device": "cpu"}
    free = search(recipe, data, tmp_path / "free", **options)
    assert free["value"] == free["top1"] and free["cost"] > 0.3
    bound = search(recipe, data, tmp_path / "bound", budget=0.3, budget_weight=0.1, **options)
    assert bound["top1"] == free["top1"]
    assert bound["value"] == pytest.approx(bound["top1"] - 10 * (bound["cost"] - 0.3), abs=1e-2)


def test_a_diverging_trial_is_left_behind(optuna, data, tmp_path, monkeypatch):
    make = search_module._run

    def half_diverge(recipe, data, out, device, parts):
        wild = {"lr": 1e30, "method_lr": 1e30, "clip": 0.0} if out.name == "trial-0000" else {}
        return make(dataclasses.replace(recipe, **wild), data, out, device, parts)

    monkeypatch.setattr(search_module, "_run", half_diverge)
    result = search(small(), data, tmp_path / "s", trials=2, holdout=0.25, device="cpu")
    assert result["trial"] == 1 and [row["value"] is None for row in result["trials"]] == [True, False]
    with pytest.raises(DwindleError, match="diverged in all 1 trials"):
        search(small(), data, tmp_path / "all", trials=1, holdout=0.25, device="cpu")


def test_errors_that_are_not_the_settings_fault_are_raised(optuna, data, tmp_path, monkeypatch):
    broken = tmp_path / "data"
    shutil.copytree(data, broken)
    for path in (broken / "train").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DwindleError, match="Cannot decode"):
        search(small(), str(broken), tmp_path / "s", trials=2, device="cpu")


def test_search_refuses(optuna, data, tmp_path, monkeypatch):
    out = tmp_path / "s"
    for options, message in (
        ({"trials": 0}, "at least one trial"),
        ({"budget_weight": -1.0}, "no weight < 0"),
        ({"space": {}}, "empty"),
        ({"space": {"method.lambda_p": (1.0, 0.5)}}, "no range to draw from"),
        ({"space": {"method.lambda_q": (0.1, 1.0)}}, "did you mean 'lambda_"),
        ({"space": {"method.neuron": (1, 4)}}, "neuron = 1.0: it must be a whole number"),
        ({"space": {"epochs": (1, 4)}}, "epochs = .*: it must be a whole number"),
        ({"space": {"epoch": (1, 4)}}, "did you mean 'epochs'"),
        ({"holdout": 1.5}, "Cannot hold out 1.5"),
    ):
        with pytest.raises(DwindleError, match=message):
            search(small(), data, out, device="cpu", **options)
    assert not out.exists()
    with pytest.raises(DwindleError, match="neither a share"):
        search(small(), data, out, device="cpu", budget=7)
    with pytest.raises(DwindleError, match=r"budget=7 \(now 0.5\)"):
        search(small(), data, out, device="cpu", budget=0.5)
    (out / JOURNAL).write_text("no journal\n" * 100)
    with pytest.raises(DwindleError, match=r"study\.jsonl cannot be read"):
        search(small(), data, out, device="cpu", budget=7)
    (tmp_path / "file").write_text("")
    with pytest.raises(DwindleError, match="is a file"):
        search(small(), data, tmp_path / "file", device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DwindleError, match="2 processes, and each runs trials alone"):
        search(small(), data, out, device="cpu")


def test_without_the_extra(monkeypatch, data, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(DwindleError, match=r'pip install "dwindle\[search\]"'):
        search(small(), data, tmp_path / "s")
