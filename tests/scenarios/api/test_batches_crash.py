"""Killed with SIGKILL in the middle, a server goes on with its batches, and ``run-batch`` with its file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.batches.batch_service import WORKERS

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[3]
NUMBER = 100
MOST = 60  # that a server is asked before it stops
CLIENTS = 4


def request(number: int) -> str:
    body = {"messages": [{"role": "user", "content": f"number {number}"}]}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})


def python(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def server(folder: Path, asked: Path, most: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = python(str(ROOT / "tests/support/api/children/batch_child.py"), str(folder), str(asked), str(most))
    assert process.stdout and process.stdin
    with process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def stopped(process: subprocess.Popen[str]) -> bool:
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def counts(text: str) -> Counter[str]:
    return Counter(json.loads(each)["custom_id"] for each in text.splitlines())


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(trust_env=False))


def test_a_killed_server_goes_on_with_its_batch(tmp_path: Path) -> None:
    folder, asked = tmp_path / "batches", tmp_path / "asked"
    with server(folder, asked, MOST) as (process, url), client_of(url) as client:
        data = "\n".join(map(request, range(NUMBER))).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        endpoint: Any = "/v1/chat/completions"
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        account = folder / "batches" / f"{batch.id}.answers"
        wait_until(lambda: stopped(process))
        process.kill()
    done = lines(account)
    assert MOST - WORKERS <= done < MOST
    with server(folder, asked) as (_, url), client_of(url) as client:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert (ended.request_counts.total, ended.request_counts.completed) == (NUMBER, NUMBER)
        assert ended.output_file_id and ended.error_file_id is None
        assert counts(client.files.content(ended.output_file_id).text) == Counter(map(str, range(NUMBER)))
        assert client.files.retrieve(file.id).bytes == len(data)
    assert NUMBER <= lines(asked) <= NUMBER + WORKERS  # only what was under way is asked again


def test_a_killed_run_batch_goes_on_with_its_file(tmp_path: Path) -> None:
    given, out, asked = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "asked"
    given.write_text("\n".join(map(request, range(NUMBER))) + "\n")
    with server(tmp_path / "batches", asked, MOST) as (process, url):
        words = (
            "-m",
            "rootgraft.api.cli.main",
            "run-batch",
            "-i",
            str(given),
            "-o",
            str(out),
            "--url",
            url,
            "--max-concurrency",
            str(CLIENTS),
        )
        with python(*words) as first:
            wait_until(lambda: stopped(process) and lines(out) >= MOST - CLIENTS)
            first.kill()
        process.send_signal(signal.SIGCONT)
        before = out.read_bytes()
        assert MOST - CLIENTS <= before.count(b"\n") < MOST
        with python(*words) as second:
            said, _ = second.communicate(timeout=HANG_SECONDS)
    assert second.returncode == 0 and f"{NUMBER} requests" in said
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert counts(out.read_text()) == Counter(map(str, range(NUMBER)))
    assert lines(asked) <= NUMBER + CLIENTS
