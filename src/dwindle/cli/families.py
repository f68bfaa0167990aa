"""Commands that families of models implement: one parser with the options of all families, one function per family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from ..core.registry import Family, families
from ..errors import DwindleError, listed, unknown
from ..io.checkpoint import family_at, is_checkpoint, shipped
from ..show.terminal import only_for

FUNCTIONS = {"eval": "evaluate"}  # functions that are not named as their command, because Python has the name
UNTRAINED = ("bench",)  # commands that also take a model's name in place of a checkpoint


def single(name: str, function: Callable[..., None], text: str) -> Any:
    """The command that calls one function."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(name, help=text)(function)
    return typer.main.get_command(app)


def family_command(name: str, text: str) -> TyperCommand:
    """The command of this name, with the functions of all families that have it."""
    commands = {
        family: single(name, getattr(import_module(family.cli), FUNCTIONS.get(name, name)), text)
        for family in families()
        if name in family.commands
    }
    return FamilyCommand(name, text, commands)


class FamilyCommand(TyperCommand):
    """A command with the options of all families. It calls the function of the model's family, or refuses an option
    which that family does not take."""

    def __init__(self, name: str, text: str, commands: dict[Family, Any]) -> None:
        params: dict[str, Any] = {}
        takers: dict[str, list[str]] = {}  # option: the families that take it
        for family, command in commands.items():
            for param in command.params:
                takers.setdefault(param.name, []).append(family.many)
                _join(params, param, family)
        for option, many in takers.items():
            if len(many) < len(commands):
                params[option].rich_help_panel = f"For {listed(many, 'and')}"
        super().__init__(name, params=list(params.values()), help=text, rich_markup_mode="rich")
        self.commands, self.takers = commands, takers

    def invoke(self, ctx: Any) -> Any:
        family = self._family(ctx.params[self.params[0].name])
        command = self.commands[family]
        takes = {param.name: param for param in command.params}
        options = {
            name: value for name, value in ctx.params.items() if ctx.get_parameter_source(name).name != "DEFAULT"
        }
        for name, value in options.items():
            if name not in takes:
                only_for(listed(self.takers[name], "and"), family.one, **{name: value})
        for name, param in takes.items():
            if param.required and not ctx.params[name]:
                shown = name if param.param_type_name == "argument" else param.opts[0]
                raise DwindleError(
                    f"dwindle {self.name} needs {shown} for {family.one}; see dwindle {self.name} --help."
                )
        return command.callback(**options)

    def _family(self, source: str) -> Family:
        """The family of a checkpoint or of a model's name. It must have this command."""
        if self.name in UNTRAINED and not is_checkpoint(source):
            family = next((family for family in self.commands if family.builds(source)), None)
            if family is None:
                known = [*shipped(), *(name for other in self.commands for name in other.untrained())]
                hint = "give a model's name, a checkpoint folder or a shipped name"
                raise unknown("model or checkpoint", source, known, hint)
            return family
        family = family_at(source)
        if family not in self.commands:
            kinds, own = listed([other.many for other in self.commands], "and"), listed(family.commands)
            raise DwindleError(
                f"{source} is {family.one}, and dwindle {self.name} takes {kinds}; with it use dwindle {own}."
            )
        return family


def _join(params: dict[str, Any], param: Any, family: Family) -> None:
    """Add a family's option to those of the families before it.

    An option is required if all families require it. Where the help texts differ, it has both.
    """
    before = params.get(param.name)
    if before is None:
        params[param.name] = copy.copy(param)
        return
    before.required = before.required and param.required
    if param.help and param.help not in before.help:
        before.help = f"{before.help.removesuffix('.')}; of {family.many}: {param.help}"
