"""Answer stream: passes the outputs of one ``AsyncLLM`` request from the engine's event loop to the caller's loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from ..serving.output_processor import OutputProcessor, SequenceOutput, TextDelta
from .request_output import OutputBuilder, RequestOutput
from .sampling_params import RequestOutputKind


class AnswerStream:
    """The ``DeltaReceiver`` of a request. Deltas arrive on the engine's event loop and are read on the caller's.

    If the reader is slower than the engine, one output contains all deltas since the previous output.

    Args:
        kind: whether the reader wants cumulative outputs, only new parts, or only the final output.

    Attributes:
        running: output processors of the sequences that have not ended, by id. The engine's loop writes it.
        is_aborted: whether the request was aborted, perhaps before it began. The engine's loop writes it.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self.running: dict[int, OutputProcessor] = {}
        self.is_aborted = False
        self._kind = kind
        self._deltas: deque[TextDelta] = deque()
        self._new: dict[int, SequenceOutput] = {}  # New parts since the last output, by the answer's index.
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._arrival = asyncio.Event()
        self._is_waking = False

    def add(self, delta: TextDelta) -> None:
        """Receive a delta. Called on the engine's loop."""
        self._deltas.append(delta)
        if delta.finish is not None or self._kind is not RequestOutputKind.FINAL_ONLY:
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error.

        If this is called several times, the first error counts. Called on the engine's loop.
        """
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            # The reader's loop is closed, so there is no reader to wake.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        # The flag is cleared before the deltas are read. So a delta that arrives later wakes the reader again.
        self._is_waking = False
        self._arrival.set()

    async def outputs(self, builder: OutputBuilder) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs that the reader wants. The last output is ``finished``.

        Raises:
            EngineError: the engine refuses the request, or has ended. The error is raised after the deltas that arrived
                before it.
        """
        is_complete = False
        while not is_complete:
            await self._arrival.wait()
            self._arrival.clear()
            error, is_complete = self._error, self._read(builder)
            if self._kind is RequestOutputKind.FINAL_ONLY:
                if is_complete:
                    yield builder.build()
            # Logprobs of the prompt alone cause no output; they are part of the output with the first token.
            elif any(part.tokens or part.text or part.finish for part in self._new.values()):
                new, self._new = self._new, {}
                yield builder.build_part(new, only_new=self._kind is RequestOutputKind.DELTA)
            if error is not None and not is_complete:
                raise error

    def _read(self, builder: OutputBuilder) -> bool:
        """Pass the arrived deltas to the builder, and collect the new parts of each answer.

        Returns:
            Whether all answers have ended.
        """
        while self._deltas:
            delta = builder.add(self._deltas.popleft())
            self._new.setdefault(delta.index, SequenceOutput()).add(delta)
        return builder.is_complete
