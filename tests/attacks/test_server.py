"""The server as a stranger may treat it: what arrives slowly, endlessly, wrong, or is more than it looks.

While an attack goes on, an honest client (witness.py, in a process of its own) asks for health and for answers. The
server keeps answering it, soon, and its memory stays within bounds.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from PIL import Image

import dwindle
from shared.tally import SLOW, Tally
from shared.tiny import build

pytest.importorskip("fastapi", reason="extra `serve` is not installed")
from dwindle.serve.limits import Limits

TOKEN = "a-token-for-the-attacks"
HEALTHY = 0.1  # seconds to an answer of /healthz, at the median: attackers run on the same cores
MOST = 30.0  # seconds to any answer
HEAD = b"Host: localhost\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
Send = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Target:
    process: subprocess.Popen
    port: int
    picture: Path

    def memory(self, peak: bool = True) -> float:
        """MiB."""
        told = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB", told)[1]) / 1024

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    if not sys.platform.startswith("linux"):
        pytest.skip("memory is read from /proc")
    folder = tmp_path_factory.mktemp("server")
    method = dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6)
    checkpoint = dwindle.save(build("vit", method), folder / "tiny")
    picture = folder / "picture.png"
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(picture)
    line = [sys.executable, "-m", "dwindle", "serve", str(checkpoint), "--port", "0"]
    with (folder / "log").open("w") as log:
        environment = os.environ | {"DWINDLE_TOKEN": TOKEN}
        server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        address = next(json.loads(said)["address"] for said in server.stdout if said.startswith("{"))
        yield Target(server, int(address.rstrip("/").rsplit(":", 1)[1]), picture)
        server.send_signal(signal.SIGTERM)
        assert server.wait(40) in (0, -signal.SIGTERM)
        assert (folder / "log").stat().st_size < 20_000, (folder / "log").read_text()[:4000]
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def witnessed(target: Target, tally: Tally, grows: float) -> Iterator[None]:
    """grows: MiB that the server may take for the attack."""
    target.forget_peak()
    before = target.memory()
    line = [sys.executable, "-I", "-S", str(Path(__file__).with_name("witness.py"))]
    line += [str(target.port), str(target.picture), TOKEN]
    witness = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert witness.stdout.readline() == "ready\n"
        yield
        told = json.loads(witness.communicate(timeout=60)[0])
    finally:
        witness.kill()
    health, images = (
        [seconds if status == 200 else float("inf") for seconds, status in told[of]] for of in ("health", "image")
    )
    grown = target.memory() - before
    said = f"health median {median(health) * 1e3:.0f} ms, worst {max(health) * 1e3:.0f} ms of {len(health)}"
    said += f"; images worst {max(images) * 1e3:.0f} ms of {len(images)}; memory grew by {grown:.0f} MiB"
    print(said)
    tally(median(health) < HEALTHY and max(health) < MOST, said)
    tally(max(images) < MOST, f"{said}: {[status for _, status in told['image'] if status != 200]}")
    tally(grown < grows, said)


async def connected(target: Target, send: Send, patience: float) -> bytes:
    """What comes back until the server closes, or the patience ends."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    except OSError:
        return b""
    got = b""
    try:
        with contextlib.suppress(OSError, EOFError):
            await send(reader, writer)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(patience):
                while data := await reader.read(1 << 16):
                    got += data
    finally:
        writer.close()
    return got


def saying(data: bytes) -> Send:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), 1 << 20):
            writer.write(data[at : at + (1 << 20)])
            await writer.drain()

    return send


def trickling(begin: bytes, seconds: float, drop: bytes = b"a") -> Send:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not writer.is_closing():
            writer.write(drop)
            await writer.drain()
            await asyncio.sleep(0.5)

    return send


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def post(path: str, body: bytes, kind: str = "application/json", more: bytes = b"") -> bytes:
    said = f"POST {path} HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return said.encode() + HEAD + more + b"\r\n" + body


