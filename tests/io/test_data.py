"""Finding, decoding, transforming and serving images, on small data made here and on the real data where it is."""

import io
import json
import os
import pickle
import random
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as t

import dwindle
from dwindle.errors import DwindleError
from dwindle.io import parquet
from dwindle.io.augment import Augment, applied, boxes, erased, jittered, noise
from dwindle.io.batches import draws, loader
from dwindle.io.datasets import Images, check_labels, hold_out, limit
from dwindle.io.draws import seeded
from dwindle.io.images import Preprocess, load_image, preprocess_of
from dwindle.io.opening import open_data
from dwindle.io.resident import Resident, _scaled
from dwindle.methods.tome import ToMe

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real data folder {SHARED} is absent")


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No data of this machine leaks in."""
    monkeypatch.delenv("DWINDLE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def pixels(seed, width=20, height=16):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image, fmt="PNG", **options):
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def class_folders(root, classes=("ant", "bee"), each=3):
    for c, word in enumerate(classes):
        (root / word).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(pixels(10 * c + i)).save(root / word / f"{i}.png")
    return root


def shard(path, labels, names=None, label="label", image="image", rows=None, row_group_size=None, extra=None):
    """One parquet file; image i is pixels(i)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    if rows is None:
        rows = [{"bytes": encode(Image.fromarray(pixels(i))), "path": None} for i in range(len(labels))]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(rows, kind), label: labels, **(extra or {})})
    if names:
        features = {label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def of_arrays(arrays, labels=None):
    """Images straight from arrays, for the tests that are not about files."""
    return Images("made", lambda i: Image.fromarray(arrays[i]), np.arange(len(arrays)) if labels is None else labels)


# load_image


def rgb(image):
    return np.asarray(load_image(encode(image)))


def test_load_image_modes():
    grey = pixels(0)[..., 0]
    assert (rgb(Image.fromarray(grey)) == grey[..., None]).all()
    colour = Image.fromarray(pixels(0))
    assert (rgb(colour) == pixels(0)).all()
    palette = colour.convert("P")
    assert (rgb(palette) == np.asarray(palette.convert("RGB"))).all()
    cmyk = load_image(encode(colour.convert("CMYK"), "TIFF"))
    assert cmyk.mode == "RGB" and np.abs(np.asarray(cmyk).astype(int) - pixels(0)).max() <= 2


@pytest.mark.parametrize("mode,half", [("RGBA", (255, 0, 0, 128)), ("LA", (0, 128))])
def test_transparency_is_composited_on_white(mode, half):
    clear = (0,) * len(half)
    image = Image.new(mode, (2, 1), clear)
    image.putpixel((1, 0), half)
    left, right = rgb(image)[0]
    assert (left == 255).all()
    assert right.tolist() == ([255, 127, 127] if mode == "RGBA" else [127, 127, 127])


def test_transparent_palette_is_composited_on_white():
    image = Image.new("P", (2, 2), 3)
    image.putpalette([0] * 768)
    assert (np.asarray(load_image(encode(image, transparency=3))) == 255).all()


def test_sixteen_bit_grey_is_scaled():
    deep = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
    for fmt in ("PNG", "TIFF"):
        assert np.asarray(load_image(encode(Image.fromarray(deep), fmt)))[0, :, 0].tolist() == [0, 100, 255]


def turned_by_exif():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    return exif


def test_exif_orientation():
    assert load_image(encode(Image.fromarray(pixels(0)), "JPEG", exif=turned_by_exif())).size == (16, 20)


@pytest.mark.parametrize("low,high", [(0.0, 1.0), (0.25, 0.5)])
def test_floats_from_zero_to_one_are_scaled(low, high):
    ramp = np.linspace(low, high, 12, dtype=np.float32).reshape(3, 4)
    seen = np.asarray(load_image(encode(Image.fromarray(ramp), "TIFF")))[..., 0]
    assert np.abs(seen - 255 * ramp).max() <= 0.51


@pytest.mark.parametrize(
    "values,message",
    [
        (np.float32([[0, np.nan]]), r"no numbers \(NaN"),
        (np.float32([[0, np.inf]]), r"no numbers \(NaN"),
        (np.float32([[0, 255]]), "from 0 to 255 and not from 0 to 1"),
        (np.float32([[-1, 1]]), "from -1 to 1 and not from 0 to 1"),
        (np.int32([[0, 300]]), "32 bits"),
    ],
)
def test_numbers_whose_white_nobody_knows_are_refused(values, message):
    with pytest.raises(DwindleError, match=message):
        load_image(encode(Image.fromarray(values), "TIFF"))


def test_one_bit_palettes_and_pages():
    bits = Image.fromarray(pixels(0)[..., 0] > 127)
    assert set(np.unique(np.asarray(load_image(encode(bits, "TIFF"))))) == {0, 255}
    first, second = (Image.fromarray(pixels(i)) for i in range(2))
    pages = encode(first, "TIFF", save_all=True, append_images=[second])
    assert (np.asarray(load_image(pages)) == pixels(0)).all()
    frames = encode(first.convert("P"), "GIF", save_all=True, append_images=[second.convert("P")])
    assert (np.asarray(load_image(frames)) == np.asarray(first.convert("P").convert("RGB"))).all()


def test_load_image_takes_what_is_decoded_already():
    array, image = pixels(0), Image.fromarray(pixels(0))
    for source in (array, image, bytearray(encode(image)), memoryview(encode(image)), image.convert("RGBA")):
        assert (np.asarray(load_image(source)) == array).all()
    assert (np.asarray(load_image(array[..., :1])) == array[..., :1]).all() and image.mode == "RGB"
    turned = Image.open(io.BytesIO(encode(image, "JPEG", exif=turned_by_exif())))
    assert load_image(turned).size == (16, 20) and turned.size == (20, 16)  # the caller's own stays as it was
    for source, message in (
        (array.astype(np.float32), "type float32"),
        (array[None], "8-bit pixels"),
        (array[:0], "8-bit pixels"),
        (torch.zeros(3, 4, 4), "Cannot take a Tensor as an image"),
        (7, "Cannot take a int as an image"),
        (None, "Cannot take a NoneType as an image"),
        ("with\0null", "null"),
    ):
        with pytest.raises(DwindleError, match=message):
            load_image(source)


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    os.symlink("/dev/zero", tmp_path / "endless.jpg")
    os.symlink("loop.jpg", tmp_path / "loop.jpg")
    for name in ("pipe.jpg", "endless.jpg", "loop.jpg"):
        with pytest.raises(DwindleError, match=name):
            load_image(tmp_path / name)


def test_load_image_refuses(tmp_path, monkeypatch):
    with pytest.raises(DwindleError, match=r"no file '.*gone\.png'"):
        load_image(tmp_path / "gone.png")
    with pytest.raises(DwindleError, match="Cannot decode"):
        load_image(tmp_path)
    (tmp_path / "words.png").write_text("not an image")
    with pytest.raises(DwindleError, match=r"words\.png"):
        load_image(tmp_path / "words.png")
    for fmt in ("PNG", "JPEG"):
        with pytest.raises(DwindleError, match="Cannot decode"):
            load_image(encode(Image.fromarray(pixels(0, 64, 64)), fmt)[:-600])
    with pytest.raises(DwindleError, match=r"Cannot decode .* none of JPEG"):  # no object's address in it
        load_image(b"")
    monkeypatch.setattr("dwindle.io.images.MAX_PIXELS", 300)
    with pytest.raises(DwindleError, match="20x16 pixels"):
        load_image(encode(Image.fromarray(pixels(0))))


# Class folders


def test_class_folders_serve_any_split(tmp_path):
    class_folders(tmp_path / "d")
    (tmp_path / "d" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "d" / "ant" / ".hidden.png").write_text("no image")
    images = open_data(str(tmp_path / "d"))
    assert len(images) == 6 and images.classes == ["ant", "bee"] and images.num_classes == 2
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1] and images.labels.dtype == np.int64
    image, label = images[4]
    assert label == 1 and (np.asarray(image) == pixels(11)).all()
    images.transform = lambda image: image.size
    assert images[0] == ((20, 16), 0)
    assert len(open_data(str(tmp_path / "d"), "test")) == 6
    with pytest.raises(DwindleError, match="did you mean 'train'"):
        open_data(str(tmp_path / "d"), "trian")


