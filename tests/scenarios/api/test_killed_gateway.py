"""Two gateways in processes of their own, of which one is killed: the other goes on, and nothing is done twice.

A short form of ``benchmarks/fleet/gateways.py``, over fake replicas. A stopped gateway takes no connection, so that
a test can choose which of the two answers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.api.key_files import entry, write
from support.api.real_server import free_port
from support.machine.waits import HANG_SECONDS, wait_until
from support.models.tiny_tokenizers import train_byte_level, write_folder

ROOT = Path(__file__).parents[3]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LIMITED = "limited"  # a key
LINES = 12


class Scene:
    """A server of two gateways and two fake replicas."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], ledger: Path, hold: Path) -> None:
        self.url = url
        self.process = process
        self.ledger = ledger
        self._hold = hold

    def http(self, key: str = "admin") -> httpx.Client:
        return httpx.Client(
            base_url=self.url, timeout=HANG_SECONDS, trust_env=False, headers={"authorization": f"Bearer {key}"}
        )

    def fleet(self) -> dict[str, Any]:
        with self.http() as http:
            return dict(http.get("/v1/fleet").json())

    def gateways(self) -> list[dict[str, Any]]:
        return list(self.fleet()["gateways"]["data"])

    def serve_both(self) -> bool:
        return [each["state"] for each in self.gateways()] == ["serving", "serving"]

    @contextmanager
    def only(self, number: int) -> Iterator[httpx.Client]:
        """Let only one of the gateways take connections."""
        stopped = psutil.Process(pid_of(self.gateways()[1 - number]))
        stopped.suspend()
        try:
            wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
            with self.http() as http:
                yield http
        finally:
            stopped.resume()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no replica compute meanwhile."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    def rows(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens of answers in the ledger, by key."""
        with closing(sqlite3.connect(self.ledger)) as database:
            counted = "SELECT key, sum(requests), sum(completion_tokens) FROM usage GROUP BY key"
            return {key: (requests, tokens) for key, requests, tokens in database.execute(counted)}


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, pause=0.05)


def pid_of(gateway: dict[str, Any]) -> int:
    return int(gateway["place"].removeprefix("process "))


