"""Streams over a fake client: abort exactly once in every state, death, n, refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft.engine.errors import CapacityError, DeadlineExceeded, EngineDead, RequestError
from rootgraft.engine.messages import Done, Failed, Message, Ready, Submit, TokenOut
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.output_processor import TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.prompt_cache import Owner
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import FinishReason, SamplingParams, Usage


class FakeClient:
    """Records what it is told; the test says what comes back."""

    def __init__(self) -> None:
        self.submitted: list[list[Submit]] = []
        self.aborted: list[list[int]] = []
        self.dead = False
        self.on_frame: Any = None
        self.on_death: Any = None

    def submit(self, submits: list[Submit]) -> None:
        if self.dead:
            raise EngineDead("The engine is not running.")
        self.submitted.append(list(submits))

    def abort(self, ids: list[int]) -> None:
        self.aborted.append(list(ids))

    @property
    def ids(self) -> list[int]:
        return [submit.id for submit in self.submitted[-1]]

    def send(self, *messages: Message) -> None:
        self.on_frame(list(messages))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def async_engine(client: FakeClient, tiny: Tokenizer) -> AsyncEngine:
    return AsyncEngine(cast(EngineClient, client), tiny, Ready(100, 420, 10, 16, ()))


REQUEST = TextRequest(array("i", [5, 6, 7]), SamplingParams(max_tokens=20))


def out(number: int, tiny: Tokenizer, text: str) -> TokenOut:
    return TokenOut(number, tuple(tiny.encode(text, False)))


def end(number: int, reason: FinishReason = FinishReason.LENGTH, completion: int = 4) -> Done:
    return Done(number, reason, Usage(3, 0, completion))


async def collect(async_engine: AsyncEngine, request: TextRequest) -> list[list[TextDelta]]:
    return [deltas async for deltas in async_engine.stream(request)]


async def started(
    async_engine: AsyncEngine, client: FakeClient, request: TextRequest
) -> asyncio.Task[list[list[TextDelta]]]:
    """A task that reads the stream, once its sequences are submitted."""
    task = asyncio.create_task(collect(async_engine, request))
    while not client.submitted and not task.done():
        await asyncio.sleep(0)
    return task


async def test_one_list_for_each_frame(async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer) -> None:
    task = await started(async_engine, client, replace(REQUEST, n=2))
    first, second = client.ids
    client.send(out(first, tiny, "Hel"), out(second, tiny, "a"))
    await asyncio.sleep(0)
    client.send(out(first, tiny, "lo"), end(first), out(second, tiny, "b"))
    await asyncio.sleep(0)
    client.send(end(second))
    frames = await task
    assert [[(delta.index, delta.text) for delta in deltas] for deltas in frames] == [
        [(0, "Hel"), (1, "a")],
        [(0, "lo"), (0, ""), (1, "b")],
        [(1, "")],
    ]
    assert frames[2][0].finish is not None
    assert client.aborted == []
    assert async_engine.num_running == 0


async def test_frames_collect_while_the_reader_is_away(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    task = await started(async_engine, client, REQUEST)
    [number] = client.ids
    for letter in "abc":
        client.send(out(number, tiny, letter))
    client.send(end(number))
    [deltas] = await task
    assert "".join(delta.text for delta in deltas) == "abc"


async def test_n_sequences_go_out_in_one_call(async_engine: AsyncEngine, client: FakeClient) -> None:
    seeded = replace(REQUEST, n=3, params=replace(REQUEST.params, seed=41))
    task = await started(async_engine, client, seeded)
    assert len(client.submitted) == 1
    assert [submit.params.seed for submit in client.submitted[0]] == [41, 42, 43]
    other = asyncio.create_task(collect(async_engine, REQUEST))
    await asyncio.sleep(0)
    assert len({submit.id for submits in client.submitted for submit in submits}) == 4
    for submits in client.submitted:
        client.send(*(end(submit.id) for submit in submits))
    assert len(await task) == len(await other) == 1


async def test_nothing_is_sent_before_the_first_item_is_asked_for(
    async_engine: AsyncEngine, client: FakeClient
) -> None:
    stream = cast(Any, async_engine.stream(REQUEST))
    await stream.aclose()
    assert client.submitted == client.aborted == []


@pytest.mark.parametrize("how", ["before any frame", "between frames", "with frames unread"])
async def test_cancelled_reader_aborts_once(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer, how: str
) -> None:
    task = await started(async_engine, client, replace(REQUEST, n=2))
    first, second = client.ids
    if how != "before any frame":
        client.send(out(first, tiny, "a"), out(second, tiny, "b"))
    if how == "between frames":
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.aborted == [[first, second]]
    assert async_engine.num_running == 0
    client.send(out(first, tiny, "late"), end(first, FinishReason.ABORT), end(second, FinishReason.ABORT))
    assert client.aborted == [[first, second]]


@pytest.mark.parametrize("leave", ["aclose", "exception"])
async def test_left_iterator_aborts_only_what_runs(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer, leave: str
) -> None:
    async def read() -> None:
        async with aclosing(cast(Any, async_engine.stream(replace(REQUEST, n=2)))) as stream:
            async for _ in stream:
                if leave == "exception":
                    raise ValueError("reader")
                return

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    first, second = client.ids
    client.send(out(first, tiny, "a"), end(first), out(second, tiny, "b"))
    if leave == "exception":
        with pytest.raises(ValueError, match="reader"):
            await task
    else:
        await task
    assert client.aborted == [[second]]


async def test_stop_string_aborts_once_and_ends_with_done(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    task = await started(async_engine, client, replace(REQUEST, stop=("!",), n=2))
    first, second = client.ids
    client.send(out(first, tiny, "yes! more"), out(second, tiny, "b!"))
    assert client.aborted == [[first, second]]
    client.send(out(first, tiny, "even more"))
    client.send(end(first, FinishReason.ABORT, 9), end(second, FinishReason.LENGTH, 2))
    deltas = [delta for deltas in await task for delta in deltas]
    assert "".join(delta.text for delta in deltas if delta.index == 0) == "yes"
    finishes = [delta.finish for delta in deltas if delta.finish is not None]
    assert [(finish.reason, finish.stop_reason) for finish in finishes] == [(FinishReason.STOP, "!")] * 2
    assert finishes[0].usage.completion == len(tiny.encode("yes!", False))
    assert client.aborted == [[first, second]]


async def test_leaving_after_a_stop_string_does_not_abort_again(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    task = await started(async_engine, client, replace(REQUEST, stop=("!",), n=2))
    first, second = client.ids
    client.send(out(first, tiny, "yes!"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.aborted == [[first], [second]]


async def test_refused_sequence_ends_the_request(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    task = await started(async_engine, client, replace(REQUEST, n=3))
    first, second, third = client.ids
    client.send(out(first, tiny, "a"), Failed(second, "CapacityError", "The queue is full."), end(third))
    with pytest.raises(CapacityError, match="The queue is full"):
        await task
    assert client.aborted == [[first]]
    assert async_engine.num_running == 0


async def test_refusal_keeps_field_and_code(async_engine: AsyncEngine, client: FakeClient) -> None:
    task = await started(async_engine, client, REQUEST)
    client.send(Failed(client.ids[0], "UnknownModel", "The model 'x' does not exist.", "model", "model_not_found"))
    with pytest.raises(RequestError) as caught:
        await task
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert client.aborted == []


async def test_text_that_came_before_an_error_is_delivered(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    seen = []

    async def read() -> None:
        async for deltas in async_engine.stream(REQUEST):
            seen.extend(deltas)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    client.send(out(client.ids[0], tiny, "abc"))
    client.on_death(EngineDead("The engine process has ended."))
    with pytest.raises(EngineDead, match="The engine process has ended"):
        await task
    assert [delta.text for delta in seen] == ["abc"]


async def test_death_ends_all_streams_and_aborts_none(async_engine: AsyncEngine, client: FakeClient) -> None:
    tasks = [asyncio.create_task(collect(async_engine, replace(REQUEST, n=n))) for n in (1, 2, 3)]
    await asyncio.sleep(0)
    assert async_engine.num_running == 6
    client.dead = True
    client.on_death(EngineDead("gone"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDead] * 3
    assert client.aborted == []
    assert async_engine.num_running == 0
    with pytest.raises(EngineDead):
        await collect(async_engine, REQUEST)
    assert async_engine.num_running == 0


async def test_bug_in_one_stream_ends_no_other(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = await started(async_engine, client, REQUEST)
    [first] = client.ids
    healthy = asyncio.create_task(collect(async_engine, REQUEST))
    await asyncio.sleep(0)
    [second] = client.ids
    client.send(TokenOut(first, cast(Any, (["no token"],))), out(second, tiny, "fine"), end(second))
    with pytest.raises(TypeError):
        await broken
    [deltas] = await healthy
    assert deltas[0].text == "fine"
    assert client.aborted == [[first]]


async def test_requests_are_checked(async_engine: AsyncEngine, client: FakeClient) -> None:
    with pytest.raises(RequestError):
        async_engine.limits.check(replace(REQUEST, params=replace(REQUEST.params, max_tokens=98)))
    with pytest.raises(RequestError, match="prompt must be a token id from 0 to 419"):
        async_engine.limits.check(replace(REQUEST, tokens=array("i", [420])))
    assert client.submitted == []
    assert async_engine.limits.default_max_tokens(3) == 97
    assert (async_engine.max_model_len, async_engine.vocab_size) == (100, 420)


async def test_encode_short_and_long(async_engine: AsyncEngine, tiny: Tokenizer) -> None:
    for text in ("the fox", "the fox " * 1000):
        for special in (False, True, False):
            assert await async_engine.encode(text, add_special_tokens=special, owner=Owner()) == tiny.encode(
                text, special
            )
    for special in (False, True):
        with pytest.raises(RequestError, match=r"surrogate, U\+D800, at position 3000"):
            await async_engine.encode("x" * 3000 + "\ud800", add_special_tokens=special, owner=Owner())


class Watched(Tokenizer):
    """Notes which threads cut and encode, and whether the event loop turned meanwhile."""

    threads: set[int]

    def cuts(self, text: str) -> Iterator[int]:
        self.threads.add(threading.get_ident())
        return super().cuts(text)

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens)


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A tokenizer with as many added tokens as Gemma's, most of them alike."""
    definition = json.loads(train_byte_level().to_str())
    first = definition["added_tokens"][0]
    names = [f"<unused{number}>" for number in range(6_400)]
    definition["added_tokens"] += [first | {"id": 420 + at, "content": name} for at, name in enumerate(names)]
    tokenizer = Watched.load(write_folder(tmp_path_factory.mktemp("many"), definition))
    assert isinstance(tokenizer, Watched)
    tokenizer.threads = set()
    return tokenizer


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", ["<" * 400_000, "<unused" * 60_000, "<unused17> the fox " * 20_000], ids=str.__len__)
async def test_long_texts_leave_the_event_loop_alone(
    client: FakeClient, many_tokens: Watched, text: str, special: bool
) -> None:
    async_engine = AsyncEngine(cast(EngineClient, client), many_tokens, Ready(100, 6_820, 10, 16, ()))
    many_tokens.threads.clear()
    job = asyncio.create_task(async_engine.encode(text, add_special_tokens=special, owner=Owner()))
    beats = 0
    while not job.done():
        await asyncio.sleep(0)
        beats += 1
    assert (await job)[-5:] == Tokenizer.encode(many_tokens, text, special)[-5:]
    assert threading.get_ident() not in many_tokens.threads
    assert beats > 10


