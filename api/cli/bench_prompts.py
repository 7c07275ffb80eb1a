"""Requests of ``rootgraft bench serve``: random prompts of a given length in tokens, or a data set file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson

from ...engine.errors import ConfigError
from .options import BenchOptions

# Short frequent words: in nearly every tokenizer each is one token, together with the space before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music market"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Tokens of a prompt by the server's tokenizer: ``fixed + per_word * words``."""

    fixed: float
    per_word: float

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenScale:
        """Line through two measurements (words, tokens); one token per word if the server reports no usage."""
        if few[1] <= 0 or many[1] <= few[1]:
            return cls(0.0, 1.0)
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int, *, fixed: bool) -> int:
        """Number of words for about ``tokens`` tokens, less the fixed part if ``fixed``; at least one."""
        return max(1, round((tokens - (self.fixed if fixed else 0)) / self.per_word))


def words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def body_for(text: str, max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    """Request body for one prompt, for ``options.endpoint``."""
    prompt = {"messages": [{"role": "user", "content": text}]} if options.endpoint == "chat" else {"prompt": text}
    return _with_fields(prompt, max_tokens, options)


def random_bodies(options: BenchOptions, scale: TokenScale) -> list[dict[str, Any]]:
    """``num_prompts`` request bodies with a shared prefix of ``shared_prefix_len`` tokens. Deterministic per seed."""
    rng = Random(options.seed)
    prefix = ""
    if options.shared_prefix_len:
        prefix = words(rng, scale.words(options.shared_prefix_len, fixed=True)) + " "
    own = scale.words(options.input_len, fixed=not prefix)
    return [body_for(prefix + words(rng, own), options.output_len, options) for _ in range(options.num_prompts)]


def dataset_bodies(options: BenchOptions, path: Path) -> list[dict[str, Any]]:
    """Read the first ``num_prompts`` requests of a file of JSON lines. Raises ``ConfigError`` for an invalid line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} cannot be read as a text file.") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][: options.num_prompts]
    if not rows:
        raise ConfigError(f"--dataset: {path} holds no requests.")
    return [_row_body(number, line, options) for number, line in rows]


def _row_body(number: int, line: str, options: BenchOptions) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise ConfigError(f"--dataset: line {number} is not JSON: {error}.") from error
    length = row.get("output_len", options.output_len) if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(length, int) or length < 1:
        raise ConfigError(f"--dataset: line {number} must be an object; its output_len a whole number of at least 1.")
    if isinstance(row.get("prompt"), str):
        return body_for(row["prompt"], length, options)
    if isinstance(row.get("messages"), list) and options.endpoint == "chat":
        return _with_fields({"messages": row["messages"]}, length, options)
    expected = "prompt (a text) or messages (a list)" if options.endpoint == "chat" else "prompt (a text)"
    raise ConfigError(f"--dataset: line {number} has no {expected}.")


def _with_fields(prompt: Mapping[str, Any], max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    ignore_eos = {"ignore_eos": True} if options.ignore_eos else {}
    return {**prompt, "max_tokens": max_tokens, "temperature": 0, **ignore_eos}


def extra_fields(text: str | None) -> dict[str, Any]:
    """Parse ``--extra-body``. Raises ``ConfigError`` if it is not a JSON object."""
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text}.")
    return extra
