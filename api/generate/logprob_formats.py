"""Logprob formats: OpenAI's formats for chats and completions, and vLLM's format for prompts."""

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
"""OpenAI's number for "very unlikely". It replaces minus infinity, which JSON does not have."""


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def chat_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """Return the format of chats: one object for each token. The tokens' bytes join to the bytes of the text."""
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
    """Return a token's text; if its bytes are not valid UTF-8, return them in OpenAI's spelling."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: TokenLogprob, num_top: int) -> dict[str, float]:
    """Return the logprobs of the best tokens and the sampled one by text.

    If two tokens have the same text, the likelier one counts.
    """
    best = {_name(token.bytes): _finite(token.logprob)}
    for other in token.top[:num_top]:
        name = _name(other.bytes)
        best[name] = max(_finite(other.logprob), best.get(name, FLOOR))
    return best


@dataclass(frozen=True, slots=True)
class Unscored:
    """A token at the beginning of the prompt, which has no logprob."""

    token: int
    bytes: bytes


class CompletionLogprobs:
    """Builds the completions format for one answer, piece by piece. The text offsets continue from piece to piece.

    Args:
        num_top: number of best tokens at each position, in addition to the sampled one.
        silent: tokens whose text is left out.
        lead: number of characters of the first tokens that are missing in the text, for example the space that some
            tokenizers put before a text.
    """

    def __init__(self, num_top: int, silent: frozenset[int] = frozenset(), lead: int = 0) -> None:
        self._num_top = num_top
        self._silent = silent
        self._offset = -lead
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, tokens: Iterable[TokenLogprob | Unscored]) -> dict[str, list[Any]]:
        """Return the format's four lists for the next tokens."""
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
    """Return vLLM's format for a prompt, by token id. ``tokens`` start at position ``start``, which is at least 1."""
    return [*[None] * max(1, start), *(_by_id(token, num_top) for token in tokens)]


def _by_id(token: TokenLogprob, num_top: int) -> dict[str, Any]:
    entries = {
        str(other.token): {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.text}
        for rank, other in enumerate(token.top[:num_top], 1)
    }
    chosen = {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.text}
    return {**entries, str(token.token): chosen}


def field_probabilities(fields: Sequence[FieldProbability]) -> list[dict[str, Any]]:
    """Return the field probabilities in the form for clients, to be serialized by ``orjson.dumps``."""
    return [
        {"path": each.path, "kind": each.kind, "value": _written(each.value), "probability": each.probability}
        for each in fields
    ]


def _written(value: Any) -> Any:
    """Return a value that ``orjson.dumps`` can serialize, because it does not serialize integers beyond 64 bits."""
    return orjson.Fragment(dumps_exact(value)) if isinstance(value, int) else value