async def test_short_texts_are_encoded_at_once(client: FakeClient, many_tokens: Watched) -> None:
    async_engine = AsyncEngine(cast(EngineClient, client), many_tokens, Ready(100, 6_820, 10, 16, ()))
    many_tokens.threads.clear()
    for special in (False, True):
        await async_engine.encode("<unused17>" * 200, add_special_tokens=special, owner=Owner())
    assert many_tokens.threads == {threading.get_ident()}


async def test_long_texts_with_little_new_are_encoded_at_once(client: FakeClient, many_tokens: Watched) -> None:
    async_engine = AsyncEngine(cast(EngineClient, client), many_tokens, Ready(100, 6_820, 10, 16, ()))
    known, new = "<unused17>" + "the fox " * 400, "<unused17> the end"
    for text, is_quick in ((known, False), (known + new, True), (known + new + known[1:], False)):
        many_tokens.threads.clear()
        tokens = await async_engine.encode(text, add_special_tokens=False, owner=Owner())
        encoding = many_tokens.threads - {threading.get_ident()}
        assert bool(encoding) is not is_quick
        assert tokens == Tokenizer.encode(many_tokens, text, False)


async def test_time_that_is_up_before_the_first_token_is_an_error(
    async_engine: AsyncEngine, client: FakeClient
) -> None:
    task = await started(async_engine, client, replace(REQUEST, n=2, timeout=0.01))
    with pytest.raises(DeadlineExceeded, match=r"0\.01 seconds"):
        await task
    assert client.aborted == [client.ids] and async_engine.num_running == 0


