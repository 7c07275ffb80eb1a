"""Running requests of an ``LLM``: the receivers of their deltas, their callbacks, and the progress bar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from ..errors import EngineError, RequestError
from ..serving.output_processor import OutputProcessor, TextDelta
from ..serving.request import TextRequest
from .request_output import OutputBuilder, RequestOutput

_SHOW_EVERY = 0.5  # Seconds between updates of the displayed speed.


class RunningRequest:
    """A request of ``LLM.begin``. It is the ``DeltaReceiver`` of its sequence.

    Attributes:
        running: output processors of the sequences that have not ended, by id.
        error: the error that ended the request, None if there is none.
        on_delta: callback for each delta, called between two steps; None for no callback.
        request: the request as given by the caller.
    """

    def __init__(
        self,
        request: TextRequest,
        builder: OutputBuilder,
        on_delta: Callable[[TextDelta], None] | None,
        callbacks: DeltaCallbacks,
    ) -> None:
        self.request = request
        self._builder = builder
        self._callbacks = callbacks
        self.on_delta = on_delta
        self.running: dict[int, OutputProcessor] = {}
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or self._builder.is_complete

    def add(self, delta: TextDelta) -> None:
        """Add a delta to the output, and schedule the callback."""
        self._builder.add(delta)
        if self.on_delta is not None:
            self._callbacks.add(self, delta)

    def fail(self, error: Exception) -> None:
        self.error = self.error or error

    def abort(self) -> None:
        """Mark the request as aborted unless it has ended. It gets no more deltas."""
        self.on_delta = None
        if not self.is_done:
            self.error = RequestError("The request was aborted.")

    def output(self, request_id: str | None = None) -> RequestOutput:
        """Return the output of a request that has ended. Raises ``error`` if it is set, and EngineError before the end.

        Args:
            request_id: id that replaces the request's own id in the output.
        """
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise EngineError("The request has not ended: call step() until is_done.")
        built = self._builder.build()
        return built if request_id is None else replace(built, request_id=request_id)


class GenerateCall:
    """The requests of one call of ``generate`` or ``chat``. It is the ``DeltaReceiver`` of their sequences.

    Attributes:
        running: output processors of the sequences that have not ended, by id.
        error: the first error of any request, None if there is none.
        num_ended: number of answers that have ended.
        num_tokens: number of tokens of all answers so far.
    """

    def __init__(self, builders: Sequence[OutputBuilder], num_answers: int) -> None:
        self._builders = builders
        self._num_answers = num_answers
        self.running: dict[int, OutputProcessor] = {}
        self.error: Exception | None = None
        self.num_ended = 0
        self.num_tokens = 0

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.num_ended == self._num_answers

    def add(self, delta: TextDelta) -> None:
        """Add a delta to the output of its request."""
        self._builders[delta.prompt].add(delta)
        self.num_tokens += len(delta.tokens)
        self.num_ended += delta.finish is not None

    def fail(self, error: Exception) -> None:
        self.error = self.error or error

    def check(self) -> None:
        """Raise ``error`` if there is one."""
        if self.error is not None:
            raise self.error


class DeltaCallbacks:
    """Queue of deltas for the callbacks of their requests.

    A step first passes on all its deltas. Then the callbacks run one after the other on the caller's thread. Their
    exceptions are kept until ``raise_errors``, so that an exception in one callback does not affect other requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[RunningRequest, TextDelta]] = deque()
        self._errors: list[Exception] = []

    def add(self, request: RunningRequest, delta: TextDelta) -> None:
        self._waiting.append((request, delta))

    def run(self) -> None:
        """Call the callback once for each waiting delta, and keep the exceptions."""
        while self._waiting:
            request, delta = self._waiting.popleft()
            # The request was aborted after this delta arrived.
            if request.on_delta is None:
                continue
            try:
                request.on_delta(delta)
            except Exception as error:
                self._errors.append(error)

    def raise_errors(self) -> None:
        """Raise the first kept exception. The other exceptions are added to it as notes."""
        if not self._errors:
            return
        (first, *others), self._errors = self._errors, []
        for other in others:
            first.add_note(f"and: {other!r}")
        raise first


class ProgressBar:
    """Progress bar of ``generate`` and ``chat``: shows the finished answers, and the tokens per second."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = tqdm(total=total, disable=not shown, unit="answer", desc="Generating", dynamic_ncols=True)
        self._started = self._last = time.monotonic()
        self._tokens = 0

    def update(self, num_ended: int, num_tokens: int) -> None:
        """Update the number of finished answers, and every ``_SHOW_EVERY`` seconds the speed."""
        self._tokens = num_tokens
        if num_ended > self._bar.n:
            self._bar.update(num_ended - self._bar.n)
        now = time.monotonic()
        if now - self._last >= _SHOW_EVERY:
            self._show(now)

    def close(self) -> None:
        self._show(time.monotonic())
        self._bar.close()

    def _show(self, now: float) -> None:
        self._last = now
        self._bar.set_postfix_str(f"{self._tokens / max(now - self._started, 1e-9):.1f} tokens/s")
