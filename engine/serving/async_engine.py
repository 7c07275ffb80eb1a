"""Asynchronous engine of the API process: accepts requests in tokens, and streams their answers as text deltas."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from copy import copy
from functools import partial

from ..errors import ContextTooLong, DeadlineExceeded
from ..messages import Ready
from ..sandbox.program_pool import POOL
from ..text.chat_template import rendered
from ..text.prompt_cache import Owner, PromptCache, PromptEncoder
from ..text.tokenizer import Tokenizer, check_unicode
from ..types import SamplingDefaults
from .adapter_tokenizers import ServedTokenizer
from .engine_like import SequenceEngine
from .output_processor import OutputProcessor, TextDelta
from .request import RequestLimits, TextRequest
from .request_threads import on_request_thread
from .sequence_table import SequenceTable

_NEUTRAL = SamplingDefaults()
_LONG_TEXT = 2048  # Number of characters. A shorter text is encoded in less time than a switch to a thread takes.
# Number of characters. A longer text is cut on a thread, because cutting it takes longer than a switch to a thread.
_LONGEST_CUT = 1 << 14


class AsyncEngine:
    """Turns requests into sequences of the engine, and the tokens of these sequences into text.

    Belongs to one event loop.

    The engine's frames arrive through ``client.on_frame``. Each item of a stream holds all deltas since the previous
    item. So a slow reader receives longer items, and no task waits for the reader.

    Attributes:
        tokenizer: the model's tokenizer, or an adapter's own.
        defaults: sampling parameters of requests that set none.
        limits: bounds of requests; every request must pass ``limits.check`` before ``stream``.
        max_model_len: largest number of tokens in prompt and answer together.
        pooler: the pooled values, such as embeddings, that the model offers.
        vocab_size: exclusive upper bound of the token ids.
        served: ``tokenizer`` and ``vocab_size`` in the form that the engine uses.
    """

    def __init__(
        self, client: SequenceEngine, tokenizer: Tokenizer, ready: Ready, defaults: SamplingDefaults = _NEUTRAL
    ) -> None:
        self.defaults = defaults
        self.max_model_len = ready.max_model_len
        self.pooler = ready.pooler
        self._cache = PromptCache()
        self._take(ServedTokenizer(tokenizer, ready.vocab_size))
        self._sequences = SequenceTable(client)
        client.on_frame = self._sequences.take
        client.on_death = self._sequences.fail_all

    def _take(self, served: ServedTokenizer) -> None:
        self.served = served
        self.tokenizer, self.vocab_size = served.tokenizer, served.vocab_size
        self.limits = RequestLimits(self.max_model_len, served.vocab_size)
        self._prompts = PromptEncoder(served.tokenizer, self._cache, served.identity)

    def with_tokenizer(self, served: ServedTokenizer) -> AsyncEngine:
        """Return an engine with the same sequences for requests of an adapter that has its own tokenizer."""
        other = copy(self)
        other._take(served)
        return other

    @property
    def num_running(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._sequences)

    def check_length(self, text: str) -> None:
        """Raise ContextTooLong for a text that cannot fit in the model's context length, without encoding the text."""
        fewest = self.tokenizer.fewest_tokens(text) if len(text) > self.max_model_len else 0
        if fewest > self.max_model_len:
            raise ContextTooLong(fewest, 0, self.max_model_len, at_least=True)

    async def render(self, call: Callable[[], str], *, at_once: bool) -> str:
        """Return the text that ``call`` renders with the chat template.

        Args:
            at_once: whether to render on the calling thread. A template that needs too much work is rendered in another
                process anyway.
        """
        return await rendered(call, at_once=at_once)

    async def encode(self, text: str, *, add_special_tokens: bool, owner: Owner) -> array[int]:
        """Return the token ids of ``text``. Long texts are encoded on another thread, and very long ones in parts.

        The texts of requests that arrive together are encoded one after another without other work in between, so that
        the tokenizer's data stays in the processor's caches. With 32 requests, each text then takes two thirds of the
        time.

        Args:
            add_special_tokens: see ``Tokenizer.encode``. If False, parts of the text that the same owner has encoded
                before are reused.
            owner: the tenant and the cache salt of the request.

        Raises:
            RequestError: the text contains lone surrogates.
        """
        if self.tokenizer.waits:
            return await POOL.off_loop(lambda: self._encoding(text, add_special_tokens, owner)[0]())
        if len(text) > _LONGEST_CUT:
            return await on_request_thread(lambda: self._encoding(text, add_special_tokens, owner)[0]())
        await asyncio.sleep(0)
        encode, num_new = self._encoding(text, add_special_tokens, owner)
        if num_new >= _LONG_TEXT:
            return await on_request_thread(encode)
        tokens = encode()
        await asyncio.sleep(0)
        return tokens

    def _encoding(self, text: str, add_special_tokens: bool, owner: Owner) -> tuple[Callable[[], array[int]], int]:
        """Return a function that encodes a text, and the number of characters that no earlier call has encoded."""
        check_unicode(text)
        if add_special_tokens:
            return partial(self.tokenizer.encode, text, True), len(text)
        parts = self._prompts.cut(text)
        return partial(self._prompts.encode, parts, owner), self._prompts.num_new(parts, owner)

    async def stream(self, *requests: TextRequest) -> AsyncGenerator[list[TextDelta], None]:
        """Run requests that ``limits.check`` has accepted.

        All are sent to the engine together, when the first item is requested.

        If the iterator is closed before its end, the sequences that still run are aborted. A caller that leaves a loop
        over the iterator must close the iterator (``contextlib.aclosing``); otherwise the sequences run until the
        garbage collector closes it.

        Args:
            requests: requests of one client; the timeout of the first one applies to all.

        Yields:
            The deltas of one frame, or of several frames if the reader was slower than the engine. The deltas of each
            sequence are in order.

        Raises:
            RequestError, CapacityError: the engine refuses one of the sequences.
            DeadlineExceeded: the timeout has passed, and some prompt has no token yet. If all prompts have tokens, the
                running sequences end with the reason ``TIMEOUT`` instead.
            EngineDead: the engine has ended or hangs, before or during the stream.
        """
        stream = _Stream()
        self._sequences.start(requests, stream, self.served)
        timer, timeout = None, requests[0].timeout
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, self._expire, stream, timeout)
        try:
            while stream.running or stream.deltas or stream.error:
                yield await stream.take()
        finally:
            if timer is not None:
                timer.cancel()
            self._sequences.stop(stream)

    def _expire(self, stream: _Stream, timeout: float) -> None:
        """End a stream after its timeout: with an error if a prompt has no token yet, else by an abort of its
        sequences.
        """
        if any(processor.prompt not in stream.begun for processor in stream.running.values()):
            stream.fail(DeadlineExceeded(f"The request had no token within its limit of {timeout:g} seconds."))
        else:
            self._sequences.expire(stream)


class _Stream:
    """Queue of the deltas of one ``AsyncEngine.stream``. ``SequenceTable`` appends to it as a ``DeltaReceiver``.

    Attributes:
        running: output processors of the sequences that have not ended, by id.
        deltas: deltas that the reader has not taken yet.
        error: error that is raised after the last delta.
        begun: indices of the prompts that have a first token.
    """

    def __init__(self) -> None:
        self.running: dict[int, OutputProcessor] = {}
        self.deltas: list[TextDelta] = []
        self.error: Exception | None = None
        self.begun: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None  # Set while the reader waits for a delta.

    def add(self, delta: TextDelta) -> None:
        """Append a delta and wake the reader."""
        if delta.finish is None:
            self.begun.add(delta.prompt)
        self.deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with ``error``. After several calls, the first error is the one raised."""
        self.error = self.error or error
        self._wake()

    async def take(self) -> list[TextDelta]:
        """Return the deltas since the last call, at least one. Raises ``error`` once all deltas were taken."""
        if not self.deltas and self.error is None:
            self._arrival = self._loop.create_future()
            await self._arrival
        if self.deltas:
            deltas, self.deltas = self.deltas, []
            return deltas
        assert self.error is not None
        raise self.error

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
