"""Commands that families of models answer: one parser for the options of all, and the function of the one given."""

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

FUNCTIONS = {"eval": "evaluate"}  # where a command's name is a word of Python's
UNTRAINED = ("bench",)  # also takes names of models that no checkpoint holds


def single(name: str, function: Callable[..., None], text: str) -> Any:
    """A command of one function."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(name, help=text)(function)
    return typer.main.get_command(app)


def answered(name: str, text: str) -> TyperCommand:
    """A command by its name, as the families that have it answer it."""
    own = {
        family: single(name, getattr(import_module(family.cli), FUNCTIONS.get(name, name)), text)
        for family in families()
        if name in family.commands
    }
    return Answered(name, text, own)


class Answered(TyperCommand):
    """The options of all families; an option is given to the family that takes it, or refused."""

    def __init__(self, name: str, text: str, own: dict[Family, Any]) -> None:
        params: dict[str, Any] = {}
        takers: dict[str, list[str]] = {}  # of each option
        for family, command in own.items():
            for param in command.params:
                takers.setdefault(param.name, []).append(family.many)
                _join(params, param, family)
        for option, many in takers.items():
            if len(many) < len(own):
                params[option].rich_help_panel = f"For {listed(many, 'and')}"
        super().__init__(name, params=list(params.values()), help=text, rich_markup_mode="rich")
        self.own, self.takers = own, takers

    def invoke(self, ctx: Any) -> Any:
        family = self._family(ctx.params[self.params[0].name])
        command, one = self.own[family], family.one
        takes = {param.name: param for param in command.params}
        given = {name: value for name, value in ctx.params.items() if ctx.get_parameter_source(name).name != "DEFAULT"}
        for name, value in given.items():
            if name not in takes:
                only_for(listed(self.takers[name], "and"), one, **{name: value})
        for name, param in takes.items():
            if param.required and not ctx.params[name]:
                shown = name if param.param_type_name == "argument" else param.opts[0]
                raise DwindleError(f"dwindle {self.name} needs {shown} for {one}; see dwindle {self.name} --help.")
        return command.callback(**given)

    def _family(self, source: str) -> Family:
        """Of what was named, if it has this command."""
        if self.name in UNTRAINED and not is_checkpoint(source):
            family = next((family for family in self.own if family.builds(source)), None)
            if family is None:
                known = [*shipped(), *(name for other in self.own for name in other.untrained())]
                hint = "give a model's name, a checkpoint folder or a shipped name"
                raise unknown("model or checkpoint", source, known, hint)
            return family
        family = family_at(source)
        if family not in self.own:
            kinds, own = listed([other.many for other in self.own], "and"), listed(family.commands)
            raise DwindleError(
                f"{source} is {family.one}, and dwindle {self.name} takes {kinds}; with it use dwindle {own}."
            )
        return family


def _join(params: dict[str, Any], param: Any, family: Family) -> None:
    """Among those of the families before: needed where all need it, and explained where they differ."""
    before = params.get(param.name)
    if before is None:
        params[param.name] = copy.copy(param)
        return
    before.required = before.required and param.required
    if param.help and param.help not in before.help:
        before.help = f"{before.help.removesuffix('.')}; of {family.many}: {param.help}"
