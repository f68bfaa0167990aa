"""A room knows only the rooms above it, nothing is imported in a circle, and no import of ours hides in a function."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import dwindle

SRC = Path(dwindle.__file__).parent
# In the order in which they may know each other; docs/reading_order.md says what each is for.
ROOMS = (
    ("errors", "settings", "files", "version"),
    ("ops",),
    ("core",),
    ("backbones",),
    ("methods",),
    ("io",),
    ("runtime",),
    ("tasks",),
    ("evaluate",),
    ("train",),
    ("show",),
    ("experiments",),
    ("models",),
    ("serve",),
    ("recipes",),
    ("cli",),
    ("__main__",),
)
PLACE = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}


@cache
def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(SRC.parent).with_suffix("").parts) for path in SRC.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def imports(module: str) -> list[tuple[str, int, bool]]:
    """What a module imports of ours: which, in which line, and whether in a function. Not what only types are of."""
    path = modules()[module]
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    typed = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.unparse(guard.test)
        for node in ast.walk(guard)
    }
    hidden = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        targets = []
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            targets = [f"{base}.{name.name}" if f"{base}.{name.name}" in modules() else base for name in node.names]
        elif isinstance(node, ast.Import):
            targets = [name.name for name in node.names if name.name in modules()]
        found += [(target, node.lineno, id(node) in hidden) for target in targets]
    return found


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_every_module_is_in_a_room():
    assert {room(module) for module in modules()} - {None} <= set(PLACE)


def test_rooms_know_only_rooms_above():
    wrong = [
        f"{module}:{line} imports {target}"
        for module in modules()
        for target, line, _ in imports(module)
        if room(module) and (room(target) is None or PLACE[room(target)] > PLACE[room(module)])
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_of_ours_is_imported_in_a_function():
    hidden = [f"{module}:{line} imports {t}" for module in modules() for t, line, inside in imports(module) if inside]
    assert not hidden, "\n".join(hidden)


def test_no_circles():
    graph = {module: {t for t, _, _ in imports(module) if t != module} for module in modules()}
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for target in sorted(graph[module]):
            # A package's own list of what it offers is no knowledge of its parts.
            if not module.startswith(f"{target}."):
                visit(target)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)
