"""Settings are checked against their annotations, such as `sigma: Above0 = 1.0`, which say what each may be.

`checked` checks the arguments of a constructor or function, `check_fields` the fields of a dataclass, and `options` the
entries of a dictionary, such as a part of a config file, against a TypedDict. Other values are refused in one sentence.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from .errors import DwindleError, brief, unknown

Call = TypeVar("Call", bound=Callable[..., Any])
MOST = 3.4e38  # above this value a float32 is infinite
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "settings by name"}


@dataclasses.dataclass(frozen=True)
class Within:
    """Bounds of a number. over, under: whether the lower or the upper bound itself is excluded."""

    low: float = -MOST
    high: float = MOST
    over: bool = False
    under: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.over else value >= self.low
        return above and (value < self.high if self.under else value <= self.high)

    def __str__(self) -> str:
        if self.high == MOST:
            return f"be {'above' if self.over else 'at least'} {self.low:g}"
        if self.over and self.under:
            return f"lie between {self.low:g} and {self.high:g}"
        return f"lie in {'(' if self.over else '['}{self.low:g}, {self.high:.12g}{')' if self.under else ']'}"


@dataclasses.dataclass(frozen=True)
class Count:
    """Bounds of a length: the entries of a list, or the characters of a text."""

    least: int
    most: int

    def holds(self, value: Any) -> bool:
        return self.least <= len(value) <= self.most

    def __str__(self) -> str:
        return f"hold {self.least} to {self.most} of them"


Share = Annotated[float, Within(0, 1)]
Inside = Annotated[float, Within(0, 1, over=True, under=True)]
Above0 = Annotated[float, Within(0, over=True)]
AtLeast0 = Annotated[float, Within(0)]
Whole0 = Annotated[int, Within(0)]
Whole1 = Annotated[int, Within(1)]
Word = Annotated[str, Count(0, 64)]
Budget = float | Word | None  # a share of the static cost, or GMACs, as '3.1G'
# Sizes that memory or time depends on are bounded, far above the sizes of real models.
Size = Annotated[int, Within(1, 1 << 16)]  # width, tokens, a side of an image
Classes = Annotated[int, Within(1, 1 << 20)]
Depth = Annotated[int, Within(1, 256)]  # blocks
ImageSize = Annotated[int, Within(1, 1 << 13)]
Workers = Annotated[int, Within(0, 1 << 10)]
Batch = Annotated[int, Within(1, 1 << 20)]
Seed = Annotated[int, Within(0, (1 << 32) - 1)]
Stages = Annotated[tuple[int, ...], Count(0, 256)]  # numbers of blocks


class _Unfit(Exception):
    """A value does not fit its annotation. The message is what it must be or do.

    close: the value has the right type, but is out of bounds.
    """

    def __init__(self, must: str, close: bool = False) -> None:
        super().__init__(must)
        self.close = close


def checked(call: Call) -> Call:
    """Decorate a function or constructor, so that it refuses arguments that do not fit its annotations. Lists become
    tuples where the annotation is a tuple (JSON has no tuples), and numpy's numbers Python's.

    An argument that is a dataclass groups settings that belong together: its fields are passed by their own names.
    """
    signature = inspect.signature(call)
    named = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @wraps(call)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        owner = type(args[0]).__name__ if named[:1] == ["self"] else call.__name__
        groups = _groups(call)
        if not takes_all:
            _check_names(owner, kwargs, [name for name in parameters(call) if name != "self"] + list(groups))
        kwargs = _grouped(kwargs, groups, owner)
        try:
            bound, kinds = signature.bind(*args, **kwargs), _kinds(call)
        except TypeError as error:
            raise DwindleError(f"{owner} cannot be made of these settings ({error}); see what it takes.") from error
        for name in named:
            value = bound.arguments.get(name, signature.parameters[name].default)
            if name in kinds and value is not signature.parameters[name].default:
                bound.arguments[name] = checked_value(value, kinds[name], name, owner)
        return call(*bound.args, **bound.kwargs)

    return cast(Call, checked_call)


def parameters(call: Any) -> dict[str, Any]:
    """The defaults of a call's arguments by name, in order, with the fields of groups in the place of the groups;
    `inspect.Parameter.empty` where there is no default."""
    defaults: dict[str, Any] = {}
    groups = _groups(call)
    for name, parameter in inspect.signature(call).parameters.items():
        if name in groups:
            defaults |= {field.name: getattr(groups[name], field.name) for field in dataclasses.fields(groups[name])}
        else:
            defaults[name] = parameter.default
    return defaults


def _groups(call: Any) -> dict[str, Any]:
    """The arguments whose defaults are dataclasses, by name."""
    arguments = inspect.signature(call).parameters.items()
    return {name: p.default for name, p in arguments if dataclasses.is_dataclass(p.default)}


def _grouped(kwargs: dict[str, Any], groups: dict[str, Any], owner: str) -> dict[str, Any]:
    """The arguments, with the fields that belong to groups moved into their groups."""
    grouped = dict(kwargs)
    for name, default in groups.items():
        loose = {f.name: grouped.pop(f.name) for f in dataclasses.fields(default) if f.name in grouped}
        if not isinstance(grouped.get(name, default), type(default)):
            kind = type(default).__name__
            raise DwindleError(f"{name} = {brief(grouped[name])}: it must be a {kind} (a setting of {owner}).")
        if loose or name in grouped:
            grouped[name] = dataclasses.replace(grouped.get(name, default), **loose)
            check_fields(grouped[name], owner)
    return grouped


def check_fields(group: Any, owner: str | None = None) -> None:
    """Check a dataclass against its annotations; its lists become tuples where these are tuples.

    owner: what errors say the settings belong to; None: the dataclass itself.
    """
    cls: Any = type(group)
    kinds = _kinds(cls)
    for field in dataclasses.fields(group):
        value = checked_value(getattr(group, field.name), kinds[field.name], field.name, owner or cls.__name__)
        object.__setattr__(group, field.name, value)  # works for frozen dataclasses too


def options(given: Any, kind: Any, owner: str) -> dict[str, Any]:
    """The dictionary, if its names and values are those of a TypedDict. owner: what errors say they belong to."""
    values: dict[str, Any] = checked_value(given, kind, "options", owner)
    return values


def checked_value(value: Any, kind: Any, name: str, owner: str) -> Any:
    """The value of the setting `name`, converted to this annotation; refused if it does not fit."""
    try:
        return _fit(value, kind, owner)
    except _Unfit as error:
        choices = [choice for one in (kind, *get_args(kind)) if get_origin(one) is Literal for choice in get_args(one)]
        if isinstance(value, str) and any(isinstance(choice, str) for choice in choices):
            raise unknown(name, value, choices, hint=f"a setting of {owner}") from None
        raise DwindleError(f"{name} = {brief(value)}: it must {error} (a setting of {owner}).") from None


def _check_names(owner: str, given: Iterable[Any], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise unknown(f"option of {owner}", name, known)


@lru_cache(256)
def _kinds(call: Any) -> dict[str, Any]:
    """Annotations by name; empty where they cannot be resolved, which may be so in a user's class."""
    try:
        return typing.get_type_hints(call, include_extras=True)
    except (NameError, AttributeError, TypeError):
        return {}


