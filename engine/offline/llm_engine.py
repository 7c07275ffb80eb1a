"""``LLMEngine`` and ``EngineArgs`` as in vLLM: requests are added one by one, and ``step`` advances all of them."""

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
    """Keyword arguments of ``LLM`` as attributes: ``LLM(**vars(args))``, ``LLMEngine.from_engine_args(args)``."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.__dict__.update({"model": model} | options)

    @staticmethod
    def add_cli_args(parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add the options of ``LLM`` to a parser.

        The parsed namespace has attributes only for the options that are given.

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
        """Create the arguments from a namespace that was parsed with the options of ``add_cli_args``."""
        return cls(**{name: value for name, value in vars(args).items() if name in engine_option_names()})


AsyncEngineArgs = EngineArgs
"""The same class for ``AsyncLLM.from_engine_args``. vLLM's own options of this class have no effect here."""


def _value(text: str) -> Any:
    """Parse a text as JSON. A text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class LLMEngine:
    """An engine to which requests can be added at any time.

    ``step`` returns the outputs of the requests that end in the step.

    Args:
        llm: the ``LLM`` that computes the requests; ``close`` closes it.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._running: dict[str, RunningRequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Create the engine. Raises like ``LLM``."""
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
            arrival_time: a parameter of vLLM. This parameter and vLLM's further ones have no effect.

        Raises:
            RequestError: the id is in use, or the prompt or a parameter is out of bounds.
        """
        if request_id in self._running:
            raise RequestError(f"request_id {request_id!r} is in use.", param="request_id")
        self._running[request_id] = self._llm.begin_prompt(prompt, params, lora_request=lora_request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step of all requests. Returns the outputs of the requests that have ended, with their ids."""
        self._llm.step()
        ended = [name for name, running in self._running.items() if running.is_done]
        return [self._running.pop(name).output(request_id=name) for name in ended]

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests. Ids that are not running are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (running := self._running.pop(name, None)) is not None:
                self._llm.abort(running)

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> TokenizerFace:
        """Return the tokenizer, like ``LLM.get_tokenizer``."""
        return self._llm.get_tokenizer(lora_request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Remove all cached KV that no running request uses, like ``LLM.reset_prefix_cache``."""
        return self._llm.reset_prefix_cache(*args, **kwargs)

    def close(self) -> None:
        """Close the ``LLM``."""
        self._llm.close()
