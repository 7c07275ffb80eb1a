"""The real server of the real model with small caches, so that what is bounded reaches its bound within minutes.

All worker processes and all threads of pools are started with it: one that comes when two jobs first meet, perhaps
after half an hour, would look like growth.

python -m benchmarks.soaking.bounded_server engine FD LIVENESS FOLDER OPTIONS    started by the API process
python -m benchmarks.soaking.bounded_server api FOLDER PORT GRPC_PORT THREADS
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.soaking import ROOT
from rootgraft.api.config import ServerConfig
from rootgraft.api.http import server
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.api.structured import output_check
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import engine_process, structured_output
from rootgraft.engine.sandbox import program_pool
from rootgraft.engine.serving import request_threads
from rootgraft.engine.speculation import proposer
from rootgraft.engine.speculation.output_lookup import OutputLookup
from rootgraft.grammar import vocabulary
from rootgraft.grammar.compile.compile_service import CompileService
from rootgraft.grammar.compile.worker_handle import WorkerStarved
from rootgraft.grammar.compile.worker_pool import WorkerPool
from rootgraft.tenancy import tenant_threads

GRAMMAR_BYTES, MASK_BYTES = 4 << 20, 4 << 20
RESPONSE_BYTES = 1 << 17
VALIDATOR_BYTES = 1 << 20
COMPILERS = 2  # Compiler processes that yield to others, and the same number that do not.
DRAFT_POSITIONS = 1024
PAGES, PAGE, MAX_LEN = 160, 16, 1024


def start_all(workers: WorkerPool[Any], count: int) -> None:
    """Start all workers of a pool, by asking for all of them at once."""
    held: list[Any] = []
    while len(held) < count:
        try:
            held.append(workers.acquire())
        except WorkerStarved:
            time.sleep(1.0)
    for worker in held:
        workers.release(worker)


def start_threads(submit: Callable[[Callable[[], int]], Any], count: int) -> None:
    """Start all threads of a pool: each of so many calls waits for the others."""
    barrier = threading.Barrier(count + 1)
    for _ in range(count):
        submit(barrier.wait)
    barrier.wait()


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with all of its threads."""
    threads = ThreadPoolExecutor(count, name)
    start_threads(threads.submit, count)
    return threads


def compile_service(*arguments: Any, **options: Any) -> CompileService:
    """Return the engine's compile service, with a small cache and all of its workers."""
    service = CompileService(*arguments, cache_bytes=GRAMMAR_BYTES, **options)
    for workers in (service._steady, service._yielding):
        start_all(workers, COMPILERS)
    return service


def engine(parent: str, fd: str, liveness: str, folder: str, options: str) -> int:
    """The engine process, with small caches of grammars and of outputs that drafts come from."""
    vocabulary.CACHE_BYTES = MASK_BYTES
    # The modules look these names up when they make them.
    for module, name, made in (
        (proposer, "OutputLookup", partial(OutputLookup, DRAFT_POSITIONS)),
        (structured_output, "CompileService", compile_service),
    ):
        setattr(module, name, made)
    return engine_process.main([parent, fd, liveness, folder, options])


def spawn(fd: int, liveness: int, model_path: str, options: str) -> subprocess.Popen[bytes]:
    """Start the engine process above in place of the usual one, and the threads of the event loop."""
    loop = asyncio.get_running_loop()
    start_threads(partial(loop.run_in_executor, None), min(32, (os.cpu_count() or 1) + 4))
    words = [sys.executable, "-m", "benchmarks.soaking.bounded_server", "engine", str(os.getpid())]
    return subprocess.Popen([*words, str(fd), str(liveness), model_path, options], pass_fds=[fd, liveness], cwd=ROOT)


def api(folder: str, port: str, grpc_port: str, threads: str) -> int:
    """Run the API process."""
    place = Path(folder)
    output_check.MOST_BYTES = VALIDATOR_BYTES
    start_all(program_pool.POOL._open(), program_pool.MOST_WORKERS)
    setattr(tenant_threads, ThreadPoolExecutor.__name__, started_threads)
    for pool in (request_threads.THREADS, program_pool.POOL._threads):  # made before that
        start_threads(pool._threads.submit, pool._threads._max_workers)
    config = EngineConfig(
        threads=int(threads), num_gpu_blocks_override=PAGES, block_size=PAGE, max_model_len=MAX_LEN, max_num_seqs=16,
        enable_lora=True, max_loras=4, lora_dir=str(place / "adapters"),
        lora_modules=(f"second-pirate={place / 'adapters' / 'pirate'}",),
    )  # fmt: skip
    options = ServerConfig(
        port=int(port), grpc_port=int(grpc_port), log_level="info", log_format="json",
        usage_ledger=str(place / "usage.db"), batch_dir=str(place / "batches"),
        max_stored_response_bytes=RESPONSE_BYTES, max_queue_seconds=600.0,
    )  # fmt: skip
    model = ServedModel(ModelEntry(), config, options)
    return server.serve_models([model], lambda: [model], spawn)


if __name__ == "__main__":
    programs: dict[str, Callable[..., int]] = {"engine": engine, "api": api}
    sys.exit(programs[sys.argv[1]](*sys.argv[2:]))
