"""`dwindle demo`."""

from __future__ import annotations

from pathlib import Path

from ..show.demo import demo as run
from ..show.terminal import Device, FigureFolder, console, device_for, finish, plain, show_rows


def demo(out: FigureFolder = Path("dwindle-demo"), device: Device = None) -> None:
    """Classify the shipped photographs, print a table and draw the figures."""
    result = run(out, device_for(device))
    rows = [
        {
            "image": row["image"],
            "label": row["label"],
            "confidence": f"{row['confidence']:.0%}",
            "mean depth": row["depth"],
            "GMACs": row["gmacs"],
            "of static": f"{row['gmacs'] / result['gmacs_static']:.0%}",
        }
        for row in result["images"]
    ]
    show_rows(f"{result['model']} on {len(rows)} photographs", list(rows[0]), rows)
    console.print(
        f"{result['gmacs']} GMACs per image against {result['gmacs_static']} static; {result['speedup']}x faster than "
        f"static on this machine (batch of {len(result['images'])}). Figures in {plain(str(out))}/"
    )
    finish(result)
