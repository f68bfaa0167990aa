"""A headless Chromium driven over its debugging protocol: what the page's tests need of one, and no more."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any


def chromium() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Browser:
    def __init__(self, folder: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        import websocket

        program = chromium()
        assert program is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        self.process = subprocess.Popen(
            [program, *flags, "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = self._until(lambda: int((folder / "DevToolsActivePort").read_text().splitlines()[0]), 60)
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self.socket, self.numbers = websocket.create_connection(address, timeout=60), itertools.count(1)
        self.tell("Page.enable")
        self.resize(width, height)
        if dark:
            self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self.socket.recv())
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def resize(self, width: int, height: int) -> None:
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def open(self, address: str) -> None:
        self.tell("Page.navigate", url=address)

    def js(self, expression: str) -> Any:
        said = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        return self._until(lambda: self.js(expression) or None, seconds)

    def slide(self, element: str, value: float) -> None:
        self.js(f"{element}.value = {value}; {element}.dispatchEvent(new Event('input'))")

    def upload(self, path: Path) -> None:
        root = self.tell("DOM.getDocument")["root"]["nodeId"]
        node = self.tell("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        self.tell("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(20)

    @staticmethod
    def _until(call: Any, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                if (value := call()) is not None:
                    return value
            except (OSError, AssertionError, IndexError, ValueError):
                if time.monotonic() > end:
                    raise
            assert time.monotonic() < end, "the page did not get there in time"
            time.sleep(0.1)
