"""TGI reply: one object, or an event for each token, the last of which contains the whole text.

data: {"index": 1, "token": {"id": 7, "text": "a", "logprob": -0.2, "special": false}, "generated_text": null, ...}
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.types import FinishReason
from ..error_responses import tgi_body
from ..errors import ErrorReply, reply_to
from ..generate.logprob_formats import FLOOR
from ..generate.streams import Deltas, ReplyEnd
from .tgi_request import TgiRequest

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TextDelta, TokenLogprob, TopLogprob


class TgiReply(ReplyEnd):
    """State of one answer, from its request to its end.

    Args:
        special: ids of tokens without text.
    """

    def __init__(self, body: TgiRequest, special: frozenset[int]) -> None:
        self._body = body
        self._special = special
        self._text: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._tops: list[list[dict[str, Any]]] = []
        # The last event, until it is sent, because the end of the answer is added to it.
        self._last: dict[str, Any] | None = None
        # The last event, if its text is not complete yet, and the number of bytes that the text is behind the tokens.
        self._held: list[dict[str, Any]] = []
        self._num_behind = 0

    def take(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add a delta. Returns its events. The text of several tokens is in the event of the last of them.

        The engine reports the end separately from the last tokens, so the last event may change until ``sent`` is
        called. While the text of the last token is held back, because a stop string or a character may not be complete,
        its event is held back too: so the rest of the text at the end belongs to a token.
        """
        events, self._held = self._held, []
        self._text.append(delta.text)
        for number, scored in enumerate(delta.logprobs):
            is_last = number + 1 == len(delta.logprobs)
            events.append(self._event(self._token(scored, delta.text if is_last else ""), scored))
            self._num_behind += 0 if scored.token in self._special else len(scored.bytes)
        # A replacement character may have more bytes than its token, so the number may be too small, but never below 0.
        self._num_behind = max(0, self._num_behind - len(delta.text.encode("utf-8", "surrogatepass")))
        if delta.finish is None and events and self._num_behind > 0:
            self._held = [events.pop()]
        if delta.finish is not None:
            self._finish = delta.finish
            if self.failure is None:
                rest = "" if delta.logprobs else delta.text
                self._end(delta.finish, events, rest)
        return events

    def sent(self) -> None:
        """Record that the events so far were sent, so that they cannot change any more."""
        if not self._held:
            self._last = None

    def body(self) -> dict[str, Any]:
        """Return the whole answer. Raises ``failure`` if it is set, and EngineError if the engine did not end it."""
        finish = self.ended()
        details = {**self._details(finish), "prefill": [], "tokens": self._tokens}
        if self._body.parameters.top_n_tokens:
            details["top_tokens"] = self._tops
        return {"generated_text": self._whole()} | ({"details": details} if self._body.parameters.details else {})

    def _whole(self) -> str:
        return (self._body.inputs if self._body.parameters.return_full_text else "") + "".join(self._text)

    def _end(self, finish: Finish, events: list[dict[str, Any]], rest: str) -> None:
        """Add the end to the event of the token that ended the answer, or else of the last token.

        If that event was already sent, an event without a new token reports the end.
        """
        if finish.stop_token is not None or self._last is None:
            last = self._tokens[-1]["id"] if self._tokens else 0
            token = last if finish.stop_token is None else finish.stop_token
            events.append(self._event({"id": token, "text": rest, "logprob": 0.0, "special": not rest}, None))
        else:
            self._last["token"]["text"] += rest
        assert self._last is not None
        details = self._details(finish) | {"input_length": finish.usage.prompt}
        self._last |= {"generated_text": self._whole(), "details": details}

    def _details(self, finish: Finish) -> dict[str, Any]:
        reason = "eos_token"
        if finish.reason is FinishReason.LENGTH or finish.ended_by_budget:
            reason = "length"
        elif isinstance(finish.stop_reason, str):
            reason = "stop_sequence"
        seed = self._body.parameters.seed
        return {"finish_reason": reason, "generated_tokens": finish.usage.completion, "seed": seed}

    def _event(self, token: dict[str, Any], scored: TokenLogprob | None) -> dict[str, Any]:
        self._tokens.append(token)
        event = {"index": len(self._tokens), "token": token, "generated_text": None, "details": None}
        if most := self._body.parameters.top_n_tokens:
            tops = [] if scored is None else [self._token(each, each.text) for each in scored.top[:most]]
            self._tops.append(tops)
            event["top_tokens"] = tops
        self._last = event
        return event

    def _token(self, scored: TokenLogprob | TopLogprob, text: str) -> dict[str, Any]:
        special = scored.token in self._special
        return {"id": scored.token, "text": text, "logprob": max(scored.logprob, FLOOR), "special": special}


async def tgi_events(reply: TgiReply, deltas: Deltas) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer. An error after the first event is sent as the last event."""
    begun = False
    try:
        async with aclosing(deltas) as stream:
            async for several in stream:
                # All deltas are processed before the first event is sent, because the end changes the last event.
                events = [event for delta in several for event in reply.take(delta)]
                if events:
                    begun = True
                    written = [b"data: %b\n\n" % orjson.dumps(each) for each in events]
                    reply.sent()
                    yield b"".join(written)
                if reply.failure is not None:
                    raise reply.failure
    except Exception as error:
        if not begun:
            raise
        yield tgi_error(reply_to(error))


def tgi_error(reply: ErrorReply) -> bytes:
    """Serialize an error as the last event of a stream."""
    return b"data: %b\n\n" % tgi_body(reply)
