"""Match the classes of a data set to those of a model: by name where both have names, else by number.

Names are compared without regard to case, spaces, underscores, hyphens, slashes and Unicode's normal forms (macOS
stores an accent as a character of its own). ImageNet's classes are known by WordNet ids (n01440764, n01440764_tench)
and by each of their names ('tench, Tinca tinca'). A name that may be two classes, such as 'crane', is matched only
where an id or the whole name decides; otherwise it is left out and reported.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..errors import DwindleError, printable

WORDNET_ID = re.compile(r"(n\d{8})(?![^\W_])", re.IGNORECASE)
IN_ORDER = 0.9  # share of a list's names that must be ImageNet's, each in its place, for the list to be ImageNet's
NONE = -1  # the number of a class without a match


def known_classes(model: Any) -> list[str] | None:
    """The class names in a checkpoint, a Hugging Face config or timm's config; None where none has them."""
    vit = getattr(model, "vit", None)
    by_number = getattr(getattr(vit, "config", None), "id2label", None) or {}
    labels = [str(by_number.get(i, f"LABEL_{i}")) for i in range(len(by_number))]
    placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in labels)
    timms = (getattr(vit, "pretrained_cfg", None) or {}).get("label_names")
    for names in ((getattr(model, "extra", None) or {}).get("classes"), None if placeholders else labels, timms):
        if isinstance(names, list | tuple) and len(names) == model.classes:
            return [str(name) for name in names]
    return None


def class_names(model: Any) -> list[str] | None:
    """The `known_classes`; else the names of the ImageNet set that has as many classes as the head, or None."""
    if not model.classes:
        raise DwindleError(
            "This model has no head (num_classes=0): what it answers is an embedding and no class; give it one, or use "
            "out.logits from Python."
        )
    return known_classes(model) or imagenet_names(model.classes)


def imagenet_names(count: int) -> list[str] | None:
    """The first name of each class of timm's ImageNet set of that size."""
    table = _imagenet(count)
    return None if table is None else [description.split(",")[0] for _, description in table]


@cache
def _imagenet(count: int) -> list[tuple[str, str]] | None:
    """Wordnet ids and names of timm's ImageNet set of that many classes."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return list(zip(info.label_names(), info.label_descriptions()))  # type: ignore[arg-type]


@cache
def _wordnet() -> Any:
    """timm's descriptions of all WordNet ids."""
    from timm.data import ImageNetInfo

    return ImageNetInfo()


def _plain(name: str) -> str:
    """A name as it is compared: normalised, in lower case, with single spaces between words."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return re.sub(r"[\s_/-]+", " ", unicodedata.normalize("NFKC", folded)).strip()


def _parts(name: str) -> list[str]:
    """The names that commas separate, as they are compared."""
    return [part for part in (_plain(part) for part in name.split(",")) if part]


class _Class:
    """A class with all its names.

    id: its WordNet id. first: its first name. names: all its names. wholes: its full name, names joined by commas.
    """

    def __init__(self, name: str, wordnet_id: str | None = None) -> None:
        own = WORDNET_ID.match(name.strip())
        self.name, self.plain = name, _plain(name)
        self.id = own[1].lower() if own else wordnet_id
        parts = _parts(name)
        self.first = parts[0] if parts else self.plain
        self.names, self.wholes = {self.plain, *parts}, {self.plain}
        if self.id is not None:
            try:
                known = _wordnet().label_name_to_description(self.id)
            except KeyError:
                return
            self.names |= set(_parts(known))
            self.wholes.add(_plain(known))
            if own:
                self.first = _parts(known)[0]


def _classes(names: Sequence[str]) -> list[_Class]:
    """The classes of these names. If nearly all are an ImageNet set's, in its order, they get its WordNet ids."""
    plain, table = [_Class(name) for name in names], _imagenet(len(names))
    if table is None:
        return plain
    agree = [bool(set(_parts(described)) & one.names) for one, (_, described) in zip(plain, table)]
    if sum(agree) < IN_ORDER * len(names):
        return plain
    return [_Class(one.name, entry[0]) if same else one for one, entry, same in zip(plain, table, agree)]


@dataclass(frozen=True)
class Match:
    """How the data's classes were matched to the model's.

    numbers: for each class of the data the model's number, or NONE. how: 'by name' or 'by number'. count: how many
    classes the data and the model have. names: the data's class names. unsure: names that may be several classes.
    left_out: how many images are of classes without a number.
    """

    numbers: np.ndarray
    how: str
    count: tuple[int, int]
    names: Sequence[str] | None = None
    unsure: tuple[str, ...] = ()
    left_out: int = 0

    @cached_property
    def both(self) -> int:
        """How many classes were matched."""
        return int((self.numbers != NONE).sum())

    @property
    def same(self) -> bool:
        """Whether every class keeps its number."""
        return self.count[0] == self.count[1] and bool((self.numbers == np.arange(self.count[0])).all())

    def about(self) -> dict[str, Any]:
        """The match as JSON."""
        data, model = self.count
        counts = {"matched": self.how, "classes": self.both, "classes_data": data, "classes_model": model}
        return counts | {"images_left_out": self.left_out} | ({"unsure": list(self.unsure)} if self.unsure else {})

    def summary(self) -> str:
        """The match in sentences."""
        data, model = self.count
        if self.how == "by number":
            return f"Without names to match, the data's {data} classes are taken for the model's {model}, by number."
        text = f"{self.both} of the data's {data} classes are among the model's {model}, matched by name."
        rest = [name for name, number in zip(self.names or (), self.numbers) if number == NONE]
        if foreign := [name for name in rest if name not in self.unsure]:
            text += f" The model has no {_some(foreign)}."
        if self.unsure:
            text += f" {_some(self.unsure)}: which of its classes these are is not certain; ImageNet's ids would tell."
        return text + (f" {self.left_out} images are left out." if self.left_out else "")


