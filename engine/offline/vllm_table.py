"""vLLM table: parameters, fields and methods of vLLM's Python classes, each supported, without effect, or refused.

The table is ``vllm_classes.toml``; the comment at its beginning explains its values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import EngineError, RequestError


@dataclass(frozen=True, slots=True)
class PeerName:
    """A parameter, field or method of vLLM.

    Attributes:
        status: ``done`` for supported, ``inert`` for accepted without effect, ``refuse`` for refused.
        words: the reason why it has no effect, or what to do instead; "" if it is supported.
    """

    status: Literal["done", "inert", "refuse"]
    words: str = ""


@cache
def peer_names(owner: str) -> Mapping[str, PeerName]:
    """Return the table's rows for a class or a method of vLLM, such as ``LLM.generate``, by name."""
    rows = tomllib.loads(Path(__file__).with_name("vllm_classes.toml").read_text("utf-8"))[owner]
    return {name: _name(row) for name, row in rows.items()}


def _name(row: Any) -> PeerName:
    if row == "done":
        return PeerName("done")
    [(status, words)] = row.items()
    return PeerName(status, words)


def check_values(owner: str, values: Mapping[str, Any], neutral: Mapping[str, Any] | None = None) -> None:
    """Check the values that were passed to a class or method of vLLM.

    Args:
        values: values by name.
        neutral: values by name that count as not given, as None and empty values do.

    Raises:
        RequestError: a value is given for a name that is refused. The message is the table's.
        TypeError: vLLM has no such name there.
    """
    names = peer_names(owner)
    for name, value in values.items():
        if name not in names:
            raise TypeError(f"{owner} has no parameter {name!r}.")
        asks = not is_nothing(value) and not (name in (neutral or {}) and value == (neutral or {})[name])
        if names[name].status == "refuse" and asks:
            raise RequestError(f"{name} is not supported: {names[name].words}.", param=name)


class NotOffered(EngineError, AttributeError):
    """Raised for a method of vLLM that does not exist here. The message names an alternative."""


def check_offered(owner: str, name: str) -> None:
    """Check the name of an attribute that one of this package's classes lacks.

    Methods of vLLM without effect are accepted.

    Raises:
        NotOffered: the method is refused; the message is the table's.
        AttributeError: vLLM has no such name there.
    """
    row = peer_names(owner).get(name)
    if row is None or row.status == "done":
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")
    if row.status == "refuse":
        raise NotOffered(f"{owner}.{name} does not exist: {row.words}.")


def is_nothing(value: Any) -> bool:
    """Return whether a value is None or an empty list, dict or string."""
    return value is None or (isinstance(value, (list, tuple, dict, str)) and not value)
