"""The report: its numbers against what single traces say, and a page that stands by itself."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import dwindle
from dwindle.evaluate.analysis import Stream, measure, measure_static, spread_settings, sweep
from dwindle.evaluate.bench import some_photos
from dwindle.evaluate.evaluate import evaluate
from dwindle.io.images import preprocess_of
from dwindle.io.opening import open_data
from dwindle.methods.dynamicvit import DynamicViT
from dwindle.show import drawing, report
from dwindle.show import figures as charts
from dwindle.show.figures import read_metrics
from shared.tiny import METHODS, build

CLASSES = ("0 ant", "1 b<e>e", "2 $cat", "3 dog", "4 eel")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Thirty images between flat and noisy, so that they differ in cost; most labels are what the tiny AHT says."""
    root, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    model = build("vit", METHODS["AHT"]())
    for name in CLASSES:
        (root / "val" / name).mkdir(parents=True)
    for i in range(30):
        pixels = generator.normal(generator.uniform(0, 255, 3), 5 + 6 * i, (40, 36, 3)).clip(0, 255)
        image = Image.fromarray(pixels.astype(np.uint8))
        with torch.inference_mode():
            said = int(model(preprocess_of(model).eval_transform()(image)[None]).logits.argmax())
        image.save(root / "val" / CLASSES[i if i < 5 else said] / f"{i}.png")
    return str(root)


def checkpoint(folder, method="AHT", **extra):
    """A tiny model, saved with `extra` as a run would save it."""
    return dwindle.save(build("vit", METHODS[method]()), folder, extra=extra)


def stream(data, batch=7):
    return Stream(open_data(data, "test"), batch, "cpu")


def whole(model, images):
    """All images as one batch, and what the model makes of it."""
    transform = preprocess_of(model).eval_transform()
    with torch.inference_mode():
        return model(torch.stack([transform(images.image(i)) for i in range(len(images))]))


def metrics(folder, text):
    (folder / "metrics.csv").write_text(text)


@pytest.mark.parametrize("method", ["AHT", "AViT", "Static"])
def test_sums_over_batches_are_those_of_one_trace(data, method):
    model, images = build("vit", METHODS[method]()), open_data(data, "test")
    seen, one = measure(model, stream(data)), whole(model, images)
    trace = one.trace
    np.testing.assert_allclose(seen.depth, trace.mean_depth, rtol=1e-6)
    np.testing.assert_allclose(seen.gmacs, model.macs(trace) / 1e9, rtol=1e-9)
    np.testing.assert_allclose(seen.patches, trace.patches.double().mean(0), rtol=1e-9)
    assert seen.stops.tolist() == [int((trace.depth == block).sum()) for block in range(1, 5)]
    np.testing.assert_array_equal(seen.top1, one.logits.argmax(-1).numpy() == images.labels)
    assert seen.top5.all()  # there are five classes
    images.transform = preprocess_of(model).eval_transform()
    batch = torch.stack([images[i][0] for i in range(len(images))])
    expected = evaluate(model, [(batch, torch.tensor(images.labels))])
    assert round(100 * seen.top1.mean(), 3) == expected["top1"] and round(seen.gmacs.mean(), 4) == expected["gmacs"]
    if method == "Static":
        assert seen.scores is None
    else:
        for block in range(4):
            for i in range(len(images)):
                live = trace.live[block, i]
                mean = trace.scores[block, i][live].mean().item()  # NaN where nobody is left
                np.testing.assert_allclose(seen.scores[block, i], mean, rtol=1e-5)


def test_a_block_without_scores_has_none(data):
    seen = measure(build("vit", DynamicViT(stages=(1, 3))), stream(data))
    assert np.isnan(seen.scores).all(1).tolist() == [False, True, False, True]


def test_static_is_the_model_with_nothing_halted(data):
    model = build("vit", METHODS["AHT"]())
    off = build("vit", dwindle.AHT(stages=(1, 2), beta=-1e9))
    images = open_data(data, "test")
    base = measure_static(model, "itself", stream(data))
    np.testing.assert_array_equal(base.top1, whole(off, images).logits.argmax(-1).numpy() == images.labels)
    assert base.gmacs == model.static_macs() / 1e9