def _some(names: Sequence[str]) -> str:
    """The first four names, quoted, and how many more there are."""
    shown = ", ".join(f"'{printable(name, 80)}'" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def match(
    data: Sequence[str] | None,
    data_count: int,
    model: Sequence[str] | None,
    model_count: int,
    *,
    named: str,
    owner: str = "the model",
) -> Match:
    """Match by name where the data and the model have names, else by number; refused where neither fits.

    data, model: the names of their classes, or None. named, owner: what errors call the data and the model.
    """
    likely = model or (imagenet_names(model_count) if data else None)
    if data and likely:
        found = by_name(data, likely)
        if found.both:
            return found
        if model or data_count != model_count:
            unsure = f" (for {_some(found.unsure)} it is not certain)" if found.unsure else ""
            raise DwindleError(
                f"'{named}' has none of the classes of {owner}: it has {_some(data)}, {owner} {_some(likely)}{unsure}; "
                "give data with classes that both have."
            )
    if data_count != model_count:
        nameless = (
            "Neither names its classes"
            if not data and not model
            else (f"'{named}' does not name its classes" if not data else f"{owner} does not name its classes")
        )
        raise DwindleError(
            f"{nameless[0].upper()}{nameless[1:]}, and by number {data_count} of '{named}' cannot be the {model_count} "
            f"of {owner}; give names (classes.json beside parquet files), or data of as many classes."
        )
    return Match(np.arange(data_count), "by number", (data_count, model_count))


def by_name(data: Sequence[str], model: Sequence[str]) -> Match:
    """Match by names alone; it may be that no class is matched."""
    numbers, unsure = np.full(len(data), NONE), set()
    if list(data) == list(model):  # the same lists match even where they hold a name twice
        numbers = np.arange(len(data))
    else:
        ours, theirs = _classes(data), _classes(model)
        for key in ("id", "first"):
            unsure |= _settle(ours, theirs, key, numbers)
        unsure |= _settle_rest(ours, theirs, numbers, unsure)
    named = tuple(data[i] for i in sorted(unsure))
    return Match(numbers, "by name", (len(data), len(model)), data, named)


def _settle(ours: list[_Class], theirs: list[_Class], key: str, numbers: np.ndarray) -> set[int]:
    """Set the numbers of our classes that share `key` (their id or first name) with one of theirs. Returns those that
    may be several of theirs."""
    left = _grouped(ours, key, {i for i, number in enumerate(numbers) if number != NONE})
    right = _grouped(theirs, key, set(numbers.tolist()))
    unsure = set()
    for name in left.keys() & right.keys():
        pairs = _paired([ours[i] for i in left[name]], [theirs[k] for k in right[name]])
        for place, i in enumerate(left[name]):
            if place in pairs:
                numbers[i] = right[name][pairs[place]]
            elif any(_may_be(ours[i], theirs[k]) for k in right[name]):
                unsure.add(i)
    return unsure


def _grouped(classes: list[_Class], key: str, without: set[int]) -> dict[str, list[int]]:
    """The indices of classes by the value of `key`, except those in `without`."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(classes):
        if i not in without and getattr(one, key) is not None:
            groups[getattr(one, key)].append(i)
    return groups


def _paired(left: list[_Class], right: list[_Class]) -> dict[int, int]:
    """Index of `left` to index of `right`, for classes that all share one name, where the pairing is certain."""
    pairs: dict[int, int] = {}
    for i, one in enumerate(left):
        whole = [k for k, other in enumerate(right) if "," in one.name and one.plain in other.wholes]
        if len(whole) == 1 and sum(other.plain == one.plain for other in left) == 1:
            pairs[i] = whole[0]
    rest = [i for i in range(len(left)) if i not in pairs]
    free = [k for k in range(len(right)) if k not in pairs.values()]
    spelled = {right[k].name: k for k in free}
    if len(rest) == len(free) == 1 and _may_be(left[rest[0]], right[free[0]]):
        pairs[rest[0]] = free[0]
    elif len(spelled) == len(free) == len(rest) and spelled.keys() == {left[i].name for i in rest}:
        pairs |= {i: spelled[left[i].name] for i in rest}  # as 'Cardigan' and 'cardigan' are
    return pairs


def _settle_rest(ours: list[_Class], theirs: list[_Class], numbers: np.ndarray, unsure: set[int]) -> set[int]:
    """As `_settle`, by any of their names, for the classes without a number that are not unsure."""
    taken, by_any = set(numbers.tolist()), defaultdict(set)
    for k, one in enumerate(theirs):
        for name in one.names if k not in taken else ():
            by_any[name].add(k)
    rest = [i for i in range(len(ours)) if numbers[i] == NONE and i not in unsure]
    found = {i: {k for name in ours[i].names for k in by_any[name] if _may_be(ours[i], theirs[k])} for i in rest}
    claims = Counter(k for candidates in found.values() for k in candidates)
    for i, candidates in found.items():
        if len(candidates) == 1 and claims[next(iter(candidates))] == 1:
            numbers[i] = candidates.pop()
    return {i for i, candidates in found.items() if candidates}


def _may_be(one: _Class, other: _Class) -> bool:
    """Whether their WordNet ids allow that two classes are the same."""
    return one.id is None or other.id is None or one.id == other.id
