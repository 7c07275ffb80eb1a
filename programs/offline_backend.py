"""Offline backend: one thread steps the ``LLM``, and the branches' threads wait for the deltas of their requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

from ..engine.errors import EngineError
from ..engine.offline.ending_logprobs import read_logprobs
from ..engine.offline.request_output import RequestOutput
from ..engine.offline.running_request import RunningRequest
from ..engine.offline.sampling_params import AnyParams
from ..engine.serving.output_processor import TextDelta
from ..engine.types import SamplingParams, Usage
from ..grammar.errors import GrammarError
from ..grammar.spec import GrammarSpec
from .branch_calls import (
    AnswerFormat,
    CallParams,
    Completion,
    FormatKind,
    Prompt,
    choice_tree,
    session_name,
    stop_string,
)
from .errors import CallFailed
from .token_report import Report

if TYPE_CHECKING:
    from ..engine.offline.llm import LLM


@dataclass(eq=False, slots=True)
class _Call:
    """One request, shared by a branch's thread and the stepping thread.

    Attributes:
        deltas: queue of the request's deltas, which ends with an error or None.
        running: the request's handle in the ``LLM``, once it has begun.
    """

    tokens: Sequence[int]
    params: AnyParams
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    adapter: str | None = None
    session: str = ""
    pin: int = 0
    deltas: SimpleQueue[TextDelta | BaseException | None] = field(default_factory=SimpleQueue)
    running: RunningRequest | None = None

    def read(self) -> Generator[str, None, RequestOutput]:
        """Yield the texts. Returns the whole output. Raises CallFailed."""
        while (delta := self.deltas.get()) is not None:
            if isinstance(delta, BaseException):
                raise CallFailed(str(delta)) from delta
            if delta.text:
                yield delta.text
        assert self.running is not None
        return self.running.output()

    def wait(self) -> RequestOutput:
        """Wait for the whole output, and return it. Raises CallFailed."""
        reading = self.read()
        while True:
            try:
                next(reading)
            except StopIteration as end:
                output: RequestOutput = end.value
                return output


class OfflineBackend:
    """Backend on an ``LLM``, with the methods of ``branch_calls.ModelBackend``.

    All branches share its engine's steps.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The unfinished calls. Only the stepping thread uses them.
        self._calls: list[_Call] = []
        self._session = uuid4().hex
        # The lock prevents other threads from sending a call after the end of the jobs.
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._drive, name="llm", daemon=True)
        self._thread.start()

    def stream(self, prompt: Prompt, params: CallParams) -> Generator[str, None, Completion]:
        """Generate one sequence."""
        defaults = self._llm.get_default_sampling_params()
        sampling = replace(defaults, max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed)
        grammar = _grammar(params.format) if params.format else None
        call = _Call(self._tokens(prompt), sampling, params.stop, grammar, prompt.adapter, self._name(prompt))
        with self._sent([call]):
            output = yield from call.read()
        [answer], [usage] = output.outputs, output.usage
        stop = stop_string(answer.stop_reason, params.stop)
        assert answer.finish_reason is not None
        return Completion(answer.text, answer.finish_reason, _report(usage), stop, usage.shortest)

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        """Compute the logprobs of the choices as a tree, with one sequence for each inner node of the tree."""
        tree = choice_tree(self._tokens(prompt), [self._tokens(prompt.followed_by(choice)) for choice in choices])
        session = self._name(prompt)
        calls = [_Call(read.tokens, read.params, adapter=prompt.adapter, session=session) for read in tree.reads]
        with self._sent(calls):
            outputs = [call.wait() for call in calls]
        report = Report(calls=1)
        for output in outputs:
            report += _report(output.usage[0], calls=0, dropped=1)
        return tree.by_token(read_logprobs(*each) for each in zip(tree.reads, outputs, strict=True)), report

    def warm(self, prompt: Prompt, pin: int) -> Report:
        """Compute the prompt's KV in a sequence whose single generated token is dropped."""
        params, session = SamplingParams(max_tokens=1), self._name(prompt)
        call = _Call(self._tokens(prompt), params, adapter=prompt.adapter, session=session, pin=pin)
        with self._sent([call]):
            return _report(call.wait().usage[0], dropped=1)

    def close(self) -> None:
        """End the stepping thread. Unfinished requests fail."""
        with self._closing:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        try:
            tokenizer = self._llm.get_tokenizer(prompt.adapter)
            text = tokenizer.render_chat(
                prompt.messages,
                add_generation_prompt=not prompt.is_open,
                continue_final_message=prompt.is_open,
                tools=None,
                kwargs=None,
            )
            return tokenizer.encode(text, False)
        except EngineError as error:
            raise CallFailed(str(error)) from error

    def _name(self, prompt: Prompt) -> str:
        return session_name(self._session, prompt.branch)

    @contextmanager
    def _sent(self, calls: Sequence[_Call]) -> Iterator[None]:
        """Context manager: send calls.

        If the block ends early, by an interrupt, an error or its reader, they are aborted.
        """
        try:
            with self._closing:
                if self._closed:
                    raise CallFailed("the session is closed")
                for call in calls:
                    self._jobs.put(partial(self._begin, call))
            yield
        except BaseException:
            for call in calls:
                self._jobs.put(partial(self._abort, call))
            raise

    # The methods below run on the stepping thread.

    def _drive(self) -> None:
        """Run jobs and steps until ``close``.

        An exception fails all calls, so that no branch waits for its answer forever.
        """
        while True:
            try:
                while not self._calls or not self._jobs.empty():
                    job = self._jobs.get()
                    if job is None:
                        return self._fail_all(CallFailed("the session was closed"))
                    job()
                self._llm.step()
            except Exception as error:
                self._fail_all(error)
            self._finish_calls()

    def _begin(self, call: _Call) -> None:
        try:
            call.running = self._llm.begin(
                call.tokens,
                call.params,
                stop=call.stop,
                grammar=call.grammar,
                adapter=call.adapter,
                session=call.session,
                pin_seconds=call.pin,
                on_delta=call.deltas.put,
            )
        except Exception as error:
            call.deltas.put(error)
        else:
            self._calls.append(call)

    def _finish_calls(self) -> None:
        for call in [call for call in self._calls if call.running is not None and call.running.is_done]:
            self._calls.remove(call)
            assert call.running is not None
            call.deltas.put(call.running.error)

    def _abort(self, call: _Call) -> None:
        if call in self._calls:
            self._calls.remove(call)
            assert call.running is not None
            self._llm.abort(call.running)

    def _fail_all(self, error: Exception) -> None:
        calls = self._calls[:]
        for call in calls:
            call.deltas.put(error)
        for call in calls:
            # The engine may be closed or broken, and each call has received its error already.
            with suppress(Exception):
                self._abort(call)


def _grammar(format: AnswerFormat) -> GrammarSpec:
    try:
        match format.kind:
            case FormatKind.SCHEMA:
                return GrammarSpec.json_schema(format.value)
            case FormatKind.REGEX:
                return GrammarSpec.regex(format.value)
            case FormatKind.CHOICES:
                return GrammarSpec.choice(format.value)
    except GrammarError as error:
        raise CallFailed(str(error)) from error


def _report(usage: Usage, calls: int = 1, dropped: int = 0) -> Report:
    """Return the report for the engine's usage, without ``dropped`` generated tokens."""
    return Report(
        calls, usage.prompt, usage.cached, usage.forked, usage.completion - dropped, usage.drafted, usage.forced
    )
