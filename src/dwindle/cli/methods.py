"""`dwindle methods`."""

from __future__ import annotations

import inspect
from typing import Any

from ..methods import Method
from ..settings import parameters
from ..show.terminal import console, finish, plain


def methods() -> None:
    """List every method with its settings."""
    rows: list[dict[str, Any]] = []
    for name, kind in sorted(Method.registry.items()):
        about: dict[str, Any] = {"name": name, "paper": kind.paper, "about": inspect.getdoc(kind)}
        rows.append(about | {"settings": parameters(kind)})
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold]  {plain(row['paper'])}\n  {plain(row['about'])}")
        console.print("  " + plain(", ".join(f"{n}={v}" for n, v in row["settings"].items())) + "\n", style="dim")
    finish({"methods": rows})
