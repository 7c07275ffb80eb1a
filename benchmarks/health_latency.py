"""Latency of ``/health`` under attack: programs whose work doubles, large bodies and files, held uploads, ranges.

    python -m benchmarks.health_latency [--asks 300] [--output FILE.json]

Each hostile input is sent again and again by two clients while ``/health`` is asked on one connection. Told are the
99th percentile and the longest for each, and beside them those of the server at rest, of before and after: what the
machine itself adds is in both. Beside all that another client asks the same question again and again. Exit code 1 where
a 99th percentile is above 50 ms and above twice that at rest, or an answer to that question is not the one at rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.fleet_harness import percentiles, serve_command, wait_ready
from benchmarks.hostile_programs import LOOPS, doubling, unevaluated
from benchmarks.serve.server import ROOT, Server, machine
from rootgraft.engine.kv_cache.session_files import KEPT_MAGIC, pack_head

ADAPTER = ROOT / "examples" / "adapters" / "pirate"
LIMIT_SECONDS = 0.05
PAUSE_SECONDS = 0.01
Body = dict[str, Any] | Callable[[str, threading.Event], int]
MEMORY = "{{ 'a' * 4000000000 }}"


def normalizers(count: int) -> dict[str, Any]:
    """Return a normalizer that doubles a text so many times."""
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [double] * count}


def make_adapters(folder: Path) -> tuple[str, ...]:
    """Write adapters that bring programs. Returns their names."""
    names = ("template", "template-memory", "pattern", "normalizer", "split", "long-token")
    for name in names:
        shutil.copytree(ADAPTER, folder / name)
    for name, template in (("template", LOOPS), ("template-memory", MEMORY)):
        (folder / name / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "pattern" / "adapter_config.json").read_text())
    config["rank_pattern"] = {"(((((((a?){64}){64}){64}){64}){64}){64}){64}": 4}
    (folder / "pattern" / "adapter_config.json").write_text(json.dumps(config))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+x"}, "behavior": "Isolated", "invert": False}
    for name, step in (("normalizer", {"normalizer": normalizers(34)}), ("split", {"pre_tokenizer": split})):
        tokenizer = {"version": "1.0", **step, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, '"' * (8 << 20): 1}, "merges": []}}
    (folder / "long-token" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return names


def inputs(model: str, adapters: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the bodies of hostile requests by name."""
    messages = [{"role": "user", "content": "a" * 40}]
    schemas = {
        "allOf, 12 levels": doubling("allOf", 12),
        "allOf, 22 levels": doubling("allOf", 22),
        "anyOf, 22 levels": doubling("anyOf", 22),
        "unevaluatedProperties, 30 levels": unevaluated(30),
    }
    found: dict[str, dict[str, Any]] = {"nothing, before": {}}
    for name, schema in schemas.items():
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        found[name] = {"model": model, "messages": messages, "response_format": form, "max_tokens": 24}
    found |= {f"adapter: {name}": {"model": name, "messages": messages, "max_tokens": 4} for name in adapters}
    found |= {name: {"model": model, "max_tokens": 4} | fields for name, fields in large_bodies().items()}
    return found | {"nothing, after": {}}


def large_bodies() -> dict[str, dict[str, Any]]:
    """Return fields whose work is proportional to a body of a megabyte or more, by name."""
    message = {"role": "user", "content": "a"}
    tool = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(120)}}
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": tool}} for number in range(256)]
    return {
        "100,000 unknown fields": {"messages": [message], **{f"x{number}": 1 for number in range(100_000)}},
        "90,000 parts of messages": {"messages": [{**message, "content": [{"type": "text", "text": "a"}] * 900}] * 100},
        "256 tools of 120 parameters": {"messages": [message], "tools": tools, "tool_choice": "required"},
        "user of 4 MB": {"messages": [message], "user": "x" * 4_000_000},
    }


