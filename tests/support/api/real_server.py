"""The whole server in a process of its own, as its users start it, with a client for it."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx
import openai

from support.machine.waits import HANG_SECONDS

QUESTION = [{"role": "user", "content": "Name three colours."}]


class RealServer:
    """A server process and a client for it.

    Its engine computes on one thread, unless the options say otherwise: test processes share the cores, and a pool of
    threads spends its time waiting for whichever of them has no core.
    """

    def __init__(self, port: int, *options: str, cwd: Path | None = None, stderr: IO[bytes] | None = None) -> None:
        command = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--port", str(port)]
        threads = () if "--threads" in options else ("--threads", "1")
        names = () if "--served-model-name" in options else ("--served-model-name", "small")
        self.process = subprocess.Popen([*command, *threads, *names, *options], cwd=cwd, stderr=stderr)
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=HANG_SECONDS, trust_env=False)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(trust_env=False),
        )

    def status(self) -> int:
        try:
            return self.http.get("/ready").status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> None:
        while self.status() != 200:
            assert self.process.poll() is None
            time.sleep(0.05)

    def close(self) -> None:
        self.http.close()
        self.client.close()
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port that is free now, below those that the system gives to others who ask for any."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000))) as sock,
        ):
            return int(sock.getsockname()[1])


def start(*options: str, cwd: Path | None = None) -> RealServer:
    server = RealServer(free_port(), *options, cwd=cwd)
    server.wait_ready()
    return server


@contextmanager
def tiny_server(folder: Path, *options: str) -> Iterator[RealServer]:
    """Serve a tiny model in fp32 on one thread of the CPU until the block ends."""
    server = start(str(folder), "--dtype", "float32", "--device", "cpu", *options)
    try:
        yield server
    finally:
        server.close()
