"""The server: answers alone and in company, budgets, limits, hostile input, shutdown, and the page in a browser."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
import zlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import dwindle
from dwindle.cli.main import app
from dwindle.io.images import upright
from dwindle.methods.tome import ToMe
from dwindle.runtime.dtypes import converted
from shared.tiny import build

pytest.importorskip("fastapi", reason="extra `serve` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
import httpx
from fastapi.testclient import TestClient

from dwindle.serve import bodies, pictures
from dwindle.serve.app import create_app
from dwindle.serve.batching import Batcher, Job
from dwindle.serve.bodies import Bodies, parsed
from dwindle.serve.connection import Connections, served_by
from dwindle.serve.guard import HEADERS, Hosts
from dwindle.serve.limits import Limits, Refused, authorised, checked_token
from dwindle.serve.metrics import Metrics
from dwindle.serve.models import PASSES, Served
from dwindle.serve.pictures import Memory, decode, from_base64, read_image
from dwindle.serve.run import served_models


def picture(seed: int = 0, size: tuple[int, int] = (40, 50), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def bomb(side: int = 50_000) -> bytes:
    """A PNG that says it is side x side and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def model(method: dwindle.Method) -> dwindle.AdaptiveViT:
    return build("vit", method)


@pytest.fixture(scope="module")
def served() -> list[Served]:
    aht = dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6)
    return [
        Served("aht", model(aht)),
        Served("tome", model(ToMe(r=2.5))),
        Served("static", model(dwindle.Static())),
    ]


@pytest.fixture(scope="module")
def client(served):
    limits = Limits(bytes=200_000, pixels=1_000_000, images=4, batch=8, linger=0.02, seconds=20)
    with TestClient(create_app(served, limits)) as client:
        yield client


def test_batches_run_beside_each_other_and_share_the_cores():
    batcher, meet, before = Batcher(Limits(), workers=2, cores=2), threading.Barrier(2), torch.get_num_threads()

    def met() -> int:
        meet.wait(20)  # both are at work
        return torch.get_num_threads()

    async def ask(*calls):
        return await asyncio.gather(*(batcher.alone(call) for call in calls))

    try:
        assert asyncio.run(ask(torch.get_num_threads)) == [2]
        assert 1 in asyncio.run(ask(met, met))
    finally:
        batcher.close()
        torch.set_num_threads(before)
    assert not batcher.alive


def test_a_batch_waits_for_images_on_their_way_while_others_run():
    batcher = Batcher(Limits(linger=0.0, linger_busy=20.0), workers=0)
    batcher.jobs.append(Job(None, None))
    batcher.admitted = 2
    assert batcher._linger() <= 0  # cores are idle
    batcher.busy, batcher.running, batcher.admitted = 1, 3, 5
    assert batcher._linger() > 10
    batcher.admitted = 4
    assert batcher._linger() <= 0  # all are here


def test_bytes_and_json_get_the_same_answer(client):
    plain = client.post("/v1/classify", content=picture(), headers={"content-type": "image/png"})
    coded = client.post("/v1/classify", json={"image": base64.b64encode(picture()).decode()})
    assert plain.status_code == coded.status_code == 200
    assert plain.json() == coded.json()
    told = plain.json()
    assert len(told["top"]) == 5 and told["model"] == "aht" and 0 < told["cost"] <= 1.2
    assert sum(one["confidence"] for one in told["top"]) == pytest.approx(1, abs=1e-3)  # all five classes


def test_images_are_prepared_as_everywhere(served):
    for kind in ("PNG", "JPEG"):
        photo = Image.open(io.BytesIO(picture(size=(70, 90), kind=kind)))
        prepared = served[0].preprocess.normalised(served[0].prepare(photo)[None])
        assert torch.equal(prepared[0], served[0].preprocess.eval_transform()(photo))


def test_alone_or_in_company(client):
    """Different budgets in one batch: each answer is what the image gets alone."""
    asked = [(seed, budget) for seed in range(6) for budget in (None, 0.7, 0.9)]

    def one(which):
        seed, budget = which
        query = "" if budget is None else f"?budget={budget}"
        return client.post(f"/v1/classify{query}", content=picture(seed)).json()

    alone = [one(which) for which in asked]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, asked))
    for a, b in zip(alone, together):
        assert a["depth"] == b["depth"] and a["gmacs"] == b["gmacs"] and a["budget"] == b["budget"]
        assert [t["confidence"] for t in a["top"]] == pytest.approx([t["confidence"] for t in b["top"]], abs=2e-4)
    batches = client.get("/metrics").text
    assert float(batches.split("dwindle_batch_images_sum ")[1].split()[0]) > float(
        batches.split("dwindle_batch_images_count ")[1].split()[0]
    )


@pytest.mark.parametrize("name", ["aht", "tome"])
def test_a_larger_budget_costs_more(client, served, name):
    table = next(one for one in served if one.name == name).table
    costs = []
    for budget in np.linspace(table[0][0] + 1e-3, min(table[-1][0], 1), 3):  # random weights do not reach everything
        said = [client.post(f"/v1/classify?model={name}&budget={budget}", content=picture(s)) for s in range(4)]
        assert all(answer.status_code == 200 for answer in said), said[0].text
        costs.append(np.mean([answer.json()["cost"] for answer in said]))
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_batch_answers_each(client):
    image = base64.b64encode(picture()).decode()
    items = [{"image": image, "budget": 0.8}, {"image": "not base64!"}, {"image": image, "model": "nobody"}]
    results = client.post("/v1/batch", json={"images": items}).json()["results"]
    assert "top" in results[0] and "error" in results[1] and results[2]["status"] == 404
    assert client.post("/v1/batch", json={"images": [items[0]] * 5}).status_code == 422