@pytest.mark.parametrize("word", ["val", "validation", "test"])
def test_split_folders(tmp_path, word):
    class_folders(tmp_path / "d" / "train", ("ant", "bee", "cat"))
    class_folders(tmp_path / "d" / word, ("ant", "cat"), each=1)
    for asked in ("val", "validation", "test"):
        held = open_data(str(tmp_path / "d"), asked)
        # "cat" keeps the number it has in training, though evaluation has no "bee"
        assert held.labels.tolist() == [0, 2] and held.classes == ["ant", "bee", "cat"]
    with pytest.raises(DwindleError, match=rf"no split 'dev', it has .*{word}"):
        open_data(str(tmp_path / "d"), "dev")


def test_evaluation_class_unknown_to_training(tmp_path):
    class_folders(tmp_path / "d" / "train")
    class_folders(tmp_path / "d" / "val", ("ant", "wasp"))
    with pytest.raises(DwindleError, match="wasp"):
        open_data(str(tmp_path / "d"), "val")


def test_a_class_may_be_called_train(tmp_path):
    assert open_data(str(class_folders(tmp_path / "d", ("car", "train")))).classes == ["car", "train"]


def test_only_training_split_refuses_evaluation(tmp_path):
    class_folders(tmp_path / "d" / "train")
    with pytest.raises(DwindleError, match=r"no split 'test', it has train"):
        open_data(str(tmp_path / "d"), "test")


def test_bad_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "ant").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    class_folders(tmp_path / "flat", ("train", "val"))  # images where class folders should be
    for name in ("empty", "bare", "flat"):
        with pytest.raises(DwindleError, match="holds no images"):
            open_data(name)
    with pytest.raises(DwindleError, match="is a file"):
        open_data("file")
    with pytest.raises(DwindleError, match="'/no/such/place' was not found"):
        open_data("/no/such/place")


def test_corrupt_image_in_folder_is_named(tmp_path):
    class_folders(tmp_path / "d")
    broken = tmp_path / "d" / "bee" / "0.png"
    broken.write_bytes(broken.read_bytes()[:100])
    images = open_data("d")
    with pytest.raises(DwindleError, match=r"bee/0\.png"):
        images[3]


def tree(root, *paths):
    for i, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i)).save(root / path)
    return root


def named(images):
    """The files, by the names of their classes."""
    names = [os.fsdecode(name) for name in images.source.args[1]]
    return [(images.classes[label], Path(name).name) for name, label in zip(names, images.labels)]


def test_parts_of_a_set_are_no_classes(tmp_path):
    for words in (("training", "testing"), ("data_x", "test"), ("Training", "data_256_raw")):
        root = class_folders(tmp_path / words[0], words)
        if words[0] == "data_x":
            assert open_data(str(root)).classes == ["data_x", "test"]
            continue
        with pytest.raises(DwindleError, match="parts of a data set and no classes"):
            open_data(str(root))
    for word in ("valid", "VAL"):
        class_folders(tmp_path / word / "Train")
        class_folders(tmp_path / word / word, each=1)
        assert len(open_data(str(tmp_path / word))) == 6 and len(open_data(str(tmp_path / word), "test")) == 2


def test_images_a_level_deeper_are_refused(tmp_path):
    nested = tree(tmp_path / "d", "x/ant/0.png", "x/bee/0.png", "y/cat/0.png", "y/ant/1.png")
    with pytest.raises(DwindleError, match=r"a level deeper than its folders \(x/ant/0\.png\).*holds the classes"):
        open_data(str(nested))
    with pytest.raises(DwindleError, match=r"give '.*one/all'"):
        open_data(str(tree(tmp_path / "one", "all/ant/0.png", "all/bee/0.png")))
    # Classes that are parted further, and those whose images lie in one folder each, are classes.
    tree(tmp_path / "mixed", "ant/0.png", "ant/more/1.png", "bee/old/0.png", "bee/new/1.png")
    assert open_data(str(tmp_path / "mixed")).labels.tolist() == [0, 0, 1, 1]
    tiny = tree(tmp_path / "tiny", "ant/images/0.png", "bee/images/0.png")
    assert open_data(str(tiny)).classes == ["ant", "bee"]


def places(root, train="data_256", val="val_256"):
    """Places365 as it comes, in small: three of its classes."""
    tree(root, f"{train}/a/airfield/00000001.jpg", f"{train}/b/bow_window/indoor/00000001.jpg",
         f"{train}/b/bow_window/indoor/00000002.jpg", f"{val}/Places365_val_00000001.jpg",
         f"{val}/Places365_val_00000002.jpg")  # fmt: skip
    (root / "categories_places365.txt").write_text("/a/airfield 0\n/a/alcove 1\n/b/bow_window/indoor 2\n")
    (root / "places365_train_standard.txt").write_text("/a/airfield/00000001.jpg 0\n")
    (root / "places365_val.txt").write_text("Places365_val_00000001.jpg 2\nPlaces365_val_00000002.jpg 0\n")
    return root