async def test_time_that_is_up_later_ends_what_has_begun(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()
    with monkeypatch.context() as patch:
        call_later = loop.call_later

        def noted(delay: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
            timers.append((delay, partial(callback, *args)))
            return call_later(delay, callback, *args)

        patch.setattr(loop, "call_later", noted)
        task = await started(async_engine, client, replace(REQUEST, n=3, timeout=60.0))
    first, second, third = client.ids
    client.send(out(first, tiny, "Hel"), out(second, tiny, "a"), end(second))
    [(delay, expire)] = timers
    assert delay == 60.0 and not client.aborted
    expire()  # as the loop does then
    assert client.aborted == [[first, third]]
    client.send(end(first, FinishReason.ABORT), end(third, FinishReason.LENGTH))
    finishes = {delta.index: delta.finish for deltas in await task for delta in deltas if delta.finish}
    reasons = {index: finish.reason for index, finish in finishes.items()}
    assert reasons == {0: FinishReason.TIMEOUT, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert finishes[0].usage == Usage(3, 0, 4) and client.aborted == [[first, third]]


async def test_an_answer_in_time_leaves_no_timer(
    async_engine: AsyncEngine, client: FakeClient, tiny: Tokenizer
) -> None:
    task = await started(async_engine, client, replace(REQUEST, timeout=60.0))
    client.send(out(client.ids[0], tiny, "a"), end(client.ids[0]))
    await task
    assert client.aborted == []
    for timeout in (0.0, -1.0, float("nan"), float("inf"), True, 1e6):
        with pytest.raises(RequestError, match="timeout"):
            async_engine.limits.check(replace(REQUEST, timeout=timeout))


async def test_requests_that_come_together_are_encoded_one_after_another(
    async_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *given: (stages.append("encode"), encode(*given))[1])

    async def request(text: str) -> None:
        stages.append("prepare")
        await async_engine.encode(text, add_special_tokens=False, owner=Owner())
        stages.append("submit")

    await asyncio.gather(*(request(text) for text in ("one", "two", "three")))
    assert stages == ["prepare"] * 3 + ["encode"] * 3 + ["submit"] * 3
