"""The command line. Every command prints text for people, and then one line of JSON as the last line of stdout.

A command's module is imported when the command is called, so that `dwindle --help` starts fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..core.registry import families
from ..errors import DwindleError, missing
from ..runtime.memory import keep_freed_memory
from ..show.terminal import aside, plain
from ..version import __version__
from .families import family_command, single

COMMANDS = {  # name: (the module here that has a function of that name, the help text)
    "demo": ("demo", "Classify the shipped photographs with the shipped model and draw where the compute went."),
    "train": (
        "train",
        "Train a recipe. A killed run loses what came after its last save (each epoch): go on with --resume.",
    ),
    "compare": (
        "train",
        "Train and evaluate methods under the same conditions. A killed comparison goes on where it was: same command.",
    ),
    "search": (
        "train",
        "Search lambda_p and lambda_t with Optuna, judged on held-out training images. A killed search goes on.",
    ),
    "fit": (
        "encoders",
        "Make a model's features true again at a budget: from images without labels, with the static model as teacher.",
    ),
    "fidelity": (
        "encoders",
        "How close a model's features are to the static model's, on unlabelled images; and the cheapest setting that "
        "keeps a promise of it.",
    ),
    "speedup": (
        "encoders",
        "What can be had of a model without training: fidelity and time at several budgets and of smaller images. The "
        "winner is saved.",
    ),
    "embed": (
        "encoders",
        "Embeddings of millions of images in one parquet file, with patch features where wanted. A killed run goes on "
        "where it was: same command.",
    ),
    "serve": (
        "serve",
        "A web page that shows where the compute goes, and an API. $DWINDLE_TOKEN: a bearer token to ask for.",
    ),
    "methods": ("methods", "List the methods and their settings."),
}


def help_texts() -> dict[str, str]:
    """The help text of each command, of those here and of those that families of models implement."""
    texts_of = {name: [text] for name, (_, text) in COMMANDS.items()}
    for family in families():
        for name, text in family.commands.items():
            texts_of.setdefault(name, []).append(text)
    return {name: " ".join(text for text in texts if text) for name, texts in texts_of.items()}


class Commands(TyperGroup):
    """The group of all commands. It lists them with their help texts, and imports a command when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(help_texts())

    def get_command(self, ctx: Any, name: str) -> Any:
        text = help_texts().get(name)
        return None if text is None else TyperCommand(name, help=text, rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found: Any
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and command_of(found.name, found.help), rest


def command_of(name: str, text: str) -> TyperCommand:
    """The command of this name, with its options."""
    if name not in COMMANDS:
        return family_command(name, text)
    module = import_module(f".{COMMANDS[name][0]}", __package__)
    return single(name, getattr(module, name), text)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Make a vision transformer stop computing tokens that are done. Start with [bold]dwindle demo[/bold].",
)


def main() -> None:
    """Run the command line. An error that a user can mend ends it with one sentence on stderr and exit code 2."""
    keep_freed_memory()
    try:
        try:
            app()
        except ModuleNotFoundError as error:  # a package of an extra is missing
            raise missing(error) from error
    except (DwindleError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        aside.print(f"[red]dwindle:[/red] {plain(str(error))}", soft_wrap=True)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dwindle {__version__}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