@pytest.mark.parametrize(
    "train,val", [("data_256", "val_256"), ("data_large", "val_large"), ("data_256_standard", "val_256")]
)
def test_places365_as_it_comes(tmp_path, train, val):
    root = places(tmp_path / "data" / "places365", train, val)
    images, held = open_data("places365"), open_data("places365", "test")
    assert images.classes == held.classes == ["airfield", "alcove", "bow_window/indoor"]
    assert named(images) == [("airfield", "00000001.jpg"), *[("bow_window/indoor", f"0000000{i}.jpg") for i in (1, 2)]]
    assert held.labels.tolist() == [2, 0] and images.split == "train" and held[1][0].size == (20, 16)
    alone = open_data(str(root / train))  # only the tree: its classes are those it has
    assert alone.classes == ["airfield", "bow_window/indoor"] and alone.labels.tolist() == [0, 1, 1]
    with pytest.raises(DwindleError, match=r"no images in class folders.*Places365's .*needs categories_places365"):
        open_data(str(root / val))
    (root / "places365_val.txt").write_text("Places365_val_00000001.jpg 2\nPlaces365_val_00000009.jpg 0\n")
    with pytest.raises(DwindleError, match=r"names Places365_val_00000009\.jpg, which .* lacks"):
        open_data("places365", "val")
    (root / "places365_val.txt").write_text("what is this\n")
    with pytest.raises(DwindleError, match="no list of names and numbers"):
        open_data("places365", "val")
    (root / "places365_val.txt").unlink()
    with pytest.raises(DwindleError, match=r"stands in categories_places365\.txt, places365_val\.txt; put these"):
        open_data("places365", "val")
    tree(root, f"{train}/z/zoo/1.jpg")
    with pytest.raises(DwindleError, match="class 'zoo', which categories"):
        open_data("places365")


def test_links_are_followed_once(tmp_path):
    """In a circle they would lead to the same images for ever."""
    root = class_folders(tmp_path / "d")
    for at, to in (("ant/round", root), ("bee/ants", root / "ant"), ("self", root), ("bee/deep", root / "bee")):
        os.symlink(to, root / at)
    Image.fromarray(pixels(7)).save(tmp_path / "elsewhere.png")
    os.symlink(tmp_path / "elsewhere.png", root / "bee" / "x.png")
    os.symlink("gone.png", root / "bee" / "y.png")
    os.symlink("z.png", root / "bee" / "z.png")
    os.mkfifo(root / "bee" / "pipe.png")
    os.symlink("/dev/zero", root / "bee" / "zero.png")
    images = open_data("d")
    assert images.classes == ["ant", "bee"]
    assert [name for word, name in named(images) if word == "bee"] == [
        "0.png",
        "1.png",
        "2.png",
        "x.png",
        "y.png",
        "z.png",
    ]
    assert len(images) == 9 and (np.asarray(images[6][0]) == pixels(7)).all()
    for broken in (7, 8):  # named where they are read, and not left out in silence
        with pytest.raises(DwindleError, match=f"bee/{'yz'[broken - 7]}"):
            images[broken]
    os.symlink(root / "ant", root / "emmet")
    with pytest.raises(DwindleError, match="'emmet' are one folder"):
        open_data("d")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    root, scan = class_folders(tmp_path / "d"), os.scandir

    def refusing(path):
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DwindleError, match=r"Cannot list the folder '.*bee' \(Permission denied\)"):
        open_data(str(root))


# Known names


def test_known_names(tmp_path, monkeypatch):
    with pytest.raises(DwindleError, match=r"'data/imagenet'.*DWINDLE_DATA"):
        open_data("imagenet")
    class_folders(tmp_path / "data" / "imagenet", each=1)
    assert len(open_data("imagenet")) == 2
    class_folders(tmp_path / "env" / "imagenet", each=2)
    monkeypatch.setenv("DWINDLE_DATA", str(tmp_path / "env"))
    assert len(open_data("imagenet")) == 4
    shard(tmp_path / "root" / "imagenet" / "train-00000-of-00001.parquet", [0, 1, 2])
    assert len(open_data("imagenet", root=str(tmp_path / "root"))) == 3
    with pytest.raises(DwindleError, match="did you mean 'cifar100'"):
        open_data("cifar10")


