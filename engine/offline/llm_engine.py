"""``LLMEngine`` and ``EngineArgs`` in vLLM's form: requests that are added one by one and advanced step by step."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

from ...lora.request import LoRARequest
from ..errors import RequestError
from ..peer_options import engine_option_names
from .inputs import PromptType
from .llm import LLM
from .request_output import RequestOutput
from .running_request import RunningRequest
from .sampling_params import SamplingParams
from .tokenizer_face import TokenizerFace


class EngineArgs:
    """Keywords of ``LLM`` as attributes, for ``LLM(**vars(args))`` and ``LLMEngine.from_engine_args(args)``."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.__dict__.update({"model": model} | options)

    @staticmethod
    def add_cli_args(parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add the options of ``LLM`` to a parser. Options that are not given are no attributes of the parsed namespace.

        Args:
            async_args_only: a parameter of vLLM, without effect.
        """
        group = parser.add_argument_group("options of the engine")
        for name in engine_option_names():
            flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
            group.add_argument(*flags, dest=name, nargs="?", const=True, default=SUPPRESS, type=_value, help=SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> EngineArgs:
        """Make arguments from a namespace parsed with the options of ``add_cli_args``."""
        return cls(**{name: value for name, value in vars(args).items() if name in engine_option_names()})


AsyncEngineArgs = EngineArgs
"""The same for ``AsyncLLM.from_engine_args``; in vLLM it has options of its own, which have no effect here."""


def _value(text: str) -> Any:
    """Return the value of a text that is JSON; return any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class LLMEngine:
    """An engine to which requests are added at any time. ``step`` returns the outputs of requests that ended in it.

    Args:
        llm: the ``LLM`` that computes the requests; ``close`` closes it.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._running: dict[str, RunningRequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Make the engine. Raises as ``LLM``."""
        return cls(LLM(**vars(engine_args)))

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        **_: Any,
    ) -> str:
        """Begin a request.

        Args:
            arrival_time: a parameter of vLLM, without effect, like its further parameters.

        Raises:
            RequestError: the id is in use, or a prompt or parameter is out of bounds.
        """
        if request_id in self._running:
            raise RequestError(f"request_id {request_id!r} is in use.", param="request_id")
        self._running[request_id] = self._llm.begin_prompt(prompt, params, lora_request=lora_request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute a step of all requests; return the outputs of ended requests, with their ids."""
        self._llm.step()
        ended = [name for name, running in self._running.items() if running.is_done]
        return [self._running.pop(name).output(request_id=name) for name in ended]

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; ids that are not running are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (running := self._running.pop(name, None)) is not None:
                self._llm.abort(running)

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> TokenizerFace:
        """Return the tokenizer, as ``LLM.get_tokenizer``."""
        return self._llm.get_tokenizer(lora_request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Remove all cached KV that no running request uses, as ``LLM.reset_prefix_cache``."""
        return self._llm.reset_prefix_cache(*args, **kwargs)

    def close(self) -> None:
        """End the engine."""
        self._llm.close()
