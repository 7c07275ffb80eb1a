"""``AsyncLLM`` as in vLLM: an engine in a separate process, whose requests are asynchronous generators."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ...lora.request import LoRARequest
from ..errors import EngineDead, RequestError, UnknownModel
from ..serving.request import TextRequest
from ..types import Priority
from .answer_stream import AnswerStream
from .inputs import PromptType
from .offline_model import OfflineModel
from .process_engine import ProcessEngine
from .request_inputs import CallOptions, Input, RequestMaker
from .request_output import OutputBuilder, RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer_face import TokenizerFace
from .vllm_table import check_offered, check_values


@dataclass(frozen=True, slots=True)
class AsyncModelConfig:
    """The part of ``AsyncLLM.model_config`` that scripts read: the model's path or name, and its context length."""

    model: str
    max_model_len: int


class AsyncLLM:
    """An engine in a separate process.

    Any number of generators, on any number of event loops, may run at the same time.

    No long operation runs on the caller's event loop: prompts are encoded on one thread, and the engine's messages are
    read on another. The constructor blocks until the model is loaded, and ``shutdown`` blocks until the process has
    ended.

    Args:
        model: as in ``LLM``.
        options: as in ``LLM``.

    Attributes:
        model_config: the model's path or name and its context length; ``get_model_config`` returns the same object.

    Raises:
        ModelError: the model does not exist or is not supported exactly.
        ConfigError: options do not exist, are out of bounds or contradict each other.
        EngineDead: the engine has ended while it was loading.

    >>> engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=2048))
    >>> async for output in engine.generate("Is the sea salty?", SamplingParams(max_tokens=8), "0"):
    ...     print(output.outputs[0].text)
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        found = OfflineModel.find(model, options)
        self.tokenizer = found.tokenizer
        self._requests = RequestMaker.of(found.config, found.path)
        self._engine = ProcessEngine(found.config, found.path, self.tokenizer)
        self._end = weakref.finalize(self, self._engine.close)
        self._streams: dict[str, AnswerStream] = {}
        self._lora_names: dict[int, str] = {}
        self.model_config = AsyncModelConfig(found.name, self._engine.max_model_len)

    @classmethod
    def from_engine_args(cls, engine_args: object, *_: Any, **__: Any) -> Self:
        """Create the engine from ``AsyncEngineArgs``. vLLM's further arguments have no effect.

        Raises like the constructor.
        """
        return cls(**vars(engine_args))

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate answers to a prompt. If the generator is closed or cancelled before its end, the request is aborted.

        Args:
            prompt: one prompt, in any form of ``LLM.generate``.
            sampling_params: sampling parameters. Their ``output_kind`` selects whether an output holds the whole answer
                so far or only the new part, or whether there is only one output at the end.
            request_id: id of the request in its outputs and for ``abort``; no running request may have the same id.
            lora_request: a LoRA adapter, which is loaded first if it is not loaded yet.
            priority: below 0, the request is served before others; above 0, after them.
            others: vLLM's further parameters; ``vllm_classes.toml`` describes the effect of each.

        Yields:
            Outputs with the answers that have a new part; the last output is ``finished``.

        Raises:
            ValueError: the prompt or a parameter is out of bounds, or there is no such adapter.
            EngineDead: the engine has ended, before or during the request.
        """
        try:
            check_values("AsyncLLM.generate", others)
            if request_id in self._streams:
                raise RequestError(f"request_id {request_id!r} is in use.", param="request_id")
            self._engine.check()
            kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
            stream = self._streams[request_id] = AnswerStream(RequestOutputKind(kind))
            try:
                read = partial(self._read, prompt, sampling_params, lora_request, _priority(priority))
                given, request, builder = await self._on_thread(read, lora_request)
                self._engine.start(request, stream, given.adapter.model.served)
                async with aclosing(stream.outputs(builder)) as outputs:
                    async for output in outputs:
                        yield replace(output, request_id=request_id)
            finally:
                del self._streams[request_id]
                self._engine.stop(stream)
        except RequestError as error:
            raise ValueError(str(error)) from error

    def _read(
        self, prompt: PromptType, params: SamplingParams, lora_request: LoRARequest | None, priority: Priority
    ) -> tuple[Input, TextRequest, OutputBuilder]:
        """Convert the arguments to a checked request. Raises RequestError."""
        [given] = self._engine.adapters.inputs([prompt], lora_request=lora_request)
        if lora_request is not None:
            self._lora_names[lora_request.lora_int_id] = lora_request.lora_name
        request = replace(self._requests.request(given, params, CallOptions()), priority=priority)
        request = given.adapter.model.limits.check(request)
        return given, request, self._requests.builder(given, request)

    async def _on_thread(self, call: Any, lora_request: LoRARequest | None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._engine.prompts[lora_request is not None], call)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests. The last output of each has the finish reason ``abort``.

        Ids that are not running are ignored.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (stream := self._streams.get(name)) is not None:
                self._engine.abort(stream)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for later requests. Returns True. Raises ValueError if the adapter cannot be loaded."""
        self._engine.check()
        try:
            await self._on_thread(partial(self._engine.adapters.name_of, lora_request), lora_request)
        except RequestError as error:
            raise ValueError(str(error)) from error
        self._lora_names[lora_request.lora_int_id] = lora_request.lora_name
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter of a ``lora_int_id``.

        Running requests keep its weights. Returns False if none is loaded.
        """
        self._engine.check()
        if lora_id not in await self.list_loras():
            return False
        try:
            await self._engine.unload(self._lora_names.pop(lora_id))
        except UnknownModel:
            return False
        return True

    async def list_loras(self) -> set[int]:
        """Return the ``lora_int_id`` of each adapter that a ``LoRARequest`` has loaded."""
        return {number for number, name in self._lora_names.items() if self._engine.has_adapter(name)}

    async def pin_lora(self, lora_id: int) -> bool:
        """Return True without any effect: an adapter that was evicted from the device is reloaded when it is requested.

        Raises:
            ValueError: no loaded adapter has this number.
        """
        if lora_id not in await self.list_loras():
            raise ValueError(f"lora_id {lora_id!r} is not the id of a loaded adapter: load it with add_lora.")
        return True

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Remove all cached KV that no running request uses, from all tiers. Returns True. The arguments are vLLM's."""
        await self._engine.reset_cache()
        return True

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> TokenizerFace:
        """Return the model's tokenizer, or the tokenizer of an adapter that has its own."""
        read = partial(self._engine.adapters.texts_of, lora_request)
        return TokenizerFace((await self._on_thread(read, lora_request)).served.tokenizer)

    async def get_model_config(self) -> AsyncModelConfig:
        """Return ``model_config``."""
        return self.model_config

    @property
    def is_running(self) -> bool:
        return self._engine.death is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> EngineDead:
        """The error that requests raise after the engine has ended."""
        return self._engine.death or EngineDead("The engine is not running.")

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has ended or hangs."""
        self._engine.check()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's process.

        Running requests raise EngineDead. Further calls do nothing. ``timeout`` is vLLM's.
        """
        self._end()

    def __getattr__(self, name: str) -> Any:
        """Handle a vLLM method that this class lacks: accept it without effect, or raise the table's error.

        The table is ``vllm_classes.toml``.
        """
        check_offered("AsyncLLM", name)
        return _without_effect


AsyncLLMEngine = AsyncLLM
"""Name of the class in vLLM's older versions."""


async def _without_effect(*_: Any, **__: Any) -> None:
    """Do nothing. Replaces methods of vLLM that are not needed here."""


def _priority(number: int) -> Priority:
    """Convert vLLM's priority number, where lower numbers go first, to a priority class. Raises RequestError."""
    if type(number) is not int:
        raise RequestError(f"priority must be a whole number, not {number!r}.", param="priority")
    return Priority.INTERACTIVE if number == 0 else Priority.REALTIME if number < 0 else Priority.BATCH
