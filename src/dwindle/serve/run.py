"""`dwindle serve`: checkpoints in, a listening server out."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import DwindleError
from ..methods import Method
from ..methods.static import Static
from ..methods.tome import ToMe
from ..runtime.dtypes import check_runs, converted
from ..runtime.memory import keep_freed_memory
from ..show.demo import DEMO
from ..tasks.classify import load_classifier
from .app import create_app
from .connection import served_by
from .guard import Hosts
from .limits import Limits, checked_token
from .metrics import Metrics
from .models import Served, beside

BESIDE: dict[str, Callable[[], Method]] = {  # methods that need no training, on the first checkpoint's weights
    "ToMe": partial(ToMe, budget=0.67),
    "static": Static,
}
SWITCH = 2e-4  # seconds between two chances of a thread to get Python's lock
KEPT = 1 << 30  # bytes of freed memory that stay with the process


def served_models(checkpoints: Sequence[str], device: str = "cpu", dtype: str = "fp32") -> list[Served]:
    """The models of the checkpoints, and after them the first one's weights under the methods that need no training."""
    names = list(checkpoints) or [DEMO]
    short = [name.rstrip("/").rsplit("/", 1)[-1] for name in names]
    if len({*short, *BESIDE}) < len(short) + len(BESIDE):
        raise DwindleError(
            f"Two of the checkpoints {', '.join(names)} have the same name, or one has that of a model served beside "
            f"them ({', '.join(BESIDE)}); rename it."
        )
    loaded = (converted(load_classifier(source), dtype, device).to(device) for source in names)
    models = [Served(name, model) for name, model in zip(short, loaded)]
    models += [beside(models[0], make(), name) for name, make in BESIDE.items()]
    for model in models:
        model.warm(Limits.batch)
    return models


def serve(
    checkpoints: Sequence[str],
    host: str,
    port: int,
    device: str,
    dtype: str,
    say: Callable[[str], None],
    finish: Callable[[dict], None],
    allowed: Sequence[str] = (),
) -> None:
    """Load the models, then answer requests until the process is stopped.

    say: prints a line for people. finish: is given the address and the models once the server is about to listen.
    allowed: names that requests may address the server by, besides `host` and localhost.
    """
    token = checked_token(os.environ.get("DWINDLE_TOKEN"))
    check_runs(dtype, device)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio turns Nagle's delay (40 ms a response) off only for sockets that name TCP.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))  # before the models are loaded: a taken port is known at once
        except (OSError, OverflowError) as error:
            raise DwindleError(
                f"Cannot listen on {host} port {port} ({error}); choose another --host or --port."
            ) from error
        keep_freed_memory(KEPT)
        models = served_models(checkpoints, device, dtype)
        # A model's thread asks for Python's lock after each of its hundreds of operations. While the event loop is
        # busy, that thread gets the lock only after a switch interval, which is 5 ms by default.
        sys.setswitchinterval(SWITCH)
        bound, port = listening.getsockname()[:2]
        limits, metrics = Limits(), Metrics()
        app = create_app(models, limits, token, Hosts((host, bound), allowed), metrics)
        server = served_by(app, limits, metrics)
        gc.collect()
        gc.freeze()  # the models stay: the garbage collector need not walk through them between requests
        address = f"http://{f'[{host}]' if family == socket.AF_INET6 else host}:{port}/"
        say(f"{', '.join(model.name for model in models)} at {address} (Ctrl+C ends)")
        if token is None and not ipaddress.ip_address(bound).is_loopback:
            say("Everyone who reaches this address may ask: set DWINDLE_TOKEN to require a token.")
        result: dict[str, Any] = {"address": address, "models": [model.about() for model in models]}
        finish(result)
        try:
            server.run(sockets=[listening])
        finally:
            gc.unfreeze()
