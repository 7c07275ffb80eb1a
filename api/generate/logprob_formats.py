"""Logprob formats: OpenAI's formats for chats and completions, and vLLM's format for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from ..exact_json import dumps_exact

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TokenLogprob
    from ...engine.text.field_probabilities import FieldProbability

T = TypeVar("T")

FLOOR = -9999.0
"""OpenAI's number for "very unlikely". It replaces minus infinity, which JSON does not have."""
PIECE = 256
"""Number of positions whose logprobs are serialized at once.

With 20 logprobs each, this takes a millisecond or two, for which orjson holds the interpreter's lock (GIL).
"""


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


class WrittenLists:
    """Lists of a response body, serialized piece by piece. The objects of a long answer would take much memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}

    def add(self, **lists: Sequence[Any]) -> None:
        """Append the next values of each list."""
        for name, values in lists.items():
            self._pieces.setdefault(name, []).append(orjson.dumps(values)[1:-1])

    def __getitem__(self, name: str) -> orjson.Fragment:
        """Return a whole list, for ``orjson.dumps``."""
        return orjson.Fragment(b"[" + b",".join(filter(None, self._pieces.get(name, ()))) + b"]")

    def fields(self) -> dict[str, orjson.Fragment]:
        """Return all lists by name."""
        return {name: self[name] for name in self._pieces}


def _in_pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield at most ``PIECE`` values at a time; an empty sequence is yielded, too."""
    for start in range(0, max(1, len(values)), PIECE):
        yield values[start : start + PIECE]


def written_chat_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    """Return ``chat_logprobs`` for a whole answer, with its list serialized."""
    written = WrittenLists()
    for piece in _in_pieces(tokens):
        written.add(content=chat_logprobs(piece, num_top)["content"])
    return {**written.fields(), "refusal": None}


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

    def written(self, tokens: Sequence[TokenLogprob | Unscored]) -> dict[str, orjson.Fragment]:
        """Return the format's four lists for a whole answer, serialized."""
        written = WrittenLists()
        for piece in _in_pieces(tokens):
            written.add(**self.piece(piece))
        return written.fields()


def prompt_logprobs(tokens: Sequence[TokenLogprob], num_top: int, start: int = 0) -> orjson.Fragment:
    """Return vLLM's format for a prompt, by token id, as a serialized list.

    ``tokens`` start at position ``start``, which is at least 1.
    """
    written = WrittenLists()
    written.add(scored=[None] * max(1, start))
    for piece in _in_pieces(tokens):
        written.add(scored=[_by_id(token, num_top) for token in piece])
    return written["scored"]


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
