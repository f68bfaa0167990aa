"""Hostile images, one by one and in folders: an image comes out or one sentence does, in bounded time and memory."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import resource
import signal
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dwindle
from dwindle.evaluate.predict import predict
from dwindle.io.augment import DRAWS, Augment
from dwindle.io.images import MAX_PIXELS, Preprocess, load_image
from dwindle.io.opening import open_data
from shared.tiny import METHODS, build

SECONDS, MEMORY = 10, 1 << 30  # of the CPU and beside what the process has, for one image
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
SIZE = 64


Try = tuple[str, Callable[[], Any]]


def bounded(tries: Iterable[Try], tally: Any, together: int = 25) -> None:
    """Try each in a process of its own, or some after one another: an image or one sentence must come of it."""
    left = list(tries)
    while left:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            _tried(left[:together], theirs)
        theirs.close()
        told = []
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        status = os.waitpid(child, 0)[1]
        if len(told) < min(together, len(left)):
            late = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF)
            told.append("took too long" if late else f"killed it: {status}")
        for (name, _), what in zip(left, told):
            tally(not what, f"{name}: {what}")
        left = left[len(told) :]


def _tried(tries: list[Try], told: Any) -> None:
    try:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        warnings.simplefilter("ignore")
        for _, call in tries:
            signal.alarm(6 * SECONDS)  # others compute here too
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            told.send(_told(call))
    finally:
        os._exit(0)


def _told(call: Callable[[], Any]) -> str:
    try:
        call()
    except dwindle.DwindleError as error:
        whole = str(error).endswith((".", "?")) and "\n" not in str(error) and len(str(error)) < 2000
        return "" if whole else f"said {str(error)[:200]!r}"
    except BaseException as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    return ""


def used(source: Any, size: int = SIZE) -> None:
    """All that is made of an image: the model's view, and what training makes of it."""
    image = load_image(source)
    pre = Preprocess(size=size)
    assert pre.seen(image).size == (size, size) and image.mode == "RGB"
    generator = torch.Generator().manual_seed(0)
    augment = Augment.of(pre, randaugment="rand-m9-mstd0.5-inc1", erase=0.5, jitter=0.3)
    for i in range(3):
        made = augment(image, torch.rand(DRAWS, generator=generator), i)
        assert made.shape == (3, size, size) and made.isfinite().all()


