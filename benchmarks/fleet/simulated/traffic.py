"""Traffic of the workloads as token ids, with made-up answers: what asks for what, and after which answers.

W3, W4 and the programs of ``benchmarks/programs`` say the same as on a server. A token is a word here, so that no model
and no tokenizer is needed. A call comes once those have ended whose answers are in its prompt.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from random import Random
from zlib import crc32

from benchmarks.programs.workloads import PROGRAMS, run
from benchmarks.serve.workloads import workload
from rootgraft.api.cli.bench_requests import words
from rootgraft.programs import Session
from rootgraft.programs.branch_calls import CallParams, Completion, FormatKind, Message, Prompt
from rootgraft.programs.token_report import Report

NAMES = ("W3", "W4", *PROGRAMS)


@dataclass(frozen=True, slots=True)
class Call:
    """A request.

    Attributes:
        tokens: of its prompt.
        answer: tokens of its answer.
        after: places, in the list of all calls, of those that must have ended before.
        adapter: its name; None for the base model.
        at: seconds before which it does not come.
    """

    tokens: array[int]
    answer: array[int]
    after: tuple[int, ...] = ()
    adapter: str | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls in the order of their times, so many of them at once."""

    calls: Sequence[Call]
    concurrency: int


def traffic(name: str, seed: int = 0) -> Traffic:
    """Return the calls of a workload or program. KeyError for a name that is none."""
    return _program(name, seed) if name in PROGRAMS else _conversations(name, seed)


def side_by_side(parts: Sequence[Traffic], seed: int = 0) -> Traffic:
    """Return traffic of several kinds at once: which one's next call comes next is drawn."""
    draw, left, order = Random(seed), [0] * len(parts), []
    turns = [part for part, each in enumerate(parts) for _ in each.calls]
    draw.shuffle(turns)
    for part in turns:
        order.append((part, left[part]))
        left[part] += 1
    places = {each: place for place, each in enumerate(order)}
    calls = []
    for part, at in order:
        call = parts[part].calls[at]
        calls.append(replace(call, after=tuple(places[part, each] for each in call.after)))
    return Traffic(calls, sum(each.concurrency for each in parts))


def adapter_traffic(weights: Sequence[float], count: int, rate: float, seed: int = 0) -> Traffic:
    """Return calls of 100 tokens and 48 of answer that come at random, ``rate`` a second, to weighted adapters."""
    draw, at, calls = Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        [adapter] = draw.choices(range(len(weights)), weights)
        prompt, answer = (array("i", [draw.randrange(50_000) for _ in range(size)]) for size in (100, 48))
        calls.append(Call(prompt, answer, adapter=f"adapter-{adapter}", at=at))
    return Traffic(calls, count)


def _conversations(name: str, seed: int) -> Traffic:
    load, draw = workload(name, 0, seed), Random(seed)
    calls: list[Call] = []
    for conversation in load.conversations:
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        after: tuple[int, ...] = ()
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn})
            text = words(draw, conversation.fields["max_tokens"])
            calls.append(Call(_prompt(messages), _tokens(text), after))
            messages.append({"role": "assistant", "content": text})
            after = (len(calls) - 1,)
    return Traffic(calls, load.concurrency)


def _program(name: str, seed: int) -> Traffic:
    model = _MadeUp(seed)
    with Session("http://127.0.0.1:9/v1") as session:  # where nothing listens: no call goes there
        session._backend = model
        run(name, 0, seed, session)
    calls: list[Call] = []
    for prompt, _ in model.calls:
        texts = [message["content"] for message in prompt.messages]
        after = [at for at, (_, text) in enumerate(model.calls[: len(calls)]) if any(text in each for each in texts)]
        calls.append(Call(_prompt(prompt.messages), _tokens(model.calls[len(calls)][1]), tuple(after)))
    return Traffic(calls, len(calls))


class _MadeUp:
    """A model that answers with words that no other answer has, or with one of the choices. See ``ModelBackend``."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)
        self._lock = threading.Lock()
        self.calls: list[tuple[Prompt, str]] = []

    def stream(self, prompt: Prompt, params: CallParams) -> Generator[str, None, Completion]:
        with self._lock:
            is_choice = params.format is not None and params.format.kind is FormatKind.CHOICES
            text = self._draw.choice(params.format.value) if is_choice and params.format else ""
            text = text or f"{words(self._draw, min(30, params.max_tokens))} {len(self.calls)}."
            self.calls.append((prompt, text))
        yield text
        return Completion(text, "stop", Report(calls=1))

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        raise NotImplementedError("no program of these scores")

    def warm(self, prompt: Prompt, pin: int) -> Report:
        raise NotImplementedError("no program of these warms a prompt")

    def close(self) -> None:
        """Do nothing."""


def _prompt(messages: Sequence[Message]) -> array[int]:
    text = "".join(f"<{each['role']}> {each['content']} <end>" for each in messages)
    return _tokens(text + ("" if messages[-1]["role"] == "assistant" else "<assistant>"))


def _tokens(text: str) -> array[int]:
    return array("i", [crc32(word.encode()) % 50_000 for word in re.findall(r"\w+|[^\w\s]", text)])
