"""`dwindle methods`."""

from __future__ import annotations

import inspect
from typing import Any

from ..methods import Method
from ..show.terminal import console, finish, plain


def methods() -> None:
    """From their registry."""
    rows: list[dict[str, Any]] = []
    for name, kind in sorted(Method.registry.items()):
        settings = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
        rows.append({"name": name, "paper": kind.paper, "about": inspect.getdoc(kind), "settings": settings})
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold]  {plain(row['paper'])}\n  {plain(row['about'])}")
        console.print("  " + plain(", ".join(f"{n}={v}" for n, v in row["settings"].items())) + "\n", style="dim")
    finish({"methods": rows})
