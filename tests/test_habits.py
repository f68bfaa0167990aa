"""How the project is kept: what tests may import."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_imports_another():
    """What tests share is in tests/shared, and fixtures are in conftest.py."""
    wrong = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{path.name}:{node.lineno} imports {name}" for name in names if name.startswith("test_")]
            wrong += [f"{path.name}:{node.lineno} imports conftest" for name in names if name == "conftest"]
    assert not wrong, "\n".join(wrong)
