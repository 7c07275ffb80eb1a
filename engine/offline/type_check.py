"""Type check: checks that a value read from a file has the types that its dataclass declares, at every depth."""

from __future__ import annotations

from array import array
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: dict[str, Any] = {"array": {int: array}}
"""Meaning of names in annotations.

``array[int]`` needs an entry, because before Python 3.12 the class takes no item type.
"""


def is_of_type(value: object, hint: Any) -> bool:
    """Return whether a value has a type: a class, dataclass, tuple, frozenset, array, literal, or a union of these.

    An integer is also accepted as a float; a boolean is accepted as neither.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(is_of_type(value, each) for each in parts)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in parts)
    if hint is None or hint is NoneType:
        return value is None
    if kind is tuple:
        return isinstance(value, tuple) and _are_of_types(value, parts)
    if kind is frozenset:
        return isinstance(value, frozenset) and all(is_of_type(each, parts[0]) for each in value)
    if hint is array:
        return isinstance(value, array) and value.typecode == "i"
    if is_dataclass(hint):
        return type(value) is hint and all(
            is_of_type(getattr(value, name), each) for name, each in get_type_hints(hint, localns=_NAMES).items()
        )
    if hint in (int, float):
        return type(value) is int or (hint is float and type(value) is float)
    return isinstance(value, hint)


def _are_of_types(values: tuple[object, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(is_of_type(each, hints[0]) for each in values)
    return len(values) == len(hints) and all(map(is_of_type, values, hints))
