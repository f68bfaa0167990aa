"""What README and docs say is so: python blocks run, commands parse, tables are what the results hold."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import dwindle
from dwindle.cli import app
from dwindle.core.backbone import Backbone
from dwindle.core.registry import Family
from dwindle.methods import Method
from dwindle.recipes import find_comparison, find_recipe
from dwindle.tasks import Task
from dwindle.train.recipe import changed

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
HISTORY = ("docs/changelog.md", "docs/benchmarks/log.md")
PAGE = "page"  # the module that blocks run in
TINY = {"img_size": 224, "patch_size": 16, "embed_dim": 32, "depth": 12, "num_heads": 2}


def fenced(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of these languages, those in lists too."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, kind, code in found if kind in languages]


# Python blocks


def tiny(name: str, pretrained: bool = False, **options: Any) -> Any:
    """In place of timm's models: as deep, and as large in nothing else."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**(TINY | options))


def tiny_checkpoint(name: str, **options: Any) -> Any:
    """In place of shipped checkpoints, which other tests load; what a page saved is read as it is."""
    if Path(name).is_dir():
        return REAL_LOAD(name, **options)
    if name == "ada_small_cifar100":
        return dwindle.AdaPerceiver.preset("small", classes=100)
    if name == "tsa_shakespeare":
        return REAL_LOAD(name)
    model = dwindle.adapt(tiny("deit"), dwindle.AHT(budget=0.67)).eval()
    model.method.trained = model.method.budget_held = True
    return model


REAL_LOAD, REAL_CALIBRATE = dwindle.load, dwindle.calibrate


def ray_of_one_worker() -> types.ModuleType:
    """Ray's Data as far as the page goes: reads one photograph, runs the stage on it in this process."""
    photo = next((Path(dwindle.__file__).parent / "assets/photos").glob("*.jpg")).read_bytes()

    class Rows(dict):
        def map_batches(self, stage: type, fn_constructor_args: list, **_: Any) -> Rows:
            return Rows(stage(*fn_constructor_args)(self))

        def drop_columns(self, names: list[str]) -> Rows:
            return Rows({name: column for name, column in self.items() if name not in names})

        def write_parquet(self, path: str) -> None:
            assert {"prediction", "name", "confidence", "top5", "depth", "gmacs", "error"} <= {*self}
            assert self["error"][0] is None

    ray = types.ModuleType("ray")
    ray.data = types.SimpleNamespace(read_binary_files=lambda *_, **__: Rows(bytes=[photo], path=["photo.jpg"]))  # type: ignore[attr-defined]
    return ray


@pytest.fixture
def small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """An empty folder, tiny models under timm's names, and what pages take for granted: a ViT, images, a loader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("timm.create_model", tiny)
    monkeypatch.setattr(dwindle, "load", tiny_checkpoint)
    monkeypatch.setattr(dwindle, "calibrate", lambda *given: REAL_CALIBRATE(*given, steps=2))
    torch.manual_seed(0)
    images, labels = torch.randn(2, 3, 224, 224), torch.tensor([0, 1])
    world = {"vit": tiny("vit"), "images": images, "loader": [(images, labels)], "ids": torch.randint(65, (2, 16))}
    world["model"] = tiny_checkpoint("aht")
    yield world | {"__name__": PAGE}
    for registered in [name for name, kind in Method.registry.items() if kind.__module__ == PAGE]:
        del Method.registry[registered]
    Backbone.families[:] = [family for family in Backbone.families if family.__module__ != PAGE]
    for registered in [name for name, kind in Task.registry.items() if kind.__module__ == PAGE]:
        del Task.registry[registered]
    Family.known[:] = [family for family in Family.known if type(family).__module__ != PAGE]


def before_cluster(world: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "ray", ray_of_one_worker())
    dwindle.save(tiny_checkpoint("aht"), "my-aht")


def before_export(world: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="extra `onnx` is not installed")
    patch.setitem(TINY, "depth", 2)
    patch.setitem(TINY, "img_size", 64)


def before_own_model(world: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="extra `hf` is not installed")


def before_task(world: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Four photographs of two classes to train on, two to evaluate."""
    photos = sorted((Path(dwindle.__file__).parent / "assets/photos").glob("*.jpg"))
    for number, photo in enumerate(photos[:4] + photos[:2]):
        place = Path("photos", "train" if number < 4 else "val", "ab"[number % 2])
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, place)
    patch.setitem(TINY, "img_size", 64)


