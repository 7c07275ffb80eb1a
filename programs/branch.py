"""Branch: a program's conversation, with gen, stream, select and fork, and parallel branches with map and join."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Any, Self, TypeVar, overload

from pydantic import ValidationError

from ..engine.types import MAX_PIN_SECONDS
from .branch_calls import (
    AnswerFormat,
    CallParams,
    Completion,
    Message,
    ModelBackend,
    Prompt,
    answer_format,
    check_choices,
    check_text,
    check_texts,
    parse_value,
)
from .errors import CallFailed, ProgramError
from .token_report import TokenTotals

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 64
_LONGEST_PIN = int(MAX_PIN_SECONDS)
_EMPTY_ANSWER: Message = {"role": "assistant", "content": ""}


class Branch:
    """A conversation and the values parsed from its answers.

    ``system`` and ``user`` begin a message. ``assistant``, ``gen``, ``stream`` and ``select`` append text to the
    assistant's message, which ends with the next ``user``.

    Only one thread at a time may use a branch. The branches of a fork run in parallel.

    Attributes:
        path: ``root``, followed by the indices of forked branches, as in ``root/0/3``.
        messages: the conversation so far.
        values: results of ``gen``, ``stream``, ``select`` and ``join``, by name.
        scores: log-likelihoods of the choices of each ``select``, by name.
    """

    def __init__(self, path: str, backend: ModelBackend, totals: TokenTotals, defaults: Mapping[str, Any]) -> None:
        self.path = path
        self.messages: list[Message] = []
        self.values: dict[str, Any] = {}
        self.scores: dict[str, dict[str, float]] = {}
        self._backend = backend
        self._totals = totals
        self._defaults = defaults
        self._numbers = itertools.count()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def system(self, text: str) -> Self:
        """Add a system message."""
        return self._say("system", text)

    def user(self, text: str) -> Self:
        """Add a user message."""
        return self._say("user", text)

    def assistant(self, text: str) -> Self:
        """Append text to the assistant's message, which the next answer continues."""
        with self._naming_branch("assistant"):
            self.messages = list(Prompt(tuple(self.messages)).followed_by(check_text("text", text)).messages)
        return self

    @overload
    def gen(self, name: str, *, schema: type[T], **options: Any) -> T: ...
    @overload
    def gen(self, name: str, *, schema: Mapping[str, Any], **options: Any) -> Any: ...
    @overload
    def gen(self, name: str, **options: Any) -> str: ...
    def gen(self, name: str, **options: Any) -> Any:
        """Generate an answer and store its value under a name.

        Args:
            name: key in ``values``.
            options: the other arguments of ``stream``.

        Returns:
            An instance of ``schema`` if that is a type, parsed JSON if it is a JSON Schema, else the text.

        Raises:
            ProgramError: an argument is wrong, the call failed, or the answer was cut off before its format was
                complete.
        """
        for _ in self.stream(name, **options):
            pass
        return self.values[name]

    def stream(
        self,
        name: str,
        *,
        schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        adapter: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """Generate an answer like ``gen``, but yield its pieces. ``branch[name]`` is set after the last piece.

        If the loop over the pieces is left early, the conversation does not change.

        Args:
            schema: a pydantic model, any other type that pydantic supports, or a JSON Schema.
            regex: a regular expression that the whole text must match.
            choices: texts, one of which is sampled token by token. In contrast, ``select`` compares whole texts.
            adapter: name of an adapter; None for the session's model.
            max_tokens, temperature: None for the session's default.
            stop: stop strings, which are not part of the text.
            seed: seed for sampling. The same seed gives the same text.
        """
        step = f"gen {name!r}"
        with self._naming_branch(step):
            format = answer_format(schema, regex, choices)
            params = CallParams(
                format,
                self._defaults["max_tokens"] if max_tokens is None else max_tokens,
                self._defaults["temperature"] if temperature is None else temperature,
                tuple(check_texts("stop", [stop] if isinstance(stop, str) else stop)),
                seed,
            )
            if isinstance(params.temperature, float) and not math.isfinite(params.temperature):
                raise ValueError(f"temperature must be at least 0 and at most 2, not {params.temperature}")
            answer = yield from _closed(self._backend.stream(self._prompt(adapter), params))
            self._totals.add(answer.report)
            self._check(answer, format, params.max_tokens)
            self.values[name] = parse_value(answer.text, schema)
        self.assistant(answer.text)

    def select(self, name: str, choices: Sequence[str], *, adapter: str | None = None, normalise: bool = False) -> str:
        """Append the choice with the highest log-likelihood as the next text.

        The score of a choice is the sum of its tokens' logprobs at temperature 1. The prompt is computed only once.
        ``scores[name]`` contains the scores of all choices.

        Args:
            normalise: divide each sum by the number of tokens, which removes the bias against long choices.

        Raises:
            ProgramError: the call failed, or ``choices`` is not a list of strings, is empty, or has an empty string.
        """
        with self._naming_branch(f"select {name!r}"):
            listed = check_choices(choices)
            tokens, report = self._backend.score(self._prompt(adapter), listed)
        self._totals.add(report)
        sums = [math.fsum(each) / (len(each) if normalise else 1) for each in tokens]
        self.scores[name] = dict(zip(listed, sums, strict=True))
        best = listed[sums.index(max(sums))]
        self.values[name] = best
        self.assistant(best)
        return best

    def warm(self, *, adapter: str | None = None, pin: int = 0) -> Self:
        """Compute the KV of the conversation into the prefix cache, for all branches that extend the conversation.

        Args:
            pin: seconds for which the conversation's pages are pinned in the prefix cache, at most 86,400; 0 for no
                pin.
        """
        with self._naming_branch("warm"):
            if type(pin) is not int or not 0 <= pin <= _LONGEST_PIN:
                raise ValueError(f"pin must be a whole number of seconds from 0 to {_LONGEST_PIN}, not {pin!r}")
            self._totals.add(self._backend.warm(self._prompt(adapter), pin))
        return self

    def fork(self, count: int) -> Fork:
        """Create branches, each with a copy of the conversation and the values.

        Raises:
            ProgramError: ``count`` is not an integer of at least 0.
        """
        with self._naming_branch("fork"):
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"count must be an integer of at least 0, not {count!r}")
        return Fork(self, [self._child() for _ in range(count)])

    def map(self, function: Callable[[Branch, T], R], items: Iterable[T]) -> list[R]:
        """Fork for each item, and call ``function(branch, item)`` for all of them in parallel, like ``Fork.map``."""
        listed = list(items)
        return self.fork(len(listed)).map(function, listed)

    def _child(self) -> Branch:
        child = Branch(f"{self.path}/{next(self._numbers)}", self._backend, self._totals, self._defaults)
        child.messages, child.values, child.scores = self.messages[:], dict(self.values), dict(self.scores)
        return child

    def _say(self, role: str, text: str) -> Self:
        with self._naming_branch(role):
            self.messages.append({"role": role, "content": check_text("text", text)})
        return self

    def _prompt(self, adapter: str | None) -> Prompt:
        if adapter is not None and not check_text("adapter", adapter):
            raise ValueError("adapter must be the name of an adapter, or None for the model of the session")
        messages = self.messages
        if messages[-1:] == [_EMPTY_ANSWER]:
            # An empty answer at the end is removed, because the model cannot continue it.
            messages = messages[:-1]
        if not messages:
            raise ValueError("the conversation is empty: begin it with system or user")
        return Prompt(tuple(messages), adapter, self.path)

    @contextmanager
    def _naming_branch(self, step: str) -> Iterator[None]:
        """Context manager: convert an error in the block to a ``ProgramError`` with this branch and step."""
        try:
            yield
        except (CallFailed, ValidationError, ValueError) as error:
            raise ProgramError(self.path, step, str(error)) from error

    def _check(self, answer: Completion, format: AnswerFormat | None, max_tokens: int) -> None:
        """Raise CallFailed for an aborted answer, or a structured answer cut off at ``max_tokens`` or a stop string."""
        if answer.finish_reason not in ("stop", "length"):
            raise CallFailed(f"the answer ended with {answer.finish_reason!r}: {answer.text!r}")
        if format is not None and answer.stop is not None:
            raise CallFailed(f"the stop string {answer.stop!r} cut off the answer: {answer.text!r}")
        if format is not None and answer.finish_reason == "length":
            least = f"; the shortest takes {answer.shortest} tokens" if answer.shortest else ""
            raise CallFailed(f"max_tokens={max_tokens} is too small for an answer of this form{least}")


