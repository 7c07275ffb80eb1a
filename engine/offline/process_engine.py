"""Process engine: the engine of an ``AsyncLLM``, in a separate process, driven from an event loop on a thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..adapter_sources.adapter_fetcher import AdapterFetcher
from ..adapter_sources.named_sources import fetch_named, named_source
from ..config import EngineConfig
from ..errors import EngineDead, EngineError
from ..serving.adapter_tokenizers import AdapterTokenizers, ServedTokenizer
from ..serving.engine_client import EngineClient
from ..serving.request import TextRequest
from ..serving.sequence_table import SequenceTable
from ..text.tokenizer import Tokenizer
from .answer_stream import AnswerStream
from .engine_loop import EngineLoop
from .prompt_adapters import PromptAdapters
from .prompt_texts import AdapterTexts

_SHUT_DOWN = "This AsyncLLM was shut down: create another one."


class ProcessEngine:
    """An engine process, with the client, the running requests and the adapters. Thread-safe.

    Args:
        config: options of the engine.
        path: path of the model.
        tokenizer: tokenizer of the model.

    Attributes:
        adapters: finds and loads the adapters of prompts; must not be used on an event loop.
        prompts: two threads that read prompts: one for prompts without a ``LoRARequest``, and one for prompts with one,
            so that the download of an adapter delays only the latter.
        max_model_len: largest number of tokens of prompt and answer together.

    Raises:
        ModelError: the model is not supported exactly.
        ConfigError: options are out of bounds or contradict each other.
        EngineDead: the process has ended while it was loading.
    """

    def __init__(self, config: EngineConfig, path: Path, tokenizer: Tokenizer) -> None:
        self._fetcher = AdapterFetcher.of(config)
        self._lora_dir = config.lora_dir
        self._loop = EngineLoop()
        self._is_closed = False
        try:
            self._client = EngineClient(fetch_named(config, self._fetcher)[0], path)
            ready = self._loop.run(self._client.start())
        except BaseException:
            self._loop.close()
            self._fetcher.close()
            raise
        self.max_model_len = ready.max_model_len
        self._sequences = SequenceTable(self._client)
        self._loop.post(self._listen)
        tokenizers = AdapterTokenizers(ServedTokenizer(tokenizer, ready.vocab_size), config)
        loaded = self._client.adapters
        self._texts = AdapterTexts(tokenizers, loaded, lambda name: self._load(name, name, False), ready.max_model_len)
        self.adapters = PromptAdapters(self._texts, loaded, self._load)
        self.prompts = (ThreadPoolExecutor(1, "prompts"), ThreadPoolExecutor(1, "adapters"))

    def _listen(self) -> None:
        self._client.on_frame = self._sequences.take
        self._client.on_death = self._sequences.fail_all

    @property
    def death(self) -> EngineDead | None:
        """Reason for which the engine has ended; None while it runs."""
        return EngineDead(_SHUT_DOWN) if self._is_closed else self._client.death

    def start(self, request: TextRequest, stream: AnswerStream, served: ServedTokenizer) -> None:
        """Begin a checked request. Its deltas, or the error if it is refused, are passed to ``stream``."""
        self._loop.post(self._start, request, stream, served)

    def _start(self, request: TextRequest, stream: AnswerStream, served: ServedTokenizer) -> None:
        try:
            self._sequences.start([request], stream, served)
        except Exception as error:
            stream.fail(error)
        if stream.is_aborted:
            self._abort(stream)

    def abort(self, stream: AnswerStream) -> None:
        """Abort a request, which may not have begun yet. It ends with the reason ``ABORT``."""
        self._loop.post(self._abort, stream)

    def _abort(self, stream: AnswerStream) -> None:
        stream.is_aborted = True
        if stream.running:
            self._client.abort(tuple(stream.running))

    def stop(self, stream: AnswerStream) -> None:
        """Abort the sequences of a request that nobody reads any more, and remove the request."""
        self._loop.post(self._sequences.stop, stream)

    def _load(self, name: str, path: str, replace: bool) -> None:
        """Load an adapter. Must not be called on an event loop, because it blocks.

        Raises RequestError, AdapterUnavailable, EngineDead.
        """
        load = partial(self._client.load_adapter, name, replace=replace)
        source = named_source(path, self._lora_dir)
        if source is None:
            self._loop.run(load(path, num_tokens=self._texts.num_own(name, path)))
            return
        fetched = self._fetcher.fetch(source, trusted=True)
        try:
            self._loop.run(load(str(fetched.folder), trusted=True))
        except EngineError:
            self._fetcher.release(fetched)
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter. Running requests keep its weights. Raises UnknownModel, EngineDead."""
        self.check()
        await self._loop.wait(self._client.unload_adapter(name))

    async def reset_cache(self) -> None:
        """Remove all cached KV that no running request uses. Raises EngineDead."""
        self.check()
        await self._loop.wait(self._client.reset_cache())

    def has_adapter(self, name: str) -> bool:
        return name in self._client.adapters

    def check(self) -> None:
        """Raise EngineDead if the engine has ended."""
        if (death := self.death) is not None:
            raise EngineDead(str(death))

    def close(self) -> None:
        """End the process, and fail running requests with EngineDead. Blocks until the process has ended."""
        if self._loop.is_here:
            # The garbage collector may call this method on any thread that allocates memory, including the loop's own
            # thread, which cannot wait for itself.
            threading.Thread(target=self.close).start()
            return
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.run(self._close())
        self._loop.close()
        for threads in self.prompts:
            threads.shutdown(cancel_futures=True)
        self._fetcher.close()

    async def _close(self) -> None:
        self._sequences.fail_all(EngineDead(_SHUT_DOWN))
        await self._client.close()