def together(target: Target, sends: list[Send], at_once: int = 1000, patience: float = MOST + 5) -> list[bytes]:
    """What each got."""

    async def run() -> list[bytes]:
        places = asyncio.Semaphore(at_once)

        async def one(send: Send) -> bytes:
            async with places:
                return await connected(target, send, patience)

        return await asyncio.gather(*map(one, sends))

    return asyncio.run(run())


SLOWLY = {
    "heads": b"GET /healthz HTTP/1.1\r\nX: ",
    "header lines": b"GET /healthz HTTP/1.1\r\n",
    "bodies": b"POST /v1/classify HTTP/1.1\r\n" + HEAD + b"Content-Length: 100000\r\n\r\n",
    "bodies without a token": b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
    "JSON": b"POST /v1/batch HTTP/1.1\r\nContent-Type: application/json\r\n" + HEAD + b"Content-Length: 9999\r\n\r\n[",
    "nothing": b"",
}


def each(of: Iterable[str]) -> pytest.MarkDecorator:
    """All in one go; where there is time, one after the other, so that each is witnessed for itself."""
    kinds = [[what] for what in of] if SLOW else [list(of)]
    return pytest.mark.parametrize("kinds", kinds, ids=[kind[0] if SLOW else "everything" for kind in kinds])


