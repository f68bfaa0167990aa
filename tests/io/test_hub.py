"""Pushing to the Hub, against a folder that plays it."""

from __future__ import annotations

import shutil
import socket
import time
from threading import Thread

import pytest
import torch

import dwindle
from dwindle.io import download
from dwindle.io.hub import push_to_hub
from dwindle.train.build import build_vit
from dwindle.train.recipe import Recipe
from shared.tiny import METHODS, build, images_for


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo, private, exist_ok):
            (tmp_path / repo).mkdir(parents=True, exist_ok=True)
            return f"hub://{repo}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / name))
    return tmp_path


def test_there_and_back(hub):
    model = build("vit", METHODS["AHT"]())
    results = {"top1": 71.5, "top5": 90.25, "gmacs": 0.8, "gmacs_static": 1.25, "images": 1000}
    model.extra = {"results": results}
    assert push_to_hub(model, "me/tiny-aht") == "hub://me/tiny-aht"
    names = sorted(path.name for path in (hub / "me" / "tiny-aht").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    card = (hub / "me" / "tiny-aht" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: dwindle") and "71.50" in card and 'load("me/tiny-aht")' in card
    back, images = dwindle.load("me/tiny-aht"), images_for(model)
    with torch.no_grad():
        torch.testing.assert_close(back(images).logits, model(images).logits)


def test_as_a_method_of_the_model(hub):
    assert build("vit", METHODS["Static"]()).push_to_hub("me/static") == "hub://me/static"
    assert (hub / "me" / "static" / "model.safetensors").is_file()


def test_a_language_model_has_its_own_card(hub):
    push_to_hub(dwindle.load("tsa_shakespeare"), "me/tsa")
    card = (hub / "me" / "tsa" / "README.md").read_text()
    assert "text-generation" in card and "dwindle generate me/tsa" in card and "images" not in card


def test_bad_names_and_no_network(hub, monkeypatch):
    import huggingface_hub

    model = build("vit", METHODS["Static"]())
    with pytest.raises(dwindle.DwindleError, match="no Hub id"):
        push_to_hub(model, "nonsense")

    def offline(self, *given, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", offline)
    with pytest.raises(dwindle.DwindleError, match="could not be written"):
        push_to_hub(model, "me/model")


@pytest.fixture
def online(monkeypatch):
    """As outside of tests, where the Hub's library asks; with the Hub at an address of this machine."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda port: monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


def test_without_a_network_it_is_said_soon(online, monkeypatch):
    """Nobody there, and one who takes the call and says nothing."""
    from huggingface_hub import constants

    monkeypatch.setattr(download, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (9, silent.getsockname()[1]):
            online(port)
            begin = time.monotonic()
            with pytest.raises(dwindle.DwindleError, match=r"Hub \(.*answer"):
                dwindle.load("nobody/nothing")
            with pytest.raises(dwindle.DwindleError, match="Weights for test_vit could not be fetched"):
                build_vit(Recipe(model="test_vit"), 3)
            assert time.monotonic() - begin < 5 and not constants.HF_HUB_OFFLINE


def test_what_was_fetched_before_needs_no_network(online, monkeypatch, tmp_path):
    dwindle.save(build("vit", METHODS["Static"]()), tmp_path / "me" / "static")
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options)
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    online(9)
    dwindle.load("me/static")
    assert asked["local_files_only"] is True
    with socket.create_server(("127.0.0.1", 0)) as hub:
        online(hub.getsockname()[1])
        Thread(target=answer_once, args=(hub,), daemon=True).start()
        asked.clear()
        dwindle.load("me/static", revision="v1")
    assert "local_files_only" not in asked and asked["revision"] == "v1"


def answer_once(server: socket.socket) -> None:
    caller, _ = server.accept()
    caller.recv(4096)
    caller.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    caller.close()
