"""The async face of the engine: requests in tokens go out, text comes back as the engine makes it."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator
from functools import partial

from ..errors import ContextTooLong, DeadlineExceeded, EngineDead
from ..messages import Done, Failed, Message, Ready, TokenOut
from ..text.prompt_cache import Owner, PromptEncoder
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer, check_unicode
from .engine_client import EngineClient
from .output_processor import OutputProcessor, TextDelta, error_of
from .request import RequestLimits, TextRequest

_LONG_TEXT = 2048  # characters; encoding fewer takes less time than handing them to a thread


class AsyncEngine:
    """Turns requests into sequences of the engine and their tokens into text. Belongs to one event loop.

    The engine's frames come in through ``client.on_frame``; a stream takes what has come since it last looked, so
    that a slow reader costs one list and not a task.

    Attributes:
        tokenizer: the model's.
        max_model_len: most tokens in prompt and answer together.
        vocab_size: token ids are below this.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, ready: Ready) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = ready.max_model_len
        self.vocab_size = ready.vocab_size
        self._prompts = PromptEncoder(tokenizer)
        self._limits = RequestLimits(ready.max_model_len, ready.vocab_size)
        self._client = client
        self._ids = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._described = False
        client.on_frame = self._on_frame
        client.on_death = self._on_death

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._streams)

    def check(self, request: TextRequest) -> TextRequest:
        """The request as the engine takes it. Raises RequestError and ContextTooLong: see ``RequestLimits``."""
        return self._limits.check(request)

    def resolve_max_tokens(self, num_prompt: int, asked: int | None) -> int:
        """Most tokens to generate, None being as many as fit. Raises ContextTooLong and RequestError."""
        return self._limits.resolve_max_tokens(num_prompt, asked)

    def check_length(self, text: str) -> None:
        """Raise ContextTooLong for a text that cannot fit the model's length, which is found without encoding it."""
        fewest = self.tokenizer.fewest_tokens(text) if len(text) > self.max_model_len else 0
        if fewest > self.max_model_len:
            raise ContextTooLong(fewest, 0, self.max_model_len, at_least=True)

    async def encode(self, text: str, *, add_special_tokens: bool, owner: Owner) -> array[int]:
        """Token ids of ``text``; long texts are encoded on another thread. Raises RequestError for lone surrogates.

        Args:
            add_special_tokens: see ``Tokenizer.encode``.
            owner: whose request it is. Without such tokens, what was encoded for the owner before is not encoded anew.
        """
        check_unicode(text)
        if add_special_tokens:
            length, job = len(text), partial(self.tokenizer.encode, text, True)
        else:
            parts = self._prompts.cut(text)
            length, job = self._prompts.num_missing(parts, owner), partial(self._prompts.encode, parts, owner)
        return job() if length < _LONG_TEXT else await asyncio.to_thread(job)

    async def stream(self, request: TextRequest) -> AsyncGenerator[list[TextDelta], None]:
        """Run a request. Nothing is sent to the engine before the first item is asked for.

        Leaving the iterator early, in whatever way, aborts what still runs. An iterator that is left inside a loop
        must be closed (``contextlib.aclosing``); otherwise the abort waits for the garbage collector.

        Yields:
            The deltas of a frame, or of several if the reader was slower than the engine; in order for each sequence.

        Raises:
            RequestError, CapacityError: the engine refuses one of the sequences.
            DeadlineExceeded: ``request.timeout`` is over before the first token. What has begun by then ends with
                reason ``TIMEOUT`` instead.
            EngineDead: the engine is gone, now or while the stream runs.
        """
        stream = self._open(self.check(request))
        try:
            while stream.generations or stream.deltas or stream.error:
                yield await stream.take()
        finally:
            self._forget(stream)
            if unwanted := [number for number in stream.generations if number not in stream.aborted]:
                self._client.abort(unwanted)

    def _open(self, request: TextRequest) -> _Stream:
        """Register the request's sequences and send them."""
        if request.grammar is not None and not self._described:
            self._client.describe_tokens(self.tokenizer.texts())
            self._described = True
        stops = StopStrings(request.stop) if request.stop else None
        submits = request.submits(self._ids)
        stream = _Stream(
            {submit.id: OutputProcessor(self.tokenizer, request, stops, index) for index, submit in enumerate(submits)}
        )
        self._streams.update(dict.fromkeys(stream.generations, stream))
        try:
            self._client.submit(submits)
        except EngineDead:
            self._forget(stream)
            raise
        if request.timeout is not None:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(request.timeout, self._expire, stream, request.timeout)
        return stream

    def _expire(self, stream: _Stream, timeout: float) -> None:
        """The time of a request is up: an error if it has no token yet, else the end of what still runs."""
        if not stream.has_begun:
            stream.fail(DeadlineExceeded(f"The request had no token after the {timeout:g} seconds that it was given."))
        elif numbers := stream.expire():
            self._client.abort(numbers)

    def _forget(self, stream: _Stream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
        for number in stream.generations:
            self._streams.pop(number, None)

    def _on_frame(self, messages: list[Message]) -> None:
        """Take a frame of the engine's. Messages of sequences that nobody waits for any more are ignored."""
        stopped = []
        for message in messages:
            if isinstance(message, (TokenOut, Done, Failed)) and (stream := self._streams.get(message.id)):
                if isinstance(message, (Done, Failed)):
                    del self._streams[message.id]
                if stream.push(message):
                    stopped.append(message.id)
        if stopped:
            self._client.abort(stopped)

    def _on_death(self, error: EngineDead) -> None:
        """Every stream ends with the engine."""
        streams, self._streams = self._streams, {}
        for stream in {id(stream): stream for stream in streams.values()}.values():
            stream.generations.clear()
            stream.fail(EngineDead(str(error)))


class _Stream:
    """One request between the engine's frames and its reader.

    Attributes:
        generations: its sequences that have not ended, by id.
        aborted: those of them that the engine has been told to abort.
        deltas: what the reader has not taken yet.
        error: what ends the stream once the deltas are taken.
        has_begun: whether any token has come.
        timer: of the request's timeout.
    """

    def __init__(self, generations: dict[int, OutputProcessor]) -> None:
        self.generations = generations
        self.aborted: set[int] = set()
        self.deltas: list[TextDelta] = []
        self.error: Exception | None = None
        self.has_begun = False
        self.timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None  # what a reader waits for that found nothing

    def push(self, message: TokenOut | Done | Failed) -> bool:
        """Take a message. Returns whether the sequence must be aborted, because a stop string ended it just now.

        A bug in the text of one sequence ends this stream and no other.
        """
        ends = isinstance(message, (Done, Failed))
        self.has_begun |= isinstance(message, TokenOut)
        generation = self.generations.pop(message.id) if ends else self.generations[message.id]
        try:
            if isinstance(message, Failed):
                raise error_of(message)
            if (delta := generation.push(message)) is not None:
                self.deltas.append(delta)
                self._wake()
        except Exception as error:
            self.fail(error)
        if ends or not generation.stopped or message.id in self.aborted:
            return False
        self.aborted.add(message.id)
        return True

    def expire(self) -> list[int]:
        """Let what still runs end with reason ``TIMEOUT``. Returns the sequences that must be aborted."""
        unwanted = [number for number in self.generations if number not in self.aborted]
        for number in unwanted:
            self.generations[number].expire()
        self.aborted.update(unwanted)
        return unwanted

    def fail(self, error: Exception) -> None:
        """End the stream with ``error``, the first one if there are several."""
        self.error = self.error or error
        self._wake()

    async def take(self) -> list[TextDelta]:
        """What has come since the last call, at least one delta; raises what ended the stream."""
        if not self.deltas and self.error is None:
            self._news = self._loop.create_future()
            await self._news
        if self.deltas:
            deltas, self.deltas = self.deltas, []
            return deltas
        assert self.error is not None
        raise self.error

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
