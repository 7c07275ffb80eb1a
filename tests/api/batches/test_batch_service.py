"""``/v1/files`` and ``/v1/batches`` through OpenAI's client: the whole way, every state, errors, and who sees what."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.api_live import Live, make_state, serve
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.batches import batch_service as desk_module
from rootgraft.api.batches.batch_files import MAX_CUSTOM_ID, BatchOutput
from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.batches.fair_slots import FairSlots
from rootgraft.api.config import ServerConfig
from rootgraft.api.routes import files as files_module
from rootgraft.api.storage.batch_store import BatchRecords
from rootgraft.api.storage.file_store import FileStore, new_file_id
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.types import Priority
from rootgraft.grammar.spec import GrammarSpec

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> str:
    asked = {"messages": [{"role": "user", "content": str(number)}]} if url == CHAT else {}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": asked | body})


MAX_LINE = 4 << 20


def padded(text: str, size: int) -> str:
    """A line with as many spaces as it lacks."""
    return text[:-1] + " " * (size - len(text)) + text[-1]


def named(custom_id: str) -> str:
    return json.dumps({**json.loads(line(0)), "custom_id": custom_id})


def deep(levels: int) -> str:
    """A line of so many lists and objects inside each other."""
    return line(0)[:-2] + ', "x": ' + "[" * (levels - 2) + "9" * 20 + "]" * (levels - 2) + "}}"


@contextmanager
def start(folder: Path, **options: Any) -> Iterator[Live]:
    state = make_state(ServerConfig(batch_dir=str(folder), **options))
    state.stores.batches = BatchService(folder, state.options.max_stored_file_bytes, state.limits.caller_named)
    for live in serve(state):
        live.loop.call_soon_threadsafe(state.stores.batches.resume, state.stores.internal_client)
        try:
            yield live
        finally:
            asyncio.run_coroutine_threadsafe(state.stores.batches.close(), live.loop).result(HANG_SECONDS)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with start(tmp_path / "batches") as live:
        yield live


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with live.openai() as client:
        yield client


def upload(client: openai.OpenAI, *lines: str, **more: Any) -> Any:
    data = io.BytesIO("\n".join(lines).encode() + b"\n")
    return client.files.create(file=("in.jsonl", data), purpose="batch", **more)


def begin(client: openai.OpenAI, *lines: str, endpoint: Any = CHAT, **more: Any) -> Any:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "an answer appears twice"
    return found


def test_the_whole_way(live: Live, client: openai.OpenAI) -> None:
    batch = begin(client, *map(line, range(40)), line(99, max_tokens=-1), metadata={"a": "b"})
    assert (batch.object, batch.status, batch.endpoint, batch.metadata) == ("batch", "validating", CHAT, {"a": "b"})
    assert batch.output_file_id is None and batch.expires_at == batch.created_at + 86400
    done = ended(client, batch)
    assert done.status == "completed" and done.errors is None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (41, 40, 1)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = answers(client, done.output_file_id)
    assert found.keys() == {f"r{number}" for number in range(40)}
    body = found["r7"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "answer 0" and found["r7"]["error"] is None
    refused = answers(client, done.error_file_id)
    assert refused["r99"]["response"]["status_code"] == 400
    assert refused["r99"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert {request.priority for request in live.async_engine.seen} == {Priority.BATCH} and len(
        live.async_engine.seen
    ) == 40
    assert done.usage.output_tokens == 40 * 8 and done.usage.total_tokens > done.usage.input_tokens > 0
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(client.files.content(output.id).content)
    assert live.state.stats()["batches_unfinished"] == 0 and live.state.stats()["files_stored_bytes"] > 0


@pytest.mark.parametrize(
    ("endpoint", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})]
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    done = ended(client, begin(client, line(1, endpoint, **body), "", endpoint=endpoint))
    assert done.status == "completed" and done.request_counts.total == 1 and done.error_file_id is None
    assert answers(client, done.output_file_id)["r1"]["response"]["status_code"] == 200
    assert done.usage.output_tokens == 8


def test_a_byte_order_mark_is_no_part_of_the_first_line(client: openai.OpenAI) -> None:
    done = ended(client, begin(client, "\ufeff" + line(1), line(2)))
    assert done.status == "completed" and done.request_counts.completed == 2


def test_integers_beyond_64_bits_are_exact_in_schemas(live: Live, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 2**64 + 1}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    live.async_engine.say = lambda request, index: '{"x": 18446744073709551617}'
    for endpoint, body in ((CHAT, {"guided_json": schema}), ("/v1/responses", {"input": "x", "text": text})):
        done = ended(client, begin(client, line(1, endpoint, **body), endpoint=endpoint))
        answer = answers(client, done.output_file_id)["r1"]["response"]
        assert answer["status_code"] == 200 and live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)
    assert answer["body"]["text"]["format"]["schema"] == schema


def test_files(client: openai.OpenAI) -> None:
    made = [upload(client, line(number)) for number in range(3)]
    assert made[0].object == "file" and made[0].filename == "in.jsonl" and made[0].status == "processed"
    assert made[0].id.startswith("file-") and made[0].bytes == len(line(0)) + 1
    assert made[0].expires_at == made[0].created_at + 30 * 86400
    assert client.files.retrieve(made[1].id) == made[1]
    assert client.files.content(made[2].id).text == line(2) + "\n"
    told = client.files.with_raw_response.content(made[2].id).headers
    assert (told["x-content-type-options"], told["content-disposition"]) == ("nosniff", "attachment")
    assert [file.id for file in client.files.list(order="asc")] == [file.id for file in made]
    assert [file.id for file in client.files.list(limit=1)] == [file.id for file in reversed(made)]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    short = upload(client, line(1), expires_after={"anchor": "created_at", "seconds": 3600})
    assert short.expires_at == short.created_at + 3600


def test_files_expire(live: Live, client: openai.OpenAI) -> None:
    file = upload(client, line(1))
    live.state.stores.batches.files._clock = lambda: file.expires_at - 1
    assert client.files.retrieve(file.id).id == file.id
    live.state.stores.batches.files._clock = lambda: file.expires_at
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert not list((Path(live.state.options.batch_dir) / "files").iterdir())


@pytest.mark.parametrize(
    ("lines", "code", "number", "said"),
    [
        ([line(0), "{"], "invalid_request", 2, "is not a JSON object"),
        ([line(0), line(0)], "duplicate_custom_id", 2, "used twice"),
        ([line(0, "/v1/completions", prompt="x")], "invalid_request", 1, "url /v1/chat/completions"),
        ([line(0, stream=True)], "invalid_request", 1, "does not ask for a stream"),
        ([line(0, background=True)], "invalid_request", 1, "or a background response"),
        ([line(0), padded(line(1), MAX_LINE + 1)], "invalid_request", 2, f"longer than the limit of {MAX_LINE} bytes"),
        ([named("x" * (MAX_CUSTOM_ID + 1))], "invalid_request", 1, f"at most {MAX_CUSTOM_ID} characters"),
        ([deep(100_000)], "invalid_request", 1, "is not a JSON object"),
        ([line(0).replace('"body": {', '"body": {"x": NaN, ')], "invalid_request", 1, "is not a JSON object"),
    ],
)
def test_an_input_that_is_no_batch(
    live: Live, client: openai.OpenAI, lines: list[str], code: str, number: int, said: str
) -> None:
    done = ended(client, begin(client, *lines))
    [error] = done.errors.data
    assert (done.status, error.code, error.line) == ("failed", code, number) and said in error.message
    assert done.output_file_id is done.error_file_id is None and not live.async_engine.seen


def test_lines_and_ids_may_be_as_long_as_that(live: Live, client: openai.OpenAI) -> None:
    deepest = [deep(levels).replace('"r0"', f'"r{levels}"') for levels in (240, 500, 900)]
    done = ended(client, begin(client, padded(line(0), MAX_LINE), named("x" * MAX_CUSTOM_ID), *deepest))
    assert done.status == "completed" and done.request_counts.completed == 2
    refused = [each["response"] for each in answers(client, done.error_file_id).values()]
    assert [(each["status_code"], each["body"]["error"]["param"]) for each in refused] == [(400, "x")] * 3


def test_no_line_is_read_on_the_event_loop(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line that has no answer may be behind fifty thousand that have one."""
    read, threads = desk_module.read_requests, set[str]()

    def noted(*arguments: Any) -> Iterator[Any]:
        for request in read(*arguments):
            threads.add(threading.current_thread().name)
            yield request

    monkeypatch.setattr(desk_module, "read_requests", noted)
    assert ended(client, begin(client, *map(line, range(20)))).request_counts.completed == 20
    assert threads and all(name.startswith("batch-files") for name in threads), threads