def test_photos_to_bench_are_drawn_with_one_seed(data):
    model, images = build("vit", METHODS["AHT"]()), open_data(data, "test")
    photos, transform = some_photos(model, data, 4), preprocess_of(model).eval_transform()
    drawn = np.random.default_rng(0).permutation(30)[:4]
    assert torch.equal(photos, torch.stack([transform(images.image(i)) for i in drawn]))


def test_score_boxes_are_quartiles_of_the_images():
    scores = np.random.default_rng(0).random((3, 50))
    scores[2, 10:] = np.nan  # most images had nobody left
    axis = charts.score_boxes(scores).axes[0]
    boxes = [patch.get_path().vertices[:, 1] for patch in axis.patches]
    for row, box in zip(scores, boxes):
        quartiles = np.nanpercentile(row, [25, 75])
        np.testing.assert_allclose([box.min(), box.max()], quartiles)
    medians = [line.get_ydata()[0] for line in axis.lines if line.get_color() == "black" and len(line.get_ydata()) == 2]
    for row in scores:
        assert any(np.isclose(np.nanmedian(row), median) for median in medians)
    charts.score_boxes(np.stack([scores[0], np.full(50, np.nan)]))  # a block nobody reached


def test_depth_map_and_exits_show_the_numbers():
    mean = np.array([[1.0, 2.5, 4.0], [3.0, 3.0, 2.0]])
    axis = charts.depth_map(mean, 4, 9).axes[0]
    np.testing.assert_allclose(axis.images[0].get_array(), drawing.depth_colours(4).to_rgba(mean))
    assert axis.get_title() == "mean depth over 9 images: 1.0 to 4.0"
    bars = charts.exits(np.array([1, 0, 3, 4])).axes[0].patches
    assert [bar.get_height() for bar in bars] == [12.5, 0, 37.5, 50]


def test_easiest_and_hardest_are_right_and_ordered_by_depth():
    depth = np.array([5.0, 1.0, 3.0, 2.0, 9.0, 4.0])
    right = np.array([True, False, True, True, False, True])
    easy, hard = charts.easiest_and_hardest(right, depth, 2)
    assert easy.tolist() == [3, 2] and hard.tolist() == [0, 5]
    easy, hard = charts.easiest_and_hardest(right, depth, 6)  # fewer than asked for: none in both
    assert easy.tolist() == [3, 2] and hard.tolist() == [0, 5]
    assert not len(charts.easiest_and_hardest(~right & (depth > 5), depth, 2)[0])


def test_examples_are_veiled_by_their_own_depths():
    photo, names = np.full((8, 8, 3), 100, dtype=np.uint8), ["50 $ $ note", "b", "a name much too long to print"]
    patches = [np.array([[1, 4], [4, 4]]), np.array([[2, 2], [2, 2]]), np.array([[4, 4], [4, 4]])]
    easy, *hard = [charts.Example(photo, p, name, p.mean()) for p, name in zip(patches, names)]
    figure = charts.easy_and_hard([easy], hard, 4)
    figure.savefig("/dev/null", format="png")
    shown = [axis.images[0].get_array() for axis in figure.axes if axis.images]
    for drawn, depths in zip((shown[1], *shown[4:]), patches):
        np.testing.assert_allclose(drawn, drawing.veil(photo, depths, 4))
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["50 $ $ note\ndepth 3.2", "b\ndepth 2.0", "a name much too long …\ndepth 4.0"]


def test_class_changes_by_hand():
    labels = np.array([0, 0, 0, 0, 1, 1, 2, 2, 3])
    static = np.array([1, 1, 0, 0, 1, 1, 0, 0, 1], dtype=bool)
    adaptive = np.array([1, 0, 1, 1, 0, 0, 0, 1, 0], dtype=bool)
    changes = charts.class_changes(labels, adaptive, static)
    rows = [(c.label, c.images, c.static, c.adaptive, c.gained, c.lost) for c in changes]
    assert rows == [
        (1, 2, 100.0, 0.0, 0, 2),  # as much hurt as 3, on more images
        (3, 1, 100.0, 0.0, 0, 1),
        (0, 4, 50.0, 75.0, 2, 1),
        (2, 2, 0.0, 50.0, 1, 0),
    ]
    assert not any(change.beyond_chance for change in changes)
    many = np.zeros(20, dtype=int)
    assert charts.class_changes(many, many == 0, many == 1)[0].beyond_chance


