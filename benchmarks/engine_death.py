"""How soon is it seen that the engine is gone or hangs? Measured on the real server, with streams under way.

    python -m benchmarks.engine_death [--repeats 5] [--output FILE.json]

The engine process is killed (SIGKILL), or stopped so that it is there and does nothing (SIGSTOP), while it answers two
streams and has children that compile grammars. From that moment on are taken, in seconds: until ``/health``, asked over
and over on new connections, first says anything but 200; until both streams have ended; until the server's process has
ended. Exit code 1 unless health is down within 1 second of a death, and of ``--heartbeat-timeout`` after a hang, each
stream ends with an error event, the server with code 70, and no process is left.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cache_timing import wait_until_ready
from benchmarks.serve.server import ROOT, free_port, machine

WATCHDOG = 3  # seconds, of --heartbeat-timeout
ALLOWED = 1.0
EXIT_CODE = 70
STREAMS = 2
HOWS = {"killed": signal.SIGKILL, "hanging": signal.SIGSTOP}


class Stream(threading.Thread):
    """A client that reads an answer as it comes.

    Attributes:
        begun: set with the first token.
        ended: when the answer ended.
        events: data of all events.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.begun = threading.Event()
        self.ended = 0.0
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120, trust_env=False) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.TransportError as error:
            self.events.append(repr(error))
        self.ended = time.perf_counter()

    @property
    def told(self) -> bool:
        """Whether it ended with an error event of the server's."""
        last = [event for event in self.events if event != "[DONE]"][-1]
        return last.startswith("{") and json.loads(last).get("error", {}).get("code") == "engine_dead"


def compile_a_grammar(url: str) -> None:
    """Have an answer that follows a schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {
        "messages": [{"role": "user", "content": "A number."}],
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).raise_for_status()


def health(url: str) -> str:
    """The status of ``/health``; why there is none, where the server has ended."""
    try:
        return str(httpx.get(f"{url}/health", timeout=20, trust_env=False).status_code)
    except httpx.TransportError as error:
        return type(error).__name__


def end(how: str) -> dict[str, Any]:
    """One server, and the end of its engine."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--heartbeat-timeout", str(WATCHDOG), "--log-level", "error"]
    with subprocess.Popen([sys.executable, "-m", "rootgraft.api.cli.main", "serve", *options], cwd=ROOT) as server:
        try:
            wait_until_ready(url, server)
            compile_a_grammar(url)
            [engine] = psutil.Process(server.pid).children()
            processes = psutil.Process(server.pid).children(recursive=True)
            streams = [Stream(url) for _ in range(STREAMS)]
            for stream in streams:
                stream.begun.wait()
            start = time.perf_counter()
            engine.send_signal(HOWS[how])
            while (said := health(url)) == "200":
                pass
            down = time.perf_counter() - start
            for stream in streams:
                stream.join(60)
            code = server.wait(60)
            ended = time.perf_counter() - start
            return {
                "health_down_seconds": round(down, 3),
                "health_said": said,
                "streams_ended_seconds": round(max(stream.ended for stream in streams) - start, 3),
                "streams_told": all(stream.told for stream in streams),
                "server_ended_seconds": round(ended, 3),
                "exit_code": code,
                "processes": len(processes),
                "processes_left": len(psutil.wait_procs(processes, timeout=5)[1]),
            }
        finally:
            server.kill()


def holds(how: str, seen: dict[str, Any]) -> bool:
    """Whether a run keeps the bounds."""
    allowed = ALLOWED + (WATCHDOG if how == "hanging" else 0)
    sound = seen["streams_told"] and seen["exit_code"] == EXIT_CODE and not seen["processes_left"]
    return sound and seen["health_down_seconds"] <= allowed


def main() -> int:
    """Measure, print, write the file if one is named. 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs = {how: [end(how) for _ in range(options.repeats)] for how in HOWS}
    document = {
        "command": f"python -m benchmarks.engine_death --repeats {options.repeats}",
        "machine": machine(),
        "heartbeat_timeout": WATCHDOG,
        "runs": runs,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if all(holds(how, seen) for how, each in runs.items() for seen in each) else 1


if __name__ == "__main__":
    sys.exit(main())
