"""Settings are what their annotations say, however they are given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest

import dwindle
from dwindle.errors import DwindleError, unknown
from dwindle.io.images import Preprocess
from dwindle.methods import Method, Verdict
from dwindle.models.lm import Router, Static
from dwindle.settings import Above0, Budget, Count, Share, Size, _kinds, checked, options
from dwindle.train.recipe import Recipe

HOSTILE = [math.nan, math.inf, -math.inf, 1e300, 10**400, "x", True, [1], {"a": 1}, [[1]], object(), b"1", np.ones(3)]


class Part(TypedDict, total=False):
    size: Size
    share: Share | None


class Thing:
    @checked
    def __init__(
        self,
        width: Above0 = 1.0,
        stages: Annotated[tuple[int, ...], Count(0, 3)] = (1,),
        budget: Budget = None,
        kind: Literal["none", "nearest"] = "none",
        flag: bool = True,
        part: Part | None = None,
    ) -> None:
        self.given = (width, stages, budget, kind, flag, part)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"width": 0}, "width = 0: it must be above 0 (a setting of Thing)."),
        ({"width": math.nan}, "width = nan: it must be a number, and finite (a setting of Thing)."),
        ({"width": 10**5000}, "width = one int of very many digits: it must be a number, and finite"),
        ({"width": True}, "width = True: it must be a number"),
        ({"stages": 3}, "stages = 3: it must be a list, each a whole number"),
        ({"stages": [1.5]}, "stages = [1.5]: it must be a list, each a whole number"),
        ({"stages": [1] * 4}, "stages = [1, 1, 1, 1]: it must hold 0 to 3 of them"),
        ({"budget": [0.5]}, "budget = [0.5]: it must be a number or text or none"),
        (
            {"kind": "neares"},
            "Unknown kind 'neares' (did you mean 'nearest'?); known: nearest, none; a setting",
        ),
        ({"kind": 3}, "kind = 3: it must be one of none, nearest"),
        ({"flag": 1}, "flag = 1: it must be true or false"),
        ({"part": {"size": 0}}, "size = 0: it must lie in [1, 65536]"),
        ({"part": {"share": 2}}, "share = 2: it must lie in [0, 1]"),
        ({"part": {"sizes": 1}}, "Unknown option of Thing 'sizes' (did you mean 'size'?); known: share, size."),
        ({"part": [1]}, "part = [1]: it must be settings by name or none"),
        ({"witdh": 1}, "Unknown option of Thing 'witdh' (did you mean 'width'?)"),
        ({"stages": [[[[[1]]]]] * 1000}, "stages = [[[[...]]], "),
    ],
)
def test_one_sentence(given, said):
    with pytest.raises(DwindleError) as caught:
        Thing(**given)
    assert str(caught.value).startswith(said.rstrip(".")) and len(str(caught.value)) < 300


def test_what_is_taken():
    assert type(Thing(10**30).given[0]) is float  # what torch can take
    assert Thing(np.float32(0.5), [1, 2], "3.1G", "nearest", False, {"size": 2, "share": None}).given == (
        *(0.5, (1, 2), "3.1G", "nearest", False, {"size": 2, "share": None}),
    )
    assert type(Thing(np.int64(2)).given[0]) is int and Thing(2).given[0] == 2
    with pytest.raises(DwindleError, match="multiple values"):
        Thing(1.0, width=2.0)
    with pytest.raises(DwindleError, match="options = 3: it must be settings by name"):
        options(3, Part, "part")


def test_a_method_of_somebody_else(tmp_path):
    """Annotations that say more than is checked, or that cannot be read, refuse nothing that they allow."""

    class Odd(Method):
        def __init__(
            self,
            each: Callable[[int], int] = abs,
            missing: Annotated[int, "a note"] = None,  # noqa: RUF013
            rest: Mapping[str, int] = {},
        ) -> None:
            super().__init__()
            self.each, self.missing, self.rest = each, missing, rest

        def step(self, depth, tokens):
            return Verdict(None)

    class Unread(Method):
        def __init__(self, what: Nowhere = 1) -> None:  # noqa: F821
            super().__init__()
            self.what = what

    try:
        Odd(len, None, {"a": 1}), Odd(missing=None), Odd(), Unread("anything")
        for given in ({"each": 3}, {"missing": "x"}, {"rest": 3}, {"more": 1}):
            with pytest.raises(DwindleError, match=next(iter(given))):
                Odd(**given)
    finally:
        del Method.registry["Odd"], Method.registry["Unread"]


def test_long_and_odd_names_are_shown_in_short():
    said = str(unknown("thing", "\ud800\n" + "x" * 10**6, ["known"]))
    assert said.isprintable() and said.startswith("Unknown thing '\\ud800\\nxxx") and len(said) < 300


@pytest.mark.parametrize("kind", [*Method.registry.values(), *Router.registry.values()], ids=lambda kind: kind.__name__)
def test_every_setting_of_every_method(kind):
    """Each has an annotation that can be read, and takes nothing that is of no kind it names."""
    if "__init__" not in vars(kind) or kind.__module__.startswith("test"):
        return
    kinds = _kinds(inspect.unwrap(kind.__init__))
    bound = Static()
    bound.shape = None
    needed = {"router": bound, "kind": "mean", "rates": (0.5,)} if kind.__name__ == "Control" else {}
    for name in inspect.signature(kind).parameters:
        assert name in kinds, f"{kind.__name__}.{name}"
        for value in HOSTILE:
            is_text = isinstance(value, str) and kinds[name] == Budget
            is_list = isinstance(value, list) and value == [1] and "tuple" in str(kinds[name])
            if is_text or is_list or (value is True and kinds[name] is bool) or name == "router":
                continue
            with pytest.raises(DwindleError, match=name):
                kind(**needed | {name: value})


SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    (Recipe, {"image_size": -5}),
    (Recipe, {"image_size": 10**9}),
    (Recipe, {"lr": math.nan}),
    (Recipe, {"batch": "many"}),
    (Recipe, {"workers": 10**6}),
    (Recipe, {"layout": "loose"}),
    (Recipe, {"model": 3}),
    (Preprocess, {"size": 0}),
    (Preprocess, {"size": 10**9}),
    (Preprocess, {"size": "224"}),
    (Preprocess, {"mean": [0.5]}),
    (Preprocess, {"mean": "abc"}),
    (Preprocess, {"std": [0, 0, 0]}),
    (Preprocess, {"crop_pct": 1e-9}),
    (Preprocess, {"interpolation": 3}),
    (dwindle.AdaPerceiver, {"depth": 20_000}),
    (dwindle.AdaPerceiver, {"tokens": [4, "8"]}),
    (dwindle.AdaPerceiver, {"width": math.inf}),
    (dwindle.AdaPerceiver, {"depth": True}),
]


@pytest.mark.parametrize("make, given", SETTINGS)
def test_recipes_images_and_networks(make, given):
    with pytest.raises(DwindleError, match=next(iter(given))):
        made = make(**given)
        made.check()