@pytest.mark.parametrize("where", ["data/cifar100", "data"])
def test_cifar_as_torchvision_keeps_it(tmp_path, monkeypatch, where):
    folder = tmp_path / where / "cifar-100-python"
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    for split in ("train", "test"):
        (folder / split).write_bytes(pickle.dumps({"data": rows, "fine_labels": [3, 1, 2, 0]}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": list("abcd")}))
    with pytest.raises(DwindleError, match="incomplete or altered"):
        open_data("cifar100")
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    images = open_data("cifar100", "val")
    assert images.classes == list("abcd") and images.labels.tolist() == [3, 1, 2, 0]
    assert (np.asarray(images[1][0]) == rows[1].reshape(3, 32, 32).transpose(1, 2, 0)).all()


# Parquet


@pytest.mark.parametrize("inner", ["", "data"])
def test_parquet_shards(tmp_path, inner):
    root = tmp_path / "d"
    coarse = {"coarse_label": [9, 9, 9, 9, 9]}
    for k in range(2):
        shard(root / inner / f"train-0000{k}-of-00002.parquet", [0, 1, 2, 1, 0], list("xyz"), "fine_label", "img",
              row_group_size=2, extra=coarse)  # fmt: skip
    shard(root / inner / "test-00000-of-00001.parquet", [2], list("xyz"), "fine_label", "img")
    images = open_data("d")
    assert len(images) == 10 and images.classes == list("xyz") and images.num_classes == 3
    assert images.labels.tolist() == [0, 1, 2, 1, 0] * 2
    image, label = images[8]
    assert label == 1 and (np.asarray(image) == pixels(3)).all()
    assert list(images.source.held) == [4]  # one row group of six was read
    assert not pickle.loads(pickle.dumps(images.source)).held
    assert len(open_data("d", "validation")) == 1
    with pytest.raises(IndexError):
        images[10]


def test_parquet_class_names(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        shard(root / "validation-00000-of-00001.parquet", [0, 4], label="only_integer")
    images = open_data("one", "test")
    assert images.classes is None and images.num_classes == 5
    (two / "classes.json").write_text(json.dumps([{"wnid": f"n{i}", "name": f"c{i}"} for i in range(7)]))
    assert open_data("two", "val").classes == [f"c{i}" for i in range(7)]
    (two / "classes.json").write_text("7")
    with pytest.raises(DwindleError, match=r"classes\.json"):
        open_data("two", "val")


def test_parquet_refuses(tmp_path):
    root = tmp_path / "d"
    train = shard(root / "train-00000-of-00001.parquet", [0, 1])
    with pytest.raises(DwindleError, match=r"no split 'val', it has train"):
        open_data("d", "val")
    train.write_bytes(train.read_bytes()[:-20])
    with pytest.raises(DwindleError, match=r"Cannot read parquet file .*train-00000"):
        open_data("d")
    shard(train, [0, None])
    with pytest.raises(DwindleError, match="without a label"):
        open_data("d")
    shard(train, [0, 1], label="a", extra={"b": [1, 2]})
    with pytest.raises(DwindleError, match="columns image, a, b"):
        open_data("d")
    train.rename(root / "train-00000-of-00003.parquet")
    with pytest.raises(DwindleError, match="1 of 3"):
        open_data("d")


def test_parquet_files_that_are_not_the_shards_of_one_set(tmp_path):
    import pyarrow.parquet as pq

    one, two = (tmp_path / "d" / f"train-0000{k}-of-00002.parquet" for k in range(2))
    shard(one, [0, 1])
    shard(two, [1, 1], label="other")
    with pytest.raises(DwindleError, match=r"00001-of-00002\.parquet' has other columns than"):
        open_data("d")
    two.rename(two.with_name("train-00000-of-00002 (1).parquet"))  # fetched twice
    with pytest.raises(DwindleError, match=r"not the shards of one set"):
        open_data("d")
    none = shard(tmp_path / "none" / "train-00000-of-00001.parquet", [0])
    pq.write_table(pq.read_table(none)[:0], none)
    with pytest.raises(DwindleError, match="has no image"):
        open_data("none")


@pytest.mark.parametrize("note", [b"{", b"[1]", b'{"info": null}', b'{"info": {"features": {"label": {"names": 5}}}}'])
def test_a_parquet_file_with_strange_notes_names_no_classes(tmp_path, note):
    import pyarrow.parquet as pq

    file = shard(tmp_path / "d" / "train-00000-of-00001.parquet", [0, 1])
    pq.write_table(pq.read_table(file).replace_schema_metadata({b"huggingface": note}), file)
    assert open_data("d").classes is None


def test_what_is_wrong_with_a_parquet_file_is_said_in_one_line(tmp_path):
    file = shard(tmp_path / "d" / "train-00000-of-00001.parquet", [0, 1])
    whole = bytearray(file.read_bytes())
    chance = np.random.default_rng(0)
    for at in chance.integers(4, len(whole) - 8, 60):
        file.write_bytes(whole[:at] + whole[at + 40 :])
        with pytest.raises(DwindleError) as told:
            images = open_data("d")
            [images[i] for i in range(2)]
        assert "\n" not in str(told.value)


def test_corrupt_parquet_image_is_named(tmp_path):
    good = encode(Image.fromarray(pixels(0)))
    rows = [{"bytes": good, "path": None}, {"bytes": good[:80], "path": None}, None]
    shard(tmp_path / "d" / "train-00000-of-00001.parquet", [0, 1, 2], rows=rows)
    images = open_data("d")
    assert images[0][1] == 0
    for i in (1, 2):
        with pytest.raises(DwindleError, match=f"in row {i}"):
            images[i]


# Sets larger than memory


def held_bytes(images):
    return sum(column.nbytes for column in images.source.held.values())


@pytest.fixture
def many_groups(tmp_path, monkeypatch):
    """400 rows in 40 row groups of two shards, of which a quarter may be held; `reads` notes each group read."""
    for k in range(2):
        shard(tmp_path / "big" / f"train-0000{k}-of-00002.parquet", list(range(200 * k, 200 * k + 200)),
              row_group_size=10)  # fmt: skip
    size = sum(open_data("big").source.sizes)
    images = open_data("big", memory=size // 4)
    reads, read = [], parquet.parquet_file

    def noted(path):
        file = read(path)
        return types.SimpleNamespace(
            read_row_group=lambda part, **options: (reads.append((path, part)), file.read_row_group(part, **options))[1]
        )

    monkeypatch.setattr(parquet, "parquet_file", noted)
    return images, reads


def test_sizes_are_known_before_reading(many_groups):
    images, _ = many_groups
    for g in range(0, 40, 7):
        assert 0.5 * images.source.sizes[g] < images.source._group(g).nbytes <= images.source.sizes[g]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_keeps_to_the_memory(many_groups, workers):
    images, reads = many_groups
    assert images.streams
    images.transform = lambda _: torch.tensor([held_bytes(images), len(reads)])  # in the process that reads
    seen, noted = [], []
    batches = loader(images, 16, train=True, workers=workers, seed=1)
    batches.set_epoch(3)
    for x, y in batches:
        seen += y.tolist()
        noted += x.tolist()
    assert sorted(seen) == sorted(set(seen)) and len(seen) == 400
    held, counted = np.array(noted).T
    assert 0 < held.max() <= images.source.memory // max(workers, 1)
    assert counted.max() <= 40  # every process reads a row group once, or not at all


def test_many_workers_hold_a_window_each(many_groups):
    images, reads = many_groups
    images.share_memory(100)
    images.transform = lambda _: torch.tensor(held_bytes(images))
    batches = loader(images, 16, train=True)
    assert max(int(x.max()) for x, _ in batches) <= images.source.window
    assert len(reads) == 40


def test_evaluation_of_a_large_set_reads_each_group_once(many_groups):
    images, reads = many_groups
    images.transform = lambda _: torch.tensor(held_bytes(images))
    assert max(int(x.max()) for x, _ in loader(images, 16)) <= images.source.memory
    assert len(reads) == 40 == len(set(reads))


def test_threads_share_a_bounded_cache(many_groups):
    images, reads = many_groups
    assert len(Resident(images, 28, threads=4)) == 400
    assert len(reads) <= 80 and held_bytes(images) <= images.source.memory


def test_block_order_is_random_and_repeatable(many_groups):
    images, _ = many_groups

    def order(seed, of=images):
        return of.shuffled(torch.Generator().manual_seed(seed)).tolist()

    assert order(0) == order(0) == order(0, pickle.loads(pickle.dumps(images))) != order(1)
    assert sorted(order(0)) == list(range(400))
    groups = np.array(order(0)) // 10
    assert 2 <= len(set(groups[:20])) <= 4 and len({tuple(np.array(order(s)[:20]) // 10) for s in range(5)}) == 5
    part = limit(images, 150, seed=0)
    assert part.streams and sorted(order(0, part)) == list(range(150))


def test_a_set_that_fits_is_permuted_whole_and_kept(many_groups):
    images, reads = many_groups
    small = limit(images, 90)
    assert not small.streams
    expected = torch.randperm(90, generator=torch.Generator().manual_seed(4)).tolist()
    assert small.shuffled(torch.Generator().manual_seed(4)).tolist() == expected
    small.transform = lambda _: torch.tensor(len(reads))
    assert max(int(x.max()) for x, _ in loader(small, 16, train=True, workers=2)) == 9  # all read before the fork
    assert len(reads) == 9


def test_a_row_group_larger_than_the_memory_is_held_alone(many_groups):
    images, _ = many_groups
    images.source.memory = images.source.room = 1
    images.transform = lambda _: torch.tensor(len(images.source.held))
    assert max(int(x.max()) for x, _ in loader(images, 16, train=True)) == 1


# Hub


def test_hub_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DwindleError, match=r'pip install "dwindle\[hub\]"'):
        open_data("org/name")


def test_hub(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    table = pq.read_table(shard(tmp_path / "hub.parquet", [1, 0], list("ab")))

    class Rows:
        features = types.SimpleNamespace(arrow_schema=table.schema)

        def __getitem__(self, key):
            return table.column(key).to_pylist() if isinstance(key, str) else table.slice(key, 1).to_pylist()[0]

        def cast_column(self, column, feature):
            assert column == "image" and feature == "undecoded"
            return self

    def load(name, split):
        if name != "org/name":
            raise FileNotFoundError("no such repository")
        assert split == "test"
        return Rows()

    fake = types.SimpleNamespace(
        get_dataset_split_names=lambda name: ["train", "test"],
        load_dataset=load,
        Image=lambda decode: "decoded" if decode else "undecoded",
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    images = open_data("org/name", "val")
    assert images.labels.tolist() == [1, 0] and images.classes == ["a", "b"]
    assert (np.asarray(images[1][0]) == pixels(1)).all()
    with pytest.raises(DwindleError, match=r"no split 'dev', it has train, test"):
        open_data("org/name", "dev")
    with pytest.raises(DwindleError, match="no such repository"):
        open_data("org/other", "test")


# Subsets and labels


def test_limit():
    images = of_arrays([pixels(i) for i in range(8)])
    assert limit(images, 3).labels.tolist() == [0, 1, 2]
    drawn = limit(images, 3, seed=1)
    assert drawn.labels.tolist() == limit(images, 3, seed=1).labels.tolist() != [0, 1, 2]
    assert all((np.asarray(image) == pixels(label)).all() for image, label in (drawn[i] for i in range(3)))
    assert drawn.num_classes == 8 and len(limit(images, 99)) == 8
    assert limit(limit(images, 4, seed=0), 2).labels.tolist() == limit(images, 4, seed=0).labels[:2].tolist()
    with pytest.raises(DwindleError, match="to 0 images"):
        limit(images, 0)


@settings(deadline=None)  # the machine may be busy
@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=80), share=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_hold_out_is_stratified(labels, share, seed):
    images = Images("made", None, np.array(labels))
    kept, held = hold_out(images, share, seed)
    assert sorted([*kept.rows, *held.rows]) == list(range(len(labels))) and len(kept) and len(held)
    count = min(max(round(share * len(labels)), 1), len(labels) - 1)
    assert len(held) == count
    for label, of_class in enumerate(np.bincount(labels)):
        assert abs((held.labels == label).sum() - of_class * count / len(labels)) < 1 + 1e-9
    assert held.rows.tolist() == hold_out(images, share, seed)[1].rows.tolist()


def test_hold_out_refuses_and_varies():
    images = Images("made", None, np.arange(100) % 5)
    assert hold_out(images, 0.2, 0)[1].rows.tolist() != hold_out(images, 0.2, 1)[1].rows.tolist()
    for part, share in ((images, 0.0), (images, 1.0), (limit(images, 1), 0.5)):
        with pytest.raises(DwindleError, match="Cannot hold out"):
            hold_out(part, share)


def test_check_labels():
    check_labels(np.array([0, 9]), 10)
    check_labels(torch.tensor([], dtype=torch.long), 10)
    with pytest.raises(DwindleError, match=r"highest label in the data is 12.*10 classes.*at least 13"):
        check_labels(torch.tensor([0, 12]), 10)
    with pytest.raises(DwindleError, match="label -1"):
        check_labels([-1, 0], 10)


# Transforms


def test_eval_transform_does_not_resample_at_its_own_size():
    array = pixels(0, 256, 256)
    out = Preprocess().eval_transform()(Image.fromarray(array))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (Preprocess.mean, Preprocess.std))
    expected = (torch.from_numpy(array[16:240, 16:240].copy()).permute(2, 0, 1) / 255 - mean) / std
    torch.testing.assert_close(out, expected)
    assert Preprocess(size=32).eval_transform()(Image.fromarray(pixels(0, 90, 50))).shape == (3, 32, 32)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_what_a_model_sees_is_a_resize_and_a_crop(interpolation):
    """To the last bit, though what the crop leaves out is not always resampled."""
    sizes = [(480, 320), (320, 480), (500, 375), (375, 500), (320, 320), (451, 300), (300, 900), (90, 700), (256, 300)]
    for size, share in ((224, 0.875), (224, 0.9), (32, 1.0)):
        pre = Preprocess(size=size, crop_pct=share, interpolation=interpolation)
        resize = t.Resize(round(size / share), t.InterpolationMode(interpolation))
        for seed, (width, height) in enumerate(sizes):
            image = Image.fromarray(pixels(seed, width, height))
            assert pre.seen(image).tobytes() == t.CenterCrop(size)(resize(image)).tobytes(), (width, height)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_a_strip_costs_what_its_crop_does(interpolation):
    """To a level of the whole's resize; the longest is one that could not be resized whole."""
    resize = t.Resize(64, t.InterpolationMode(interpolation))
    pre = Preprocess(size=56, interpolation=interpolation)
    for size in ((700, 40), (40, 700), (511, 30), (997, 60), (29, 1000)):
        image = Image.fromarray(pixels(0, *size))
        whole = np.asarray(t.CenterCrop(56)(resize(image))).astype(int)
        assert np.abs(np.asarray(pre.seen(image)) - whole).max() <= 1
    begin = time.process_time()
    for size in ((10_000_000, 1), (1, 10_000_000), (59_999, 3)):
        assert pre.seen(Image.new("RGB", size, (1, 2, 3))).getcolors() == [(56 * 56, (1, 2, 3))]
    assert time.process_time() - begin < 2


def test_preprocess_of_a_model():
    import timm

    vit = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=1)
    assert preprocess_of(dwindle.adapt(vit, ToMe(r=1))) == Preprocess(size=64, crop_pct=0.9)
    plain = timm.models.VisionTransformer(img_size=48, patch_size=8, embed_dim=16, depth=1, num_heads=1)
    assert preprocess_of(dwindle.adapt(plain, ToMe(r=1))) == Preprocess(size=48)


def test_preprocess_survives_json():
    p = Preprocess(size=96, mean=(0.5, 0.5, 0.5), crop_pct=1.0)
    assert Preprocess.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    with pytest.raises(DwindleError, match="did you mean 'size'"):
        Preprocess.from_dict({"sizes": 3})
    with pytest.raises(DwindleError, match="bicubic"):
        Preprocess(interpolation="cubic")
    with pytest.raises(DwindleError, match="crop_pct"):
        Preprocess(crop_pct=1.5)


# Loader


AUGMENT = Augment.of(Preprocess(size=24), jitter=0.4, randaugment="rand-m9-mstd0.5-inc1", erase=0.5)


@pytest.fixture
def augmented(tmp_path):
    shard(tmp_path / "d" / "train-00000-of-00001.parquet", list(range(10)), row_group_size=4)
    images = open_data("d")
    images.transform = Preprocess(size=24).eval_transform()
    return images


def test_batches_repeat_whatever_the_workers(augmented):
    def epochs(loader_, *which):
        out = []
        for e in which:
            loader_.set_epoch(e)
            out.append(list(loader_))
        return out

    def same(a, b):
        return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True))

    options = {"train": True, "augment": AUGMENT}
    here = loader(augmented, 4, workers=0, seed=5, **options)
    there = loader(augmented, 4, workers=2, seed=5, **options)
    assert len(here) == 2  # the last two images are dropped
    first, second = epochs(here, 0, 1)
    assert not same(first, second)
    assert all(same(a, b) for a, b in zip((first, second), epochs(there, 0, 1)))
    resumed = loader(augmented, 4, workers=0, seed=5, **options)
    assert same(second, *epochs(resumed, 1))
    assert not same(second, *epochs(loader(augmented, 4, seed=6, **options), 1))


def test_loader_leaves_the_callers_generators_alone(augmented):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    list(loader(augmented, 4, train=True, augment=AUGMENT))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_evaluation_keeps_order_and_everything(augmented):
    labels = [y for _, y in loader(augmented, 4)]
    assert torch.cat(labels).tolist() == list(range(10))
    assert len(loader(limit(augmented, 3), 4, train=True)) == 1  # fewer than a batch: kept, not dropped
    augmented.transform = None
    with pytest.raises(DwindleError, match="no transform"):
        loader(augmented, 4)


# Sharding


def drawn(images, batch, epoch=0, **options):
    """The indices of each batch."""
    batches = loader(images, batch, **options)
    batches.set_epoch(epoch)
    order = [i for _, i, _ in batches.sampler]
    assert len(order) == len(batches.sampler)
    return [order[at : at + batch] for at in range(0, len(order), batch)]


def numbered(n):
    images = Images("made", None, np.zeros(n))
    images.transform = lambda image: image
    return images


@settings(deadline=None)
@given(n=st.integers(1, 60), batch=st.integers(1, 6), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_ranks_share_the_batch_of_one_process(n, batch, world, epoch):
    images = numbered(n)
    if world > 1 and n < world * batch:
        with pytest.raises(DwindleError, match="too few for a joint batch"):
            drawn(images, batch, train=True, world=world)
        return
    joint = drawn(images, batch * world, epoch, train=True, seed=7)
    ranks = [drawn(images, batch, epoch, train=True, seed=7, rank=r, world=world) for r in range(world)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == joint
    assert len(joint) == max(n // (world * batch), 1)


@settings(deadline=None)
@given(n=st.integers(0, 60), batch=st.integers(1, 6), world=st.integers(1, 4))
def test_ranks_evaluate_every_image_once(n, batch, world):
    images = numbered(n)
    parts = [list(chain(*drawn(images, batch, rank=r, world=world))) for r in range(world)]
    assert sorted(chain(*parts)) == list(range(n))
    assert all(part == list(range(r, n, world)) for r, part in enumerate(parts))


def test_ranks_of_a_streaming_set(many_groups):
    images, _ = many_groups
    images.transform = lambda image: torch.zeros(1)
    joint = drawn(images, 24, train=True, seed=2)
    ranks = [drawn(images, 8, train=True, seed=2, rank=r, world=3) for r in range(3)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == joint


def test_loader_refuses(augmented):
    for options, message in (
        ({"rank": 2, "world": 2}, "between 0 and 1"),
        ({"workers": -1}, "workers = -1"),
    ):
        with pytest.raises(DwindleError, match=message):
            loader(augmented, 4, **options)
    with pytest.raises(DwindleError, match="batch = 0"):
        loader(augmented, 0)


# Resident


@pytest.mark.parametrize("sizes", [[(256, 256)] * 3, [(256, 256), (300, 270), (200, 410)]])
def test_resident_evaluation_is_the_eval_transform(sizes):
    images = of_arrays([pixels(i, *size) for i, size in enumerate(sizes)])
    seen = []
    resident = Resident(images, 224, "cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert resident.images.shape == (3, 3, 256, 256) and resident.images.dtype == torch.uint8
    batches = resident.batches(2)
    assert len(batches) == 2 and not any(x.requires_grad for x, _ in batches)
    got = torch.cat([x for x, _ in batches])
    images.transform = Preprocess().eval_transform()
    torch.testing.assert_close(got, torch.stack([images[i][0] for i in range(3)]), atol=1e-5, rtol=0)
    assert torch.cat([y for _, y in batches]).tolist() == [0, 1, 2]


def test_resident_store_side():
    def side(*sizes, store=None):
        arrays = [pixels(i, *size) for i, size in enumerate(sizes)]
        return Resident(of_arrays(arrays), 28, store=store).images.shape[-1]

    assert side((16, 16), (16, 16)) == 16  # native
    assert side((16, 16), (20, 16)) == 32  # mixed: 28 / 0.875
    assert side((20, 16), (20, 16)) == 32
    assert side((64, 64), (64, 64)) == 32
    assert side((64, 64), (64, 64), store=48) == 48


@pytest.mark.parametrize("side", [16, 28, 30, 32, 48])
def test_resident_sizes(side):
    resident = Resident(of_arrays([pixels(i, side, side) for i in range(3)]), 28, store=side)
    for train in (False, True):
        x, y = next(iter(resident.batches(3, train=train, dtype=torch.bfloat16)))
        assert x.shape == (3, 3, 28, 28) and x.dtype == torch.bfloat16 and y.shape == (3,)
        assert x.isfinite().all()


def test_resident_upsampling_matches_pillow():
    array = pixels(0, 32, 32)
    x, _ = next(iter(Resident(of_arrays([array]), 224).batches(1, mean=(0, 0, 0), std=(1, 1, 1))))
    # channel by channel in float: with bytes Pillow clips between its horizontal and its vertical pass
    planes = [Image.fromarray(array[..., c].astype(np.float32)) for c in range(3)]
    expected = np.stack([np.asarray(p.resize((224, 224), Image.Resampling.BICUBIC)) for p in planes])
    np.testing.assert_allclose(x[0].numpy(), expected.clip(0, 255) / 255, atol=1e-5)


def test_resident_batches_repeat():
    resident = Resident(of_arrays([pixels(i, 32, 32) for i in range(10)]), 28)

    def draw(**options):
        return list(resident.batches(4, train=True, jitter=0.4, **options))

    first = draw(seed=1, epoch=2)
    assert len(first) == 2 == len(resident.batches(4, train=True)) and len(resident.batches(4)) == 3
    assert len(resident.batches(64, train=True)) == 1
    assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(first, draw(seed=1, epoch=2)))
    for other in (draw(seed=1, epoch=3), draw(seed=2, epoch=2)):
        assert not torch.equal(first[0][0], other[0][0])
    told = resident.batches(4, train=True, seed=1, jitter=0.4)
    told.set_epoch(2)
    assert torch.equal(next(iter(told))[0], first[0][0])


def test_random_crop_is_where_it_says():
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[None, :, None] * 8, (32, 32, 3))
    resident = Resident(of_arrays([np.ascontiguousarray(ramp)]), 32, store=32)
    x = resident.images.float()

    def crop(area, left, flipped):
        u = torch.tensor([[area, 0.5, left, 0.5, 0.0 if flipped else 1.0]])
        return resident.random_crop(x, u, min_scale=0.0, flip=True)[0, 0, 0]

    torch.testing.assert_close(crop(1.0, 0.5, False), x[0, 0, 0], atol=1e-3, rtol=0)
    torch.testing.assert_close(crop(1.0, 0.5, True), x[0, 0, 0].flip(0), atol=1e-3, rtol=0)
    right = crop(0.25, 1.0, False)  # half the side, pushed to the right: columns 16 to 31, at every half
    torch.testing.assert_close(right[1:-1], torch.arange(32)[1:-1] * 4 + 126.0, atol=1e-3, rtol=0)


def test_enlarging_by_products_is_cubic_convolution():
    small = of_arrays([pixels(i, 16, 16) for i in range(3)])
    resident = Resident(small, 40)
    x, u = resident.images.float(), torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    assert x.shape[-1] < 40
    line = (torch.arange(40) * 2 + 1) / 40 - 1
    box = torch.stack([(0.3 + 0.7 * u[:, 0]) ** 0.5] * 2)  # a square: the second draw says so
    u[:, 1] = 0.5
    centre = (1 - box) * (2 * u[:, 2:4].T - 1)
    sign = torch.where(u[:, 4] < 0.5, -1.0, 1.0)
    gx, gy = centre[0, :, None] + (box[0] * sign)[:, None] * line, centre[1, :, None] + box[1, :, None] * line
    grid = torch.stack([gx[:, None, :].expand(-1, 40, -1), gy[:, :, None].expand(-1, -1, 40)], -1)
    wanted = torch.nn.functional.grid_sample(x, grid, mode="bicubic", padding_mode="border", align_corners=False)
    torch.testing.assert_close(resident.random_crop(x, u, 0.3, True), wanted.clamp(0, 255), atol=2e-3, rtol=0)


def photograph(seed, width, height):
    """Smooth, so that two ways of resampling differ little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def both(how, side=40, size=32, n=6, **pass_):
    """An epoch through workers' code, and out of memory: the same stored pixels, plain (no mean, no std)."""
    images = of_arrays([photograph(i, side, side) for i in range(n)])
    plain = Preprocess(size=size, mean=(0, 0, 0), std=(1, 1, 1))
    here = loader(images, 4, train=True, seed=3, augment=Augment.of(plain, **how), **pass_)
    here.set_epoch(2)
    resident = Resident(images, size, store=side)
    part = (pass_.get("rank", 0), pass_.get("world", 1))
    there = resident.batches(4, True, 3, 2, (0, 0, 0), (1, 1, 1), **how, part=part)
    return list(here), list(there)


SETTINGS = [
    {"min_scale": 0.3},
    {"min_scale": 1.0, "flip": False},
    {"min_scale": 0.5, "jitter": 0.4},
    {"min_scale": 0.5, "erase": 1.0},
    {"min_scale": 0.5, "randaugment": "rand-m9-mstd0.5-inc1-p1"},
    {"min_scale": 0.4, "randaugment": "rand-m20-n3-mstd0.5-inc1", "jitter": 0.3, "erase": 0.5},
]


@pytest.mark.parametrize("how", SETTINGS, ids=lambda how: "-".join(how))
@pytest.mark.parametrize("side", [40, 24])
def test_an_image_is_augmented_alike_wherever_it_lies(how, side):
    """The same box, flip, operations, factors and rectangle; only resampling rounds otherwise."""
    here, there = both(how, side)
    assert len(here) == len(there) == 1
    for (x, y), (u, v) in zip(here, there):
        assert torch.equal(y, v) and x.shape == u.shape == (4, 3, 32, 32)
        near = (x - u).abs()
        # Equalising and posterising turn a level of difference into many, in a few pixels.
        assert near.mean() < 0.01 and near.flatten(1).mean(1).max() < 0.02, near.flatten(1).mean(1)
        assert near.flatten().quantile(0.95) < 0.03


def test_erasing_and_jitter_are_the_same_to_the_bit():
    """Where nothing is resampled there is nothing left to differ."""
    image = Image.fromarray(photograph(0, 32, 32))
    how = Augment(32, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), min_scale=1.0, flip=False, jitter=0.4, erase=1.0)
    resident = Resident(of_arrays([np.asarray(image)]), 32, store=32)
    for seed in range(5):
        u = draws(1, torch.Generator().manual_seed(seed))
        u[:, :5] = 0.5  # the whole of a square, not flipped
        batch = resident.batches(1, True, mean=how.mean, std=how.std, min_scale=1.0, flip=False, jitter=0.4, erase=1.0)
        mean, std = _scaled(how.mean, how.std, torch.device("cpu"))
        with ThreadPoolExecutor(1) as pool:
            theirs = batch._augment(mean, std, pool)(resident.images.float(), u, [0])[0]
        torch.testing.assert_close(how(image, u[0], 0, 0, 0), theirs, atol=2e-5, rtol=0)


def test_ranks_are_augmented_as_one_process_is():
    how = {"min_scale": 0.4, "randaugment": "rand-m9-mstd0.5-inc1", "erase": 0.5}
    images = of_arrays([photograph(i, 40, 40) for i in range(16)])
    augment = Augment.of(Preprocess(size=32), **how)

    def drawn_by(rank, world, batch):
        return torch.cat([x for x, _ in loader(images, batch, True, seed=1, rank=rank, world=world, augment=augment)])

    joint, parts = drawn_by(0, 1, 8), [drawn_by(rank, 2, 4) for rank in range(2)]
    assert torch.equal(joint, torch.cat([part[at : at + 4] for at in (0, 4) for part in parts]))


def test_a_magnitude_is_applied_as_it_is_named():
    from dwindle.io.augment import planner

    def levels(name, op, over=200):
        made, found = planner(name, 224, (0.5, 0.5, 0.5), "bicubic"), []
        for seed in range(over):
            with seeded(seed):
                found += [args[0] for function, args, _ in made(()) if function.__name__ == op]
        return found

    assert {round(abs(angle), 3) for angle in levels("rand-m20-p1-inc1", "rotate")} == {60.0}  # 3 degrees for each
    assert {abs(angle) for angle in levels("rand-m10-p1-inc1", "rotate")} == {30.0}
    assert {abs(angle) for angle in levels("rand-m20-mmax12-p1-inc1", "rotate")} == {36.0}  # a bound by name
    assert max(abs(angle) for angle in levels("rand-m9-mstd5-p1-inc1", "rotate")) == 30.0  # timm's own, for its noise
    for name in ("rand-m20-p1-inc1", "rand-m10-p1-inc1", "rand-m0-p1"):
        assert set(levels(name, "posterize")) == {1}
    black = np.asarray(photograph(0, 32, 32)) * 0
    for seed in range(300):  # every operation of Pillow's takes what is planned
        plan = Augment(32, (0.5,) * 3, (0.2,) * 3, randaugment="rand-m20-n4-mstd3-p1-inc1").plan(seed)
        assert applied(plan, Image.fromarray(black)).size == (32, 32) and len(plan) == 4
    with pytest.raises(DwindleError, match="augment = rand-x5: timm knows no such RandAugment"):
        planner("rand-x5", 224, (0.5, 0.5, 0.5), "bicubic")


def test_erasing_is_deits():
    x, u = torch.full((2000, 3, 32, 32), 7.0), draws(2000, torch.Generator().manual_seed(0))
    made = erased(x, u, 0.25, noise(32, "cpu"))
    gone = (made != 7).all(1)
    assert abs(float(gone.any((1, 2)).float().mean()) - 0.25) < 0.03
    some = gone[gone.any((1, 2))]
    area, high, wide = some.float().mean((1, 2)), some.any(2).sum(1), some.any(1).sum(1)
    assert (some.sum((1, 2)) == high * wide).all()  # rectangles
    assert float(area.min()) > 0.01 and float(area.max()) < 0.36 and abs(float(area.mean()) - 0.177) < 0.02
    assert float((high / wide).max()) > 2 and float((wide / high).max()) > 2
    values = made.permute(1, 0, 2, 3)[:, gone]
    assert abs(float(values.mean())) < 0.05 and abs(float(values.std()) - 1) < 0.05
    assert torch.equal(made[~gone.any((1, 2))], x[~gone.any((1, 2))])


def test_crops_of_an_oblong_image_lie_within_it():
    """And are no thinner than torchvision's, also where the image is a strip."""
    u = draws(500, torch.Generator().manual_seed(0))
    for size in ((500, 375), (375, 500), (1000, 10), (10, 1000), (64, 64)):
        (x, y), (width, height) = boxes(u, 0.08, size)
        for centre, extent in ((x, width), (y, height)):
            assert (extent > 0).all() and (centre.abs() + extent <= 1 + 1e-6).all()
        ratio = (width * size[0]) / (height * size[1])
        assert float(ratio.max()) < 4 / 3 + 1e-4 and float(ratio.min()) > 3 / 4 - 1e-4
    how = Augment.of(Preprocess(size=24), min_scale=0.08)
    begin = time.process_time()
    for size in ((5_000_000, 1), (1, 5_000_000), (59_999, 3)):
        image = Image.new("RGB", size, (10, 20, 30))
        for row in u[:10]:
            assert how(image, row, 0).std((1, 2)).max() < 1e-5
    assert time.process_time() - begin < 3


def test_resident_images_are_cut_and_resampled_as_the_preprocess_says():
    images = of_arrays([photograph(i, *size) for i, size in enumerate([(20, 16), (18, 30), (50, 40)])])
    for interpolation, crop_pct in (("bilinear", 1.0), ("bicubic", 0.875), ("bicubic", 1.0)):
        wanted = Preprocess(size=28, interpolation=interpolation, crop_pct=crop_pct)
        images.transform = wanted.eval_transform()
        resident = Resident(images, 28, crop_pct=crop_pct, interpolation=interpolation)
        for (x, _), i in zip(resident.batches(1), range(3)):
            torch.testing.assert_close(x[0], images[i][0], atol=1e-5, rtol=0)
    with pytest.raises(DwindleError, match=r"interpolation = lanczos: .*set resident=false"):
        Resident(images, 28, interpolation="lanczos")


def test_jitter_of_zero_strength_changes_nothing():
    x = torch.rand(2, 3, 4, 4) * 255
    torch.testing.assert_close(jittered(x, torch.ones(2, 3)), x)
    grey = jittered(x, torch.tensor([[1.0, 1.0, 0.0], [0.5, 1.0, 1.0]]))
    torch.testing.assert_close(grey[0, 0], grey[0, 2])
    torch.testing.assert_close(grey[1], x[1] / 2)


def test_resident_of_nothing_or_broken():
    with pytest.raises(DwindleError, match="no images"):
        Resident(of_arrays([]), 28)

    def broken(i):
        if i == 5:
            raise DwindleError("Cannot decode row 5.")
        return Image.fromarray(pixels(i))

    with pytest.raises(DwindleError, match="row 5"):
        Resident(Images("made", broken, np.arange(8)), 28)


# Real data


@real
def test_real_cifar100():
    train, test = (open_data("cifar100", split, root=str(SHARED)) for split in ("train", "test"))
    assert (len(train), len(test)) == (50000, 10000)
    assert train.num_classes == test.num_classes == 100 and train.classes[:2] == ["apple", "aquarium_fish"]
    assert np.bincount(train.labels).tolist() == [500] * 100
    assert train[49999][0].size == (32, 32)


@real
def test_real_imagenet():
    held = open_data(str(SHARED / "imagenet_val"), "test")
    assert len(held) == held.num_classes == 1000 and held.classes[0] == "tench"
    assert held[0][0].size == (256, 256) and held[0][0].mode == "RGB"
    samples = open_data(str(SHARED / "imagenet_samples"))
    assert len(samples) == 1000 and samples.classes == held.classes
    with pytest.raises(DwindleError, match="it has train"):
        open_data(str(SHARED / "imagenet_samples"), "val")