def upload_held(url: str, ending: threading.Event) -> int:
    """Begin an upload of 10 MB, and hold it before its end until told. Returns the status, 0 without one."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection((host, int(port)), timeout=600) as sock:
        sock.sendall(f"{head}Content-Length: {20 << 20}\r\n\r\n".encode() + begin)
        with suppress(OSError):
            for _ in range(10):
                sock.sendall(bytes(1 << 20))
        ending.wait()
        sock.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            return int([*sock.recv(64).split(), b"0", b"0"][1])
    return 0


def ranges_asked(url: str, ending: threading.Event) -> int:
    """Ask for a file in 2,500 ranges again and again until told. Returns the last status."""
    status = 0
    parts = ",".join(f"{number}-{number}" for number in range(2_500))
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        sent = http.post(
            "/files", files={"file": ("a.jsonl", b'{"custom_id": "a"}\n' * 4_000)}, data={"purpose": "batch"}
        )
        path = f"/files/{sent.raise_for_status().json()['id']}/content"
        while not ending.is_set():
            status = http.get(path, headers={"Range": f"bytes={parts}"}).status_code
    return status


def background_asked(url: str, ending: threading.Event) -> int:
    """Ask for answers in the background again and again until told. Returns the last status."""
    status = 0
    body = {"input": "story", "background": True, "max_output_tokens": 32}
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while not ending.is_set():
            status = http.post("/responses", json=body).status_code
    return status


def patterns_asked(url: str, ending: threading.Event) -> int:
    """Ask for answers by patterns of many states and classes, each another one, until told. Returns the last status."""
    status = 0
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for number in count(20_000):
            if ending.is_set():
                break
            pattern = rf"[\p{{L}}{chr(number)}]{{1,{300 + number % 90}}}"
            body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": pattern}}
            status = http.post("/completions", json=body).status_code
    return status


def asks_again(url: str, model: str, ending: threading.Event) -> list[str]:
    """Ask the same question again and again until told. Returns the answers, at least one."""
    body = {"model": model, "prompt": "The river", "max_tokens": 8, "temperature": 0}
    answers: list[str] = []
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while not answers or not ending.is_set():
            reply = http.post("/completions", json=body)
            answers.append(reply.json()["choices"][0]["text"] if reply.status_code == 200 else str(reply.status_code))
    return answers


def other_bodies(model: str) -> dict[str, Callable[[str, threading.Event], int]]:
    """Return what sends bodies of other protocols, which are translated to a chat's, by name."""
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}] * 4_000
    parts = [{"type": "text", "text": "a"}] * 900
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    named = {f"p{number}": 1 for number in range(100_000)}
    turns = [{"role": ("user", "assistant")[number % 2], "content": parts} for number in range(99)]
    return {
        "4,000 items of a response": partial(sent_again, "/v1/responses", {"input": items}),
        "90,000 parts of Anthropic's": partial(
            sent_again, "/v1/messages", {"model": model, "max_tokens": 4, "messages": turns}
        ),
        "100,000 parameters of Triton's": partial(
            sent_again, f"/v2/models/{model}/infer", {"inputs": [text], "parameters": named}
        ),
    }


def sent_again(path: str, body: dict[str, Any], url: str, ending: threading.Event) -> int:
    """Send a body again and again until told. Returns the last status."""
    status, data = 0, json.dumps(body)
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=600, trust_env=False) as http:
        while not ending.is_set():
            status = http.post(path, content=data, headers=headers).status_code
    return status


def sessions_sent(url: str, ending: threading.Event) -> int:
    """Send 64 MB as the file of a session, whose head is nested deeply, again and again. Returns the last status."""
    status = 0
    file = pack_head(b"[" * (1 << 14), KEPT_MAGIC) + bytes(64 << 20)
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        while not ending.is_set():
            status = http.post("/cache/sessions/import", content=file).status_code
    return status


def measure(url: str, model: str, body: Body, asks: int) -> dict[str, Any]:
    """Ask for health while a request is sent again and again, or held; no request for an empty body."""
    ending, statuses, answers = threading.Event(), Counter[int](), Counter[str]()

    def send() -> None:
        if not isinstance(body, dict):
            statuses[body(url, ending)] += 1
            return
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
            while not ending.is_set():
                statuses[http.post("/chat/completions", content=data, headers=headers).status_code] += 1

    num = (24 if body is upload_held else 2) if body else 0
    other = threading.Thread(target=lambda: answers.update(asks_again(url, model, ending)))
    senders = [other, *(threading.Thread(target=send) for _ in range(num))]
    for sender in senders:
        sender.start()
    seconds = []
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=600, trust_env=False) as http:
        for _ in range(asks):
            begin = time.perf_counter()
            http.get("/health").raise_for_status()
            seconds.append(time.perf_counter() - begin)
            time.sleep(PAUSE_SECONDS)
    ending.set()
    for sender in senders:
        sender.join()
    return {"health_s": percentiles(seconds), "statuses": dict(statuses), "answers": dict(answers)}


def run(asks: int) -> dict[str, Any]:
    """Return all figures, and under ``holds`` whether each is right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = make_adapters(folder / "adapters")
        with Server(
            serve_command("--enable-lora", "--lora-dir", str(folder / "adapters"), "--batch-dir", str(folder / "files"))
        ).running() as (url, process):
            wait_ready(url, process)
            model = httpx.get(f"{url}/models", trust_env=False).json()["data"][0]["id"]
            bodies: dict[str, Body] = {**inputs(model, adapters)}
            last = bodies.popitem()
            bodies |= {"24 held uploads": upload_held, "2,500 ranges": ranges_asked}
            bodies |= {"background responses": background_asked, "files of sessions": sessions_sent}
            bodies |= {"patterns that nobody has sent": patterns_asked, **other_bodies(model), last[0]: last[1]}
            found = {each: measure(url, model, body, asks) for each, body in bodies.items()}
    rest = max(each["health_s"]["p99"] for name, each in found.items() if name.startswith("nothing"))
    [right] = found["nothing, before"]["answers"]
    holds = {
        name: each["health_s"]["p99"] <= max(LIMIT_SECONDS, 2 * rest) and set(each["answers"]) == {right}
        for name, each in found.items()
    }
    return {"holds": holds, "inputs": found}


def main() -> int:
    """Measure, print, write the file if one is named. Returns 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asks", type=int, default=300, help="health requests during each input")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python -m benchmarks.health_latency --asks {options.asks}"
    figures = {"command": command, "machine": machine()} | run(options.asks)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return int(not all(figures["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
