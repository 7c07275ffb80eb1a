"""A server under limits on its memory: does it start or say why not, and does it outlive what finds none?

    python -m benchmarks.little_memory [--output FILE.json]

First it is started under ``ulimit -v`` of several sizes, and in cgroups with a limit where this user may make them
(version 1): it serves, or it ends with one line. Then, while it serves,
its engine and after that its API process may add so many MiB, and get requests that need memory: long and short
ones, several answers with logprobs, a schema, an adapter. Each must be answered, or refused by a 503 of ours (a 400 for
what is too long); once the limit is gone, the first request must have the answer that it had before. Exit code 1 if
not. With no room at all an engine may end where Python finds no memory for the least of its objects.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.fleet.fleet_harness import serve_command, wait_ready
from benchmarks.serve.server import ROOT, Server, machine
from rootgraft.api.cli.remote_server import RemoteError

GIB = 1 << 30
STARTS = (0.3, 0.6, 0.8, 1.0, 1.5, 2.0)  # GiB of address space
IN_CGROUPS = (0.35, 1.0)  # GiB of memory
CGROUPS = Path("/sys/fs/cgroup/memory")
ROOMS = (4, 40, 200)  # MiB that a process may add
START_SECONDS = 300.0
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 16, "temperature": 0,
}  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "short": {},
    "long": {"messages": [{"role": "user", "content": "many words " * 1200}], "max_tokens": 4},
    "too long": {"messages": [{"role": "user", "content": "x" * 3_900_000}]},
    "schema": {"response_format": FORM, "max_tokens": 30},
    "adapter": {"model": "pirate"},
    "eight answers": {"n": 8, "temperature": 1, "logprobs": True, "top_logprobs": 5},
}


@contextmanager
def cgroup(gib: float) -> Iterator[Path | None]:
    """Make a cgroup with so much memory within the block; None where this user may not."""
    folder = CGROUPS / f"rootgraft-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(int(gib * GIB)))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def start_in_cgroup(gib: float) -> str | None:
    """Return what became of a server in a cgroup with so much memory; None where there can be none."""
    with cgroup(gib) as folder:
        return None if folder is None else start(lambda: folder.joinpath("cgroup.procs").write_text(str(os.getpid())))


def start_limited(gib: float) -> str:
    """Return what became of a server with so much address space."""
    limit = int(gib * GIB)
    return start(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))


def start(limit: Callable[[], object]) -> str:
    """Return what became of a server that limits itself first: that it serves, or its last line."""
    words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.strip())
            if " ready: " in line:
                process.terminate()
                break
        process.communicate(timeout=START_SECONDS)
    traces = sum("Traceback" in line for line in lines)
    return "serves" if " ready: " in lines[-1] else f"{traces} tracebacks, then: {lines[-1]}"


def ask(http: httpx.Client, model: str, more: dict[str, Any]) -> tuple[int, str]:
    """Return status and text, or the code of the error; 0 without an answer."""
    try:
        reply = http.post("/chat/completions", json={"model": model} | QUESTION | more)
    except httpx.TransportError as error:
        return 0, type(error).__name__
    body = reply.json()
    return reply.status_code, body["error"]["code"] if "error" in body else body["choices"][0]["message"]["content"]


def limited(http: httpx.Client, model: str, process: psutil.Process, mib: int) -> dict[str, Any]:
    """Return what came of each request while a process may add so much, and of the first one after it."""
    before = ask(http, model, {})
    limit = process.memory_info().vms + (mib << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        found = {name: ask(http, model, more) for name, more in REQUESTS.items()}
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {
        "answered": sum(status == 200 for status, _ in found.values()),
        "refused": {name: [status, code] for name, (status, code) in found.items() if status != 200},
        "unexpected": [
            name
            for name, (status, code) in found.items()
            if status not in (200, 503) and (name, code) != ("too long", "context_length_exceeded")
        ],
        "as before": ask(http, model, {}) == before,
    }


def run() -> dict[str, Any]:
    """Return all figures, and under ``holds`` whether each is right."""
    starts = {f"{gib:g} GiB": start_limited(gib) for gib in STARTS}
    in_cgroups = {f"{gib:g} GiB in a cgroup": start_in_cgroup(gib) for gib in IN_CGROUPS}
    starts |= {name: found for name, found in in_cgroups.items() if found is not None}
    rooms: dict[str, Any] = {}
    options = ("--enable-lora", "--lora-dir", str(ROOT / "examples" / "adapters"), "--max-model-len", "4096")
    with Server(serve_command(*options)).running() as (url, process):
        wait_ready(url, process)
        assert process is not None
        api = psutil.Process(process.pid)
        engine = next(
            child for child in api.children(recursive=True) if any("engine_process" in word for word in child.cmdline())
        )
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
            model = http.get("/models").json()["data"][0]["id"]
            for name, each in (("engine", engine), ("API process", api)):
                for mib in ROOMS:
                    rooms[f"{name}, {mib} MiB more"] = limited(http, model, each, mib)
        if process.poll() is not None:
            raise RemoteError("ended", "The server has ended.")
    holds = {f"start within {size}": text == "serves" or text.startswith("0 ") for size, text in starts.items()}
    holds |= {name: each["as before"] and not each["unexpected"] for name, each in rooms.items()}
    return {"holds": holds, "starts": starts, "rooms": rooms}


def main() -> int:
    """Measure, print, write the file if one is named. Returns 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = {"command": "python -m benchmarks.little_memory", "machine": machine()} | run()
    text = json.dumps(figures, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return int(not all(figures["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
