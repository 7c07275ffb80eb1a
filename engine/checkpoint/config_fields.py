"""Typed access to the values of an untrusted config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError


class Fields:
    """A config's values by key. Every reader raises ``ModelError`` naming the key, its value and what would be right.

    Args:
        values: the config; a key with the value None counts as absent.
        where: what the messages call it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def wrong(self, key: str, wanted: str) -> ModelError:
        """The error to raise for a value that is not what it should be."""
        value = self.values.get(key)
        return ModelError(f"{self.where}: {key} must be {wanted}, not {value!r}.")

    def has(self, key: str) -> bool:
        """Whether there is a value other than None."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int = 1, high: int = 1 << 24, *, default: int | None = None) -> int:
        """An integer from ``low`` to ``high``; absent, ``default``."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """A finite number above 0; absent, ``default``."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        """A finite number above 0, or None if absent."""
        return self.positive(key) if self.has(key) else None

    def flag(self, key: str) -> bool:
        """True or false; absent, false."""
        value = self.values.get(key, False)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; absent, an empty one."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value or {}

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; absent, none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.wrong(key, f"token ids below the vocabulary's size {vocab_size}")
        return tuple(dict.fromkeys(ids))
