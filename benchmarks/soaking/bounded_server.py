"""The real server of the real model with small caches, so that what is bounded reaches its bound within minutes.

python -m benchmarks.soaking.bounded_server engine FD LIVENESS FOLDER OPTIONS    started by the API process
python -m benchmarks.soaking.bounded_server api FOLDER PORT THREADS
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.soaking import ROOT
from rootgraft.api.config import ServerConfig
from rootgraft.api.http import server
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.api.structured import output_check
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import engine_process, structured_output
from rootgraft.engine.speculation import proposer
from rootgraft.engine.speculation.output_lookup import OutputLookup
from rootgraft.grammar import vocabulary
from rootgraft.grammar.compile.compile_service import CompileService

GRAMMAR_BYTES = 4 << 20
RESPONSE_BYTES = 1 << 17
VALIDATORS = 32
WORDS = 500
DRAFT_POSITIONS = 1024
PAGES, PAGE, MAX_LEN = 160, 16, 1024


def engine(fd: str, liveness: str, folder: str, options: str) -> int:
    """The engine process, with small caches of grammars and of outputs that drafts come from."""
    vocabulary.MAX_WORDS = WORDS
    proposer.OutputLookup = partial(OutputLookup, DRAFT_POSITIONS)  # type: ignore[misc, assignment]
    structured_output.CompileService = partial(CompileService, cache_bytes=GRAMMAR_BYTES)  # type: ignore[misc, assignment]
    return engine_process.main([fd, liveness, folder, options])


def spawn(fd: int, liveness: int, model_path: str, options: str) -> subprocess.Popen[bytes]:
    """Start the engine process above in place of the usual one."""
    words = [sys.executable, "-m", "benchmarks.soaking.bounded_server", "engine"]
    return subprocess.Popen([*words, str(fd), str(liveness), model_path, options], pass_fds=[fd, liveness], cwd=ROOT)


def api(folder: str, port: str, threads: str) -> int:
    """The API process."""
    place = Path(folder)
    output_check.MOST_CACHED = VALIDATORS
    config = EngineConfig(
        threads=int(threads), num_gpu_blocks_override=PAGES, block_size=PAGE, max_model_len=MAX_LEN, max_num_seqs=16,
        enable_lora=True, max_loras=4, lora_dir=str(place / "adapters"),
        lora_modules=(f"second-pirate={place / 'adapters' / 'pirate'}",),
    )  # fmt: skip
    options = ServerConfig(
        port=int(port), log_level="info", log_format="json", usage_ledger=str(place / "usage.db"),
        batch_dir=str(place / "batches"), max_stored_response_bytes=RESPONSE_BYTES, max_queue_seconds=600.0,
    )  # fmt: skip
    model = ServedModel(ModelEntry(), config, options)
    return server.serve_models([model], lambda: [model], spawn)


if __name__ == "__main__":
    sys.exit({"engine": engine, "api": api}[sys.argv[1]](*sys.argv[2:]))