class Fork(Sequence[Branch]):
    """The branches of one ``Branch.fork``."""

    def __init__(self, parent: Branch, branches: list[Branch]) -> None:
        self._parent = parent
        self._branches = branches

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def map(self, function: Callable[..., R], *items: Iterable[Any]) -> list[R]:
        """Call ``function(branch, item, ...)`` for all branches in parallel threads.

        Args:
            items: one item for each branch; several such lists give several arguments.

        Returns:
            The results, in the order of the branches.

        Raises:
            Exception: the exception of the first branch that failed; it is raised after all branches have ended.
            KeyboardInterrupt: raised at once; running branches continue until they end or the session is closed.
            ValueError: the number of items is not the number of branches.
        """
        try:
            arguments = list(zip(self._branches, *items, strict=True))
        except ValueError as uneven:
            raise ValueError(f"items must be {len(self)}, one for each branch of the fork: {uneven}") from uneven
        if not arguments:
            return []
        pool = ThreadPoolExecutor(min(len(arguments), _MOST_THREADS), thread_name_prefix="branch")
        try:
            futures = [pool.submit(function, *each) for each in arguments]
            wait(futures)
        finally:
            # After an interrupt, no further branch begins.
            pool.shutdown(wait=False, cancel_futures=True)
        failed = [error for future in futures if (error := future.exception()) is not None]
        for other in failed[1:]:
            failed[0].add_note(f"and: {other}")
        if failed:
            raise failed[0]
        return [future.result() for future in futures]

    def join(self) -> dict[str, list[Any]]:
        """Store the branches' new values in the parent: for each name, the list of the branches' values in order.

        For a branch without the name, the list contains None. Values set before the fork do not change.
        """
        before = self._parent.values
        names = dict.fromkeys(
            name for each in self._branches for name in each.values if each.values[name] is not before.get(name, self)
        )
        joined = {name: [each.values.get(name) for each in self._branches] for name in names}
        self._parent.values.update(joined)
        return joined


def _closed(stream: Generator[str, None, Completion]) -> Generator[str, None, Completion]:
    """Delegate to the stream, and close it when the reader leaves early."""
    with closing(stream):
        return (yield from stream)