def test_files_of_clients_are_the_owners_alone(live: Live, client: openai.OpenAI) -> None:
    """Other users of the machine read neither questions nor answers."""
    hold(live)
    batch = begin(client, line(0))
    folder = Path(live.state.options.batch_dir)
    wait_until(lambda: any(folder.rglob("*.answers")))
    found = [folder, *folder.rglob("*")]
    release(live)
    found += [path for path in folder.rglob("*") if ended(client, batch) and path not in found]
    modes = [(path.is_dir(), path.stat().st_mode & 0o777) for path in found if path.exists()]
    assert len(modes) > 8 and set(modes) == {(True, 0o700), (False, 0o600)}


def hold(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()


def release(live: Live) -> None:
    live.loop.call_soon_threadsafe(live.async_engine.gate.set)


def test_a_batch_that_is_cancelled_keeps_what_is_answered(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "WORKERS", 2)
    gate = asyncio.Event()

    def say(request: Any, index: int) -> str:
        if request.params.seed == 1:
            live.async_engine.gate = gate  # from here on nothing comes
        return "answer 0"

    live.async_engine.say = say
    batch = begin(client, *map(line, range(2)), *(line(number, seed=1) for number in range(2, 9)))
    wait_until(lambda: live.async_engine.gate is not None)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at
    unanswered = answers(client, done.error_file_id)
    answered = answers(client, done.output_file_id) if done.output_file_id else {}
    assert answered.keys() | unanswered.keys() == {f"r{number}" for number in range(9)}
    assert len(unanswered) == 9 - len(answered) >= 7
    assert {each["error"]["code"] for each in unanswered.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_that_is_cancelled_while_its_answers_are_opened_keeps_no_file_open(
    live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, gate = threading.Event(), threading.Event()
    opened, closed = list[BatchOutput](), list[BatchOutput]()

    class Slow(BatchOutput):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(self)
            opening.set()
            gate.wait(HANG_SECONDS)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(desk_module, "BatchOutput", Slow)
    batch = begin(client, *map(line, range(4)))
    assert opening.wait(HANG_SECONDS)
    client.batches.cancel(batch.id)
    gate.set()
    assert ended(client, batch).status == "cancelled"
    wait_until(lambda: len(closed) == len(opened))
    assert len(opened) == 2 and set(closed) == set(opened), "one is opened again to count the answers"


def test_a_crash_while_a_cancelled_batch_ends_leaves_no_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are written again under the same ids, as those of every other batch."""
    move = BatchRecords.move

    def fail(records: BatchRecords, record: Any, status: str) -> None:
        if status == "cancelled":
            raise OSError(28, "No space left on device")
        move(records, record, status)

    monkeypatch.setattr(BatchRecords, "move", fail)
    with start(tmp_path) as live, live.openai() as client:
        hold(live)
        batch = begin(client, *map(line, range(3)))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        client.batches.cancel(batch.id)
        wait_until(lambda: any(file.purpose == "batch_output" for file in client.files.list()))
    monkeypatch.setattr(BatchRecords, "move", move)
    with start(tmp_path) as live, live.openai() as client:
        done = ended(client, batch)
        assert done.status == "cancelled" and len(answers(client, done.error_file_id)) == 3
        files = [file.id for file in client.files.list() if file.purpose == "batch_output"]
        assert files == [done.error_file_id] and done.output_file_id is None


def test_a_file_stays_while_a_batch_reads_it(live: Live, client: openai.OpenAI) -> None:
    """Its time may be up before the batch's: the answers so far would be lost with it."""
    hold(live)
    file = upload(client, *map(line, range(3)), expires_after={"anchor": "created_at", "seconds": 3600})
    batch = begin_with(client, file.id)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    live.state.stores.batches.files._clock = lambda: file.expires_at
    assert client.files.retrieve(file.id).id == file.id
    client.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.status == "cancelled" and len(answers(client, done.error_file_id)) == 3
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_batch_whose_time_is_up(live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_POLL_SECONDS", 0.01)
    hold(live)
    batch = begin(client, *map(line, range(3)))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    live.state.stores.batches.records._clock = lambda: batch.expires_at
    done = ended(client, batch)
    assert (done.status, done.expired_at) == ("expired", batch.expires_at) and done.output_file_id is None
    assert {each["error"]["code"] for each in answers(client, done.error_file_id).values()} == {"batch_expired"}
    with pytest.raises(openai.BadRequestError, match="status 'expired'"):
        client.batches.cancel(batch.id)


def test_a_batch_whose_time_is_up_while_others_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(desk_module, "MAX_AT_ONCE", 1)
    with start(tmp_path / "b") as live, live.openai() as client:
        hold(live)
        first, second = (begin(client, line(number)) for number in range(2))
        wait_until(lambda: len(live.async_engine.seen) == 1)
        late = max(first.expires_at, second.expires_at)  # they may have come in two seconds
        live.state.stores.batches.records._clock = lambda: late
        live.state.stores.batches.records.get("", first.id).created_at += 60
        assert ended(client, second).status == "expired"
        release(live)
        assert ended(client, first).status == "completed" and len(live.async_engine.seen) == 1


def test_batches_that_wait_for_their_turn_have_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of each tenant may wait."""
    counts = {"now": 0, "most": 0}

    class Counted(BatchOutput):
        def __enter__(self) -> Counted:
            counts["now"] += 1
            counts["most"] = max(counts.values())
            return self

        def __exit__(self, *error: Any) -> None:
            counts["now"] -= 1
            super().__exit__(*error)

    monkeypatch.setattr(desk_module, "BatchOutput", Counted)
    monkeypatch.setattr(desk_module, "MAX_AT_ONCE", 2)
    with start(tmp_path / "b") as live, live.openai() as client:
        hold(live)
        batches = [begin(client, *map(line, range(3))) for _ in range(8)]
        wait_until(lambda: all(client.batches.retrieve(batch.id).status == "in_progress" for batch in batches))
        wait_until(lambda: len(live.async_engine.seen) == 6)
        assert counts == {"now": 2, "most": 2}
        assert client.batches.cancel(batches[-1].id) and ended(client, batches[-1]).status == "cancelled"
        release(live)
        assert {ended(client, batch).status for batch in batches[:-1]} == {"completed"}


def test_a_tenant_with_many_batches_holds_no_other_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of the requests in flight is free for another tenant's as soon as a request of its own ends."""
    monkeypatch.setattr(desk_module, "MAX_IN_FLIGHT", 4)
    monkeypatch.setattr(desk_module, "LEAST_IN_FLIGHT", 2)
    with (
        start(tmp_path / "b", api_key=("one", "two")) as live,
        live.openai(api_key="one") as mine,
        live.openai(api_key="two") as other,
    ):
        first, second = (live.state.limits.keys.find(key).tenant for key in (b"one", b"two"))
        hold(live)
        many = [begin(mine, *map(line, range(60))) for _ in range(2)]
        wait_until(lambda: len(live.async_engine.seen) == 4)
        few = begin(other, *map(line, range(6)))
        wait_until(lambda: len(live.async_engine.seen) == 6)
        release(live)
        assert ended(other, few).status == "completed"
        order = [request.tenant for request in live.async_engine.seen]
        assert order[:6] == [first] * 4 + [second] * 2, order
        # How many of the first's requests come before the last of the second depends on which answers end first. If
        # the second waited for one of the first's batches to end, it would be at least 60.
        assert order.count(second) == 6 and second not in order[40:], order
        assert all(ended(mine, batch).status == "completed" for batch in many)
        assert len(live.async_engine.seen) == 2 * 60 + 6


def test_a_full_disk_loses_no_answer(live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_RETRY_SECONDS", 0.01)
    add, calls = BatchOutput.add, iter(range(100))

    def fail_twice(self: BatchOutput, *answer: Any) -> None:
        if next(calls) in (3, 6):
            raise ConfigError("the output cannot be written: No space left on device.")
        add(self, *answer)

    monkeypatch.setattr(BatchOutput, "add", fail_twice)
    done = ended(client, begin(client, *map(line, range(9))))
    assert done.status == "completed" and len(answers(client, done.output_file_id)) == 9


def test_a_batch_that_is_cancelled_before_it_is_read(live: Live, client: openai.OpenAI) -> None:
    batch_service = live.state.stores.batches
    batch_service._start = lambda record: None
    batch = begin(client, "nonsense")
    del batch_service._start
    client.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.status == "cancelled" and done.output_file_id is None and done.error_file_id is None


def test_batches_of_embeddings_and_of_decisions(live: Live, client: openai.OpenAI) -> None:
    questions = [{"type": "predicate", "instructions": "x"}]
    for url, body in (
        ("/v1/embeddings", {"input": ["ab", "c"]}),
        ("/v1/decisions", {"input": "ab", "questions": questions}),
    ):
        done = ended(client, begin(client, *(line(number, url, **body) for number in range(3)), endpoint=url))
        assert (done.status, done.request_counts.completed) == ("completed", 3)
        for each in answers(client, done.output_file_id).values():
            assert len(each["response"]["body"].get("data") or each["response"]["body"]["answers"]) in (1, 2)
    assert all(request.priority is Priority.BATCH for request in live.async_engine.seen)


def test_lists_of_batches(client: openai.OpenAI) -> None:
    made = [ended(client, begin(client, line(number))) for number in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == [batch.id for batch in reversed(made)]
    assert not client.batches.list(after=made[0].id).data
    for wrong in ({"after": "nobody"}, {"limit": 0}, {"limit": 101}):
        with pytest.raises(openai.BadRequestError):
            client.batches.list(**wrong)


def test_what_is_no_batch(client: openai.OpenAI) -> None:
    file = upload(client, line(1))
    right: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, status, param in (
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"x": "y" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, 400, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}}, 400, "output_expires_after.seconds"),
        ({"extra_body": {"priority": "batch"}}, 400, "priority"),
        ({"input_file_id": "file-none"}, 404, None),
        ({"input_file_id": "../lock"}, 404, None),
    ):
        with pytest.raises(openai.APIStatusError) as told:
            client.batches.create(**{**right, **wrong})
        assert (told.value.status_code, told.value.param) == (status, param), wrong
    done = ended(client, client.batches.create(**right))
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        client.batches.create(**{**right, "input_file_id": done.output_file_id})
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, 400, "other"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"\n\n"}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"\n" * 2040 + b" "}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x" * 2049}}, 400, "file"),
        ({"data": {"purpose": "batch"}, "files": {"file": b"x\n" * 6}}, 400, "file"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, 400, "purpose"),
        ({"files": {"file": b"x"}}, 400, "purpose"),
        ({"files": {"purpose": (None, b"batch")}}, 400, "file"),
        ({"files": {"purpose": (None, b"batch"), "file": (None, b"x")}}, 400, "file"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "60"}, "files": {"file": b"x"}}, 400,
         "expires_after.anchor"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "60", "expires_after[anchor]": "created_at"},
          "files": {"file": b"x"}}, 400, "expires_after.seconds"),
        ({"json": {"purpose": "batch"}}, 415, None),
        ({"content": b"x" * 70000, "headers": {"content-type": "multipart/form-data; boundary=b"}}, 413, None),
        ({"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, "file"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; charset=undefined"}}, 415, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; charset=utf-7; boundary=b"}}, 415, None),
    ],
)  # fmt: skip
def test_uploads_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], status: int, param: str | None
) -> None:
    monkeypatch.setattr(files_module, "MAX_LINES", 5)
    with start(tmp_path / "small", max_file_bytes=2048) as live, live.http() as http:
        reply = http.post("/v1/files", **form)
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"
        kept = http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * 2046 + b"\n"})
        assert kept.status_code == 200
        assert http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x\n" * 5}).status_code == 200


