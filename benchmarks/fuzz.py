"""Malformed requests against `dwindle serve`, on this machine only: statuses by address, and memory over time.

    python benchmarks/fuzz.py --requests 10000

Half are made by schemathesis from the server's own OpenAPI description, what it allows and what it forbids; half are
images of every format it takes, cut, bent or lying about their size, as they are or in JSON, with odd settings and
headers. Ends with 1 if any answer was a 5xx or none came. The last line is JSON.
"""

from __future__ import annotations

import argparse
import base64
import collections
import concurrent.futures
import io
import json
import random
import struct
import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from load import start
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import dwindle

ADDRESSES = ("/v1/classify", "/v1/batch", "/v1/explain")
KINDS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
SETTINGS = ["", "", "", "?budget=0.7", "?budget=nan", "?budget=-1", "?budget=1e400", "?budget=%00", "?top=9999999999"]
SETTINGS += ["?top=1.5", "?model=..%2f..%2fetc", "?model=static&budget=0.5", "?budget=0.6&budget=x", "?" + "a" * 5000]
TYPES = [
    "",
    "application/octet-stream",
    "multipart/form-data",
    "text/plain; charset=\\",
    "application/json",
    "a" * 3000,
]
VALUES = [None, True, -1, 0, 0.7, 1e308, "", "0.5", [], {}, "nobody", 10**30]


def images(rng: random.Random) -> dict[str, list[bytes]]:
    """A few small ones of each format."""
    made: dict[str, list[bytes]] = {}
    for kind in KINDS:
        for side in (1, 33, 120):
            pixels = np.frombuffer(rng.randbytes(side * side * 3), np.uint8).reshape(side, side, 3)
            held = io.BytesIO()
            Image.fromarray(pixels).save(held, kind)
            made.setdefault(kind, []).append(held.getvalue())
    return made


def bent(rng: random.Random, body: bytes) -> bytes:
    """Whole, cut, with bytes changed, with a size that is not its own, twice, or followed by anything."""
    held = bytearray(body)
    how = rng.randrange(7)
    if how == 1:
        del held[rng.randrange(len(held)) :]
    elif how == 2:
        for _ in range(rng.randrange(1, 30)):
            held[rng.randrange(len(held))] = rng.randrange(256)
    elif how == 3:  # about where headers keep width and height
        at = rng.randrange(2, min(len(held) - 4, 40))
        held[at : at + 4] = struct.pack(">I", rng.choice([0, 1, 50_000, 2**31 - 1, 2**32 - 1]))
    elif how == 4:
        at, length = rng.randrange(len(held)), rng.randrange(1, 400)
        held[at:at] = held[at : at + length]
    elif how == 5:
        held += rng.randbytes(rng.randrange(3000))
    elif how == 6:
        held = bytearray(rng.randbytes(rng.randrange(2000)))
    return bytes(held)


def hostile(rng: random.Random, samples: dict[str, list[bytes]]) -> tuple[str, bytes, dict[str, str]]:
    """Address, body, headers."""
    kind = rng.choice(list(KINDS))
    body, address = bent(rng, rng.choice(samples[kind])), rng.choice(ADDRESSES)
    form = KINDS[kind] if rng.random() < 0.7 else rng.choice(TYPES)
    if address == "/v1/batch" or rng.random() < 0.3:
        coded = base64.b64encode(body).decode()
        item = {"image": coded if rng.random() < 0.8 else rng.choice(VALUES)}
        item |= {name: rng.choice(VALUES) for name in ("budget", "top", "model") if rng.random() < 0.3}
        whole = {"images": [item] * rng.choice([0, 1, 2, 33])} if address == "/v1/batch" else item
        form, body = "application/json", json.dumps(whole).encode()
        if rng.random() < 0.2:
            body = bent(rng, body)
    headers = {"content-type": form}
    if rng.random() < 0.1:
        headers[rng.choice(["content-encoding", "expect", "accept", "range", "x-forwarded-for"])] = rng.choice(
            ["gzip", "100-continue", "*/*;q=x", "bytes=0-", "a" * 4000]
        )
    return address + rng.choice(SETTINGS), body, headers


def tiny(folder: str) -> str:
    """A checkpoint that answers at once: it is what comes before the model that is tried."""
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5)
    return str(dwindle.save(dwindle.adapt(vit, dwindle.AHT(stages=(1, 2))), f"{folder}/tiny"))


class Told:
    """What the answers were."""

    def __init__(self, pid: int, total: int) -> None:
        self.pid, self.step = pid, max(total // 10, 1)
        self.statuses: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.mebibytes: list[float] = []
        self.count = 0

    def __call__(self, path: str, status: int | str) -> None:
        self.statuses[path][str(status)] += 1
        if self.count % self.step == 0:
            self.mebibytes.append(round(memory(self.pid), 1))
        self.count += 1


def memory(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def by_description(address: str, count: int, told: Told) -> None:
    schema = schemathesis.openapi.from_url(f"{address}openapi.json")
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    each = count // (len(ADDRESSES) * len(modes))
    for path in ADDRESSES:
        for mode in modes:

            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                told(case.path, case.call(timeout=60).status_code)

            ask()


def by_hand(address: str, count: int, told: Told, clients: int) -> None:
    rng = random.Random(0)
    samples = images(rng)
    asked = [hostile(rng, samples) for _ in range(count)]
    with httpx.Client(base_url=address, timeout=60) as client, concurrent.futures.ThreadPoolExecutor(clients) as pool:

        def ask(request: tuple[str, bytes, dict[str, str]]) -> tuple[str, int | str]:
            where, body, headers = request
            try:
                return where, client.post(where, content=body, headers=headers).status_code
            except httpx.HTTPError as error:
                return where, type(error).__name__

        for where, status in pool.map(ask, asked):
            told(where.partition("?")[0], status)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--checkpoint", default=None, help="by itself a tiny model made for it")
    ask.add_argument("--requests", type=int, default=10_000)
    ask.add_argument("--clients", type=int, default=16)
    options = ask.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, address = start(options.checkpoint or tiny(folder))
        told = Told(server.pid, options.requests)
        try:
            by_hand(address, options.requests // 2, told, options.clients)
            by_description(address, options.requests - options.requests // 2, told)
            alive = httpx.get(f"{address}healthz").status_code
            last = round(memory(server.pid), 1)
        finally:
            server.terminate()
            server.wait(60)
    statuses = {path: dict(sorted(counts.items())) for path, counts in sorted(told.statuses.items())}
    print(json.dumps({"statuses": statuses, "memory_mib": [*told.mebibytes, last], "healthz": alive}))
    broken = [status for counts in statuses.values() for status in counts if not status.isdigit() or int(status) >= 500]
    sys.exit(bool(broken) or alive != 200)


if __name__ == "__main__":
    main()
