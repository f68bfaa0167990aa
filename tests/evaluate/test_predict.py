"""Predictions of a whole data set: every row once, also after a kill, and broken images listed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import dwindle
from dwindle.evaluate.cluster import Classify
from dwindle.evaluate.parts import PartFiles
from dwindle.evaluate.predict import predict
from dwindle.io import images
from dwindle.io.images import load_image, preprocess_of
from shared.tiny import METHODS, build


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("predict")
    (root / "flat" / "deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(23):
        where = root / "flat" / ("deep" if i % 2 else "") / f"{i:02d}.png"
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(where)
    (root / "flat" / "04.png").write_bytes(b"broken")
    whole = (root / "flat" / "08.png").read_bytes()
    (root / "flat" / "08.png").write_bytes(whole[: len(whole) // 2])
    dwindle.save(build("vit", METHODS["AHT"]()), root / "model")
    return {"root": root, "flat": root / "flat", "model": root / "model"}


def run(places, out, **options):
    return predict(str(places["model"]), str(places["flat"]), out, **{"batch": 4, "part": 6, **options})


def test_every_row_once_and_the_broken_listed(places, tmp_path):
    told = run(places, tmp_path / "p.parquet")
    assert (told["images"], told["rows"], told["failed"]) == (23, 21, 2)
    rows = pq.read_table(told["out"]).to_pylist()
    errors = [json.loads(line) for line in Path(told["errors"]).read_text().splitlines()]
    assert sorted([r["row"] for r in rows] + [e["row"] for e in errors]) == list(range(23))
    assert {e["image"] for e in errors} == {"04.png", "08.png"} and all("decode" in e["reason"] for e in errors)
    model = dwindle.load(places["model"])
    for row in rows[::7]:
        image = preprocess_of(model).eval_transform()(load_image(places["flat"] / row["image"]))
        with torch.no_grad():
            out = model(image[None])
        assert row["prediction"] == int(out.logits.argmax()) and row["label"] is None
        assert row["gmacs"] == pytest.approx(float(model.macs(out.trace)) / 1e9, rel=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.parquet", "p.parquet.errors.jsonl"]
    assert run(places, tmp_path / "p.parquet")["done_before"] == 23


def test_odd_names_and_bent_metadata_stop_nothing(places, tmp_path, monkeypatch):
    source = next(path for path in sorted(places["flat"].glob("*.png")) if path.name == "00.png")
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in (b"\xff\xe9.png", b"bent.png"):
        Path(os.path.join(folder, os.fsdecode(name))).write_bytes(source.read_bytes())
    upright = images.upright

    def raises(image):
        if image.filename.endswith("bent.png"):
            raise TypeError("bad operand type for abs(): 'bytes'")
        return upright(image)

    monkeypatch.setattr(images, "upright", raises)
    told = predict(str(places["model"]), str(folder), tmp_path / "p.parquet")
    assert (told["rows"], told["failed"]) == (1, 1)
    assert pq.read_table(told["out"]).to_pylist()[0]["image"] == "\\xff\\xe9.png"
    assert "abs()" in Path(told["errors"]).read_text()


def test_what_is_no_file_is_no_image(places, tmp_path):
    """Neither waited for nor counted; of links in a circle every image once."""
    folder = tmp_path / "odd"
    (folder / "deep").mkdir(parents=True)
    source = (places["flat"] / "00.png").read_bytes()
    for name in ("a.png", "deep/b.png"):
        (folder / name).write_bytes(source)
    os.mkfifo(folder / "pipe.jpg")
    os.symlink("/dev/zero", folder / "zero.jpg")
    os.symlink(folder, folder / "deep" / "round")
    os.symlink("nothing.png", folder / "gone.png")
    told = predict(str(places["model"]), str(folder), tmp_path / "p.parquet", batch=4)
    assert (told["images"], told["rows"], told["failed"]) == (3, 2, 1)
    assert "gone.png" in Path(told["errors"]).read_text()


def test_other_files_are_another_task(places, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(places["flat"], folder)
    told = predict(str(places["model"]), str(folder), tmp_path / "p.parquet", part=6)
    monkeypatch.chdir(tmp_path)
    assert predict(str(places["model"]), "data", tmp_path / "p.parquet", part=6)["done_before"] == told["images"]
    (folder / "04.png").write_bytes((folder / "00.png").read_bytes())
    with pytest.raises(dwindle.DwindleError, match="something else"):
        predict(str(places["model"]), str(folder), tmp_path / "p.parquet", part=6)


def test_predictions_may_lie_beside_the_images(places, tmp_path, monkeypatch):
    """What a run writes is no other data to the next one, nor to a process that starts while it writes."""
    folder = tmp_path / "data"
    shutil.copytree(places["flat"], folder)
    ask = partial(predict, str(places["model"]), str(folder), folder / "p.parquet", part=6)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(PartFiles, "join", lambda task: (_ for _ in ()).throw(KeyboardInterrupt()))
        ask()
    assert len(list((folder / "p.parquet.parts").glob("*.parquet"))) == 4
    assert ask()["done_before"] == ask()["done_before"] == 23


def test_names_from_a_parquet_file(places, tmp_path):
    import pyarrow as pa

    paths = sorted(places["flat"].glob("*.png"))
    cells = [{"bytes": p.read_bytes(), "path": None if i == 1 else p.name} for i, p in enumerate(paths)]
    (tmp_path / "data").mkdir()
    table = pa.table({"image": cells, "label": [0] * len(cells)})
    pq.write_table(table, tmp_path / "data" / "test-00000-of-00001.parquet", row_group_size=5)
    told = predict(str(places["model"]), str(tmp_path / "data"), tmp_path / "p.parquet", batch=4, part=6)
    names = {row["row"]: row["image"] for row in pq.read_table(told["out"]).to_pylist()}
    errors = [json.loads(line) for line in Path(told["errors"]).read_text().splitlines()]
    names |= {error["row"]: error["image"] for error in errors}
    assert len(errors) == 2 and names == {i: cell["path"] for i, cell in enumerate(cells)}


def test_a_run_that_ends_early_goes_on(places, tmp_path):
    class Stop(Exception):
        pass

    def stop(part: int, rows: int) -> None:
        if part == 1:
            raise Stop

    with pytest.raises(Stop):
        run(places, tmp_path / "p.parquet", progress=stop)
    assert not (tmp_path / "p.parquet").exists()
    parts = []
    told = run(places, tmp_path / "p.parquet", progress=lambda part, rows: parts.append(part))
    assert parts == [2, 3] and told["done_before"] == 12
    whole = run(places, tmp_path / "q.parquet")
    assert pq.read_table(told["out"]).to_pylist() == pq.read_table(whole["out"]).to_pylist()


def test_killed_at_any_time(places, tmp_path):
    """SIGKILL again and again: in the end every row is there once."""
    out = tmp_path / "p.parquet"
    code = (
        "import sys, torch; torch.set_num_threads(1); from dwindle.evaluate.predict import predict; "
        "predict(*sys.argv[1:4], batch=1, part=2)"
    )
    line = [sys.executable, "-c", code, str(places["model"]), str(places["flat"]), str(out)]
    parts = out.with_name("p.parquet.parts")
    for wanted in (1, 4):
        process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while process.poll() is None and len(list(parts.glob("0*.parquet"))) < wanted and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    told = run(places, out, batch=1, part=2)
    assert told["rows"] == 21 and told["failed"] == 2
    assert len({row["row"] for row in pq.read_table(out).to_pylist()}) == 21


def test_processes_share_the_parts(places, tmp_path):
    out = tmp_path / "p.parquet"
    second = run(places, out, rank=1, world=2)
    assert "rows" not in second and not out.exists()
    told = run(places, out, rank=0, world=2)
    assert told["rows"] == 21 and pq.read_table(out)["row"].to_pylist() == sorted(pq.read_table(out)["row"].to_pylist())


def test_loading_in_other_processes(places, tmp_path):
    assert run(places, tmp_path / "p.parquet", workers=1)["rows"] == 21


def test_bad_requests(places, tmp_path):
    run(places, tmp_path / "p.parquet")
    with pytest.raises(dwindle.DwindleError, match="holds something else"):
        run(places, tmp_path / "p.parquet", part=5)
    with pytest.raises(dwindle.DwindleError, match="--limit 0"):
        run(places, tmp_path / "q.parquet", limit=0)
    with pytest.raises(dwindle.DwindleError, match=r"ends in \.parquet"):
        run(places, tmp_path / "p.csv")
    with pytest.raises(dwindle.DwindleError, match="not found"):
        predict(str(places["model"]), os.fspath(tmp_path / "nothing" / "here"), tmp_path / "r.parquet")


def test_a_batch_of_rows_for_ray(places):
    """The stage itself, which is all that Ray calls."""
    stage = Classify(places["model"], device="cpu")
    paths = sorted(places["flat"].glob("*.png"))
    rows = stage({"bytes": np.array([p.read_bytes() for p in paths], dtype=object), "path": np.array(paths)})
    broken = np.array([path.name in ("04.png", "08.png") for path in paths])
    assert ((rows["prediction"] == -1) == broken).all() and [why is not None for why in rows["error"]] == list(broken)
    assert all(len(top) == (0 if bad else 5) for top, bad in zip(rows["top5"], broken))
    arrays = {"image": np.stack([np.asarray(load_image(p)) for p, bad in zip(paths, broken) if not bad])}
    again = Classify(places["model"], column="image", device="cpu")(arrays)
    assert (again["prediction"] == rows["prediction"][~broken]).all()
    with pytest.raises(dwindle.DwindleError, match="no column 'bytes'"):
        stage({"image": arrays["image"]})


def test_on_a_local_ray(places, tmp_path):
    ray = pytest.importorskip("ray", reason="extra `ray` is not installed")
    pytest.importorskip("ray.data", reason="extra `ray` is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        images = ray.data.read_binary_files(str(places["flat"]), include_paths=True)
        told = images.map_batches(Classify, fn_constructor_args=[str(places["model"])], batch_size=4, concurrency=1)
        rows = told.drop_columns(["bytes"]).take_all()
    finally:
        ray.shutdown()
    run(places, tmp_path / "p.parquet")
    wanted = {row["image"]: row for row in pq.read_table(tmp_path / "p.parquet").to_pylist()}
    found = {str(Path(row["path"]).relative_to(places["flat"])): row for row in rows}
    assert len(found) == len(rows) == 23
    assert {name for name, row in found.items() if row["error"] is not None} == {"04.png", "08.png"}
    for name, row in wanted.items():
        assert found[name]["prediction"] == row["prediction"] and list(found[name]["top5"]) == row["top5"]
        assert found[name]["gmacs"] == pytest.approx(row["gmacs"], rel=1e-4)


def test_an_embedding_is_no_class(places, tmp_path):
    vit = VisionTransformer(img_size=32, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    dwindle.save(dwindle.adapt(vit, dwindle.Static()), tmp_path / "headless")
    with pytest.raises(dwindle.DwindleError, match="no head"):
        predict(str(tmp_path / "headless"), str(places["flat"]), tmp_path / "p.parquet")