def test_cost_groups_by_hand():
    gmacs = np.array([4.0, 1.0, 3.0, 2.0, 5.0])
    adaptive, static = np.array([1, 1, 0, 1, 0], dtype=bool), np.array([1, 1, 1, 0, 0], dtype=bool)
    groups = charts.cost_groups(gmacs, adaptive, static, 2)
    assert [(g.gmacs, g.images) for g in groups] == [(2.0, 3), (4.5, 2)]
    assert [g.adaptive for g in groups] == pytest.approx([200 / 3, 50])
    assert [g.static for g in groups] == pytest.approx([200 / 3, 50])
    assert len(charts.cost_groups(gmacs, adaptive, static, 9)) == 5
    axis = charts.accuracy_by_cost(groups).axes[0]
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([200 / 3, 50])


def test_settings_spread_evenly_over_the_cost():
    def cost(value):
        return 1 / (1 + np.exp(-40 * (value - 0.1)))  # all of it happens in a corner of the range

    settings = spread_settings(cost, 4.0, -4.0, 5, 24)
    costs = [cost(value) for value in settings]
    assert costs == sorted(costs) and len(costs) == 5
    np.testing.assert_allclose(costs, np.linspace(0, 1, 5), atol=0.1)
    steps = spread_settings(lambda value: float(value > 1), 0.0, 2.0, 7, 60)  # a jump is not searched for ever
    assert [value > 1 for value in steps] == [False, True]


@pytest.mark.parametrize("method", ["AHT", "AViT"])
def test_dial_runs_from_cheap_to_dear_and_is_put_back(data, method):
    model = build("vit", METHODS[method]())
    before = model.method.config, {name: value.clone() for name, value in model.state_dict().items()}
    rows = np.array([3, 0, 12, 19, 8, 5])
    trained, *points = sweep(model, stream(data, batch=4), rows, model.method.operating_point)
    assert model.method.config == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    images = open_data(data, "test").select(rows)
    one = whole(model, images)
    assert trained["gmacs"] == pytest.approx(model.macs(one.trace).mean().item() / 1e9)
    assert trained["top1"] == pytest.approx(100 * (one.logits.argmax(-1).numpy() == images.labels).mean())
    costs = [point["gmacs"] for point in points]
    assert costs == sorted(costs) and costs[0] < 0.97 * costs[-1]


def test_curves_overlay_runs_and_leave_out_epochs_without_a_value(tmp_path):
    metrics(tmp_path, "epoch,task,cost,top1\n1,2.0,1.0,\n2,1.5,0.8,40\n3,1.0,0.7,50\n")
    ours = read_metrics(tmp_path)
    other = {"epoch": np.array([1.0, 2.0]), "task": np.array([3.0, 2.0])}
    figure = charts.training_curves({"a $ b $": ours, "_other": other})
    figure.savefig("/dev/null", format="png")
    task, top1, cost = figure.axes
    assert [line.get_ydata().tolist() for line in task.lines] == [[2.0, 1.5, 1.0], [3.0, 2.0]]
    assert [line.get_xdata().tolist() for line in top1.lines] == [[2.0, 3.0], []]
    np.testing.assert_allclose(cost.lines[0].get_ydata(), [100, 80, 70])
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == ["a $ b $", "_other"]
    assert read_metrics(tmp_path / "none") is None
    for useless in ("", "epoch,lr\n1,0.1\n", "epoch,task\n1,\n"):
        metrics(tmp_path, useless)
        assert read_metrics(tmp_path) is None
    metrics(tmp_path, "epoch,task\n1,lots\n")
    with pytest.raises(dwindle.DwindleError, match="more than numbers"):
        read_metrics(tmp_path)