def test_explain_says_what_the_page_draws(client):
    told = client.post("/v1/explain?budget=0.8", content=picture()).json()
    assert np.array(told["depths"]).shape == (4, 4) and len(told["live"]) == told["blocks"] == 4
    assert told["live"][0] == told["tokens"] == 17 and told["plan"] is not None
    assert told["seen"].startswith("data:image/jpeg;base64,")
    assert client.post("/v1/explain?model=static", content=picture()).json()["plan"] is None


@pytest.mark.parametrize(
    "query, body, kind, status, said",
    [
        ("", b"", "image/png", 422, "no image"),
        ("", b"hello", "image/png", 422, "JPEG"),
        ("", picture()[:300], "image/png", 422, "decoded"),
        ("", bomb(), "image/png", 413, "pixels"),
        ("", bomb(1200), "image/png", 413, "1200 x 1200"),
        ("", b"x" * 300_000, "image/png", 413, "bytes"),
        ("", picture(kind="TIFF"), "image/tiff", 422, "PNG"),
        ("", b"/etc/passwd", "text/plain", 422, "decoded"),
        ("", b"{", "application/json", 422, "JSON"),
        ("", b"[" * 100_000, "application/json", 422, "JSON"),
        ("", b"[]", "application/json", 422, "object"),
        ("", b'{"image": 3}', "application/json", 422, "base64"),
        ("", b'{"image": "file:///etc/passwd"}', "application/json", 422, "base64"),
        ("", b'{"image": "aaaa", "budget": "NaN"}', "application/json", 422, "budget"),
        ("", b'{"image": "aaaa", "budget": NaN}', "application/json", 422, "budget"),
        ("", b'{"image": "aaaa", "top": true}', "application/json", 422, "top"),
        ("?top=1" + "0" * 30, picture(), "image/png", 400, "top"),
        ("?budget=nan", picture(), "image/png", 422, "budget"),
        ("?budget=-1", picture(), "image/png", 422, "budget"),
        ("?budget=0.0001", picture(), "image/png", 422, "budget"),
        ("?top=0", picture(), "image/png", 422, "top"),
        ("?model=../../etc", picture(), "image/png", 404, "model"),
        ("?model=static&budget=0.5", picture(), "image/png", 422, "operating point"),
    ],
)
def test_bad_input_is_one_sentence(client, query, body, kind, status, said):
    answer = client.post(f"/v1/classify{query}", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"] and said in answer.json()["error"]


def test_headers_and_small_routes(client):
    page = client.get("/")
    assert page.status_code == 200 and "<title>Dwindle" in page.text
    for address in ("/app.js", "/style.css", "/samples/coffee.jpg", "/openapi.json", "/v1/models", "/healthz"):
        answer = client.get(address)
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    for address in ("/samples/../config.json", "/samples/%2e%2e%2fx.jpg", "/docs", "/nothing"):
        assert client.get(address).status_code == 404
    assert client.get("/v1/classify").status_code == 405
    assert {"/v1/classify", "/v1/batch"} <= client.get("/openapi.json").json()["paths"].keys()


def test_token(served):
    with TestClient(create_app(served[:1], token="sesame")) as client:
        assert client.get("/healthz").status_code == 200
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
            answer = client.post("/v1/classify", content=picture(), headers=header)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/metrics").status_code == 401
        right = {"authorization": "Bearer sesame"}
        assert client.post("/v1/classify", content=picture(), headers=right).status_code == 200
    assert not authorised("Bearer sésame", "sesame") and not authorised(None, "x")


class Slow(Served):
    """Waits for the test before it runs."""

    gate = threading.Event()

    def run(self, images, operating_points):
        self.gate.wait(20)
        if (images == 255).all((1, 2, 3)).any():
            raise RuntimeError("this image breaks the model")
        return super().run(images, operating_points)


@pytest.fixture
def slow():
    Slow.gate = threading.Event()
    return Slow("slow", model(dwindle.AHT(stages=(1, 2), budget=0.6)), points=3)


def test_a_full_queue_says_when_to_come_back(slow):
    with TestClient(create_app([slow], Limits(waiting=3))) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.post, "/v1/classify", content=picture(i)) for i in range(6)]
        end = time.monotonic() + 20
        while sum(one.done() for one in asked) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        Slow.gate.set()
        answers = [one.result() for one in asked]
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 3 + [429] * 3
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)


def test_time_is_limited_and_the_server_goes_on(slow):
    with TestClient(create_app([slow], Limits(seconds=0.3))) as client:
        assert client.post("/v1/classify", content=picture()).status_code == 504
        Slow.gate.set()
        assert client.post("/v1/classify", content=picture()).status_code == 200