def test_the_storage_is_bounded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_stored_file_bytes": 4000, "max_file_bytes": 4000, "api_key": ("one", "two")}
    with start(tmp_path / "b", **options) as live, live.http() as http:
        for key, size, status in (("one", 2001, 413), ("one", 2000, 200), ("one", 1, 413), ("two", 2000, 200)):
            form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"x" * size}}
            reply = http.post("/v1/files", headers={"authorization": f"Bearer {key}"}, **form)
            assert reply.status_code == status
            assert status == 200 or reply.json()["error"]["code"] == "storage_full"


def test_a_file_and_a_batch_belong_to_their_tenant(tmp_path: Path) -> None:
    with (
        start(tmp_path / "b", api_key=("one", "two")) as live,
        live.openai(api_key="one") as mine,
        live.openai(api_key="two") as other,
    ):
        batch = ended(mine, begin(mine, line(1)))
        assert batch.status == "completed"
        assert {request.tenant for request in live.async_engine.seen} == {live.state.limits.keys.find(b"one").tenant}
        for call in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: begin_with(other, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not list(other.files.list()) and not list(other.batches.list())


def begin_with(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


def test_a_key_that_is_taken_back_asks_nothing_more(tmp_path: Path) -> None:
    with start(tmp_path / "b", api_key=("one", "two")) as live, live.openai(api_key="one") as client:
        live.state.stores.batches._slots = slots = FairSlots(0)  # for nobody
        batch = begin(client, line(1))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        keys, owner = live.state.limits.keys, live.state.limits.keys.find(b"one")
        record = live.state.stores.batches.records.get(owner.tenant, batch.id)
        keys._keys = keys._given[1:]
        live.loop.call_soon_threadsafe(slots._give_back, "nobody")
        wait_until(lambda: record.has_ended)
        keys._keys = keys._given
        done = client.batches.retrieve(batch.id)
        refused = answers(client, done.error_file_id)["r1"]["response"]
        assert refused["status_code"] == 401 and refused["body"]["error"]["code"] == "invalid_api_key"
        assert not live.async_engine.seen


def test_unfinished_batches_are_bounded(live: Live, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MAX_UNFINISHED", 2)
    monkeypatch.setattr(desk_module, "MAX_RECORDS", 3)
    hold(live)
    made = [begin(client, line(number)) for number in range(2)]
    with pytest.raises(openai.RateLimitError):
        begin(client, line(9))
    release(live)
    assert [ended(client, batch).status for batch in made] == ["completed"] * 2
    later = [ended(client, begin(client, line(number))) for number in range(3, 5)]
    assert {batch.id for batch in client.batches.list()} == {made[1].id, *(batch.id for batch in later)}


def test_paths_lead_nowhere(live: Live, client: openai.OpenAI) -> None:
    upload(client, line(1))
    with live.http() as http:
        for name in ("..%2Flock", "..", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "file-" + "0" * 32, "file-*", "%00"):
            for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
                assert http.get(path).status_code == 404, path
    data = io.BytesIO(line(1).encode())
    named = client.files.create(file=("../../../etc/cron.d/x", data), purpose="batch")
    assert client.files.content(named.id).text == line(1)
    folder = Path(live.state.options.batch_dir)
    assert {path.parent for path in folder.rglob("*") if path.is_file()} == {folder, folder / "files"}


def test_without_a_folder_there_are_no_files() -> None:
    for live in serve(make_state()):
        with live.openai() as client, pytest.raises(openai.BadRequestError, match="--batch-dir"):
            client.files.list()


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    first = BatchService(tmp_path, 1000, lambda *_: None)
    with pytest.raises(ConfigError, match="another server"):
        BatchService(tmp_path, 1000, lambda *_: None)
    asyncio.run(first.close())


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    with start(tmp_path) as live, live.openai() as client:
        hold(live)
        batch = begin(client, *map(line, range(3)))
        wait_until(lambda: len(live.async_engine.seen) == 3)
    (tmp_path / "files" / f"file-{'0' * 32}.part").write_text("half")
    account = tmp_path / "batches" / f"{batch.id}.answers"
    whole = {"custom_id": "r1", "response": {"status_code": 200, "request_id": "", "body": {"usage": {}}}}
    account.write_text(json.dumps(whole) + '\n{"id":"batch_req_0a","custom_id":"r2","resp')
    with start(tmp_path) as live, live.openai() as client:
        done = ended(client, batch)
        assert done.status == "completed" and done.request_counts.completed == 3
        found = answers(client, done.output_file_id)
        assert found.keys() == {"r0", "r1", "r2"} and found["r1"] == whole
        assert len(live.async_engine.seen) == 2
    assert not account.exists() and not list(tmp_path.rglob("*.part"))


def test_only_leftovers_of_our_own_are_cleaned_up(tmp_path: Path) -> None:
    """An operator may point at a folder in which other things lie."""
    store = FileStore(tmp_path, 1000)
    kept = store.write(store.new("", "a.jsonl", "batch", 3, None), [b"{}\n"])
    others = [tmp_path / "notes.txt", tmp_path / "file-list.json.bak"]
    leftover = tmp_path / f"{new_file_id()}.part"
    for path in (*others, leftover):
        path.write_text("x")
    (tmp_path / "folder").mkdir()
    again = FileStore(tmp_path, 1000)
    assert [file.id for file in again.of("")] == [kept.id]
    assert all(path.exists() for path in others) and not leftover.exists()


def test_a_line_with_an_image_is_refused_by_its_field(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]
    done = ended(client, begin(client, line(0), line(1, messages=asked)))
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
    refused = answers(client, done.error_file_id)["r1"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "messages[0].content[1].type"


def test_records_of_another_version_are_not_used_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch, file_id = tmp_path / "batch_1.json", new_file_id()
    batch.write_text(json.dumps({"owner": "", "key": "", "total": 3, "in_progress_at": 5}))
    metadata, content = tmp_path / f"{file_id}.json", tmp_path / f"{file_id}.data"
    metadata.write_text("nonsense")
    content.write_bytes(b"lines")
    assert not BatchRecords(tmp_path).running
    assert not FileStore(tmp_path, 1000).num_bytes
    assert [path.exists() for path in (batch, metadata, content)] == [True] * 3
    assert [record.args[0] for record in caplog.records if record.args] == [batch, metadata]