def picture(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (image.convert("P") if kind == "GIF" else image).save(out, kind, **options)
    return out.getvalue()


def png(width: int, height: int, rows: bytes, kind: int = 2, depth: int = 8) -> bytes:
    """With whatever is said of the size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_bent_files(kind, tally, many):
    """Flipped, lost, doubled and foreign bytes."""
    rng = random.Random(f"bent {kind}")
    whole, tries = encoded(picture(), kind), []
    for i in range(many(25, 1000)):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 120))
            how = rng.randrange(4)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del data[at : at + rng.choice((1, 8, len(data) // 2))]
            elif how == 2:
                data[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
            else:
                data[at:at] = data[: rng.randrange(64)]
            if not data:
                break
        tries.append((f"bent {kind} {i}", partial(used, bytes(data))))
    bounded(tries, tally)


def test_bombs(tally, many):
    """Files that say they are far larger than they are, and small files that are large."""
    nothing = zlib.compress(bytes(1000))
    zeros = zlib.compress(bytes(50_000_000), 9)
    said = {
        f"PNG of {w} x {h}": png(w, h, nothing)
        for w, h in ((60_000, 60_000), (2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (9000, 9000))
    }
    said |= {
        "PNG with more data than pixels": png(8, 8, zeros),
        "1-bit PNG": png(40_000, 40_000, zlib.compress(bytes(40_000 * 5001)), kind=0, depth=1),
        "PPM": b"P6 99999 99999 255\n" + bytes(100),
        "PGM": b"P5 9000 9000 65535\n" + bytes(100),
        "BMP": encoded(picture(), "BMP")[:18] + struct.pack("<ii", 50_000, 50_000) + encoded(picture(), "BMP")[26:],
        "GIF": encoded(picture(), "GIF")[:6] + b"\xff\xff\xff\xff" + encoded(picture(), "GIF")[10:],
        "wide TIFF": encoded(Image.new("1", (60_000, 2000)), "TIFF", compression="group4"),
        "text in PNG": encoded(picture(), "PNG", pnginfo=_text(20_000_000)),
        "as large as may be": encoded(Image.new("L", (9459, 9459)), "PNG"),
        "a pixel larger": encoded(Image.new("L", (9460, 9459)), "PNG"),
    }
    if many(0, 1):
        said["the same with transparency"] = encoded(Image.new("RGBA", (9459, 9459), (1, 2, 3, 4)), "PNG")
    bounded([(name, partial(used, data)) for name, data in said.items()], tally, together=1)
    with pytest.raises(dwindle.DwindleError, match=f"more than the {MAX_PIXELS}"):
        load_image(said["a pixel larger"])


def _text(size: int) -> Any:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("comment", "a" * size, zip=True)
    return info


@pytest.mark.parametrize("kind", FORMATS)
def test_strips(kind, tally, many):
    """Of sides in the ten thousands only what the crop needs is made."""
    longest = {"WEBP": 16_383, "JPEG": 65_500, "GIF": 65_535}.get(kind, 59_999)
    sizes = [(longest, 3), (3, longest), (longest, 1), (1, longest), (longest, 200)]
    for width, height in sizes + [(longest // i, 1 + i) for i in range(1, many(2, 40))]:
        data = encoded(Image.new("RGB", (width, height), (90, 20, 200)), kind)
        bounded([(f"{kind} of {width} x {height}", partial(used, data, 224))], tally)
        if kind != "PNG":
            continue
        seen = np.asarray(Preprocess(size=SIZE).seen(load_image(data)))
        tally((seen == (90, 20, 200)).all(), f"{kind} of {width} x {height} is of another colour")


def test_numbers_that_are_no_colours(tally):
    """What a TIFF may hold beside colours: scaled or refused, never guessed."""
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    for name, values in {
        "NaN": np.where(ramp > 0.5, np.nan, ramp),
        "infinite": np.where(ramp > 0.5, np.inf, ramp),
        "beyond 1": ramp * 1000,
        "below 0": ramp - 0.5,
        "32-bit integers": (ramp * 1e6).astype(np.int32),
    }.items():
        for compression in (None, "tiff_lzw"):
            data = encoded(Image.fromarray(values.astype(np.int32 if "32" in name else np.float32)), "TIFF",
                           compression=compression)  # fmt: skip
            with pytest.raises(dwindle.DwindleError) as said:
                load_image(data)
            tally("no numbers" in str(said.value) or "bits" in str(said.value), f"{name}: {said.value}")
    for scaled in (ramp, (ramp * 65535).astype(np.uint16), (ramp * 255).astype(np.uint8)):
        seen = np.asarray(load_image(encoded(Image.fromarray(scaled), "TIFF")))[..., 0]
        tally(np.abs(seen - 255 * ramp).max() < 1.01, f"{scaled.dtype} is scaled otherwise")


def test_metadata(tally, many):
    """EXIF of any content, and as large as it may be."""
    rng = random.Random("metadata")
    blocks = [b"Exif\0\0" + rng.randbytes(rng.randint(1, 400)) for _ in range(many(20, 500))]
    head = b"Exif\0\0II*\0\x08\0\0\0"
    for _ in range(many(20, 500)):  # a directory whose entries point anywhere
        count = rng.randint(1, 30)
        entries = b"".join(
            struct.pack("<HHII", rng.choice((0x112, 0x8769, 0x8825, 0xA005, rng.randrange(65536))),
                        rng.randrange(16), rng.choice((1, 2, 2**31)), rng.choice((6, 8, 0, 2**32 - 1)))
            for _ in range(count)
        )  # fmt: skip
        blocks.append(head + struct.pack("<H", count) + entries + struct.pack("<I", rng.choice((0, 8))))
    blocks.append(head + struct.pack("<H", 1) + struct.pack("<HHII", 0x9286, 7, 60_000, 26) + bytes(60_000))
    kinds = ("JPEG", "PNG", "WEBP")
    made = [(i, kind, encoded(picture(), kind, exif=block)) for i, block in enumerate(blocks) for kind in kinds]
    bounded([(f"EXIF {i} in {kind}", partial(used, data)) for i, kind, data in made], tally)


def test_animations(tally, many):
    """Only the first of many frames is looked at."""
    frames = [picture(160, 120, seed).convert("P") for seed in range(many(20, 400))]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        rest = {"save_all": True, "append_images": [frame.convert("RGB") for frame in frames[1:]]}
        data = encoded(frames[0].convert("RGB"), kind, **rest)
        bounded([(f"animated {kind}", partial(used, data))], tally)
        first = encoded(frames[0].convert("RGB"), kind)
        same = np.abs(np.asarray(load_image(data)).astype(int) - np.asarray(load_image(first))).mean() < 12
        tally(bool(same), f"of an animated {kind} another frame is read")


def test_what_is_called_an_image(tmp_path, tally):
    """Other contents under an image's name, and what is no file at all."""
    whole = encoded(picture(), "JPEG")
    contents = {
        "empty.jpg": b"",
        "text.jpg": b"not an image",
        "html.png": b"<html>" * 1000,
        "zip.png": b"PK\x03\x04" + bytes(100),
        "pdf.jpg": b"%PDF-1.7\n" + bytes(100),
        "eps.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(id) system\n",
        "svg.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "polyglot.gif": b"GIF89a" + whole,
        "jpeg.png": whole,
        "zeros.tif": bytes(100_000),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, to in (("zero", "/dev/zero"), ("random", "/dev/urandom"), ("tty", "/dev/tty"), ("me", "me.jpg"),
                     ("gone", "nothing"), ("mem", "/proc/self/mem"), ("fd", "/proc/self/fd/0")):  # fmt: skip
        os.symlink(to, tmp_path / f"{name}.jpg")
    bounded([(path.name, partial(used, path)) for path in sorted(tmp_path.iterdir())], tally)
    arrays = torch.zeros(3, 4, 4), np.zeros((2, 2))
    odd = (3, None, 1.5, [whole], {"bytes": whole}, *arrays, "", "a\0b", "n" * 400)
    bounded([(repr(strange), partial(used, strange)) for strange in odd], tally)


def test_folders(tmp_path, tally):
    """Circles of links, pipes, devices, names that are no UTF-8 or long: every image once, in both readings."""
    words, whole = ("ant", "bee"), encoded(picture(), "PNG")
    names = [b"a.png", b"\xff\xfe.png", b"e\xcc\x81.png", b"new\nline.png", b"-rf.png", b"n" * 240 + b".PNG"]
    model = build("vit", METHODS["AHT"]())
    dwindle.save(model, tmp_path / "model")
    for kind in ("classes", "flat"):
        root = tmp_path / kind
        for word in words:
            (root / word / "deep").mkdir(parents=True)
            for name in names:
                Path(os.fsdecode(os.path.join(os.fsencode(root / word), name))).write_bytes(whole)
            (root / word / "deep" / "b.png").write_bytes(whole)
            os.mkfifo(root / word / "pipe.png")
            os.symlink("/dev/zero", root / word / "zero.png")
            os.symlink(root, root / word / "up")
            os.symlink(root / word, root / word / "deep" / "round")
            os.symlink(root / words[0], root / word / "other")
        os.symlink(root, root / "self")
    (tmp_path / "flat" / "own.png").write_bytes(whole)
    expected = 2 * (len(names) + 1)

    def opened() -> None:
        images = open_data(str(tmp_path / "classes"))
        assert len(images) == expected and images.classes == list(words), (len(images), images.classes)
        for i in range(len(images)):
            images.image(i)

    def predicted() -> None:
        told = predict(str(tmp_path / "model"), str(tmp_path / "flat"), tmp_path / "p.parquet", batch=4)
        assert told["rows"] == told["images"] == expected + 1 and not told["failed"], told

    bounded([("class folders", opened), ("predict", predicted)], tally, together=1)