def test_a_request_that_dies_does_not_take_its_batch_along(slow):
    app = create_app([slow], Limits(batch=4, linger=0.2))
    batcher = app.state.service.batcher
    good, bad = slow.prepare(Image.open(io.BytesIO(picture()))), torch.full((32, 32, 3), 255, dtype=torch.uint8)

    async def all_four():
        jobs = [batcher.classify(slow, image, slow.trained, 5) for image in (good, bad, good, good)]
        waiting = asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.sleep(0.1)
        Slow.gate.set()
        return await waiting

    answers = asyncio.run(all_four())
    assert isinstance(answers[1], RuntimeError)
    assert all(answer["top"] for i, answer in enumerate(answers) if i != 1)
    batcher.close()


def test_shutdown_finishes_what_was_accepted(slow):
    batcher = create_app([slow]).state.service.batcher
    image = slow.prepare(Image.open(io.BytesIO(picture())))

    async def asked_before_closing():
        jobs = asyncio.gather(*(batcher.classify(slow, image, slow.trained, 5) for _ in range(5)))
        await asyncio.sleep(0.05)
        closing = asyncio.get_running_loop().run_in_executor(None, batcher.close)
        await asyncio.sleep(0.05)
        with pytest.raises(Exception, match="shutting down"):
            batcher.admit(1)
        Slow.gate.set()
        await closing
        return await jobs

    assert len(asyncio.run(asked_before_closing())) == 5


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cut=st.integers(0, 4000),
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8),
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    header=st.sampled_from(["image/png", "application/json", "", "text/html; charset=\x00", "multipart/form-data"]),
    budget=st.one_of(st.none(), st.floats(), st.text(max_size=5)),
)
def test_fuzzed_requests_never_break_it(client, cut, flips, kind, header, budget):
    body = bytearray(picture(kind=kind)[:cut])
    for at, value in flips:
        if at < len(body):
            body[at] = value
    params = {} if budget is None else {"budget": str(budget)}
    answer = client.post("/v1/classify", content=bytes(body), params=params, headers={"content-type": header})
    assert answer.status_code in (200, 413, 422), answer.text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["image", "images", "top"]), inner),
        max_leaves=8,
    )
)
def test_fuzzed_json_never_breaks_it(client, body):
    for address in ("/v1/classify", "/v1/batch", "/v1/explain"):
        answer = client.post(address, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 413, 422), answer.text


SAID = {200, 400, 401, 404, 413, 422, 429}  # 405 apart, what a request that arrives whole can be told


def test_requests_made_from_the_openapi_description(served):
    """Those it allows and those it forbids, images and JSON: never a 500, and every answer as it describes."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    app = create_app(served, Limits(bytes=200_000, pixels=1_000_000, images=4, batch=8))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    checks, statuses = schemathesis.checks, set()
    conforming = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        for path in ("/v1/classify", "/v1/batch", "/v1/explain"):

            @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
            def ask(case):
                answer = case.call()
                statuses.add(answer.status_code)
                assert answer.status_code in SAID, answer.text
                case.validate_response(answer, checks=conforming)

            ask()
    assert {200, 422} <= statuses


def test_sigterm_finishes_what_was_accepted(served, tmp_path):
    """The command itself, in a process of its own: it has images in hand, is told to end, answers them and ends."""
    checkpoint = dwindle.save(served[0].model, tmp_path / "tiny")
    line = [sys.executable, "-m", "dwindle", "serve", str(checkpoint), "--port", "0"]
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        address = next(json.loads(said)["address"] for said in server.stdout if said.startswith("{"))
        large = picture(size=(1500, 1500), kind="JPEG")  # long to decode
        with httpx.Client(base_url=address, timeout=60) as client, concurrent.futures.ThreadPoolExecutor(24) as pool:
            asked = [pool.submit(client.post, "/v1/classify", content=large) for _ in range(24)]
            end, waiting = time.monotonic() + 30, 0.0
            while waiting < 8 and time.monotonic() < end:
                told = httpx.get(f"{address}metrics").text
                waiting = float(told.split("\ndwindle_waiting_images ")[1].split()[0])
            assert waiting >= 8
            server.terminate()
            answers = [one.result() for one in asked if one.exception() is None]
        # Whoever was still connecting was turned away; everyone who was let in was answered.
        assert len([one for one in answers if one.status_code == 200]) >= waiting
        assert {one.status_code for one in answers} <= {200, 503}
        assert server.wait(30) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def address(served):
    """The server in a thread, on a port of its own."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(create_app(served), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def test_the_page_in_a_browser(address, tmp_path):
    """Upload, slide, compare, and what the page shows on an error."""
    pytest.importorskip("websocket", reason="websocket-client is not installed")
    from shared.browser import Browser, chromium

    if chromium() is None:
        pytest.skip("no Chromium on this machine")
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(picture(3))
    bad.write_bytes(b"no image")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(address)
        browser.wait("document.querySelectorAll('#samples button').length === 5")
        browser.upload(good)
        browser.wait("document.querySelectorAll('.card').length === 1")
        told = "document.querySelector('.done-said').textContent"
        assert browser.js(told).startswith("executed: mean depth")
        assert browser.js("document.querySelectorAll('.top li').length") == 5
        before = browser.js("document.querySelector('.gmacs').textContent")

        browser.js("document.getElementById('layer').focus()")
        for _ in range(3):
            browser.key("ArrowRight", 39)
        assert browser.js(told).startswith("layer 3: ") and "alive" in browser.js(
            "document.querySelector('canvas.done').getAttribute('aria-label')"
        )
        browser.slide("document.getElementById('budget')", browser.js("document.getElementById('budget').min"))
        browser.wait(f"document.querySelector('.gmacs').textContent !== {before!r}")
        browser.js("document.querySelector('[value=tome]').click()")
        browser.wait("document.querySelectorAll('.card').length === 2")
        assert browser.js("[...document.images].every((one) => one.alt)")

        browser.upload(bad)
        said = browser.wait(
            "!document.getElementById('problem').hidden && document.getElementById('problem').textContent"
        )
        assert "no image that can be decoded" in said
        browser.js("document.querySelector('[data-name=coffee]').click()")
        browser.wait("document.getElementById('state').textContent === 'Done: coffee.'")
        assert browser.js("document.getElementById('problem').hidden")
        browser.resize(390, 844)
        assert browser.js("document.documentElement.scrollWidth") <= 390
    finally:
        browser.close()


