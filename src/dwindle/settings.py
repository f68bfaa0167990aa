"""What a setting may be, said once, by its annotation: `sigma: Above0 = 1.0`.

`checked` holds a constructor or function to its annotations, `check_fields` a dataclass to those of its fields, and
`options` a dictionary, such as a part of a config file, to those of a TypedDict. The rest is refused in one sentence.
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
MOST = 3.4e38  # beyond it a float32 is infinite
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "settings by name"}


@dataclasses.dataclass(frozen=True)
class Within:
    """Bounds of a number; `over`, `under`: the bound itself is out."""

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
    """Bounds of how many: entries of a list, or characters of a text."""

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
# Sizes: what memory or time is taken for has an end, far beyond what anybody builds.
Size = Annotated[int, Within(1, 1 << 16)]  # width, tokens, a side of an image
Classes = Annotated[int, Within(1, 1 << 20)]
Depth = Annotated[int, Within(1, 256)]  # blocks
ImageSize = Annotated[int, Within(1, 1 << 13)]
Workers = Annotated[int, Within(0, 1 << 10)]
Batch = Annotated[int, Within(1, 1 << 20)]
Seed = Annotated[int, Within(0, (1 << 32) - 1)]
Stages = Annotated[tuple[int, ...], Count(0, 256)]  # blocks by number


class _Unfit(Exception):
    """What a value must be or do. close: it is of the right kind, but out of bounds."""

    def __init__(self, must: str, close: bool = False) -> None:
        super().__init__(must)
        self.close = close


def checked(call: Call) -> Call:
    """The function or constructor, taking what its annotations allow: lists where they want tuples (JSON has none),
    and numpy's numbers as Python's.

    An argument that is a dataclass groups settings that belong together: its fields are given by their own names.
    """
    signature = inspect.signature(call)
    named = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @wraps(call)
    def asked(*args: Any, **kwargs: Any) -> Any:
        owner = type(args[0]).__name__ if named[:1] == ["self"] else call.__name__
        groups = _groups(call)
        if not takes_all:
            _check_names(owner, kwargs, [name for name in parameters(call) if name != "self"] + list(groups))
        kwargs = _folded(kwargs, groups, owner)
        try:
            bound, kinds = signature.bind(*args, **kwargs), _kinds(call)
        except TypeError as error:
            raise DwindleError(f"{owner} cannot be made of these settings ({error}); see what it takes.") from error
        for name in named:
            given = bound.arguments.get(name, signature.parameters[name].default)
            if name in kinds and given is not signature.parameters[name].default:
                bound.arguments[name] = fitted(given, kinds[name], name, owner)
        return call(*bound.args, **bound.kwargs)

    return cast(Call, asked)


def parameters(call: Any) -> dict[str, Any]:
    """Defaults by name, those of groups among them, in order; `inspect.Parameter.empty` where there is none."""
    made: dict[str, Any] = {}
    groups = _groups(call)
    for name, parameter in inspect.signature(call).parameters.items():
        if name in groups:
            made |= {field.name: getattr(groups[name], field.name) for field in dataclasses.fields(groups[name])}
        else:
            made[name] = parameter.default
    return made


def _groups(call: Any) -> dict[str, Any]:
    """Arguments whose defaults are dataclasses of ours."""
    found = inspect.signature(call).parameters.items()
    return {name: p.default for name, p in found if dataclasses.is_dataclass(p.default)}


def _folded(given: dict[str, Any], groups: dict[str, Any], owner: str) -> dict[str, Any]:
    """With the fields of groups in their groups."""
    made = dict(given)
    for name, default in groups.items():
        loose = {f.name: made.pop(f.name) for f in dataclasses.fields(default) if f.name in made}
        if not isinstance(made.get(name, default), type(default)):
            kind = type(default).__name__
            raise DwindleError(f"{name} = {brief(made[name])}: it must be a {kind} (a setting of {owner}).")
        if loose or name in made:
            made[name] = dataclasses.replace(made.get(name, default), **loose)
            check_fields(made[name], owner)
    return made


def check_fields(group: Any, owner: str | None = None) -> None:
    """Of a dataclass; its lists become tuples where it wants those. owner: whose settings they are; None: its own."""
    whose: Any = type(group)
    kinds = _kinds(whose)
    for field in dataclasses.fields(group):
        value = fitted(getattr(group, field.name), kinds[field.name], field.name, owner or whose.__name__)
        object.__setattr__(group, field.name, value)  # also of a frozen one


def options(given: Any, kind: Any, owner: str) -> dict[str, Any]:
    """A dictionary whose names and values are those of a TypedDict. owner: whose settings they are."""
    fitting: dict[str, Any] = fitted(given, kind, "options", owner)
    return fitting


def fitted(value: Any, kind: Any, name: str, owner: str) -> Any:
    """The value of the setting `name`, if it is of this kind."""
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
    """Annotations by name; none where they cannot be read, as may be in somebody else's class."""
    try:
        return typing.get_type_hints(call, include_extras=True)
    except (NameError, AttributeError, TypeError):
        return {}


def _fit(value: Any, kind: Any, owner: str) -> Any:
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
        return {_fit(key, args[0], owner): _fit(held, args[1], owner) for key, held in value.items()}
    if typing.is_typeddict(kind) and isinstance(value, dict):
        kinds = _kinds(kind)
        _check_names(owner, value, kinds)
        return {name: fitted(held, kinds[name], name, owner) for name, held in value.items()}
    if kind in (int, float):
        return _fit_number(value, kind)
    if typing.is_typeddict(kind) or origin in (Literal, tuple, list, dict):
        raise _Unfit(f"be {_words(kind)}")
    try:
        fits = isinstance(value, origin or kind)
    except TypeError:  # Any, and what else is no class
        fits = True
    if not fits:
        raise _Unfit(f"be {_words(kind)}")
    return value


def _fit_any(value: Any, kind: Any, owner: str) -> Any:
    """One of several kinds. Where it is of one, but out of its bounds, that is what is said."""
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
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            raise _Unfit(f"be {_words(kind)}")
        return tuple(_fit(held, one, owner) for held, one in zip(value, args))
    try:
        each = [_fit(held, args[0], owner) for held in value]
    except _Unfit as error:
        raise error if error.close else _Unfit(f"be {_words(kind)}") from None
    return each if origin is list else tuple(each)


def _fit_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real if kind is float else Integral):
        raise _Unfit(f"be {WORDS[kind]}")
    number: Any = value.item() if hasattr(value, "item") else value  # numpy's
    if not -MOST <= number <= MOST or (kind is int and abs(number) >= 1 << 63):
        raise _Unfit(f"be {WORDS[kind]}, and finite")
    return float(number) if abs(number) >= 1 << 63 else number  # torch takes no longer int


def _words(kind: Any) -> str:
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
