"""Measure llama.cpp's slots over a restart: saved to files and restored, beside prompts that are computed."""

from __future__ import annotations

import shlex
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.serve.server import Server

_START_SECONDS = 300.0


def slot_restore(program: Path, gguf: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Ask prompts of one token, save their slots, start the server again, restore each slot and ask again.

    Args:
        program: ``llama-server``.
        prompts: token ids.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [str(program), "-m", str(gguf), "--host", "127.0.0.1", "--parallel", "1", "--ctx-size", "4096"]
        words += ["--threads", "2", "--cache-prompt", "--no-ui", "--slot-save-path", folder]
        command = f"{shlex.join(words)} --port {{port}}"
        cold, warm = (_run(command, prompts, action) for action in ("save", "restore"))
        num_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "seconds_ratio_median": statistics.median(b.seconds / a.seconds for a, b in zip(cold, warm, strict=True)),
        "with_the_restore": statistics.median(
            (b.seconds + b.moved) / a.seconds for a, b in zip(cold, warm, strict=True)
        ),
        "least_cached": min(row.cached for row in warm),
        "tokens": len(prompts[0]),
        "mib_of_files": round(num_bytes / 2**20, 1),
    }


class _Row(NamedTuple):
    """Measurements of one prompt: seconds of the request, of the slot's save or restore, and cached tokens."""

    seconds: float
    moved: float
    cached: int


def _run(command: str, prompts: list[list[int]], action: str) -> list[_Row]:
    """Start a server and ask all prompts, with the slot saved after each, or restored before."""
    rows = []
    with Server(command).running() as (url, _), httpx.Client(trust_env=False, timeout=_START_SECONDS) as http:
        base = url.removesuffix("/v1")
        _wait(http, base)
        http.post(f"{base}/completion", json={"prompt": prompts[0][:64], "n_predict": 1}).raise_for_status()
        for number, prompt in enumerate(prompts):
            moved = _move(http, base, action, number) if action == "restore" else 0.0
            began = time.perf_counter()
            body = {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "id_slot": 0, "temperature": 0.0}
            reply = http.post(f"{base}/completion", json=body).raise_for_status().json()
            seconds = time.perf_counter() - began
            if action == "save":
                moved = _move(http, base, action, number)
            rows.append(_Row(seconds, moved, len(prompt) - int(reply["timings"]["prompt_n"])))
    return rows


def _move(http: httpx.Client, base: str, action: str, number: int) -> float:
    """Save or restore the slot. Returns the seconds that it took."""
    began = time.perf_counter()
    http.post(f"{base}/slots/0?action={action}", json={"filename": f"{number}.bin"}).raise_for_status()
    return time.perf_counter() - began


def _wait(http: httpx.Client, base: str) -> None:
    """Wait until the server is ready. TimeoutError if it never is."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        try:
            if http.get(f"{base}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{base} does not start")
