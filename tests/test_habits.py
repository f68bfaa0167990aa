"""How the project is kept: what tests may import, how large a thing may grow, what an import costs, a wheel holds, an
extra brings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dwindle
from dwindle.errors import EXTRAS
from dwindle.show.demo import DEMO

TESTS, SRC = Path(__file__).parent, Path(dwindle.__file__).parent
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
# Imported where they are needed. torch._dynamo alone takes over a second.
HEAVY = {"timm", "torchvision", "transformers", "matplotlib", "pyarrow", "tensorboard", "pandas", "torch._dynamo"}
HEAVY |= {"huggingface_hub", "onnx", "optuna", "fastapi"}
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == REFUSED else super().find_spec(name, path, target)

REFUSED, *sys.argv = sys.argv[1:]
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from dwindle.__main__ import main
main()
"""


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


def size_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body: a kernel's signature has a line for each pointer, and a docstring is no work."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_files_functions_and_constructors_stay_small():
    """A file has one subject, a function one job, a constructor a dozen arguments. Recipes are lists of settings."""
    too_large = []
    for path in SRC.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(SRC)
        if (lines := text.count("\n")) > 400:
            too_large.append(f"{name} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if size_of(node) > 60:
                too_large.append(f"{name}:{node.lineno} {node.name} has {size_of(node)} lines")
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if node.name == "__init__" and len(given) > 13:  # self and twelve more
                too_large.append(f"{name}:{node.lineno} a constructor has {len(given) - 1} arguments")
    assert not too_large, "\n".join(too_large)


def python(code: str, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)


@pytest.mark.parametrize(
    "imported, heavy",
    [
        ("import dwindle, dwindle.io.datasets", HEAVY | {"datasets", "rich", "typer"}),
        ("import contextlib, dwindle.__main__ as d\nwith contextlib.suppress(SystemExit): d.main()", HEAVY),
    ],
    ids=["import dwindle", "dwindle --help"],
)
def test_what_is_heavy_is_imported_when_it_is_needed(imported, heavy):
    """So that both take no more than 0.3 s beside torch: what they may not import stands for the clock."""
    told = python(f"import sys\n{imported}\nprint('imported', *sys.modules)", "--help")
    assert told.returncode == 0, told.stderr
    there = told.stdout.rpartition("imported ")[2].split()
    assert "dwindle.core.model" in there or "dwindle.cli.main" in there
    assert not heavy & set(there)


@pytest.mark.parametrize("package, command", [("typer", "--help"), ("fastapi", "serve --help")])
def test_a_command_names_the_extra_that_is_missing(package, command):
    ended = python(WITHOUT, package, "dwindle", *command.split())
    (said,) = ended.stderr.strip().splitlines()
    assert ended.returncode == 2 and package in said and f'pip install "dwindle[{EXTRAS[package]}]"' in said


def test_extras_bring_what_they_are_said_to():
    extras = PROJECT["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in extras[extra]}
        assert package in names, f"{package} is not in [{extra}]"
    everything = re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")
    assert set(everything) == set(extras) - {"all", "test", "docs", "ray", "soap", "openvino"}


def test_a_wheel_stays_small_and_runs_the_demo():
    """Its data is below 25 MB, uncompressed, and holds what `dwindle demo` reads."""
    setuptools = PROJECT["tool"]["setuptools"]

    def matching(patterns: list[str]) -> set[Path]:
        return {path for pattern in patterns for path in SRC.glob(pattern) if path.is_file()}

    left_out = matching(setuptools["exclude-package-data"]["dwindle"])
    data = matching(setuptools["package-data"]["dwindle"]) - left_out
    code = set(SRC.rglob("*.py"))
    assert sum(path.stat().st_size for path in data | code) < 25e6
    needed = {SRC / "py.typed", *(SRC / "assets" / DEMO).iterdir(), *(SRC / "assets" / "photos").glob("*.jpg")}
    assert needed <= data
