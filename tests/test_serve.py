"""The server: answers alone and in company, budgets, limits, hostile input, shutdown, and the page in a browser."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import json
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import dwindle
from conftest import build
from dwindle.dtypes import converted
from dwindle.methods.tome import ToMe

pytest.importorskip("fastapi", reason="extra `serve` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
import httpx
from fastapi.testclient import TestClient

from dwindle.serve.app import create_app
from dwindle.serve.batching import Batcher, Job
from dwindle.serve.limits import Limits, authorised
from dwindle.serve.models import Served
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
        ("?budget=nan", picture(), "image/png", 422, "budget"),
        ("?budget=-1", picture(), "image/png", 422, "budget"),
        ("?budget=0.0001", picture(), "image/png", 422, "budget"),
        ("?top=0", picture(), "image/png", 422, "top"),
        ("?model=../../etc", picture(), "image/png", 404, "model"),
        ("?model=static&budget=0.5", picture(), "image/png", 422, "dial"),
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

    def run(self, images, dials):
        self.gate.wait(20)
        if (images == 255).all((1, 2, 3)).any():
            raise RuntimeError("this image breaks the model")
        return super().run(images, dials)


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
    batcher = app.state.batcher
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
    batcher = create_app([slow]).state.batcher
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


SAID = {200, 401, 404, 413, 422, 429}  # 405 apart, what a request that arrives whole can be told


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
    from browser import Browser, chromium

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
