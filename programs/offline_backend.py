"""A model in this process: one thread steps the ``LLM``, the threads of the branches wait for what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

from ..engine.errors import EngineError
from ..engine.offline.llm import RunningRequest
from ..engine.offline.request_output import RequestOutput
from ..engine.serving.output_processor import TextDelta
from ..engine.types import SamplingParams, Usage
from ..grammar.errors import GrammarError
from ..grammar.spec import GrammarSpec
from .branch_calls import AnswerFormat, CallParams, Completion, FormatKind, Prompt, first_difference, session_name
from .errors import CallFailed
from .token_report import Report

if TYPE_CHECKING:
    from ..engine.offline.llm import LLM


@dataclass(eq=False, slots=True)
class _Call:
    """One request between a branch's thread and the one that steps.

    Attributes:
        news: its deltas, at last an error or None for the end.
        running: what the ``LLM`` knows it by, once it is begun.
    """

    tokens: Sequence[int]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    adapter: str | None = None
    session: str = ""
    pin: int = 0
    news: SimpleQueue[TextDelta | BaseException | None] = field(default_factory=SimpleQueue)
    running: RunningRequest | None = None

    def read(self) -> Generator[str, None, RequestOutput]:
        """The texts as they come; returns the whole. Raises CallFailed."""
        while (new := self.news.get()) is not None:
            if isinstance(new, BaseException):
                raise CallFailed(str(new)) from new
            if new.text:
                yield new.text
        assert self.running is not None
        return self.running.output()

    def wait(self) -> RequestOutput:
        """The whole answer. Raises CallFailed."""
        reading = self.read()
        while True:
            try:
                next(reading)
            except StopIteration as end:
                output: RequestOutput = end.value
                return output


class OfflineBackend:
    """See ``programs.branch_calls.ModelBackend``. Requests of all branches share the steps of one engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._calls: list[_Call] = []  # begun and not ended; of the stepping thread alone
        self._session = uuid4().hex
        self._closed = False
        self._thread = threading.Thread(target=self._drive, name="llm", daemon=True)
        self._thread.start()

    def stream(self, prompt: Prompt, draw: CallParams) -> Generator[str, None, Completion]:
        """One sequence of the engine."""
        params = SamplingParams(max_tokens=draw.max_tokens, temperature=draw.temperature, seed=draw.seed)
        grammar = _grammar(draw.form) if draw.form else None
        call = _Call(self._tokens(prompt), params, draw.stop, grammar, prompt.adapter, self._name(prompt))
        self._send(call)
        ended = False
        try:
            output = yield from call.read()
            ended = True
        finally:
            if not ended:
                self._jobs.put(lambda: self._give_up(call))
        [answer], [usage] = output.outputs, output.usage
        return Completion(answer.text, answer.finish_reason, _report(usage), usage.shortest)

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        """A sequence for each choice, all of them at once."""
        base = self._tokens(prompt)
        wholes = [self._tokens(prompt.followed_by(choice)) for choice in choices]
        start = first_difference(base, wholes)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, logprob_start_len=start)
        calls = [_Call(whole, params, adapter=prompt.adapter, session=self._name(prompt)) for whole in wholes]
        for call in calls:
            self._send(call)
        outputs = [call.wait() for call in calls]
        report = Report(calls=1)
        for output in outputs:
            report += _report(output.usage[0], calls=0, dropped=1)
        return [_logprobs(output, start) for output in outputs], report

    def warm(self, prompt: Prompt, pin: int) -> Report:
        """A sequence whose one token is dropped."""
        params, session = SamplingParams(max_tokens=1), self._name(prompt)
        call = _Call(self._tokens(prompt), params, adapter=prompt.adapter, session=session, pin=pin)
        self._send(call)
        return _report(call.wait().usage[0], dropped=1)

    def close(self) -> None:
        """End the thread that steps; what still runs fails."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self._llm.tokenizer
        try:
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

    def _send(self, call: _Call) -> None:
        if self._closed:
            raise CallFailed("the session is closed")
        self._jobs.put(lambda: self._begin(call))

    # What follows runs on the stepping thread.

    def _drive(self) -> None:
        while True:
            while not self._calls or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return self._end(CallFailed("the session was closed"))
                job()
            try:
                self._llm.step()
            except Exception as error:
                self._end(error)
            self._settle()

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
                on_delta=call.news.put,
            )
        except Exception as error:
            call.news.put(error)
        else:
            self._calls.append(call)

    def _settle(self) -> None:
        """Tell those who wait for what has ended."""
        for call in [call for call in self._calls if call.running is not None and call.running.is_done]:
            self._calls.remove(call)
            assert call.running is not None
            call.news.put(call.running.error)

    def _give_up(self, call: _Call) -> None:
        if call in self._calls:
            self._calls.remove(call)
            assert call.running is not None
            self._llm.abort(call.running)

    def _end(self, error: Exception) -> None:
        for call in self._calls[:]:
            self._give_up(call)
            call.news.put(error)


def _grammar(form: AnswerFormat) -> GrammarSpec:
    try:
        match form.kind:
            case FormatKind.SCHEMA:
                return GrammarSpec.json_schema(form.value)
            case FormatKind.REGEX:
                return GrammarSpec.regex(form.value)
            case FormatKind.CHOICES:
                return GrammarSpec.choice(form.value)
    except GrammarError as error:
        raise CallFailed(str(error)) from error


def _report(usage: Usage, calls: int = 1, dropped: int = 0) -> Report:
    """The engine's count, without generated tokens that nobody asked for."""
    return Report(
        calls, usage.prompt, usage.cached, usage.forked, usage.completion - dropped, usage.drafted, usage.forced
    )


def _logprobs(output: RequestOutput, start: int) -> list[float]:
    assert output.prompt_logprobs is not None
    positions = zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True)
    return [scores[token].logprob for token, scores in positions if scores is not None]
