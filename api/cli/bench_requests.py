"""Requests of ``rootgraft bench serve``: random prompts, shared prefixes, schemas, adapters, or lines of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ...engine.errors import ConfigError
from ..exact_json import loads_exact
from .options import BenchOptions

# Short frequent words. In nearly every tokenizer, each of these words is one token together with the space before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body "
    "information back parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education foot boy age policy music market"
)
_WORDS = _TEXT.split()
# Number of tokens of a mix's shared prefix, unless --shared-prefix-len sets another.
_SHARED_TOKENS = 1024


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_WORD = {"type": "string", "minLength": 1, "maxLength": 24}
_SCHEMAS = (
    _object(title=_WORD, year={"type": "integer", "minimum": 1400, "maximum": 2100}, lent={"type": "boolean"}),
    _object(mood={"enum": ["calm", "cross", "glad"]}, reason=_WORD, strength={"type": "integer"}),
    _object(name=_WORD, address=_object(street=_WORD, town=_WORD), age={"type": ["integer", "null"]}),
    _object(
        parts={"type": "array", "minItems": 1, "maxItems": 2, "items": _object(id={"type": "integer"}, kind=_WORD)}
    ),
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a load.

    Attributes:
        body: request body without the fields that ``RemoteServer.stream`` adds.
        mix: name of the part of the load to which it belongs.
        schema: JSON Schema of the answer; None for free text.
    """

    body: dict[str, Any]
    mix: str
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Number of tokens of a prompt in the server's tokenizer: ``fixed + per_word * words``."""

    fixed: float
    per_word: float

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenScale:
        """Return the line through two measurements (words, tokens). If no usage is reported, a word is one token."""
        if few[1] <= 0 or many[1] <= few[1]:
            return cls(0.0, 1.0)
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - per_word * few[0], per_word)

    def words(self, tokens: int, *, fixed: bool) -> int:
        """Return the number of words, at least 1, for about ``tokens`` tokens. ``fixed``: subtract the fixed part."""
        return max(1, round((tokens - (self.fixed if fixed else 0)) / self.per_word))


def words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def mixed_requests(options: BenchOptions, scale: TokenScale, rng: Random, count: int) -> list[BenchRequest]:
    """Return ``count`` requests, of the kinds of ``--mix`` in turn. All prompts differ, also between calls.

    Args:
        rng: source of random prompts; the same state makes the same requests.
    """
    prefixes = {mix: _prefix(mix, options, scale, rng) for mix in options.mix}
    requests = []
    for number in range(count):
        mix = options.mix[number % len(options.mix)]
        turn = number // len(options.mix)
        own = scale.words(options.input_len, fixed=not prefixes[mix])
        text = prefixes[mix] + words(rng, own)
        if mix == "schema":
            requests.append(_schema_request(text, turn, options))
            continue
        body = body_for(text, options.output_len, options)
        if mix == "adapters" and (adapter := turn % (len(options.adapters) + 1)):
            body["model"] = options.adapters[adapter - 1]
        requests.append(BenchRequest(body, mix))
    return requests


def _prefix(mix: str, options: BenchOptions, scale: TokenScale, rng: Random) -> str:
    """Return the common beginning of all prompts of a mix."""
    length = options.shared_prefix_len or (_SHARED_TOKENS if mix == "shared-prefix" else 0)
    return words(rng, scale.words(length, fixed=True)) + " " if length else ""


def _schema_request(text: str, turn: int, options: BenchOptions) -> BenchRequest:
    schema = _SCHEMAS[turn % len(_SCHEMAS)]
    keys = ", ".join(schema["properties"])
    body = body_for(f"{text}\nMake up a JSON object with {keys} from these words.", options.output_len, options)
    body.pop("ignore_eos", None)
    form = {"type": "json_schema", "json_schema": {"name": "example", "schema": schema, "strict": True}}
    return BenchRequest(body | {"response_format": form}, "schema", schema)


def body_for(text: str, max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    """Return the request body for one prompt, for ``options.endpoint``."""
    prompt = {"messages": [{"role": "user", "content": text}]} if options.endpoint == "chat" else {"prompt": text}
    return _with_fields(prompt, max_tokens, options)


def dataset_requests(options: BenchOptions, path: Path) -> list[BenchRequest]:
    """Read the first ``num_prompts`` requests of a file of JSON lines. Raises ``ConfigError`` for an invalid line."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} cannot be read as a text file.") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][: options.num_requests]
    if not rows:
        raise ConfigError(f"--dataset: {path} contains no requests.")
    return [BenchRequest(_row_body(number, line, options), "dataset") for number, line in rows]


def _row_body(number: int, line: str, options: BenchOptions) -> dict[str, Any]:
    try:
        row = loads_exact(line.encode())
    except ValueError as error:
        raise ConfigError(f"--dataset: line {number} is not JSON: {error}.") from error
    length = row.get("output_len", options.output_len) if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"--dataset: line {number} must be an object; its output_len must be a whole number of at least 1."
        )
    if isinstance(row.get("prompt"), str):
        return body_for(row["prompt"], length, options)
    if isinstance(row.get("messages"), list) and options.endpoint == "chat":
        return _with_fields({"messages": row["messages"]}, length, options)
    expected = "prompt (a string) or messages (a list)" if options.endpoint == "chat" else "prompt (a string)"
    raise ConfigError(f"--dataset: line {number} has no {expected}.")


def _with_fields(prompt: Mapping[str, Any], max_tokens: int, options: BenchOptions) -> dict[str, Any]:
    ignore_eos = {"ignore_eos": True} if options.ignore_eos else {}
    return {**prompt, "max_tokens": max_tokens, "temperature": options.temperature, **ignore_eos}


def extra_fields(text: str | None) -> dict[str, Any]:
    """Parse ``--extra-body``. Raises ``ConfigError`` if it is not a JSON object."""
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text}.")
    return extra
