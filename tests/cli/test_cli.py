"""The command line: its frozen surface, the JSON each command ends with, and one sentence for each bad input."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

import dwindle
from dwindle.cli.main import command_of, help_texts
from shared.checkpoint import edit
from shared.command import refused, run


def photo(seed: int, size: tuple[int, int] = (32, 32)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def dataset(folder: Path, classes: str) -> None:
    for split, count in (("train", 4), ("val", 2)):
        for word in classes:
            (folder / split / word).mkdir(parents=True)
            for i in range(count):
                photo(ord(word) + i).save(folder / split / word / f"{i}.png")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads on two cores that others use too wait for each other, for seconds at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Folders by name: good and bad data, images, and checkpoints. Tests leave them as they are."""
    root = tmp_path_factory.mktemp("cli")
    made = {name: root / name for name in ("data", "other", "broken", "empty", "img", "run", "static", "nan")}
    for name, classes in (("data", "abc"), ("other", "xyz"), ("broken", "abc")):
        dataset(made[name], classes)
    made["empty"].mkdir()
    (img := made["img"]).mkdir()
    photo(0).save(img / "good.png")
    whole = (img / "good.png").read_bytes()
    (img / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (img / "corrupt.png").write_bytes(whole[:60] + bytes(100) + whole[160:])
    (img / "text.png").write_text("not an image")
    photo(1).convert("L").save(img / "grey.png")
    photo(2).convert("RGBA").save(img / "rgba.png")
    photo(3).convert("CMYK").save(img / "cmyk.jpg")
    photo(4, (7, 300)).save(img / "oblong.png")
    for split in ("train", "val"):
        shutil.copy(img / "truncated.png", made["broken"] / split / "b" / "0.png")

    done = run("train tiny_test --data {data} --out {run} {tiny}", **made)
    (root / "train.json").write_text(json.dumps(done.json))
    vit = timm.create_model("test_vit", num_classes=3, img_size=32)
    dwindle.save(dwindle.adapt(vit, dwindle.Static()), made["static"])
    weights = safetensors.torch.load_file(made["run"] / "model.safetensors")
    copy_checkpoint(made["run"], made["nan"])
    safetensors.torch.save_file({n: w * float("nan") for n, w in weights.items()}, made["nan"] / "model.safetensors")
    return made | {"root": root}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder, where the default places of output lie too."""
    monkeypatch.delenv("DWINDLE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copy_checkpoint(source: Path, to: Path) -> None:
    to.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, to / name)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def test_commands_and_flags_are_frozen():
    found = {
        name: [p.opts[0] if p.param_type_name == "option" else p.name.upper() for p in command_of(name, text).params]
        for name, text in help_texts().items()
    }
    wanted: dict[str, list[str]] = {
        "demo": ["--out", "--device"],
        "train": [
            *("RECIPE", "--data", "--preset", "--model", "--method", "--budget", "--epochs", "--weights", "--out"),
            *("--eval-data", "--set", "--resume", "--limit", "--holdout", "--skip-corrupt", "--device"),
        ],
        "compare": [
            *("COMPARISON", "--data", "--preset", "--source", "--out", "--results", "--eval-data", "--only", "--set"),
            *("--until", "--limit", "--device"),
        ],
        "search": [
            *("RECIPE", "--data", "--out", "--preset", "--trials", "--space", "--budget", "--holdout", "--set"),
            *("--limit", "--device"),
        ],
        "fit": [
            *("MODEL", "--data", "--budget", "--out", "--method", "--learns", "--epochs", "--minutes", "--eval-data"),
            *("--weights", "--image-size", "--batch", "--set", "--resume", "--limit", "--device"),
        ],
        "fidelity": [
            *("MODEL", "--data", "--patch-cosine", "--class-cosine", "--confidence", "--certainty", "--out"),
            *("--against", "--weights", "--image-size", "--method", "--budget", "--batch", "--limit", "--workers"),
            *("--device", "--dtype"),
        ],
        "speedup": [
            *("MODEL", "--data", "--max-drop", "--patch-cosine", "--class-cosine", "--out", "--budgets", "--batch"),
            *("--limit", "--seconds", "--weights", "--image-size", "--device", "--dtype"),
        ],
        "embed": [
            *("MODEL", "--data", "--out", "--patches", "--weights", "--image-size", "--method", "--budget"),
            *("--batch", "--workers", "--limit", "--device", "--dtype"),
        ],
        "serve": ["CHECKPOINT", "--host", "--port", "--device", "--dtype", "--allow-host"],
        "methods": [],
        "eval": [
            *("CHECKPOINT", "--data", "--layout", "--threshold", "--batch", "--limit", "--workers", "--holdout"),
            *("--skip-corrupt", "--device", "--dtype", "--tau", "--tokens", "--depth", "--width", "--exit"),
            *("--exits", "--policy", "--rivals", "--context"),
        ],
        "bench": [
            *("MODEL", "--batch", "--fraction", "--dtype", "--seconds", "--static", "--data", "--device"),
            *("--generate", "--exit", "--exits", "--context"),
        ],
        "view": ["CHECKPOINT", "IMAGES", "--out", "--threshold", "--device", "--tau"],
        "report": ["RUN", "--out", "--data", "--against", "--limit", "--batch", "--device"],
        "export": ["CHECKPOINT", "--to", "--out", "--budget", "--seconds"],
        "quantize": ["CHECKPOINT", "--out", "--data", "--budget", "--limit", "--batch", "--seconds"],
        "predict": ["CHECKPOINT", "--data", "--out", "--batch", "--workers", "--limit", "--device", "--dtype"],
        "routing": ["CHECKPOINT", "--data", "--tau", "--batch", "--limit", "--context", "--device"],
        "calibrate": ["CHECKPOINT", "--out", "--loss", "--data", "--batch", "--limit", "--context", "--device"],
        "generate": ["CHECKPOINT", "--prompt", "--length", "--temperature", "--top-k", "--seed", "--tau", "--device"],
        "grid": [
            *("CHECKPOINT", "--data", "--out", "--between", "--seconds", "--dtype", "--batch", "--limit", "--device"),
        ],
        "policies": [
            *("CHECKPOINT", "--data", "--thresholds", "--prices", "--exits", "--epochs", "--out", "--batch"),
            *("--limit", "--device"),
        ],
    }
    assert {name: set(params) for name, params in found.items()} == {n: set(params) for n, params in wanted.items()}
    for name, params in wanted.items():
        assert found[name][: sum(map(str.isupper, params))] == [word for word in params if word.isupper()]
        done = run(f"{name} --help")
        assert done.code == 0
        assert all(flag in done.out for flag in found[name] if flag.startswith("--"))


def test_version_as_a_process():
    line = [sys.executable, "-c", "from dwindle.cli.main import main; main()", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dwindle {dwindle.__version__}\n", "")


@pytest.mark.parametrize(
    "line, said",
    [
        ("nonsense", "nonsense"),
        ("eval {run}", "--data"),
        ("eval {run} --data {data} --batch abc", "--batch"),
        ("view {run}", "images"),
        ("bench test_vit --nonsense", "--nonsense"),
    ],
)
def test_usage(line, said, places, here):
    done = run(line, **places)
    assert done.code == 2 and done.out == "" and said in done.err.lower() and "Traceback" not in done.err


def test_demo(here, monkeypatch):
    def once(calls, seconds, device):
        for call in calls:
            call()
        return [[3.0], [2.0]]

    monkeypatch.setattr("dwindle.show.demo.milliseconds", once)
    result = run("demo --out figures --device cpu").json
    assert {"images", "gmacs", "gmacs_static", "speedup", "figures"} <= result.keys()
    assert len(result["images"]) >= 4 and result["speedup"] == 1.5
    for image in result["images"]:
        assert {"image", "label", "confidence", "depth", "gmacs"} <= image.keys()
        assert isinstance(image["label"], str) and 0 < image["confidence"] <= 1
    assert sorted(result["figures"]) == sorted(str(p) for p in Path("figures").iterdir())
    assert 0 < result["gmacs"] < result["gmacs_static"] == pytest.approx(1.26, abs=0.01)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "images_per_s"} for row in csv.DictReader(file)]


def test_train(places):
    result = json.loads((places["root"] / "train.json").read_text())
    assert result["out"] == str(places["run"]) and result["epoch"] == 2
    assert {"top1", "gmacs", "gmacs_static", "total", "task", "cost"} <= result.keys()
    assert [row["epoch"] for row in rows_of(places["run"])] == ["1", "2"]
    assert not [p.name for p in places["run"].iterdir() if p.name.startswith(".")]
    model = dwindle.load(places["run"])
    assert type(model.method).__name__ == "AHT" and model.method.stages == (2, 4)
    assert model.backbone.shape.classes == 3 and model.backbone.shape.image == (32, 32)


def test_set_changes_what_is_trained(places, here):
    # Level 10 of RandAugment reaches the ends of every operation's range.
    more = "--set augment=rand-m10-n8-p1-inc1 --set method.threshold=2.0 --set ema=0.5 --set epochs=1 --limit 8"
    result = run(f"train tiny_test --data {{data}} --out run {{tiny}} {more}", **places).json
    assert result["epoch"] == 1 and result["images"] == 6
    config = json.loads(Path("run/config.json").read_text())
    assert config["extra"]["recipe"]["ema"] == 0.5 and config["extra"]["recipe"]["epochs"] == 1
    assert config["extra"]["recipe"]["method_options"]["threshold"] == 2.0


def test_stopped_run_resumes_to_the_same_end(places, here, monkeypatch):
    from dwindle.train.loop import Run

    train_epoch = Run._train_epoch

    def stopped(self, tick):
        if self.epoch == 1:
            raise KeyboardInterrupt
        return train_epoch(self, tick)

    line = "train tiny_test --data {data} --out run {tiny}"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_train_epoch", stopped)
        assert run(line, **places).code == 130
    assert len(rows_of(Path("run"))) == 1
    assert run(f"{line} --resume", **places).json["epoch"] == 2
    assert rows_of(Path("run")) == rows_of(places["run"])
    ours, theirs = (safetensors.torch.load_file(at / "model.safetensors") for at in (Path("run"), places["run"]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert run(f"{line} --resume", **places).json["epoch"] == 2  # nothing left to do is no mistake


def test_a_run_killed_before_its_first_save_begins_again(places, here, monkeypatch):
    from dwindle.train.loop import Run

    def stopped(self, tick):
        raise KeyboardInterrupt

    line = "train tiny_test --data {data} --out run {tiny}"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_train_epoch", stopped)
        assert run(line, **places).code == 130
    done = run(f"{line} --resume", **places)
    assert done.json["epoch"] == 2 and "from the start" in done.err
    Path("other", "run").mkdir(parents=True)
    refused(run("train tiny_test --data {data} --out other {tiny} --resume", **places), "no run to resume")
    assert rows_of(Path("run")) == rows_of(places["run"])


def test_eval(places, here):
    packed = run("eval {run} --data {data} --device cpu", **places).json
    numbers = {"top1", "top5", "gmacs", "gmacs_static", "depth", "images", "images_per_s"}
    matched = {"on", "matched", "classes", "classes_data", "classes_model", "images_left_out"}
    assert set(packed) == numbers | matched
    assert packed["on"] == f"split val of {places['data']}: 6 images" and packed["matched"] == "by name"
    masked = run("eval {run} --data {data} --layout masked --workers 0", **places).json
    assert packed["images"] == 6 and all(masked[k] == packed[k] for k in packed if k != "images_per_s")
    assert run("eval {run} --data {data} --workers 0 --limit 4 --batch 3", **places).json["images"] == 4
    low, high = (run(f"eval {{run}} --data {{data}} --workers 0 --threshold {t}", **places).json for t in (0.1, 9))
    assert low["depth"] < high["depth"] and low["gmacs"] < high["gmacs"]


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_skipped_counted_and_listed(places, here, workers):
    done = run(f"eval {{run}} --data {{broken}} --skip-corrupt --workers {workers} --device cpu", **places)
    assert done.json["images"] == 5 and done.json["corrupt"] == 1 and done.json["on"].endswith("5 images")
    assert done.err.count("0.png") == 2 and "skipped b/0.png: Cannot decode" in done.err  # its name, and its path
    line = f"train tiny_test --data {{broken}} --out run {{tiny}} --skip-corrupt --set workers={workers}"
    told = run(line, **places).json
    assert told["images"] == 5 and told["corrupt"] == told["corrupt_training"] == 1
    listed = [json.loads(text) for text in Path("run/corrupt.jsonl").read_text().splitlines()]
    assert [row["image"] for row in listed] == ["b/0.png"] * 2 and all("truncated" in row["reason"] for row in listed)
    assert "val/b" in listed[1]["reason"] and "train/b" in listed[0]["reason"]


def test_a_folder_without_splits_is_not_evaluated_on_what_it_trains_on(places, here):
    plain = places["root"] / "plain"
    if not plain.exists():
        shutil.copytree(places["data"] / "train", plain)
    told = run(f"train tiny_test --data {plain} --out run {{tiny}}", **places).json
    assert told["on"] == f"10% held out of {plain} by seed 0: 1 images" and told["images"] == 1
    assert told["on"] in Path("run/README.md").read_text()
    again = run(f"eval run --data {plain} --workers 0", **places).json
    assert again["on"] == told["on"] and again["top1"] == told["top1"]
    whole = run(f"eval run --data {plain} --workers 0 --holdout 0", **places).json
    assert whole["images"] == 12 and whole["on"].startswith(f"all of {plain}, images it was trained on among them: 12")
    third = run(f"train tiny_test --data {plain} --out third {{tiny}} --holdout 0.34", **places).json
    assert third["images"] == 4 and third["on"].startswith("34% held out")


@pytest.mark.parametrize("model", ["{run}", "test_vit"])
def test_bench(model, places):
    result = run(f"bench {model} --batch 1,2 --fraction 1.0,0.6 --seconds 0 --device cpu", **places).json
    assert {"rows", "device", "torch"} <= result.keys()
    assert [(row["batch"], row["fraction"]) for row in result["rows"]] == [(1, 1.0), (1, 0.6), (2, 1.0), (2, 0.6)]
    for row in result["rows"]:
        assert min(row[name] for name in ("adaptive_ms", "speedup")) > 0 and row["engine"] == "packed"
        assert min(row["static_ms"].values()) > 0 and row["best"] in row["static_ms"]


def test_quantize_writes_what_the_others_take(places, here):
    result = run("quantize {run} --out small --data {data} --seconds 0.01", **places).json
    assert 0 < result["bytes"] < 2 * result["bytes_float"] and 0 <= result["same_answers"] <= 1
    assert result["int8"]["images"] == result["float"]["images"] == 6
    assert [row["batch"] for row in result["speed"]] == [1, 8] and result["speed"][0]["speedup"] > 0
    assert run("eval small --data {data} --workers 0", **places).json["top1"] == result["int8"]["top1"]
    assert run("bench small --batch 1 --fraction 0.6 --seconds 0 --device cpu").json["dtype"] == "int8"
    assert run("bench {run} --dtype int8 --batch 1 --fraction 0.6 --seconds 0 --device cpu", **places).json["rows"]
    assert run("predict small --data {data} --out p.parquet --workers 0 --device cpu", **places).json["rows"] == 6
    refused(run("quantize small --out again"), "already")
    refused(run("export small --to onnx --out small.onnx"), "int8")


@pytest.mark.usefixtures("bf16_on_cpu")
def test_bf16_on_a_cpu(places, here):
    whole = run("eval {run} --data {data} --workers 0 --device cpu", **places).json
    half = run("eval {run} --data {data} --workers 0 --device cpu --dtype bf16", **places).json
    assert half["images"] == 6 and half["gmacs"] == pytest.approx(whole["gmacs"], rel=0.1)
    assert run("bench {run} --dtype bf16 --batch 1 --fraction 0.6 --seconds 0 --device cpu", **places).json["rows"]
    line = "predict {run} --data {data} --out p.parquet --workers 0 --device cpu"
    assert run(line + " --dtype bf16", **places).json["rows"] == 6
    refused(run(line, **places), "holds something else")  # answers of two formats never meet in one file
    run("quantize {run} --out small", **places)
    refused(run("eval small --data {data} --device cpu --dtype bf16", **places), "in int8")


def test_a_cpu_without_bf16_says_so(places, here, monkeypatch):
    monkeypatch.setattr("dwindle.ops.half.cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    for line in (
        "eval {run} --data {data}",
        "predict {run} --data {data} --out p.parquet",
        "bench {run}",
        "serve {run}",
    ):
        refused(run(line + " --dtype bf16 --device cpu", **places), "this CPU has no instructions to multiply in bf16")


def test_view_takes_any_kind_of_image(places, here):
    names = ["grey.png", "rgba.png", "cmyk.jpg", "oblong.png"]
    result = run("view {run} " + " ".join(f"{{img}}/{n}" for n in names) + " --out figures", **places).json
    assert [image["image"] for image in result["images"]] == names
    assert {image["label"] for image in result["images"]} <= set("abc")
    assert sorted(result["figures"]) == sorted(str(p) for p in Path("figures").iterdir())


def test_methods():
    rows = run("methods").json["methods"]
    assert {"AHT", "AViT", "Static"} <= {row["name"] for row in rows}
    assert all({"name", "paper", "about", "settings"} <= row.keys() for row in rows)


def test_names_are_not_markup(places, here):
    Path("a[").mkdir()
    Path("a[/b] c").symlink_to(places["data"])
    assert run("eval {run} --data {odd} --workers 0", **places, odd="a[/b] c").json["images"] == 6
    refused(run("view {run} {odd}", **places, odd="[red]none.png"), "'[red]none.png'")
    refused(run("eval {odd} --data {data}", **places, odd="x\\[/b]:fire:"), "x\\[/b]:fire:")
    Path(os.fsdecode(b"\xff.png")).write_bytes((next(places["img"].glob("*.png"))).read_bytes())
    assert run("view {run} {odd} --out seen", **places, odd=os.fsdecode(b"\xff.png")).code == 0


# Bad input: a command and what its message must name

BAD = {
    "view {run} {img}/corrupt.png": "corrupt.png",
    "view {run} {img}/good.png {img}/truncated.png": "truncated.png",
    "view {run} {img}/none.png": "none.png",
    "view {run} {img}/text.png": "text.png",
    "view {run} {img}": "img",
    "view {nan} {img}/good.png": "nan",
    "view {run} {img}/good.png --threshold 0": "--threshold",
    "view {run} {img}/good.png --out {img}/text.png": "text.png",
    "view {run} {img}/good.png --out {img}/text.png/sub": "text.png",
    "eval {run} --data {data} --layout packd": "'packed'",
    "eval {run} --data {data} --device cude": "'cuda'",
    "eval {run} --data {data} --device cpu:abc": "cpu:abc",
    "eval {run} --data {data} --threshold -1": "--threshold",
    "eval {static} --data {data} --threshold 1": "Static",
    "eval {run} --data {data} --tau 0.5": "--tau",
    "view {run} {img}/good.png --tau 0.5": "--tau",
    "bench {run} --fraction 0.01": "fraction",
    "bench {run} --seconds -1": "--seconds",
    "export {run} --to onnx --out new.onnx --seconds -1": "--seconds",
    "quantize {run} --out new --seconds -1": "--seconds",
    "quantize aht_deit_tiny_imagenet --out new --budget 0.001": "cannot be met",
    "search tsa_tiny_test --data {data} --out new": "tsa_tiny_test",
    "search ada_tiny_test --data {data} --out new": "ada_tiny_test",
    "eval {run} --data {data} --batch 0": "--batch",
    "eval {run} --data {data} --limit 0": "--limit",
    "eval {run} --data {data} --workers -1": "workers",
    "eval tsa_shakespeare --batch 99999999999999999999999": "--batch",
    "bench {run} --batch 99999999999999999999999": "--batch",
    "export {run} --to torch-export --out e.pt2 --seconds inf": "--seconds",
    "quantize {run} --out q --seconds nan": "--seconds",
    "eval {run} --data {data} --workers 99999999999": "workers",  # so many processes would take all memory
    "eval {run} --data {data} --workers 0 --batch 99999999999999999999": "batch",
    "predict {run} --data {data} --out p.parquet --workers 99999999999": "workers",
    "eval {run} --data cifar10": "'cifar100'",
    "eval {run} --data cifar100": "DWINDLE_DATA",
    "eval {run} --data owner/nope": "owner/nope",
    "eval {run} --data {img}/text.png": "text.png",
    "eval {run} --data {empty}": "empty",
    "eval {run} --data {other}": "has none of the classes of the model: it has 'x', 'y', 'z', the model 'a', 'b', 'c'",
    "eval {run} --data {data} --holdout 0.1": "has a val split",
    "eval {run} --data {data} --holdout 1": "--holdout",
    "eval {run} --data {broken} --workers 0": "0.png': image file is truncated; replace or remove it; --skip-corrupt",
    "eval {run} --data {broken} --workers 2": "0.png': image file is truncated; replace or remove it; --skip-corrupt",
    "eval {nan} --data {data} --workers 0": "nan",
    "eval nope --data {data}": "nope",
    "eval aht_deit_tiny --data {data}": "'aht_deit_tiny_imagenet'",
    "eval owner/nope --data {data}": "owner/nope",
    "eval {img}/text.png --data {data}": "text.png",
    "eval {data} --data {data}": "config.json",
    "bench deit_smal_patch16_224": "'deit_small_patch16_224'",
    "bench resnet18": "resnet",
    "bench {run} --batch 0": "--batch",
    "bench {run} --batch abc": "--batch",
    "bench {run} --fraction 2": "fraction",
    "bench {run} --dtype fp33": "'fp32'",
    "bench {run} --device tpu": "'cpu'",
    "bench {run} --dtype int9": "'int8'",
    "eval {run} --data {data} --dtype int8": "known: bf16, fp16, fp32",
    "eval tsa_shakespeare --dtype bf16": "--dtype bf16 is for vision transformers",
    "predict {run} --data {data} --out new.parquet --dtype fp33": "'fp32'",
    "serve {run} --dtype fp33": "'fp32'",
    "bench tsa_shakespeare --dtype int8": "fp32",
    "quantize nowhere --out new": "nowhere",
    "quantize tsa_shakespeare --out new": "is a language model",
    "quantize {run} --out {img}/text.png": "text.png",
    "quantize {run} --out new --data {empty}": "empty",
    "quantize {run} --out new --data {other}": "none of the classes",
    "quantize {run} --out new --batch 0": "--batch",
    "quantize {run} --out new --limit 0": "--limit",
    "quantize {run} --out new --budget 2": "budget",
    "bench tsa_shakespeare --data {data}": "is a folder",
    "export tsa_shakespeare --to onnx --out new.onnx": "is a language model",
    "predict tsa_shakespeare --data {data} --out new.parquet": "is a language model",
    "serve tsa_shakespeare": "is a language model",
    "train tiny_test --data {data} --out new --set teacher=tsa_shakespeare": "is a language model",
    "demo --out {img}/text.png": "text.png",
    "train tiny_tst --data {data} --out run {tiny}": "'tiny_test'",
    "train tiny_test --data {empty} --out run {tiny}": "empty",
    "train tiny_test --data {broken} --out run {tiny}": "0.png': image file is truncated; replace or remove it; --skip",
    "train tiny_test --data {broken} --out run {tiny} --set resident=true": "--skip-corrupt",
    "train tiny_test --data {broken} --out run {tiny} --set workers=2": "0.png",
    "train tiny_test --data {data} --eval-data {other} --out run {tiny}": "none of the classes of the training data",
    "train tiny_test --data {data} --out run {tiny} --holdout 1": "holdout = 1.0",
    "train tiny_test --data {data} --out run {tiny} --holdout 0.2": "has images to evaluate on",
    "train tsa_tiny_test --out run --holdout 0.2": "vision models",
    "train tsa_tiny_test --out run --skip-corrupt": "--skip-corrupt is for vision models",
    "train tiny_test --data {data} --out {img}/text.png {tiny}": "text.png",
    "train tiny_test --data {data} --out {img}/text.png/sub {tiny}": "text.png",
    "train tiny_test --data {data} --out run {tiny} --limit 0": "limit",
    "train tiny_test --data {data} --out run {tiny} --resume": "--resume",
    "train tiny_test --data {data} --out {run} {tiny}": "--resume",
    "train tiny_test --data {data} --out {run} {tiny} --resume --set lr=0.5": "lr",
    "train tiny_test --data {other} --out {run} {tiny} --resume": "run",
}

BAD_SETTINGS = """
nonsense: key=value | epoch=3: 'epochs' | epochs=abc: whole number | epochs=True: whole number | epochs=none: epochs
epochs=0: epochs | image_size=1.5: image_size | lr=nan: lr | lr=1e999: lr | batch=[4]: batch | batch=10**9: batch
batch=0: batch | lr=-1: lr | seed=-1: seed | workers=-1: workers | smoothing=2: smoothing | min_scale=-1: min_scale
image_size=33: 33 | image_size=-5: image_size | augment=nonsense: nonsense | weights=none.pth: none.pth
weights=5: weights | teacher=5: teacher | model=test_vt: 'test_vit'
teacher=statc: teacher = statc | model=resnet18: resnet | method=AHTT: 'AHT'
method.budgt=1: 'budget' | method.budget=2: budget | method.stages=(0,3): 1..5 | method.stages=(3,6): 1..5
method.stages=3: stages | method.threshold=0: threshold | method.threshold=abc: threshold | method.neuron=9999: neuron
"""
for row in re.split(r" \| |\n", BAD_SETTINGS.strip()):
    setting, word = row.split(": ")
    BAD[f"train tiny_test --data {{data}} --out run {{tiny}} --set {setting}"] = word


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line, places, here):
    before = contents(places["root"])
    refused(run(line, **places), BAD[line])
    assert not list(here.iterdir()), "something was left behind"
    assert contents(places["root"]) == before


DAMAGE = {  # of config.json, and what the message must name
    "format": (lambda c: c.update(format=9), "format 9"),
    "foreign": (lambda c: c.pop("library"), "config.json"),
    "no backbone": (lambda c: c.pop("backbone"), "config.json"),
    "unknown method": (lambda c: c["method"].update(name="AHTT"), "'AHT'"),
    "other method": (lambda c: c["method"].update(name="AViT"), "AViT"),
    "unknown setting": (lambda c: c["method"]["options"].update(nonsense=1), "nonsense"),
    "stages": (lambda c: c["method"]["options"].update(stages=[0, 3]), "1..5"),
    "unknown backbone": (lambda c: c["backbone"].update(model="test_vt"), "'test_vit'"),
    "CNN": (lambda c: c["backbone"].update(model="resnet18"), "resnet"),
    "other backbone": (lambda c: c["backbone"].update(model="vit_tiny_patch16_224"), "does not fit"),
    "unknown family": (lambda c: c["backbone"].update(family="tim"), "'timm'"),
    "weights": (lambda c: c.update(weights="int3"), "'int8'"),
    "preprocess": (lambda c: c["extra"].update(preprocess=3), "preprocess"),
    "method only": (lambda c: c.update(saved="method"), "backbone"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_config(damage, places, here):
    copy_checkpoint(places["run"], here / "bad")
    edit(here / "bad", DAMAGE[damage][0])
    refused(run("eval bad --data {data} --workers 0", **places), DAMAGE[damage][1])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [None, 0, 5, 1000])
def test_truncated_checkpoint(name, keep, places, here):
    copy_checkpoint(places["run"], here / "bad")
    whole = Path("bad", name).read_bytes()
    Path("bad", name).unlink()
    if keep is not None:
        Path("bad", name).write_bytes(whole[:keep])
    refused(run("eval bad --data {data} --workers 0", **places), name)


def test_damaged_state(places, here):
    shutil.copytree(places["run"], "run")
    Path("run/state.pt").write_bytes(Path("run/state.pt").read_bytes()[:1000])
    refused(run("train tiny_test --data {data} --out run {tiny} --resume", **places), "state.pt")


def test_compare_report_and_search(places, here, monkeypatch):
    settings = "--set model=test_vit --set epochs=1 --set batch=4 --device cpu"
    line = f"compare tiny_compare --data {{data}} --out {{root}}/cmp --results {here}/results {settings}"
    first = run(line, **places).json
    assert [row["name"] for row in first["results"]] == [
        "static",
        *("AHT", "Random", "Resolution", "Shallow", "ToMe"),
    ]
    assert Path(first["plot"]).stat().st_size > 5000 and "| AHT, grounded | 0.70 |" in Path(first["table"]).read_text()
    files = contents(here / "results" / "tiny_compare")
    again = run(line, **places).json
    assert again["results"] == first["results"]
    made = {path: size for path, size in files.items() if path.endswith(".json")}
    assert made.items() <= contents(here / "results" / "tiny_compare").items()  # nothing was made twice

    page = run("report {root}/cmp/AHT-0.70-s0 --against {root}/cmp/static-1.00-s0 --out page --device cpu", **places)
    assert Path(page.json["page"]).read_text().startswith("<!doctype html>") and page.json["images"] == 6

    optuna = pytest.importorskip("optuna", reason="extra `search` is not installed")
    optuna.logging.set_verbosity(optuna.logging.INFO)
    line = "search tiny_test --data {data} --out study --trials 2 --holdout 0.25 {tiny}"
    found = run(line, **places).json
    assert len(found["trials"]) == 2 and found["settings"][0].startswith("method.lambda_p=")
    assert optuna.logging.get_verbosity() == optuna.logging.WARNING
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    second = run(line, **places)  # as the second process of torchrun, which leaves it to the first to tell the result
    assert (second.code, second.out) == (0, "")


@pytest.mark.parametrize(
    "line, said",
    [
        ("compare tiny_compar --data {data} --out x", "did you mean 'tiny_compare'"),
        ("compare tiny_compare --data {data} --out x --only ATH", "did you mean 'AHT'"),
        ("compare tiny_compare --data {data} --out x --set epoch=1", "did you mean 'epochs'"),
        ("train tiny_compare --data {data} --out x", "unknown recipe"),
        ("report nowhere --out x", "nowhere"),
        ("report {static} --out x", "--data"),
        ("search tiny_tst --data {data} --out x", "did you mean 'tiny_test'"),
        ("search tiny_test --data {data} --out x --holdout 2", "2"),
        ("compare tiny_compare --data {data} --out x --set seed=3", "--set seed=3"),
        ("train tiny_test --data {data} --out x --set seed=4294967296", "seed = 4294967296"),
        ("bench nosuchmodel", "give a model's name"),
        ("eval nowhere --data {data} --exit 0.9", "unknown checkpoint 'nowhere'"),
        ("view nowhere {data} --tau 0.5", "unknown checkpoint 'nowhere'"),
    ],
)
def test_compare_report_and_search_refuse(line, said, places, here):
    refused(run(line, **places), said)