BEFORE: dict[str, Callable[[dict[str, Any], pytest.MonkeyPatch], None]] = {
    "docs/add_a_task.md": before_task,
    "docs/cluster.md": before_cluster,
    "docs/export.md": before_export,
    "docs/encoders.md": before_own_model,
    "docs/own_model.md": before_own_model,
}
IN_ITS_PLACE = {"docs/export.md": {"seconds=8": "seconds=0.05"}, "docs/add_a_method.md": {"from ..": "from dwindle."}}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if fenced(page.read_text(), "python")])
def test_python_blocks_run(name: str, small_world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run one after the other, as somebody reads it."""
    if name in BEFORE:
        BEFORE[name](small_world, monkeypatch)
    for number, code in enumerate(fenced(PAGES[name].read_text(), "python"), 1):
        for old, new in IN_ITS_PLACE.get(name, {}).items():
            code = code.replace(old, new)
        exec(compile(code, f"{name}, block {number}", "exec"), small_world)


def test_the_first_block_saves_compute(small_world: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    exec(fenced(PAGES["README.md"].read_text(), "python")[0], small_world)
    assert int(re.search(r"(\d+)% of the static", capsys.readouterr().out)[1]) <= 70  # type: ignore[index]


# Commands


def commands(text: str) -> list[str]:
    """Lines of console blocks, continued ones as one, and code within a sentence that begins with a command."""
    found = []
    for block in fenced(text, "", "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"\bdwindle \w|^python benchmarks/|^pip install", line):
                found += [part.strip() for part in re.split(r"\s#.*", line)[0].split("&&")]
    found += [" ".join(code.split()) for code in re.findall(r"`((?:dwindle|python benchmarks/)[^`.]* [^`]+)`", text)]
    return [command for command in found if command]


def every_command() -> list[tuple[str, str]]:
    return [(name, command) for name, page in PAGES.items() for command in dict.fromkeys(commands(page.read_text()))]


@cache
def command_line(name: str) -> Any:
    """The command of that name, with its options."""
    group = typer.main.get_command(app)
    context = group.make_context("dwindle", [name])  # type: ignore[attr-defined]
    assert name in group.list_commands(context), group.list_commands(context)  # type: ignore[attr-defined]
    return group.resolve_command(context, [name])[1]  # type: ignore[attr-defined]


@cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@cache
def options_of(script: str) -> str:
    return (ROOT / script).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    """Commands, options, the types of their values, recipes and settings are known."""
    for command in dict.fromkeys(commands(PAGES[name].read_text())):
        try:
            check_command(command)
        except Exception as error:
            raise AssertionError(f"{name}: `{command}`: {error}") from error


def check_command(command: str) -> None:
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[:2] == ["pip", "install"]:
        assert not (named := re.search(r"\[(.*)\]", command)) or set(named[1].split(",")) <= extras(), extras()
    elif words[0] == "python":
        source = options_of(words[1])
        assert all(f'"{word}"' in source for word in words if word.startswith("--")), source[:200]
    elif "dwindle" in words:
        check_arguments(words[words.index("dwindle") + 1 :])


def check_arguments(words: list[str]) -> None:
    """As the command line itself parses them; `[--set k=v]` in brackets is optional, and checked too."""
    words = [word.strip("[]").rstrip(".") for word in words]
    if words[0].isupper():
        return  # stands for any
    command = command_line(words[0])
    if len(words) == 1:
        return
    given = command.make_context(words[0], words[1:]).params
    settings = [setting for setting in given.get("set") or [] if re.match(r"[a-z_.]+=", setting) and setting != "k=v"]
    named = given.get("recipe") or given.get("comparison")
    if named and named.islower():
        recipe = find_comparison(named)() if words[0] == "compare" else find_recipe(named)()
        if words[0] != "compare":
            changed(recipe, settings)


# Tables and style


def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_the_results() -> None:
    """`python benchmarks/tables.py` would change nothing, and every table that can be made is on a page."""
    maker, marked = tables(), set()
    for name, page in PAGES.items():
        text = page.read_text()
        assert maker.filled(text) == text, f"{name} is out of date: python benchmarks/tables.py"
        marked |= {found[1] for found in maker.MARK.findall(text)} | {found[1] for found in maker.MARK.finditer(text)}
        marked |= set(re.findall(r"<!-- table: (\S+) -->", text))
    measured = {path.stem for path in (ROOT / "benchmarks/results/measured").glob("*.json")}
    assert not (unused := (measured | {*maker.TABLES}) - marked), f"on no page: {sorted(unused)}"


def test_results_say_how_they_were_made() -> None:
    for path in (ROOT / "benchmarks/results/measured").glob("*.json"):
        result = tables().read(path)
        assert result["what"] and result["hardware"] and (result.get("commit") or result.get("date")), path.name
        assert all(len(row) == len(result["columns"]) for row in result["rows"]), path.name


def test_readme_is_short_and_its_commands_stay() -> None:
    text = PAGES["README.md"].read_text()
    assert text.count("\n") <= 150
    assert re.search(r'^pip install -e (\.|"\.\[all\]") && dwindle demo$', text, re.MULTILINE)
    assert '\npip install -e ".[test]" && pytest\n' in text
    gains = tables().made("gains")
    assert max(len(cell.strip()) for line in gains.splitlines() for cell in line.split("|")) < 60


def test_no_merge_is_left_half_done() -> None:
    for page in (*PAGES.values(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "LOG.md"):
        assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE), page


def test_every_extra_is_explained() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGES["docs/install.md"].read_text(), re.MULTILINE)) == extras()


def test_readme_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES["README.md"].read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), link


@pytest.mark.parametrize("name", [name for name in PAGES if name not in HISTORY])
def test_names_of_ours_resolve(name: str) -> None:
    """`dwindle.io.images.load_image`, in a sentence or in the reference, is there."""
    text = PAGES[name].read_text()
    keys = {"dwindle.preprocess"}  # of an exported file's metadata
    for dotted in {*re.findall(r"`(dwindle(?:\.\w+)+)", text), *re.findall(r"^::: (\S+)", text, re.MULTILINE)} - keys:
        found: Any = dwindle
        for place, part in enumerate(dotted.split(".")[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(dotted.split(".")[:place]))
            found = getattr(found, part)


@pytest.mark.parametrize("name", [name for name in PAGES if name not in HISTORY])
def test_files_named_are_there(name: str) -> None:
    """Files of the tree, by their whole path, or below src/dwindle or benchmarks."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|jsonl?|csv|html))(?:: [^`]*)?`", PAGES[name].read_text())
    homes = (ROOT, ROOT / "src" / "dwindle", ROOT / "benchmarks", ROOT / "src")
    lost = {
        path
        for path in named
        if not path.startswith("runs/") and "NAME" not in path and not any((home / path).exists() for home in homes)
    }
    assert not lost, lost


@pytest.mark.parametrize("name", [name for name in PAGES if name not in HISTORY])
def test_pages_speak_to_a_user(name: str) -> None:
    """No history, nobody else's machine, no cell that holds a paragraph."""
    text = PAGES[name].read_text()
    told = re.findall(r"\basked\b|\bby a script\b|\bsession before\b|\bnetwork of before\b|/work/|/tmp/", text)
    assert not told, told
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells), default=0) <= 200, max(cells, key=len)


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link or an anchor that leads nowhere fails."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="extra `docs` is not installed")
    pytest.importorskip("material", reason="extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
