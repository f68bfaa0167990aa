"""`dwindle demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..show.demo import demo as run
from ..show.terminal import Device, console, device_for, finish, plain, show_table


def demo(
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("dwindle-demo"), device: Device = None
) -> None:
    """The photographs, a table and the figures."""
    result = run(out, device_for(device))
    show_table(
        f"{result['model']} on {len(result['images'])} photographs",
        ["image", "label", "confidence", "mean depth", "GMACs", "of static"],
        [
            [
                i["image"],
                i["label"],
                f"{i['confidence']:.0%}",
                i["depth"],
                i["gmacs"],
                f"{i['gmacs'] / result['gmacs_static']:.0%}",
            ]
            for i in result["images"]
        ],
    )
    console.print(
        f"{result['gmacs']} GMACs per image against {result['gmacs_static']} static; {result['speedup']}x faster than "
        f"static on this machine (batch of {len(result['images'])}). Figures in {plain(str(out))}/"
    )
    finish(result)