@pytest.mark.parametrize("names", [["a/one", "b/one"], ["runs/static"], ["one", "ToMe"]])
def test_no_two_models_have_a_name(names):
    with pytest.raises(dwindle.DwindleError, match="same name"):
        served_models(names)


@pytest.mark.usefixtures("bf16_on_cpu")
def test_served_in_bf16():
    one = Served("aht", converted(model(dwindle.AHT(stages=(1, 2), gamma=2.0, follow=0.7, budget=0.6)), "bf16", "cpu"))
    assert one.dtype == torch.bfloat16
    with TestClient(create_app([one], Limits())) as client:
        for budget in ("", f"&budget={(1 + one.least) / 2:.2f}"):
            said = client.post(f"/v1/classify?top=3{budget}", content=picture())
            assert said.status_code == 200 and len(said.json()["top"]) == 3 and 0 < said.json()["cost"] <= 1
        assert client.post("/v1/explain", content=picture()).json()["static_ms"] > 0


# What arrives slowly, endlessly or wrong: over sockets, as only uvicorn's connections see it


@contextlib.contextmanager
def running(models: list[Served], limits: Limits, **given):
    """A server in a thread, bounded by the limits; gives its port."""
    metrics = Metrics()
    server = served_by(create_app(models, limits, metrics=metrics, **given), limits, metrics)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)


def connect(port: int, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 10, (source, 0))
    connection.sendall(data)
    return connection


def everything(connection: socket.socket, seconds: float = 5.0) -> bytes:
    """What comes until the server closes, or nothing more does."""
    got = b""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError), connection:
        while data := connection.recv(1 << 16):
            got += data
    return got


def ask(port: int, data: bytes, seconds: float = 5.0) -> bytes:
    with contextlib.suppress(OSError):
        connection = connect(port)
        with contextlib.suppress(OSError):
            connection.sendall(data)
        return everything(connection, seconds)
    return b""


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
CLOSE = b"Connection: close\r\n\r\n"


def whole(body: bytes, more: bytes = b"") -> bytes:
    return POST + more + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module")
def port(served):
    limits = Limits(
        bytes=200_000, pixels=1_000_000, images=4, head_seconds=0.4, body_patience=0.4, idle_seconds=0.6, connections=12
    )
    with running(served, limits) as port:
        yield port