def _fit(value: Any, kind: Any, owner: str) -> Any:
    """The value, converted to this annotation; raises `_Unfit`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _fit(value, args[0], owner)
        for bounds in args[1:]:
            if isinstance(bounds, Within | Count) and not bounds.holds(value):
                raise _Unfit(str(bounds), close=True)
        return value
    if origin in (Union, types.UnionType):
        return _fit_any(value, kind, owner)
    if origin is Literal and any(type(value) is type(choice) and value == choice for choice in args):
        return value
    if origin in (tuple, list) and isinstance(value, list | tuple | range):
        return _fit_each(value, kind, owner)
    if origin is dict and isinstance(value, dict):
        return {_fit(key, args[0], owner): _fit(entry, args[1], owner) for key, entry in value.items()}
    if typing.is_typeddict(kind) and isinstance(value, dict):
        kinds = _kinds(kind)
        _check_names(owner, value, kinds)
        return {name: checked_value(entry, kinds[name], name, owner) for name, entry in value.items()}
    if kind in (int, float):
        return _fit_number(value, kind)
    if typing.is_typeddict(kind) or origin in (Literal, tuple, list, dict):
        raise _Unfit(f"be {_words(kind)}")
    try:
        fits = isinstance(value, origin or kind)
    except TypeError:  # Any, or another annotation that is no class
        fits = True
    if not fits:
        raise _Unfit(f"be {_words(kind)}")
    return value


def _fit_any(value: Any, kind: Any, owner: str) -> Any:
    """The value, converted to the first member of a union that it fits. If it has the type of one but is out of its
    bounds, the error says so."""
    if value is None and type(None) in get_args(kind):
        return None
    must = _Unfit(f"be {_words(kind)}")
    for one in get_args(kind):
        try:
            return _fit(value, one, owner)
        except _Unfit as error:
            must = error if error.close else must
    raise must


def _fit_each(value: Sequence[Any], kind: Any, owner: str) -> Any:
    """The entries of a list or tuple, each converted."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            raise _Unfit(f"be {_words(kind)}")
        return tuple(_fit(entry, one, owner) for entry, one in zip(value, args))
    try:
        entries = [_fit(entry, args[0], owner) for entry in value]
    except _Unfit as error:
        raise error if error.close else _Unfit(f"be {_words(kind)}") from None
    return entries if origin is list else tuple(entries)


def _fit_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real if kind is float else Integral):
        raise _Unfit(f"be {WORDS[kind]}")
    number: Any = value.item() if hasattr(value, "item") else value  # numpy's
    if not -MOST <= number <= MOST or (kind is int and abs(number) >= 1 << 63):
        raise _Unfit(f"be {WORDS[kind]}, and finite")
    return float(number) if abs(number) >= 1 << 63 else number  # torch's integers have at most 64 bits


def _words(kind: Any) -> str:
    """An annotation in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_words(one) for one in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (tuple, list):
        count = f" of {len(args)}" if origin is tuple and Ellipsis not in args else ""
        return f"a list{count}, each {_words(args[0])}"
    if typing.is_typeddict(kind):
        return WORDS[dict]
    if kind is type(None):
        return "none"
    return WORDS.get(origin or kind, getattr(kind, "__name__", str(kind)))
