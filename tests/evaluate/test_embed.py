"""Embeddings of a whole data set: every row once, as the model gives them, also after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import dwindle
from dwindle.evaluate.cluster import Embed
from dwindle.evaluate.embed import embed
from dwindle.io.images import load_image, preprocess_of
from dwindle.methods.tome import ToMe
from shared.command import refused, run
from shared.tiny import build


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("embed")
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(11):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(root / "photos" / f"{i:02d}.png")
    (root / "photos" / "04.png").write_bytes(b"broken")
    dwindle.save(build("vit", ToMe(r=2.5)), root / "model")
    headless = build("registers", ToMe(r=2.5))
    headless.vit.reset_classifier(0)
    dwindle.save(headless, root / "headless")
    return {"root": root, "photos": root / "photos", "model": root / "model", "headless": root / "headless"}


def alone(model, path: Path):
    """An image by itself: what the model gives of it."""
    with torch.no_grad():
        return model(preprocess_of(model).eval_transform()(load_image(path))[None])


@pytest.mark.parametrize("name", ["model", "headless"])
def test_rows_are_what_the_model_gives(places, tmp_path, name):
    model = dwindle.load(places[name])
    told = embed(model, str(places["photos"]), tmp_path / "e.parquet", patches=True, batch=4, part=3)
    assert (told["images"], told["rows"], told["failed"], told["width"], told["grid"]) == (11, 10, 1, 32, [4, 4])
    table = pq.read_table(told["out"])
    about = json.loads(table.schema.metadata[b"features"])
    assert about["grid"] == [4, 4] and about["width"] == 32 and about["promise"] is None
    for row in table.to_pylist()[::4]:
        out = alone(model, places["photos"] / row["image"])
        states = model.states(out)
        wanted = out.logits if name == "headless" else states[:, 0]
        assert torch.allclose(torch.tensor(row["embedding"]), wanted[0], atol=1e-4)
        patches = torch.tensor(np.array(row["patches"], dtype=np.float32)).view(16, 32)
        assert torch.allclose(patches, states[0, model.backbone.shape.prefix :], atol=2e-2)
        assert row["gmacs"] == pytest.approx(float(model.macs(out.trace)) / 1e9, rel=1e-4) and row["class"] is None
    again = embed(model, str(places["photos"]), tmp_path / "e.parquet", patches=True, part=3)
    assert again["done_before"] == 11
    with pytest.raises(dwindle.DwindleError, match="something else"):
        embed(model, str(places["photos"]), tmp_path / "e.parquet", part=3)
    model.method.r = 3.0
    with pytest.raises(dwindle.DwindleError, match="something else"):
        embed(model, str(places["photos"]), tmp_path / "e.parquet", patches=True, part=3)


def test_a_stopped_run_goes_on_and_processes_share(places, tmp_path):
    def stop(part: int, rows: int) -> None:
        raise KeyboardInterrupt

    model, photos = dwindle.load(places["model"]), str(places["photos"])
    with pytest.raises(KeyboardInterrupt):
        embed(model, photos, tmp_path / "e.parquet", part=3, progress=stop)
    assert "rows" not in embed(model, photos, tmp_path / "e.parquet", part=3, rank=1, world=2)
    told = embed(model, photos, tmp_path / "e.parquet", part=3, rank=0, world=2)
    assert told["rows"] == 10 and told["done_before"] == 3
    whole = embed(model, photos, tmp_path / "f.parquet", part=3)
    assert pq.read_table(told["out"]).to_pylist() == pq.read_table(whole["out"]).to_pylist()


def test_the_command(places, tmp_path):
    done = run("embed {model} --data {photos} --out {out} --patches --workers 0", out=tmp_path / "e.parquet", **places)
    assert done.json["rows"] == 10 and done.json["promise"] is None and "10 embeddings of 32" in done.out
    refused(run("embed {model} --data {photos} --out {root}", **places), "ends in .parquet")
    refused(run("embed {model} --data {photos} --out e.parquet --limit 0", **places), "--limit 0")


def test_a_stage_for_ray(places):
    paths = sorted(places["photos"].glob("*.png"))
    rows = Embed(places["headless"], device="cpu", patches=True)(
        {"bytes": np.array([path.read_bytes() for path in paths], dtype=object)}
    )
    assert rows["embedding"].shape == (11, 32) and rows["patches"].shape == (11, 16 * 32)
    assert [why is not None for why in rows["error"]] == np.isnan(rows["embedding"]).all(1).tolist()
    model = dwindle.load(places["headless"])
    assert np.allclose(rows["embedding"][0], alone(model, paths[0]).logits[0].numpy(), atol=1e-4)
