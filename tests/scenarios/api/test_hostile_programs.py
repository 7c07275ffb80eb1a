"""Programs that clients and publishers bring: the server answers others while one runs that does not end.

Told by states: the others' requests are over while the hostile one is not, and that ends when its process does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.api.api_live import Live
from support.api.key_files import entry, write
from support.machine.waits import HANG_SECONDS, wait_until

from benchmarks.hostile_programs import LOOPS, doubling, unevaluated
from rootgraft.api.config import ServerConfig
from rootgraft.api.structured import output_check
from rootgraft.engine.sandbox import program_pool
from rootgraft.engine.text import chat_template
from rootgraft.engine.text.chat_template import ChatTemplates

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}hi"


def schema_body(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"model": "tiny", "messages": MESSAGES, "response_format": form}


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def workers() -> Iterator[psutil.Process]:
    """The processes of programs; one that ends meanwhile, as of an earlier test, is none."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any("program_worker" in part for part in child.cmdline()):
                yield child


def busy_worker() -> psutil.Process:
    """The worker process that computes: its processor time grows, whatever it has taken in earlier tests."""
    first: dict[int, float] = {}
    found: list[psutil.Process] = []

    def is_found() -> bool:
        for worker in workers():
            with suppress(psutil.Error):
                taken = worker.cpu_times().user
                if taken - first.setdefault(worker.pid, taken) > 1.0:
                    found.append(worker)
        return bool(found)

    wait_until(is_found)
    return found[0]


def check_that_others_are_served(live: Live, hostile: Any) -> None:
    with live.http() as http:
        for _ in range(20):
            assert http.get("/health").status_code == 200
        answer = http.post(CHAT, json={"model": "tiny", "messages": MESSAGES}).json()
        assert answer["choices"][0]["message"]["content"] == "answer 0"
        assert http.get("/health").status_code == 200
    assert not hostile.done()


def test_a_chat_template(live: Live, clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 600.0)
    monkeypatch.setattr(program_pool, "MOST_TRIES", 1)
    templates = ChatTemplates({"default": ENDLESS}, {})
    monkeypatch.setattr(live.async_engine.tokenizer, "render_chat", templates.render)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hang"}]}
    with live.http() as http:
        hostile = clients.submit(http.post, CHAT, json=body)
        worker = busy_worker()
        check_that_others_are_served(live, hostile)
        worker.kill()
        reply: httpx.Response = hostile.result(HANG_SECONDS)
    assert reply.status_code == 503 and "try again" in reply.json()["error"]["message"]


def test_templates_of_one_tenant_leave_processes_to_others(
    serve_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many endless renders as there are processes, and more: another tenant's are made meanwhile."""
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 600.0)
    monkeypatch.setattr(program_pool, "MOST_TRIES", 1)
    write(file := tmp_path / "keys.json", entry("a"), entry("b"))
    live = serve_with(ServerConfig(api_key_file=str(file)))
    templates = ChatTemplates({"default": ENDLESS}, {})
    templates._heavy.add("default")
    monkeypatch.setattr(live.async_engine.tokenizer, "render_chat", templates.render)
    hang = {"model": "tiny", "messages": [{"role": "user", "content": "hang"}]}
    keys = {name: {"Authorization": f"Bearer {name}"} for name in "ab"}
    count = program_pool.MOST_WORKERS + 2
    with live.http() as http, ThreadPoolExecutor(count) as clients:
        http.timeout = httpx.Timeout(600)
        hostile = [clients.submit(http.post, CHAT, json=hang, headers=keys["a"]) for _ in range(count)]
        jobs = program_pool.POOL._jobs
        # All of them: one that came after the pool's end below would open it again, for ten minutes.
        wait_until(lambda: jobs.num_held + jobs.num_waiting == count)
        reply = http.post(CHAT, json={"model": "tiny", "messages": MESSAGES}, headers=keys["b"])
        assert reply.status_code == 200 and not any(each.done() for each in hostile)
        # A job that waited for its turn may open the pool again behind a close.
        while wait(hostile, timeout=1).not_done:
            program_pool.POOL.close()
    assert {each.result().status_code for each in hostile} == {503}


def test_the_schema_of_an_answer(live: Live, clients: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_check, "VALIDATION_SECONDS", 600.0)
    monkeypatch.setattr(program_pool, "MOST_TRIES", 1)
    answer = '{"a": "x", "b": "y"}'
    live.async_engine.say = lambda request, index: "answer 0" if request.grammar is None else answer
    with live.http() as http:
        hostile = clients.submit(http.post, CHAT, json=schema_body(unevaluated(40)))
        worker = busy_worker()
        check_that_others_are_served(live, hostile)
        worker.kill()
        [choice] = hostile.result(HANG_SECONDS).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", answer)


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
@pytest.mark.parametrize("levels", [8, 16, 32])
def test_a_schema_that_names_itself_twice_is_validated_at_once(live: Live, keyword: str, levels: int) -> None:
    schema = doubling(keyword, levels)
    for text, reason in (("abc", "stop"), ("abcd", "error")):
        live.async_engine.say = lambda request, index, text=text: json.dumps(text)
        with live.http() as http:
            reply = http.post(CHAT, json=schema_body(schema))
        assert reply.json()["choices"][0]["finish_reason"] == reason