@contextmanager
def started(folder: Path) -> Iterator[Scene]:
    """Start a server and wait until both gateways serve."""
    model = write_folder(folder / "model", train_byte_level().to_str(), chat_template=CHAT)
    keys, ledger = folder / "keys.json", folder / "usage.sqlite"
    scopes = ["inference", "admin", "metrics"]
    names = (entry(name, scopes=scopes) for name in ("admin", "streams", "later"))
    write(keys, *names, entry(LIMITED, requests_per_minute=4))
    port = free_port()
    options = {"port": port, "gateways": 2, "api_key_file": str(keys), "usage_ledger": str(ledger)}
    options |= {"batch_dir": str(folder / "batches"), "log_level": "warning"}
    child = ROOT / "tests/support/api/children/gateway_child.py"
    process = subprocess.Popen(
        [sys.executable, str(child), str(model), "tiny", json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdin=subprocess.DEVNULL,
    )
    made = Scene(f"http://127.0.0.1:{port}", process, ledger, model / "hold")
    try:
        wait_for(lambda: is_ready(made))
        wait_for(made.serve_both)
        yield made
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with started(tmp_path_factory.mktemp("gateways")) as made:
        yield made
        gateways = [pid_of(each) for each in made.gateways()]
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(HANG_SECONDS) == 0
        wait_for(lambda: not any(map(runs, gateways)))


def is_ready(scene: Scene) -> bool:
    assert scene.process.poll() is None, "the server does not start"
    try:
        with scene.http() as http:
            return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def num_answered(http: httpx.Client) -> float:
    found = re.search(r'handler="/v1/completions",method="POST",status="2xx"} ([0-9.]+)', http.get("/metrics").text)
    return float(found[1]) if found else 0.0


def body(number: int, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": f"number {number}", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


def test_both_answer_with_one_model_list_one_metric_and_one_stock_of_files(scene: Scene) -> None:
    answers = []
    with scene.http() as http:
        before = num_answered(http)
    for number in (0, 1):
        with scene.only(number) as http:
            answers.append(http.post("/v1/completions", json=body(1)).json()["choices"][0]["text"])
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny"]
            name = f"{number}.jsonl"
            assert http.post("/v1/files", files={"file": (name, b"{}")}, data={"purpose": "batch"}).status_code == 200
    assert answers[0] == answers[1]
    for number in (0, 1):
        with scene.only(number) as http:
            assert {file["filename"] for file in http.get("/v1/files").json()["data"]} == {"0.jsonl", "1.jsonl"}
            assert (http.head("/health").status_code, http.head("/version").status_code) == (200, 405)
            unknown = http.get("/v1/nothing?a=%2F")
            assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_url"
            assert unknown.headers["x-request-id"]
    with scene.http() as http:
        wait_for(lambda: num_answered(http) >= before + 2)


def test_a_response_is_gone_on_from_through_the_other(scene: Scene) -> None:
    asked = {"model": "tiny", "input": "hi", "max_output_tokens": 16}
    with scene.only(0) as http:
        first = http.post("/v1/responses", json=asked).json()
    with scene.only(1) as http:
        assert http.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        with http.stream("POST", "/v1/responses", json=asked | {"stream": True}) as stream:
            assert "response.incomplete" in "".join(stream.iter_text())
        second = http.post("/v1/responses", json=asked | {"previous_response_id": first["id"]})
        assert second.status_code == 200 and second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_keys_limit_is_one_for_both(scene: Scene) -> None:
    with scene.only(0) as http:
        http.headers["authorization"] = f"Bearer {LIMITED}"
        left = [
            http.post("/v1/completions", json=body(each)).headers["x-ratelimit-remaining-requests"] for each in (1, 2)
        ]
    with scene.only(1) as http:
        http.headers["authorization"] = f"Bearer {LIMITED}"
        replies = [http.post("/v1/completions", json=body(each)) for each in range(3)]
        left += [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        wrong = http.post("/v1/completions", json={})
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert left == ["3", "2", "1", "0", "0"]
    assert wrong.status_code == 400 and wrong.headers["x-ratelimit-limit-requests"] == "4"
    wait_for(lambda: LIMITED in scene.rows() and scene.rows()[LIMITED][0] == 4)


def test_a_client_that_leaves_ends_what_the_main_process_generates_for_it(scene: Scene) -> None:
    with scene.http() as http:
        asked = {"model": "tiny", "input": "hi", "max_output_tokens": 1000, "stream": True}
        with http.stream("POST", "/v1/responses", json=asked) as reply:
            lines = reply.iter_lines()  # kept, as the connection is closed with it
            assert next(lines) == "event: response.created"
            with scene.held():  # or it might end by itself
                wait_for(lambda: sum(each["running"] for each in scene.fleet()["data"]) == 1)
    wait_for(lambda: sum(each["running"] for each in scene.fleet()["data"]) == 0)


def test_an_early_answer_to_a_large_body_arrives(scene: Scene) -> None:
    with scene.http("nobody") as http:
        reply = http.post("/v1/files", content=b"x" * (4 << 20), headers={"content-type": "text/plain"})
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"


def stream(scene: Scene, number: int, begun: set[int], results: dict[int, str]) -> None:
    """Read a stream to its end; one that is broken off leaves no result."""
    text, ended = "", False
    try:
        with (
            scene.http("streams") as http,
            http.stream("POST", "/v1/completions", json=body(number, 150, stream=True)) as reply,
        ):
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    begun.add(number)
    except httpx.TransportError:
        return
    if ended:
        results[number] = text


def test_a_killed_gateway_costs_its_own_streams_and_nothing_else(scene: Scene) -> None:
    before, rows = scene.fleet(), scene.rows()
    begun: set[int] = set()
    results: dict[int, str] = {}
    with scene.http() as http:
        prompts = [body(number)["prompt"] for number in range(6)]
        choices = http.post("/v1/completions", json=body(0, 150, prompt=prompts)).json()["choices"]
        expected = {choice["index"]: choice["text"] for choice in choices}
    with scene.http("later") as http:
        asked = [{"custom_id": str(each), "method": "POST", "url": "/v1/completions"} for each in range(LINES)]
        lines = "\n".join(json.dumps(each | {"body": body(number, 60)}) for number, each in enumerate(asked))
        file = http.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}).json()["id"]
        batch = http.post(
            "/v1/batches",
            json={"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"},
        ).json()
        response = http.post(
            "/v1/responses", json={"model": "tiny", "input": "x", "background": True, "max_output_tokens": 200}
        ).json()
    assert response["status"] in ("queued", "in_progress")
    threads = [threading.Thread(target=stream, args=(scene, number, begun, results)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(begun))
    with scene.held():  # or streams might end before the kill
        wait_for(lambda: sum(each["active"] for each in scene.gateways()) == 6)
        victim = max(scene.gateways(), key=lambda each: each["active"])
        os.kill(pid_of(victim), signal.SIGKILL)
    with scene.http() as http:
        for number in range(4):
            assert http.post("/v1/completions", json=body(number)).status_code == 200
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert results == {number: expected[number] for number in results}
    assert len(results) == 6 - victim["active"]

    with scene.http("later") as http:
        wait_for(lambda: http.get(f"/v1/responses/{response['id']}").json()["status"] == "incomplete")
        resumed = http.get(f"/v1/responses/{response['id']}", params={"stream": True, "starting_after": 2}).text
        numbers = [int(line.removeprefix("id: ")) for line in resumed.splitlines() if line.startswith("id: ")]
        assert numbers and numbers == list(range(3, 3 + len(numbers)))
        wait_for(lambda: http.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
        ended = http.get(f"/v1/batches/{batch['id']}").json()
        assert ended["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        output = http.get(f"/v1/files/{ended['output_file_id']}/content").text.splitlines()
    assert Counter(json.loads(line)["custom_id"] for line in output) == Counter(map(str, range(LINES)))

    wait_for(scene.serve_both)
    after = scene.fleet()
    assert after["gateways"]["lost"] == before["gateways"]["lost"] + 1
    assert victim["id"] not in [each["id"] for each in after["gateways"]["data"]]
    assert (after["lost"], after["replays"]) == (before["lost"], before["replays"])
    wait_for(lambda: [each["running"] for each in scene.fleet()["data"]] == [0, 0])
    later = (LINES + 1, LINES * 60 + 200)
    wait_for(lambda: scene.rows()["streams"][0] >= 6 and scene.rows()["later"] >= later)
    counted = scene.rows()
    # The requests that were cut off count as well, each once, with the tokens that had come.
    assert counted["streams"][0] == 6
    assert len(results) * 150 <= counted["streams"][1] < 6 * 150 + 1
    assert counted["later"] == later
    assert counted["admin"][0] == rows.get("admin", (0, 0))[0] + 1 + 4


def test_a_gateway_that_ends_while_it_starts_is_replaced(scene: Scene) -> None:
    lost = scene.fleet()["gateways"]["lost"]
    victim = pid_of(scene.gateways()[0])
    template = psutil.Process(victim).parent()
    assert template is not None and template.pid != scene.process.pid
    before = {each.pid for each in template.children()}
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: {each.pid for each in template.children()} - before)
    [starting] = {each.pid for each in template.children()} - before
    os.kill(starting, signal.SIGKILL)
    wait_for(lambda: scene.fleet()["gateways"]["lost"] == lost + 2)
    wait_for(scene.serve_both)


def test_no_gateway_outlives_a_killed_main_process(tmp_path: Path) -> None:
    with started(tmp_path) as scene:
        gateways = [pid_of(each) for each in scene.gateways()]
        os.kill(scene.process.pid, signal.SIGKILL)
        scene.process.wait()
        wait_for(lambda: not any(map(runs, gateways)))
        with pytest.raises(httpx.ConnectError), scene.http() as http:
            http.get("/health")


def runs(pid: int) -> bool:
    """Whether a process runs, and is no zombie of a machine without an init."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
