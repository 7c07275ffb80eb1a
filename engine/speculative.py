"""The option ``--speculative-config``: whether and how far ahead tokens are drafted. JSON, as vLLM has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

METHODS = ("auto", "ngram", "off")
MAX_SPECULATIVE_TOKENS = 64
_FLAG = "--speculative-config"


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted. None of it changes what is generated.

    Attributes:
        method: auto: from grammars, from the sequence's own tokens, from the prefix cache and from other answers of
            the same namespace; ngram: from the sequence's own tokens alone; off.
        num_speculative_tokens: most drafts of a sequence in one step, 1 to 64.
    """

    method: str = "auto"
    num_speculative_tokens: int = 16

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Read the option. Raises ConfigError that names what is wrong with it."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f'{_FLAG} must be a JSON object such as {{"method": "ngram"}}, not {text}.')
        if unknown := sorted(values.keys() - cls.__slots__):
            raise ConfigError(f"{_FLAG} has no {unknown[0]!r}; it has {', '.join(cls.__slots__)}.")
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method of {_FLAG} must be one of {', '.join(METHODS)}, not {self.method}.")
        if not _is_count(self.num_speculative_tokens):
            raise ConfigError(
                f"num_speculative_tokens of {_FLAG} must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}, "
                f"not {self.num_speculative_tokens}."
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SPECULATIVE_TOKENS
