"""`dwindle serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..serve.run import serve as run
from ..show.terminal import Device, Dtype, console, device_for, finish, plain


def serve(
    checkpoint: Annotated[
        list[str] | None, typer.Argument(help="Checkpoints to serve, the first by default; by itself the demo's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for the whole network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8000,
    device: Device = None,
    dtype: Dtype = "fp32",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name it is reached under, as behind a proxy; again for each, * for any."),
    ] = None,
) -> None:
    """Serve the checkpoints until the process is stopped."""

    def say(text: str) -> None:
        console.print(plain(text))

    run(checkpoint or [], host, port, device_for(device), dtype, say, finish, allow_host or [])
