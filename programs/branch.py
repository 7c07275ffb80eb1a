"""A conversation that a program writes and a model continues, and the branches that go on from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, Self, TypeVar, overload

from pydantic import ValidationError

from .branch_calls import (
    AnswerFormat,
    CallParams,
    Completion,
    Message,
    ModelBackend,
    Prompt,
    answer_format,
    parse_value,
)
from .errors import CallFailed, ProgramError
from .token_report import TokenTotals

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 64


class Branch:
    """A conversation and the values that were read out of it.

    ``system`` and ``user`` begin a message. ``assistant``, ``gen``, ``stream`` and ``select`` write into the
    assistant's message, one after the other, until the next ``user``.

    One branch belongs to one thread at a time; branches of a fork run beside each other.

    Attributes:
        path: its name: ``root``, ``root/0``, ``root/0/3``.
        messages: the conversation so far.
        values: what ``gen``, ``stream``, ``select`` and ``join`` found, by name.
        scores: log-likelihood of each choice of a ``select``, by name.
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
        """Add a message of the user's."""
        return self._say("user", text)

    def assistant(self, text: str) -> Self:
        """Write into the assistant's message; what follows goes on from there."""
        self.messages = list(self._prompt(None).followed_by(text).messages)
        return self

    @overload
    def gen(self, name: str, *, schema: type[T], **options: Any) -> T: ...
    @overload
    def gen(self, name: str, *, schema: Mapping[str, Any], **options: Any) -> Any: ...
    @overload
    def gen(self, name: str, **options: Any) -> str: ...
    def gen(self, name: str, **options: Any) -> Any:
        """Let the model write, and keep the value under a name.

        Args:
            name: of the value.
            options: see ``stream``.

        Returns:
            An instance of ``schema`` if that is a type, parsed JSON if it is a JSON Schema, else the text.

        Raises:
            ProgramError: the call failed, or the answer was cut off before its form was complete.
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
        """Like ``gen``, in pieces as they come; ``branch[name]`` is there after the last one.

        A loop that is left early leaves the conversation as it was.

        Args:
            schema: a pydantic model, any other type that pydantic knows, or a JSON Schema.
            regex: an expression that the text matches as a whole.
            choices: texts, one of which the model takes token by token; ``select`` compares them as wholes.
            adapter: who answers, None for the session's model.
            max_tokens, temperature: by default the session's.
            stop: strings that end the text and are no part of it.
            seed: the same seed gives the same text.
        """
        step = f"gen {name!r}"
        with self._naming_branch(step):
            form = answer_format(schema, regex, choices)
            draw = CallParams(
                form,
                self._defaults["max_tokens"] if max_tokens is None else max_tokens,
                self._defaults["temperature"] if temperature is None else temperature,
                (stop,) if isinstance(stop, str) else tuple(stop),
                seed,
            )
            answer = yield from _closed(self._backend.stream(self._prompt(adapter), draw))
            self._totals.add(answer.report)
            self._check(answer, form, draw.max_tokens)
            self.values[name] = parse_value(answer.text, schema)
        self.assistant(answer.text)

    def select(self, name: str, choices: Sequence[str], *, adapter: str | None = None, normalise: bool = False) -> str:
        """Take the choice that the model finds likeliest as the next text.

        Each choice is scored as a whole: the exact sum of the log-probabilities of its tokens, of the model's
        distribution at temperature 1. The prompt before them is computed once. ``scores[name]`` has all of them.

        Args:
            normalise: divide each sum by its number of tokens, so that long choices are not at a disadvantage.

        Raises:
            ProgramError: the call failed, or there is no choice.
        """
        with self._naming_branch(f"select {name!r}"):
            if not choices or not all(choices):
                raise ValueError("choices must be at least one text, none of them empty")
            tokens, report = self._backend.score(self._prompt(adapter), choices)
        self._totals.add(report)
        sums = [math.fsum(each) / (len(each) if normalise else 1) for each in tokens]
        self.scores[name] = dict(zip(choices, sums, strict=True))
        best = choices[sums.index(max(sums))]
        self.values[name] = best
        self.assistant(best)
        return best

    def warm(self, *, adapter: str | None = None, pin: int = 0) -> Self:
        """Have the conversation so far computed, so that whatever goes on from it finds it in the cache.

        Args:
            pin: seconds for which it is to stay there, however much else is computed meanwhile.
        """
        with self._naming_branch("warm"):
            self._totals.add(self._backend.warm(self._prompt(adapter), pin))
        return self

    def fork(self, count: int) -> Fork:
        """Branches that go on from here, each with the conversation and the values so far."""
        return Fork(self, [self._child() for _ in range(count)])

    def map(self, function: Callable[[Branch, T], R], items: Iterable[T]) -> list[R]:
        """Fork for each item, and call ``function(branch, item)`` on all of them at once. See ``Fork.map``."""
        listed = list(items)
        return self.fork(len(listed)).map(function, listed)

    def _child(self) -> Branch:
        child = Branch(f"{self.path}/{next(self._numbers)}", self._backend, self._totals, self._defaults)
        child.messages, child.values, child.scores = self.messages[:], dict(self.values), dict(self.scores)
        return child

    def _say(self, role: str, text: str) -> Self:
        self.messages.append({"role": role, "content": text})
        return self

    def _prompt(self, adapter: str | None) -> Prompt:
        return Prompt(tuple(self.messages), adapter, self.path)

    @contextmanager
    def _naming_branch(self, step: str) -> Iterator[None]:
        """What goes wrong names this branch."""
        try:
            yield
        except (CallFailed, ValidationError, ValueError) as error:
            raise ProgramError(self.path, step, str(error)) from error

    def _check(self, answer: Completion, form: AnswerFormat | None, max_tokens: int) -> None:
        """Only free text may be cut off."""
        if answer.finish_reason not in ("stop", "length"):
            raise CallFailed(f"the answer ended with {answer.finish_reason!r}: {answer.text!r}")
        if form is not None and answer.finish_reason == "length":
            least = f"; the shortest takes {answer.shortest} tokens" if answer.shortest else ""
            raise CallFailed(f"max_tokens={max_tokens} is too little for an answer of this form{least}")


class Fork(Sequence[Branch]):
    """Branches that were made together. Made by ``Branch.fork``."""

    def __init__(self, parent: Branch, branches: list[Branch]) -> None:
        self._parent = parent
        self._branches = branches

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, index: Any) -> Any:
        return self._branches[index]

    def map(self, function: Callable[..., R], *items: Iterable[Any]) -> list[R]:
        """Call ``function(branch, item, ...)`` for all branches at once, each on a thread of its own.

        Args:
            items: one item for each branch; several such lists give several arguments.

        Returns:
            What the calls returned, in the order of the branches.

        Raises:
            Exception: of the first branch that failed, once all have ended.
            ValueError: there are more or fewer items than branches.
        """
        arguments = list(zip(self._branches, *items, strict=True))
        if not arguments:
            return []
        with ThreadPoolExecutor(min(len(arguments), _MOST_THREADS), thread_name_prefix="branch") as pool:
            futures = [pool.submit(function, *each) for each in arguments]
        failed = [error for future in futures if (error := future.exception()) is not None]
        for other in failed[1:]:
            failed[0].add_note(f"and: {other}")
        if failed:
            raise failed[0]
        return [future.result() for future in futures]

    def join(self) -> dict[str, list[Any]]:
        """Give the parent what the branches found: under each name the list of their values, in their order.

        A branch without the name has None in its place. Values from before the fork stay as they are.
        """
        before = self._parent.values
        names = dict.fromkeys(
            name for each in self._branches for name in each.values if each.values[name] is not before.get(name, self)
        )
        found = {name: [each.values.get(name) for each in self._branches] for name in names}
        self._parent.values.update(found)
        return found


def _closed(stream: Generator[str, None, Completion]) -> Generator[str, None, Completion]:
    """The stream, given up as soon as its reader leaves."""
    with closing(stream):
        return (yield from stream)