def test_page_stands_by_itself(data, tmp_path):
    run = checkpoint(tmp_path / "r<u>n", data={"train": "nowhere", "eval": data}, classes=list(CLASSES))
    static = checkpoint(tmp_path / "static", "Static")
    for folder in (run, static):
        metrics(folder, "epoch,task,cost,top1\n1,2.0,1.0,30\n2,1.5,0.8,40\n")
    ticks = []
    result = report.report(
        run, tmp_path / "out", compare_with=[static], batch=8, progress=lambda *tick: ticks.append(tick)
    )
    html = (tmp_path / "out" / "index.html").read_text()
    assert json.loads(json.dumps(result))["page"] == str(tmp_path / "out" / "index.html")
    names = [
        "depth_map",
        "exits",
        "scores",
        "easy_and_hard",
        "accuracy_by_cost",
        "training",
        "operating_point",
        "threshold",
    ]
    assert result["figures"] == [str(tmp_path / "out" / f"{name}.png") for name in names]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(["index.html", *(f"{n}.png" for n in names)])
    assert result["left_out"] == {}
    sources = re.findall(r'(?:src|href)="([^"]{0,22})', html)
    assert sources == ["data:image/png;base64,"] * len(names)
    assert not re.search(r"<(script|link|iframe)|@import|url\(", html)
    assert html.count('alt="') == len(names) and 'alt=""' not in html
    assert "r&lt;u&gt;n" in html and "<u>" not in html and "<e>" not in html
    assert "the static run static" in html and "prefers-color-scheme: dark" in html
    assert ticks[0] == ("measuring", 8, 30) and ticks[-1][1:] == (30, 30)

    model = dwindle.load(run)
    seen, base = measure(model, stream(data)), measure_static(dwindle.load(static), "", stream(data))
    assert result["top1"] == round(100 * seen.top1.mean(), 3)
    assert result["top1_static"] == round(100 * base.top1.mean(), 3)
    assert result["depth"] == round(float(seen.depth.mean()), 3) and result["images"] == 30
    changed = [label for label in range(5) if (seen.top1 ^ base.top1)[seen.labels == label].any()]
    rows = (*result["helped"], *result["hurt"])
    assert rows and {row["label"] for row in rows} <= set(changed)
    for row in rows:
        mine = seen.labels == row["label"]
        difference = 100 * (seen.top1[mine].mean() - base.top1[mine].mean())
        assert row["adaptive"] - row["static"] == pytest.approx(difference) and row["class"] == CLASSES[row["label"]]
    right = [int(i) for i in np.flatnonzero(seen.top1)]
    assert set(result["easy"] + result["hard"]) <= set(right) and len(result["easy"]) == 6
    assert max(seen.depth[result["easy"]]) <= min(seen.depth[i] for i in right if i not in result["easy"])
    assert min(seen.depth[result["hard"]]) >= max(seen.depth[i] for i in right if i not in result["hard"])


def test_what_does_not_apply_is_said_and_left_out(data, tmp_path):
    run = checkpoint(tmp_path / "static", "Static")
    result = report.report(run, tmp_path / "out", data=data, limit=10)
    assert [name.rpartition("/")[2] for name in result["figures"]] == ["depth_map.png", "exits.png"]
    assert len(result["left_out"]) == 6 and result["images"] == 10
    html = (tmp_path / "out" / "index.html").read_text()
    assert "no metrics.csv" in html and "nothing to turn" in html and "the first 10 images" in html
    assert result["gmacs"] == result["gmacs_static"] and result["depth"] == 4


def test_mistakes_are_named(data, tmp_path):
    run, taken = checkpoint(tmp_path / "run"), tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        with pytest.raises(dwindle.DwindleError, match="is a file; choose another"):
            report.report(run, out, data=data)
    out = tmp_path / "out"
    with pytest.raises(dwindle.DwindleError, match="--data"):
        report.report(run, out)
    with pytest.raises(dwindle.DwindleError, match="Unknown checkpoint"):
        report.report(str(tmp_path / "no" / "run"), out, data=data)
    with pytest.raises(dwindle.DwindleError, match=r"no config\.json"):
        report.report(run, out, data=data, compare_with=tmp_path)
    with pytest.raises(dwindle.DwindleError, match="at least 1"):
        report.report(run, out, data=data, batch=0)
    with pytest.raises(dwindle.DwindleError, match="positive number"):
        report.report(run, out, data=data, limit=0)
    for label in range(6):
        (tmp_path / "six" / "val" / str(label)).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "six" / "val" / str(label) / "a.png")
    with pytest.raises(dwindle.DwindleError, match=r"by number 6 of .*six.* cannot be the 5 of the model"):
        report.report(run, out, data=str(tmp_path / "six"))
    assert not out.exists()
