"""``Fields``: typed, checked access to the values of an untrusted config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelError, quoted


class Fields:
    """A config's values by key; a value of None counts as absent.

    Every reader raises ``ModelError``, which names the config (``where``), the key, its value and the valid values.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def wrong(self, key: str, wanted: str) -> ModelError:
        """Return the error for a value that differs from the description ``wanted``."""
        value = self.values.get(key)
        return ModelError(f"{self.where}: {key} must be {wanted}, not {quoted(value)}.")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int = 1, high: int = 1 << 24, *, default: int | None = None) -> int:
        """Return an integer from ``low`` to ``high``; ``default`` if absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Return a finite number above 0; ``default`` if absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        """Return a finite number above 0; None if absent."""
        return self.positive(key) if self.has(key) else None

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` finite numbers above 0."""
        value = self.values.get(key)
        numbers = value if isinstance(value, list) else []
        whole = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        if len(numbers) != count or not whole or not all(0 < each < float("inf") for each in numbers):
            raise self.wrong(key, f"a list of {count} numbers above 0")
        return tuple(float(each) for each in numbers)

    def flag(self, key: str) -> bool:
        """Return a boolean; false if absent."""
        value = self.values.get(key, False)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object; an empty one if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value or {}

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the distinct token ids of a value that is one id or a list of ids; an empty tuple if absent.

        Ids without a token (-1, and ids beyond the vocabulary) are left out: no step can end with them.
        """
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.wrong(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))