@each(SLOWLY)
def test_slow(target, tally, many, kinds):
    """More connections than there are places, each with a byte now and then: they go, an honest client comes in."""
    drops = {"header lines": b"a: b\r\n", "nothing": b"\r\n"}
    sends = [trickling(SLOWLY[what], many(3, 20), drops.get(what, b"a")) for what in kinds]
    held = []

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)
        held.append(target.files())

    with witnessed(target, tally, grows=60):
        answers = together(target, [*sends * (many(900, 1500) // len(sends)), counting], 2000, many(1, 15))
    tally(held[0] < Limits.connections + 100, f"{kinds}: {held[0]} files are open")
    for answer in answers:
        tally(status(answer) in (0, 401, 408, 503), f"{kinds}: {answer[:60]!r}")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", before: bytes = b"", depth: int = 8, colours: int = 2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + before
        + chunk(b"IDAT", data or zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def oblong() -> bytes:
    return encoded(Image.new("RGB", (59_999, 3), "red"), "PNG")


def many_scans() -> bytes:
    """A progressive JPEG of 25 million pixels whose last scan is repeated: 42 bytes and 10 ms each."""
    data = encoded(Image.new("RGB", (5000, 5000), "red"), "JPEG", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + last * ((9 << 20) // len(last)) + data[-2:]


def many_segments() -> bytes:
    data = encoded(Image.new("RGB", (50, 50), "red"), "JPEG")
    return data[:2] + b"\xff\xe1\x00\x02" * 2_400_000 + data[2:]


def fill() -> bytes:
    data = encoded(Image.new("RGB", (50, 50), "red"), "JPEG")
    return data[:2] + b"\xff" * (9 << 20) + data[2:]


def many_profiles() -> bytes:
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * 1_000_000))
    return png(50, 50, before=profile * ((9 << 20) // len(profile)))


def many_chunks() -> bytes:
    return png(50, 50, before=chunk(b"abCd", b"") * 800_000)


def see_through() -> bytes:
    return encoded(Image.new("RGBA", (5000, 5000), (9, 8, 7, 100)), "PNG", compress_level=1)


def sixteen_bits() -> bytes:
    return encoded(Image.fromarray(np.zeros((5000, 5000), np.uint16)), "PNG", compress_level=1)


def runs() -> bytes:
    """A BMP in runs of one pixel, which Pillow decodes in Python."""
    body, colours = b"\x01\x00" * 4_900_000, b"\0\0\0\0" * 256
    offset = 14 + 40 + len(colours)
    size = struct.pack("<IiiHHIIiiII", 40, 5000, 5000, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset) + size + colours + body


IMAGES: dict[str, tuple[Callable[[], bytes], tuple[int, ...], int]] = {  # with what they may be told, and MiB
    "59,999 x 3 pixels": (oblong, (200, 413), 100),
    "50,000 x 50,000 pixels in a header": (lambda: png(50_000, 50_000), (413,), 50),
    "2,000,000,000 x 1 pixels": (lambda: png(2_000_000_000, 1), (413, 422), 50),
    "250,000 scans": (many_scans, (413,), 450),
    "2,400,000 segments": (many_segments, (200, 422), 300),
    "a long fill": (fill, (200, 422), 300),
    "10,000 profiles": (many_profiles, (413, 422), 300),
    "800,000 chunks": (many_chunks, (200, 422), 300),
    "25 million pixels, half transparent": (see_through, (200,), 1500),
    "25 million pixels of 16 bits": (sixteen_bits, (200,), 2600),
    "runs of one pixel": (runs, (413, 422), 700),
}


@each(IMAGES)
def test_images(target, tally, many, kinds):
    bodies = {what: IMAGES[what][0]() for what in kinds}
    with witnessed(target, tally, max(IMAGES[what][2] for what in kinds)):
        for what in kinds:
            begin = time.monotonic()
            answers = together(target, [saying(post("/v1/classify", bodies[what], "image/png"))] * many(2, 40))
            for answer in answers:
                tally(status(answer) in (*IMAGES[what][1], 503, 504), f"{what}: {answer[:60]!r}")
            tally(time.monotonic() - begin < MOST + 5, f"{what}: {time.monotonic() - begin:.0f} s")


SIZE = 45 << 20  # bytes of a hollow document; all of these are made when they are sent
DOCUMENTS: dict[str, Callable[[], bytes]] = {
    "arrays": lambda: b'{"images": [' + b"[]," * (SIZE // 3) + b"[]]}",
    "deep arrays": lambda: b"[" * SIZE,
    "deep objects": lambda: b'{"a":' * (SIZE // 5),
    "objects": lambda: b'{"images": [' + b"{}," * (SIZE // 3) + b"{}]}",
    "images without anything": lambda: b'{"images": [' + b'{"image":""},' * (SIZE // 13) + b'{"image":""}]}',
    "keys": lambda: b"{" + b",".join(b'"%d":0' % i for i in range(4_000_000)) + b"}",
    "numbers": lambda: b'{"images": [' + b"1," * (SIZE // 2) + b"1]}",
    "a long number": lambda: b'{"top": ' + b"1" * SIZE + b"}",
    "quotes": lambda: b'{"image": "' + b'\\"' * (SIZE // 2) + b'"}',
    "backslashes": lambda: b'{"image": "' + b"\\" * SIZE + b'"}',
    "strings of quotes": lambda: b'{"images": [' + (b'"' + b'\\"' * 300 + b'",') * (SIZE // 603) + b"0]}",
    "long strings": lambda: b'{"images": [' + (b'"' + b"A" * 600 + b'",') * (SIZE // 603) + b"0]}",
    "escapes": lambda: b'{"image": "' + b"\\u002f" * (2 << 20) + b'"}',
    "an image more than are allowed": lambda: (
        b'{"images": [' + (b'{"image": "' + base64.b64encode(oblong()) + b'"},') * 32 + b"{}]}"
    ),
    "one string": lambda: b'{"image": "' + b"A" * SIZE + b'"}',
    "large images": lambda: b'{"images": [' + b",".join([b'{"image": "' + b"A" * (4 << 20) + b'"}'] * 11) + b"]}",
    "spaces": lambda: b'{"image": ' + b" " * SIZE + b'""}',
    "no end": lambda: b'{"image": "' + b"A" * SIZE,
    "not UTF-8": lambda: b'{"image": "' + b"\xff" * 4000 + b'", "model": "\xff\xfe"}',
}
PATHS = ("/v1/batch", "/v1/classify", "/v1/explain")


@each(DOCUMENTS)
def test_json(target, tally, many, kinds):
    with witnessed(target, tally, grows=450):
        for what in kinds:
            requests = [saying(post(path, DOCUMENTS[what]())) for path in PATHS]
            for answer in together(target, requests * many(1, 10)):
                tally(status(answer) in (200, 413, 422, 503), f"{what}: {answer[:60]!r}")


GET, POST = b"GET /healthz HTTP/1.1\r\n" + HEAD, b"POST /v1/classify HTTP/1.1\r\n" + HEAD
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS: dict[str, Callable[[], bytes]] = {
    "one header": lambda: GET + b"X: " + b"a" * 100_000_000,
    "one name": lambda: GET + b"X" * 50_000_000,
    "headers": lambda: GET + b"X: a\r\n" * 5_000_000,
    "headers in lines": lambda: GET + b"X: a\r\n" + b" a\r\n" * 5_000_000,
    "address": lambda: b"GET /" + b"a" * 50_000_000,
    "query": lambda: b"GET /v1/models?" + b"a=b&" * 10_000_000,
    "method": lambda: b"G" * 10_000_000,
    "empty lines": lambda: b"\r\n" * 1_000_000,
    "chunk's size": lambda: CHUNKED + b"0" * 20_000_000,
    "chunk's extension": lambda: CHUNKED + b"1;" + b"a" * 20_000_000,
    "small chunks": lambda: CHUNKED + b"1\r\na\r\n" * 3_000_000,
    "trailers": lambda: CHUNKED + b"0\r\n" + b"X: a\r\n" * 3_000_000,
    "one trailer": lambda: CHUNKED + b"0\r\nX: " + b"a" * 20_000_000,
    "body in chunks": lambda: CHUNKED + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 1500,
    "body that is announced": lambda: POST + b"Content-Length: 1000000000000\r\n\r\n" + b"a" * 100_000_000,
    "requests": lambda: (GET + b"\r\n") * 300_000,
    "after an upgrade": lambda: GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"a" * 50_000_000,
}


@each(ENDLESS)
def test_endless(target, tally, many, kinds):
    with witnessed(target, tally, grows=80):
        for what in kinds:
            for answer in together(target, [saying(ENDLESS[what]())] * many(2, 50), patience=many(2, 15)):
                tally(len(answer) < 40_000, f"{what}: {len(answer)} bytes came back")
                fine = (0, 200) if what in ("requests", "after an upgrade", "empty lines") else (0, 400, 408, 413, 431)
                tally(status(answer) in fine, f"{what}: {answer[:60]!r}")


HIDDEN = b"GET /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n"
AMBIGUOUS = {
    "length and chunks": POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 0\r\n\r\nabc" + HIDDEN,
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc" + HIDDEN,
    "a length with a sign": POST + b"Content-Length: +3\r\n\r\nabc" + HIDDEN,
    "a length below 0": POST + b"Content-Length: -3\r\n\r\nabc" + HIDDEN,
    "a length beyond 64 bits": POST + b"Content-Length: 18446744073709551619\r\n\r\nabc" + HIDDEN,
    "chunks that are not": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks within": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a space before the colon": POST + b"Content-Length : 3\r\n\r\nabc" + HIDDEN,
    "a folded header": POST + b"X: a\r\n Content-Length: 3\r\n\r\nabc" + HIDDEN,
    "bare line feeds": b"GET /healthz HTTP/1.1\nHost: localhost\n\n" + HIDDEN,
    "a null": POST + b"X: a\x00b\r\n\r\n" + HIDDEN,
    "a wrong chunk": CHUNKED + b"zz\r\n" + HIDDEN,
    "a chunk beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\n" + HIDDEN,
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n" + HEAD + b"Connection: close\r\n\r\n",
    "another host": b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    "another origin": GET + b"Origin: http://evil.example\r\nConnection: close\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n",
}


def test_ambiguous(target, tally):
    """What two programs may read as two different things is refused, and nothing after it is read."""
    with witnessed(target, tally, grows=20):
        for what, request in AMBIGUOUS.items():
            for answer in together(target, [saying(request)], patience=3)[:1]:
                tally(answer.count(b"HTTP/1.1 ") == 1, f"{what}: {answer.count(b'HTTP/1.1 ')} answers")
                tally(400 <= status(answer) < 500, f"{what}: {answer[:60]!r}")
                tally(b"nosniff" in answer and b'{"error"' in answer, f"{what}: {answer!r}")


def test_garbage(target, tally, many):
    """Requests with bytes flipped, cut, doubled and moved: never a 5xx but for a body too many, never the end."""
    draw = random.Random(0)
    picture = target.picture.read_bytes()
    coded = json.dumps({"image": base64.b64encode(picture).decode(), "budget": 0.7}).encode()
    whole = [post("/v1/classify", picture, "image/png"), post("/v1/explain", coded), post("/v1/batch", coded), HIDDEN]

    def bent() -> bytes:
        data = bytearray(draw.choice(whole))
        edge = len(data) if draw.random() < 0.3 else min(len(data), 300)  # mostly in the head
        for _ in range(draw.randint(1, 6)):
            at, size = draw.randrange(edge), draw.randint(1, 40)
            kind = draw.randrange(4)
            if kind == 0:
                data[at % len(data)] = draw.randrange(256)
            elif kind == 1:
                del data[at : at + size]
            elif kind == 2:
                data[at:at] = data[at : at + size] * draw.randint(1, 5)
            else:
                data[at:at] = draw.randbytes(size)
            data = data or bytearray(b"G")
        return bytes(data)

    for _ in range(many(1, 50)):
        requests = [bent() for _ in range(300)]
        with witnessed(target, tally, grows=200):
            answers = together(target, [saying(request) for request in requests], 64, patience=0.5)
        for request, answer in zip(requests, answers):
            tally(status(answer) < 500, f"{request[:300]!r}: {answer[:60]!r}")


def flood(count: int, request: bytes) -> Send:
    """One request after the other on a connection that stays, each answered before the next."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(count):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        writer.close()

    return send


async def leaving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(post("/v1/classify", encoded(Image.new("RGB", (900, 900), "red"), "JPEG"), "image/jpeg"))
    await writer.drain()
    writer.close()


def greedy(count: int) -> Send:
    """Asks for photographs, and takes none."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        for _ in range(count):
            writer.write((b"GET /samples/coffee.jpg HTTP/1.1\r\n" + HEAD + b"\r\n") * 10)
            await asyncio.sleep(0.3)

    return send


async def knocking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


FLOODS: dict[str, Callable[[Callable[[int, int], int]], list[Send]]] = {
    "of connections": lambda many: [knocking] * many(700, 10_000),
    "of small requests": lambda many: [flood(many(10, 500), GET + b"\r\n")] * 60,
    "of requests refused": lambda many: [flood(many(10, 300), b"POST /v1/batch HTTP/1.1\r\nHost: a\r\n\r\n")] * 60,
    "of clients that leave": lambda many: [leaving] * many(150, 5000),
    "of clients that do not read": lambda many: [greedy(many(5, 100))] * 200,
}


@each(FLOODS)
def test_floods(target, tally, many, kinds):
    with witnessed(target, tally, grows=400):
        for what in kinds:
            together(target, FLOODS[what](many), patience=many(1, 15))
            tally(target.process.poll() is None, f"{what}: the server has ended")


def test_more_than_can_be_done(target, tally, many):
    """Photographs faster than they can be looked at: each gets its answer or is told to come again, all in time."""
    photo = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (3000, 4000, 3), np.uint8)), "JPEG")
    with witnessed(target, tally, grows=1500):
        begin = time.monotonic()
        answers = together(target, [saying(post("/v1/classify", photo, "image/jpeg"))] * many(12, 400))
        spent = time.monotonic() - begin
    for answer in answers:
        tally(status(answer) in (200, 429, 503, 504), f"{answer[:60]!r}")
    tally(spent < MOST + 5, f"the last answer came after {spent:.0f} s")
