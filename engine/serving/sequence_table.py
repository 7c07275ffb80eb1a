"""Sequence table: sends requests to the engine as sequences, and converts the engine's messages to deltas."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ..errors import EngineDead
from ..messages import AdapterChanged, Done, Failed, Message, Submit, TokenOut
from ..text.stop_strings import StopStrings
from ..weighted_adapters import names_in
from .adapter_tokenizers import ServedTokenizer
from .described_vocabularies import DescribedVocabularies, TokenReceiver
from .output_processor import OutputProcessor, TextDelta, error_of
from .request import TextRequest


class EngineLink(TokenReceiver, Protocol):
    """Interface of the engine that a table uses; the engine runs in this process or in another one."""

    def submit(self, submits: Sequence[Submit]) -> None: ...

    def abort(self, ids: Iterable[int]) -> None: ...


class DeltaReceiver(Protocol):
    """Interface of an object that receives the deltas of one or more requests.

    Attributes:
        running: output processors of the sequences that have not ended, by id. Only ``SequenceTable`` writes it.
    """

    running: dict[int, OutputProcessor]

    def add(self, delta: TextDelta) -> None: ...

    def fail(self, error: Exception) -> None: ...


class SequenceTable:
    """Gives sequences their ids, submits and aborts them, and dispatches their messages.

    Each sequence is aborted at most once.

    Args:
        engine: the engine in which the sequences run.
    """

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self._receivers: dict[int, DeltaReceiver] = {}
        self._vocabularies = DescribedVocabularies(engine)

    def __len__(self) -> int:
        return len(self._receivers)

    def start(
        self,
        requests: Sequence[TextRequest],
        receiver: DeltaReceiver,
        served: ServedTokenizer,
        generated: array[int] | None = None,
    ) -> None:
        """Submit the sequences of requests that ``RequestLimits.check`` has accepted.

        If this fails, none of them is submitted.

        Args:
            served: the tokenizer of all requests.
            generated: tokens that were generated already, if there is only one sequence; it continues after them. The
                receiver gets these tokens first.

        Raises:
            EngineDead: the engine is gone.
        """
        try:
            submits = []
            for prompt, request in enumerate(requests):
                stops = StopStrings(request.stop) if request.stop else None
                for index, submit in enumerate(request.submits(self._ids)):
                    receiver.running[submit.id] = OutputProcessor(served.tokenizer, request, stops, index, prompt)
                    submit = submit if generated is None else replace(submit, generated=generated)
                    submits.append(_of_tokenizer(submit, served) if served.identity else submit)
            self._receivers.update(dict.fromkeys(receiver.running, receiver))
            if any(each.grammar or each.reasoning for each in requests):
                asked = {each.adapter for each in requests if each.adapter is not None}
                names = {name for adapter in asked for name in names_in(adapter)}
                self._vocabularies.use(served, names, receiver.running)
            self._engine.submit(submits)
            if generated:
                self.take([TokenOut(each.id, tuple(generated)) for each in submits])
        except BaseException:
            self.stop(receiver)
            raise

    def take(self, messages: Iterable[Message]) -> None:
        """Pass the engine's messages to their receivers, and abort the sequences in which a stop string was found.

        Messages of sequences that ``stop`` has removed are ignored. If the engine reports a failure of a sequence, or a
        bug raises an exception for its text, only the receiver of that sequence fails. The other sequences of this
        receiver are then aborted.
        """
        found_stop = []
        failed: list[DeltaReceiver] = []
        for message in messages:
            if not isinstance(message, (TokenOut, Done, Failed)):
                if isinstance(message, AdapterChanged):
                    self._vocabularies.adapter_changed(message.name)
                continue
            receiver = self._receivers.get(message.id)
            if receiver is None:
                continue
            try:
                if self._push(message, receiver):
                    found_stop.append(message.id)
            except Exception as error:
                receiver.fail(error)
                failed.append(receiver)
        if found_stop:
            self._engine.abort(found_stop)
        for receiver in failed:
            self.stop(receiver)

    def expire(self, receiver: DeltaReceiver) -> None:
        """Abort the sequences of a receiver that still run. They end with the reason ``TIMEOUT``."""
        if unfinished := _unfinished(receiver):
            for number in unfinished:
                receiver.running[number].expire()
            self._engine.abort(unfinished)

    def stop(self, receiver: DeltaReceiver) -> None:
        """Abort the sequences of a receiver that still run, and remove all its sequences from the table."""
        unfinished, ids = _unfinished(receiver), tuple(receiver.running)
        self._forget(receiver)
        if unfinished:
            self._engine.abort(unfinished)
        self._vocabularies.end(ids)

    def fail_all(self, error: EngineDead) -> None:
        """Fail all receivers, because the engine is gone."""
        receivers = {id(receiver): receiver for receiver in self._receivers.values()}.values()
        for receiver in receivers:
            self._vocabularies.end(tuple(receiver.running))
            self._forget(receiver)
            # Each receiver gets its own exception object, because raising an exception extends its traceback.
            receiver.fail(EngineDead(str(error)))

    def _push(self, message: TokenOut | Done | Failed, receiver: DeltaReceiver) -> bool:
        """Process a message of a sequence.

        Returns whether the caller must abort the sequence, because a stop string was found.

        Raises:
            Exception: the failure in the message, or a bug in the sequence's text.
        """
        processor = receiver.running[message.id]
        if has_ended := isinstance(message, (Done, Failed)):
            del receiver.running[message.id], self._receivers[message.id]
            self._vocabularies.end((message.id,))
        was_ending = processor.is_ending
        if isinstance(message, Failed):
            raise error_of(message)
        delta = processor.push(message)
        if delta is not None:
            receiver.add(delta)
        return processor.is_ending and not was_ending and not has_ended

    def _forget(self, receiver: DeltaReceiver) -> None:
        for number in receiver.running:
            self._receivers.pop(number, None)
        receiver.running.clear()


def _of_tokenizer(submit: Submit, served: ServedTokenizer) -> Submit:
    """Return the sequence with the fields that identify an adapter's own tokenizer."""
    return replace(submit, vocabulary=served.key, ends=served.ends, tokenizer=served.identity)


def _unfinished(receiver: DeltaReceiver) -> list[int]:
    """Return the ids of a receiver's sequences that run and were not aborted."""
    return [number for number, processor in receiver.running.items() if not processor.is_ending]