WRONG = {  # made when asked for: some are large
    "a long header": (lambda: GET + b"X: " + b"a" * 20_000_000, 431),
    "a long name": (lambda: GET + b"X" * 3_000_000, 431),
    "many headers": (lambda: GET + b"X: a\r\n" * 200 + b"\r\n", 431),
    "a long address": (lambda: b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
    "a chunk's extension": (lambda: CHUNKED + b"1;" + b"a" * 3_000_000, 431),
    "trailers": (lambda: CHUNKED + b"0\r\n" + b"X: a\r\n" * 100_000, 431),
    "a long trailer": (lambda: CHUNKED + b"0\r\nX: " + b"a" * 3_000_000, 431),
    "small chunks": (lambda: CHUNKED + b"1\r\na\r\n" * 20_000, 400),
    "garbage": (lambda: b"\x00\xff garbage\r\n\r\n", 400),
    "two lengths": (lambda: CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n0\r\n\r\n", 400),
    "packed in transfer": (lambda: POST + b"Transfer-Encoding: gzip, chunked\r\n" + CLOSE + b"0\r\n\r\n", 415),
    "packed": (lambda: whole(b"a", b"Content-Encoding: gzip\r\n"), 415),
    "a head without an end": (lambda: b"GET /healz", 408),
    "a body without an end": (lambda: POST + b"Content-Length: 10\r\n\r\nabc", 408),
    "too much": (lambda: whole(b"x" * 9_000_000), 413),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_before_a_route_is_asked(port, what):
    """Bounded, closed, and said in one sentence under the headers of every answer."""
    request, status = WRONG[what][0](), WRONG[what][1]
    begin = time.monotonic()
    answer = ask(port, request)
    assert statuses(answer) == [status] and time.monotonic() - begin < 3
    head, _, body = answer.lower().partition(b"\r\n\r\n")
    assert list(json.loads(body)) == ["error"] and b"connection: close" in head
    assert all(f"{name}: {value}".lower().encode() in head for name, value in HEADERS.items())


def test_a_connection_without_a_request_is_closed(port):
    for begin in (b"", b"\r\n\r\n", GET + b"\r\n"):
        with connect(port, begin) as connection:
            connection.settimeout(3)
            while connection.recv(1 << 16):
                pass


def test_at_the_limit_of_connections_the_one_waited_for_longest_goes(port):
    """Slow heads and bodies, thrice as many as there are places; then an honest client."""
    slow = [connect(port, GET) if i % 2 else connect(port, POST + b"Content-Length: 99\r\n\r\n") for i in range(36)]
    assert statuses(ask(port, GET + CLOSE)) == [200]
    assert statuses(ask(port, whole(picture()))) == [200]
    assert statuses(everything(slow[0])) == [503] or not everything(slow[0])
    for one in slow:
        one.close()


def test_a_flood_from_elsewhere_takes_nobodys_connection(port):
    with connect(port, GET) as mine:
        flood = [connect(port, GET, "127.0.0.2") for _ in range(30)]
        mine.sendall(CLOSE)
        assert statuses(everything(mine)) == [200]
        for one in flood:
            one.close()


def test_requests_sent_before_an_answer_are_bounded(port):
    assert statuses(ask(port, (GET + b"\r\n") * 8, 0.3)) == [200] * 8
    assert statuses(ask(port, (GET + b"\r\n") * 1000)) == [200] * Limits.pipelined
    assert statuses(ask(port, (GET + b"\r\n") * 3 + b"\x00garbage")) == [200] * 3


def test_a_client_that_takes_no_answer_is_left(served):
    with running(served, Limits(taking_seconds=0.5)) as port:
        greedy = socket.socket()
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.connect(("127.0.0.1", port))
        greedy.settimeout(0.2)
        photo, gone = b"GET /samples/coffee.jpg HTTP/1.1\r\nHost: localhost\r\n\r\n", False
        end = time.monotonic() + 10
        while not gone and time.monotonic() < end:
            time.sleep(0.05)
            try:
                greedy.sendall(photo)
            except TimeoutError:
                continue
            except OSError:
                gone = True
        assert gone
        greedy.close()


def test_nothing_stays_of_a_connection_that_is_closed(served):
    limits = Limits(connections=8, body_patience=0.3, head_seconds=0.3, idle_seconds=0.3)
    connections = Connections(limits, lambda why: None)
    with (
        mock.patch("dwindle.serve.connection.Connections", lambda *given: connections),
        running(served, limits) as port,
    ):
        for begin in (b"", b"GET", GET + b"\r\n", POST + b"Content-Length: 9\r\n\r\n", b"\x00", whole(picture())) * 3:
            connect(port, begin)
        time.sleep(0.2)
        assert len(connections.open) <= limits.connections
        end = time.monotonic() + 5
        while connections.open and time.monotonic() < end:
            time.sleep(0.05)
    assert not connections.open and not connections.waited_for


def test_time_counts_from_the_first_byte(slow):
    """A body in three parts over half of the time leaves the model the other half."""
    with running([slow], Limits(seconds=1.0)) as port:
        begin = time.monotonic()
        request = whole(picture())
        with connect(port, request[:20]) as connection:
            for part in (request[20:200], request[200:]):
                time.sleep(0.3)
                connection.sendall(part)
            assert statuses(everything(connection)) == [504]
        assert time.monotonic() - begin < 1.5
        Slow.gate.set()


def test_who_waits_for_decoding_waits_no_longer_than_allowed(served, monkeypatch):
    def slowly(*given):
        time.sleep(0.3)
        return read_image(*given)

    monkeypatch.setattr("dwindle.serve.service.read_image", slowly)
    with (
        TestClient(create_app(served, Limits(seconds=0.7))) as client,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        begin = time.monotonic()
        answers = list(pool.map(lambda i: client.post("/v1/classify", content=picture(i)), range(16)))
        assert time.monotonic() - begin < 2 and 504 in {answer.status_code for answer in answers}


def test_the_images_of_a_batch_have_the_time_each_for_itself(served, monkeypatch):
    def slowly(data, *given):
        time.sleep(1.0 if data == picture(0) else 0.0)
        return read_image(data, *given)

    monkeypatch.setattr("dwindle.serve.service.read_image", slowly)
    monkeypatch.setattr("dwindle.serve.service.os.cpu_count", lambda: 2)
    items = [{"image": base64.b64encode(picture(i)).decode()} for i in range(2)]
    with TestClient(create_app(served, Limits(seconds=0.7))) as client:
        results = client.post("/v1/batch", json={"images": items}).json()["results"]
    assert results[0]["status"] == 504 and "top" in results[1]


def test_work_for_a_client_that_left_is_not_done(slow):
    with running([slow], Limits(batch=1)) as port:
        first = connect(port, whole(picture()))  # at the gate
        time.sleep(0.3)
        for _ in range(5):
            connect(port, whole(picture())).close()
        time.sleep(0.3)
        ran = []
        slow.answers, answers = lambda *given: ran.append(1) or answers(*given), slow.answers
        Slow.gate.set()
        assert statuses(everything(first)) == [200]
        assert statuses(ask(port, whole(picture()))) == [200]
        assert len(ran) == 2


class Coming:
    """A request whose body comes as the test says."""

    def __init__(self, *chunks: bytes, wait: float = 0.0) -> None:
        self.headers, self.chunks, self.wait = {}, chunks, wait

    async def stream(self):
        for chunk in self.chunks:
            yield chunk
            await asyncio.sleep(self.wait)


def test_bodies_are_bounded_as_a_whole(monkeypatch):
    """One that came slowly makes room, one that is here does not, and what a request had is free after it."""
    monkeypatch.setattr(bodies, "SLOW", 0.1)
    all_of_them = Bodies(Limits(bodies=1000))

    async def read(coming: Coming, keep: float = 0.0) -> int:
        async with all_of_them.read(coming, 10_000) as body:
            await asyncio.sleep(keep)
            return len(body)

    async def three() -> list:
        slow = asyncio.ensure_future(read(Coming(b"a" * 600, b"b", wait=5.0)))
        await asyncio.sleep(0.2)
        quick = asyncio.ensure_future(read(Coming(b"a" * 900), keep=0.3))
        await asyncio.sleep(0.05)
        return await asyncio.gather(slow, quick, read(Coming(b"a" * 200)), return_exceptions=True)

    slow, quick, late = asyncio.run(three())
    assert isinstance(slow, Refused) and slow.status == 503
    assert quick == 900
    assert isinstance(late, Refused) and late.status == 503 and late.retry_after
    assert all_of_them.held == 0 and not all_of_them.coming


def test_a_body_given_up_is_not_taken_for_whole_when_its_end_comes(monkeypatch):
    monkeypatch.setattr(bodies, "SLOW", 0.0)

    async def both() -> list:
        all_of_them, ready = Bodies(Limits(bodies=1000)), asyncio.Event()

        class Late(Coming):
            async def stream(self):
                yield b"a" * 600
                await ready.wait()
                yield b"b"

        class Quick(Coming):
            async def stream(self):
                ready.set()  # in the same turn of the loop as the other is given up
                yield b"c" * 900

        async def read(coming: Coming) -> bytes:
            async with all_of_them.read(coming, 10_000) as body:
                return bytes(body)

        late = asyncio.ensure_future(read(Late()))
        await asyncio.sleep(0.05)
        return await asyncio.gather(late, read(Quick()), return_exceptions=True)

    late, quick = asyncio.run(both())
    assert isinstance(late, Refused) and late.status == 503
    assert len(quick) == 900


LONG = base64.b64encode(bytes(range(256)) * 8).decode()


@pytest.mark.parametrize(
    "given",
    [
        {"image": LONG, "budget": 0.5, "model": 'a "quoted" \\ name', "top": 3},
        {"images": [{"image": LONG}, {"image": LONG[:2000], "budget": None}, {"image": "short"}]},
        {"image": {"image": [LONG, {"image": LONG}]}},
        {LONG: LONG},
        {},
    ],
)
def test_json_reads_as_always(given):
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return bytes(value).decode() if isinstance(value, memoryview) else value

    read = plain(parsed(bytearray(json.dumps(given).encode()), Limits()))
    if LONG in given:  # a key is nothing that is asked for
        given, read = list(given.values()), list(read.values())
    if isinstance(given, dict) and isinstance(given.get("image"), dict):  # nor is a long string in a list
        given["image"]["image"].pop(0), read["image"]["image"].pop(0)
    assert read == given


SIZE = 8 << 20


HOLLOW = {
    "arrays": lambda: b'{"images": [' + b"[]," * (SIZE // 3) + b"[]]}",
    "objects": lambda: b'{"images": [' + b'{"image":""},' * (SIZE // 13) + b"{}]}",
    "strings": lambda: b'{"images": [' + (b'"' + b"A" * 600 + b'",') * (SIZE // 603) + b"{}]}",
    "deep objects": lambda: b'{"a":' * (SIZE // 5),
    "deep arrays": lambda: b"[" * SIZE,
    "quotes": lambda: b'{"image": "' + b'\\"' * (SIZE // 2) + b'"}',
    "backslashes": lambda: b'{"image": "' + b"\\" * SIZE + b'"}',
    "quotes in strings": lambda: (b'"' + b'\\"' * 60 + b"A" * 600 + b'",') * (SIZE // 722),
    "a number": lambda: b'{"top": ' + b"1" * SIZE + b"}",
    "no end": lambda: b'{"image": "' + b"A" * SIZE,
}


@pytest.mark.parametrize("what", HOLLOW)
def test_json_costs_no_more_than_its_images(what):
    body = bytearray(HOLLOW[what]())
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(Refused):
        parsed(body, Limits())
    spent = time.process_time() - begin
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert spent < 2


def test_base64_may_be_escaped():
    data = bytes(range(256)) * 4
    plain = base64.b64encode(data).decode()
    assert "/" in plain and "+" in plain and "=" in plain
    php, dotnet = plain.replace("/", "\\/"), plain.replace("+", "\\u002B").replace("=", "\\u003d")
    for text in (plain, php, dotnet, memoryview(dotnet.encode())):
        assert from_base64(text, Limits()) == data
    for wrong in (plain + "\n", plain[:-1], "\\u0041" + plain, "=" + plain):
        with pytest.raises(Refused, match="base64"):
            from_base64(wrong, Limits())


@pytest.mark.parametrize(
    "name, value",
    [
        ("budget", "1" + "0" * 400),
        ("budget", "-" + "9" * 5000),  # longer than Python reads
        ("budget", "1e999"),
        ("top", "1" + "0" * 30),
        ("top", "-1" + "0" * 30),
        ("top", "9" * 5000),
    ],
)
def test_numbers_too_large_are_refused_and_nobody_elses_matter(client, name, value):
    image = base64.b64encode(picture()).decode()
    wrong, right = f'{{"image": "{image}", "{name}": {value}}}', f'{{"image": "{image}"}}'
    said = {"content-type": "application/json"}
    status = 400 if value.lstrip("-").isdigit() else 422
    assert client.post("/v1/classify", content=wrong, headers=said).status_code == status
    assert client.post(f"/v1/classify?{name}={value}", content=picture()).status_code == status
    both = client.post("/v1/batch", content=f'{{"images": [{wrong}, {right}]}}', headers=said)
    assert both.json()["results"][0]["status"] == status and "top" in both.json()["results"][1]


def test_one_that_breaks_breaks_no_other_of_its_request(client, monkeypatch):
    def breaking(data, *given):
        if data == picture(1):
            raise ZeroDivisionError("a defect")
        return read_image(data, *given)

    monkeypatch.setattr("dwindle.serve.service.read_image", breaking)
    items = [{"image": base64.b64encode(picture(i)).decode()} for i in range(3)]
    results = client.post("/v1/batch", json={"images": items}).json()["results"]
    assert [result.get("status", 200) for result in results] == [200, 500, 200]


def test_every_answer_has_the_headers(client, monkeypatch):
    def broken(*given):
        raise ZeroDivisionError("a defect")

    answers = [
        client.get("/"),
        client.head("/"),
        client.options("/v1/classify"),
        client.get("/nothing"),
        client.get("/v1/classify"),
        client.post("/v1/classify", content=b""),
        client.post("/v1/classify?budget=x", content=b""),
    ]
    monkeypatch.setattr("dwindle.serve.service.read_image", broken)
    answers.append(client.post("/v1/classify", content=picture()))
    assert [answer.status_code for answer in answers] == [200, 200, 405, 404, 405, 422, 422, 500]
    for answer in answers:
        assert all(answer.headers[name] == value for name, value in HEADERS.items())
        assert answer.status_code == 200 or list(answer.json()) == ["error"]


def test_the_token_is_asked_on_every_route_of_the_api(served):
    app = create_app(served[:1], token="sesame")
    with TestClient(app) as client:
        paths = [path for path in app.openapi()["paths"] if path.startswith("/v1")]
        assert "/v1/samples" in paths
        for path in [*paths, "/v1/nothing", "/metrics"]:
            assert client.get(path).status_code == client.post(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer sesame"}).status_code != 401
        assert client.get("/samples/coffee.jpg").status_code == 200


@pytest.mark.parametrize("token", ["", " ", "two words", "naïve", "tab\there", "line\n", "nul\0"])
def test_tokens_that_no_header_can_carry_are_refused_at_the_start(token, monkeypatch):
    with pytest.raises(dwindle.DwindleError, match=r"DWINDLE_TOKEN .*; set it"):
        checked_token(token)
    if "\0" not in token:
        monkeypatch.setenv("DWINDLE_TOKEN", token)
        result = CliRunner().invoke(app, ["serve", "no-such-checkpoint"])
        assert "DWINDLE_TOKEN" in str(result.exception)
    assert checked_token("se-same_1.~+/=") and checked_token(None) is None


@pytest.mark.parametrize(
    "bound, host, origin, status",
    [
        ("127.0.0.1", "localhost:8000", None, 200),
        ("127.0.0.1", "127.0.0.1", None, 200),
        ("127.0.0.1", "[::1]:8000", None, 200),
        ("127.0.0.1", "evil.example", None, 421),
        ("127.0.0.1", "localhost.evil.example", None, 421),
        ("127.0.0.1", "10.0.0.1", None, 421),
        ("127.0.0.1", "", None, 400),
        ("127.0.0.1", "a b", None, 400),
        ("10.0.0.1", "10.0.0.1:8000", None, 200),
        ("0.0.0.0", "10.0.0.1:8000", None, 200),
        ("::", "[fe80::1]", None, 200),
        ("0.0.0.0", "evil.example", None, 421),
        ("127.0.0.1", "dwindle.example", None, 200),
        ("127.0.0.1", "DWINDLE.example.:443", None, 200),
        ("127.0.0.1", "localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1", "localhost:8000", "http://localhost:9000", 403),
        ("127.0.0.1", "localhost:8000", "http://127.0.0.1:8000", 403),
        ("127.0.0.1", "localhost:8000", "http://evil.example", 403),
        ("127.0.0.1", "localhost:8000", "null", 403),
        ("127.0.0.1", "localhost:8000", "https://dwindle.example", 200),
    ],
)
def test_it_is_asked_under_its_own_names_and_by_its_own_page(served, bound, host, origin, status):
    client = TestClient(create_app(served[2:], hosts=Hosts((bound,), ("dwindle.example",))))
    headers = {"host": host} | ({"origin": origin} if origin else {})
    assert client.get("/healthz", headers=headers).status_code == status
    assert TestClient(create_app(served[2:], hosts=Hosts((bound,), ("*",)))).get("/healthz").status_code == 200


def test_explain_keeps_nothing_of_the_photograph_but_what_the_model_sees(served, client, monkeypatch):
    photos, kept = [], []

    def noted(image):
        photo = upright(image)
        photos.append(weakref.ref(photo))
        return photo

    monkeypatch.setattr(pictures, "upright", noted)
    explain = Served.explain
    monkeypatch.setattr(Served, "explain", lambda *given: kept.append(photos[0]()) or explain(*given))
    assert client.post("/v1/explain", content=picture(size=(200, 300))).status_code == 200
    assert kept == [None]


def test_explain_counts_as_what_it_costs(slow):
    with (
        TestClient(create_app([slow], Limits(waiting=PASSES))) as client,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        asked = pool.submit(client.post, "/v1/explain", content=picture())
        time.sleep(0.3)
        assert client.post("/v1/classify", content=picture()).status_code == 429
        Slow.gate.set()
        assert asked.result().status_code == 200


def oblong() -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (59_999, 3), "red").save(held, "PNG")
    return held.getvalue()


def scanned(times: int) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (1000, 1000), "red").save(held, "JPEG", progressive=True)
    data = held.getvalue()
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * times + data[-2:]


def test_what_is_made_of_an_image_counts(served):
    preprocess, limits = served[0].preprocess, Limits()
    begin = time.monotonic()
    with pytest.raises(Refused, match="crop it"):
        read_image(oblong(), replace(limits, pixels=10_000_000), preprocess.seen, preprocess)
    with pytest.raises(Refused, match="scans"):
        read_image(scanned(200_000), limits, preprocess.seen, preprocess)
    assert read_image(scanned(20), limits, preprocess.seen, preprocess).size == (32, 32)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("what", ["segments", "fill", "chunks", "profiles"])
def test_images_made_of_headers_end_soon(what):
    photo, size = picture(kind="JPEG" if what in ("segments", "fill") else "PNG"), 8 << 20
    chunk = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    packed = b"a\0\0" + zlib.compress(bytes(1_000_000))
    profile = struct.pack(">I", len(packed)) + b"iCCP" + packed + struct.pack(">I", zlib.crc32(b"iCCP" + packed))
    filler = {"segments": b"\xff\xe1\x00\x02", "fill": b"\xff", "chunks": chunk, "profiles": profile}[what]
    at = 2 if what in ("segments", "fill") else 33
    begin = time.process_time()
    with pytest.raises(Refused):
        decode(photo[:at] + filler * (size // len(filler)) + photo[at:], Limits())
    assert time.process_time() - begin < 2


def test_transparent_images_lie_over_white_in_bands_as_in_one_go():
    pixels = np.random.default_rng(0).integers(0, 256, (700, 1501, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    assert np.array_equal(np.asarray(upright(image)), np.asarray(whole))


def test_decoding_holds_nobody_else_up():
    """The longest that another thread waits while a large half transparent image is laid over white."""
    image, over, waits = Image.new("RGBA", (4000, 4000), (9, 8, 7, 100)), threading.Event(), [0.0]

    def watch() -> None:
        last = time.perf_counter()
        while not over.wait(0.001):
            waits.append(time.perf_counter() - last)
            last = time.perf_counter()

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    upright(image)
    spent = time.perf_counter() - begin
    over.set()
    thread.join()
    assert max(waits) < spent / 3


def test_decoding_stops_when_time_is_over():
    with pytest.raises(Refused, match="in time"):
        read_image(picture(), Limits(), decode, until=time.monotonic() - 1)


def test_memory_of_decoded_images_is_bounded():
    memory, over = Memory(1000), threading.Event()

    def hold() -> None:
        with memory.hold(900, time.monotonic() + 5):
            over.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    while not memory.held:
        time.sleep(0.01)
    with pytest.raises(Refused, match="memory"), memory.hold(200, time.monotonic() + 0.1):
        pass
    with memory.hold(100, time.monotonic()):
        pass
    over.set()
    with memory.hold(10_000, time.monotonic() + 5):  # one alone may be had
        assert memory.held == 1000
    thread.join()
    assert memory.held == 0


def test_small_images_do_not_wait_for_large_ones(served, monkeypatch):
    monkeypatch.setattr("dwindle.serve.service.LARGE", 10_000)
    monkeypatch.setattr("dwindle.serve.service.os.cpu_count", lambda: 1)
    gate = threading.Event()

    def gated(image):
        if image.width > 100:
            gate.wait(10)
        return upright(image)

    monkeypatch.setattr(pictures, "upright", gated)
    with TestClient(create_app(served)) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        large = [pool.submit(client.post, "/v1/classify", content=picture(size=(200, 200))) for _ in range(3)]
        time.sleep(0.2)
        assert client.post("/v1/classify", content=picture()).status_code == 200
        waiting = float(client.get("/metrics").text.split("\ndwindle_waiting_images ")[1].split()[0])
        gate.set()
        assert [one.result().status_code for one in large] == [200] * 3
    assert waiting == 3 * (1 + 40_000 // 10_000)
