"""A frontend whose answers pass through the engine's output processor, in chunks of tokens that a seed draws.

``FakeFrontend`` makes its deltas itself. Here stop strings, ``min_tokens``, characters of several tokens, the end token
and logprobs are the output processor's, so an answer that is asked for twice arrives in other pieces each time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

from rootgraft.engine.messages import Done, TokenOut
from rootgraft.engine.serving.output_processor import OutputProcessor, TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.stop_strings import StopStrings
from rootgraft.engine.types import FinishReason, Logprob, SamplingParams, SequenceStats, Usage
from support.api.api_fakes import EOS, FakeFrontend

_STATS = SequenceStats(0.25, 0.5, 2.0, 1, 3.5, 7)


class ChunkedFrontend(FakeFrontend):
    """Answers with the text of ``say`` and an end token.

    Attributes:
        draws: draws how many tokens a message brings, and whether the end is in the frame of the last tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(0)

    async def _frames(self, requests: Sequence[TextRequest]) -> AsyncIterator[list[TextDelta]]:
        running = [
            _Running(self, request, index, prompt)
            for prompt, request in enumerate(requests)
            for index in range(request.n)
        ]
        while running:
            frame = [delta for each in running if self.draws.random() < 0.8 for delta in each.step()]
            running = [each for each in running if not each.is_done]
            if frame:
                yield frame
            await asyncio.sleep(0)


class _Running:
    def __init__(self, frontend: ChunkedFrontend, request: TextRequest, index: int, prompt: int) -> None:
        self._request, self._draws = request, frontend.draws
        self._tokens = [*frontend.say(request, index).encode(), EOS]
        stops = StopStrings(request.stop) if request.stop else None
        self._output = OutputProcessor(frontend.tokenizer, request, stops, index, prompt)  # type: ignore[arg-type]
        self._limit, self._at, self._index = request.params.max_tokens, 0, index
        self._is_first, self._is_last, self.is_done = True, False, False

    def step(self) -> list[TextDelta]:
        """Return the deltas of one frame: of a message with tokens, of the end, or of both."""
        deltas = []
        if not self._is_last:
            deltas = [delta for delta in [self._output.push(self._message())] if delta is not None]
            if self._draws.random() < 0.5 or not self._is_last:
                return deltas
        self.is_done = True
        if (delta := self._output.push(self._done())) is not None:
            deltas.append(delta)
        return deltas

    def _message(self) -> TokenOut:
        count = self._draws.choice((1, 1, 2, 3, 7, 40))
        params = self._request.params
        tokens = self._tokens[self._at : min(self._at + count, self._limit)]
        self._at += len(tokens)
        shown = tuple(token for token in tokens if token != EOS)
        self._is_last = self._at == min(self._limit, len(self._tokens)) or self._output.stopped
        scored: tuple[Logprob, ...] = ()
        if self._is_first and params.prompt_logprobs is not None:
            begin = max(1, params.logprob_start_len)
            scored = tuple(_logprob(token, params.prompt_logprobs) for token in self._request.tokens[begin:])
        self._is_first = False
        logprobs = () if params.logprobs is None else tuple(_of_answer(token, params) for token in shown)
        return TokenOut(self._index, shown, logprobs, scored)

    def _done(self) -> Done:
        ended = self._tokens[self._at - 1] == EOS
        usage = Usage(len(self._request.tokens), len(self._request.tokens) // 2 + self._index, self._at)
        return Done(
            self._index,
            FinishReason.STOP if ended else FinishReason.LENGTH,
            usage,
            EOS if ended else None,
            _STATS,
        )


def _of_answer(token: int, params: SamplingParams) -> Logprob:
    named = params.logprob_token_ids
    if named:
        return Logprob(token, -0.25, 1, tuple((each, -0.5 - each / 256) for each in named))
    return _logprob(token, params.logprobs or 0)


def _logprob(token: int, count: int) -> Logprob:
    others = [token, *(other for other in range(97, 123) if other != token)][:count]
    return Logprob(token, -0.25, 1, tuple((other, -0.25 - rank) for rank, other in enumerate(others)))
