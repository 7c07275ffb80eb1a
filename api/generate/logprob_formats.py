"""Logprobs in OpenAI's formats for chat and for completions, and in vLLM's format for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ..exact_json import dumps_exact

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TokenLogprob
    from ...engine.text.field_probabilities import FieldProbability

FLOOR = -9999.0
"""OpenAI's number for "very unlikely", as JSON has no infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def chat_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """Return chat's format: one object for each token, with its bytes, which join to the bytes of the text."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": _finite(token.logprob),
                "bytes": list(token.bytes),
                "top_logprobs": [
                    {"token": other.text, "logprob": _finite(other.logprob), "bytes": list(other.bytes)}
                    for other in token.top[:num_top]
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _name(data: bytes) -> str:
    """Return the token's text; for a token that is not valid UTF-8, its bytes in OpenAI's spelling."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: TokenLogprob, num_top: int) -> dict[str, float]:
    """Return the best tokens and the drawn one by name. If two tokens have the same name, the likelier one counts."""
    best = {_name(token.bytes): _finite(token.logprob)}
    for other in token.top[:num_top]:
        name = _name(other.bytes)
        best[name] = max(_finite(other.logprob), best.get(name, FLOOR))
    return best


@dataclass(frozen=True, slots=True)
class Unscored:
    """A token at the start of the prompt, which has no logprob."""

    token: int
    bytes: bytes


class CompletionLogprobs:
    """Completions' format for one answer, in pieces: four lists, with offsets that continue from piece to piece.

    Args:
        num_top: number of best tokens at each position, in addition to the drawn one.
        silent: tokens without text.
        lead: number of characters of the first tokens that are missing in the text, such as the space with which some
            tokenizers begin.
    """

    def __init__(self, num_top: int, silent: frozenset[int] = frozenset(), lead: int = 0) -> None:
        self._num_top = num_top
        self._silent = silent
        self._offset = -lead
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, tokens: Iterable[TokenLogprob | Unscored]) -> dict[str, list[Any]]:
        """Return the lists for the next tokens."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            scored = None if isinstance(token, Unscored) else token
            lists["tokens"].append(_name(token.bytes))
            lists["token_logprobs"].append(None if scored is None else _finite(scored.logprob))
            lists["top_logprobs"].append(None if scored is None else _top(scored, self._num_top))
            lists["text_offset"].append(max(0, self._offset))
            if token.token not in self._silent:
                self._offset += len(self._decoder.decode(token.bytes))
        return lists


def prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int, start: int = 0) -> list[dict[str, Any] | None]:
    """Return vLLM's format for a prompt, by token id. ``tokens`` begin at position ``start``, which is at least 1."""
    return [*[None] * max(1, start), *(_by_id(token, num_top) for token in tokens)]


def _by_id(token: TokenLogprob, num_top: int) -> dict[str, Any]:
    entries = {
        str(other.token): {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.text}
        for rank, other in enumerate(token.top[:num_top], 1)
    }
    chosen = {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.text}
    return {**entries, str(token.token): chosen}


def field_probabilities(fields: Sequence[FieldProbability]) -> list[dict[str, Any]]:
    """Return the probabilities of fields in the form for clients. ``orjson.dumps`` must write it."""
    return [
        {"path": each.path, "kind": each.kind, "value": _written(each.value), "probability": each.probability}
        for each in fields
    ]


def _written(value: Any) -> Any:
    """Return a value for ``orjson.dumps``, which itself writes no integers beyond 64 bits."""
    return orjson.Fragment(dumps_exact(value)) if isinstance(value, int) else value
