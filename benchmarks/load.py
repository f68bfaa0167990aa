"""Load on `dwindle serve`, on this machine only: adaptive at 0.52 and static turn about; one line of JSON.

    python benchmarks/load.py --seconds 120 --clients 64

The clients run in this process and share the cores with the server. Both sides pay that alike.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import statistics
import subprocess
import sys
import time
import urllib.parse
from importlib.resources import files
from pathlib import Path

SLICE = 20.0  # seconds before the other side has its turn; while a slice begins and ends, batches are small


def start(checkpoint: str, dtype: str = "fp32") -> tuple[subprocess.Popen, str]:
    line = [sys.executable, "-m", "dwindle", "serve", checkpoint, "--port", "0", "--dtype", dtype]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for said in server.stdout:
        if said.startswith("{"):
            return server, json.loads(said)["address"]
    raise SystemExit("the server did not start")


def photos() -> list[bytes]:
    return [path.read_bytes() for path in sorted((Path(str(files("dwindle"))) / "assets" / "photos").glob("*.jpg"))]


class Client:
    """One connection that stays open. A client that costs little: it runs on the cores of the server."""

    async def connect(self, address: str) -> None:
        split = urllib.parse.urlsplit(address)
        self.host = split.netloc
        self.reader, self.writer = await asyncio.open_connection(split.hostname, split.port)

    async def post(self, path: str, body: bytes) -> int:
        """The status of the answer, once it is here whole."""
        self.writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: image/jpeg\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        await self.reader.readexactly(length)
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        self.writer.close()


async def load(address: str, clients: int, seconds: float, first: str, budget: float) -> dict[str, dict[str, float]]:
    images = photos()
    sides = {"adaptive": f"/v1/classify?model={first}&budget={budget}", "static": "/v1/classify?model=static"}
    spent: dict[str, list[float]] = {side: [] for side in sides}
    statuses: dict[str, collections.Counter] = {side: collections.Counter() for side in sides}
    ran = dict.fromkeys(sides, 0.0)

    async def one(side: str, end: float, number: int) -> None:
        client = Client()
        await client.connect(address)
        while time.monotonic() < end:
            begin = time.monotonic()
            image = images[(number := number + 1) % len(images)]
            statuses[side][await client.post(sides[side], image)] += 1
            spent[side].append(time.monotonic() - begin)
        client.close()

    over = time.monotonic() + seconds
    while time.monotonic() < over:
        for side in sides:
            begin = time.monotonic()
            await asyncio.gather(*(one(side, begin + SLICE, i) for i in range(clients)))
            ran[side] += time.monotonic() - begin
    return {
        side: {
            "images_per_s": round(len(spent[side]) / ran[side], 2),
            "p50_ms": round(1e3 * statistics.median(spent[side]), 1),
            "p99_ms": round(1e3 * sorted(spent[side])[int(0.99 * (len(spent[side]) - 1))], 1),
            "requests": len(spent[side]),
            "errors": sum(count for status, count in statuses[side].items() if status != 200),
        }
        for side in sides
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--checkpoint", default="aht_deit_tiny_imagenet")
    ask.add_argument("--clients", type=int, default=64)
    ask.add_argument("--seconds", type=float, default=120.0)
    ask.add_argument("--budget", type=float, default=0.52)
    ask.add_argument("--dtype", default="fp32")
    given = ask.parse_args()
    server, address = start(given.checkpoint, given.dtype)
    try:
        name = given.checkpoint.rstrip("/").rsplit("/", 1)[-1]
        sides = asyncio.run(load(address, given.clients, given.seconds, name, given.budget))
        result = {**sides, "ratio": round(sides["adaptive"]["images_per_s"] / sides["static"]["images_per_s"], 3)}
        print(json.dumps(result))
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
