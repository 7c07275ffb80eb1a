"""The server of the soak: an engine process whose device is made of integers, and an API process in front of it.

    python -m benchmarks.soaking.device engine FD LIVENESS FOLDER OPTIONS    started by the API process
    python -m benchmarks.soaking.device api FOLDER PORT [tiers]     the real server; only what loads a model is replaced

Scheduler, prefix cache, adapters with their slots, grammars and their compilers, frames between the processes, HTTP,
admission, ledger: all of it is the real thing. A token follows from a hash of all tokens before it and of the adapter,
so whoever reads an answer can tell whether a page, an adapter or a row was mixed up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from support.engine.fake_worker import FakeWorker, adapter_code
from support.models.lora_folders import file_of, good_config, good_tensors, small_reader, write_folder

from benchmarks.soaking import ROOT
from rootgraft.api.config import ServerConfig
from rootgraft.api.generate import model_engine
from rootgraft.api.http import model_service, server
from rootgraft.api.structured import output_check
from rootgraft.engine import process_memory
from rootgraft.engine.batch import Batch, StepResult
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import engine_process, structured_output
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.liveness_thread import LivenessThread
from rootgraft.engine.core.step_worker import Launched
from rootgraft.engine.ipc import Channel
from rootgraft.engine.messages import Done, Failed, Message, Submit, TokenOut, TokenTexts, encode
from rootgraft.engine.serving import engine_client
from rootgraft.grammar import vocabulary
from rootgraft.grammar.compile.compile_service import CompileService
from rootgraft.lora.adapter_pool import AdapterPool

EOS, VOCAB = 95, 96  # the printable characters of ASCII, and the end
ADAPTERS, SLOTS = 64, 8
PAGES, PAGE, MAX_LEN = 80, 16, 1024  # Pages for 32 rows: the pool gets full, so that sequences are preempted.
GRAMMAR_BYTES = 2 << 20  # small, like the next three: what is bounded shall reach its bound soon
RESPONSE_BYTES = 1 << 18
VALIDATOR_BYTES, MASK_BYTES = 1 << 20, 1 << 20
STEP_SECONDS = 0.004
CHECK_SECONDS = 0.5
REPORT = "engine.json"
DISK_GIB = 0.001  # Size of the KV files: some hundreds of pages.


def kv_folder(folder: Path) -> Path:
    """Return the folder of the KV files."""
    return folder / "kv"


def make_adapters(folder: Path) -> dict[str, int]:
    """64 adapters, and by name what each adds to a token."""
    reader = small_reader(folder)
    codes = {}
    for number in range(ADAPTERS):
        name = f"a{number}"
        write_folder(folder / name, good_config(), file_of(good_tensors(number)))
        codes[name] = adapter_code(reader.read(name).digest)
    return codes


class Characters:
    """A tokenizer with one token for each printable character of ASCII, and a chat template as short."""

    has_chat_template = True
    waits = False
    named_roles = frozenset[str]()
    vocab_size, bos_id, eos_ids, special_ids = VOCAB, None, (EOS,), frozenset({EOS})

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        return array("i", (min(max(ord(letter) - 32, 0), 94) for letter in text))

    def cuts(self, text: str) -> Iterator[int]:
        """Anywhere would do; it is where messages begin, as in others."""
        return (place for place, letter in enumerate(text) if letter == "<")

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        """For an answer, since nothing else is asked of it here."""
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def template_mentions(self, text: str) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return bytes([32 + token]) if token < EOS else b""

    def join_bytes(self, tokens: Iterable[int], skip_special_tokens: bool) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.join_bytes(tokens, skip_special_tokens).decode()

    def texts(self) -> TokenTexts:
        return TokenTexts(array("i", [1] * EOS + [5]), bytes(range(32, 127)) + b"<eos>", (EOS,))


class Device(FakeWorker):  # type: ignore[misc]  # helpers of tests have no types
    """A step takes its time, as on a device, and leaves no record, which would grow with each."""

    def run(self, batch: Batch, masks: Any = None) -> StepResult:
        time.sleep(STEP_SECONDS)
        result: StepResult = super().run(batch, masks)
        self.batches.clear()
        self.log.clear()
        return result


class CheckedCore(EngineCore):
    """All equations twice a second; and of each sequence, that it ends once and nothing comes after its end."""

    def __init__(self, config: EngineConfig, worker: Any) -> None:
        super().__init__(config, worker)
        self.open_ids: set[int] = set()
        self.counts = {"submitted": 0, "done": 0, "failed": 0, "checks": 0}
        self._checked = time.monotonic()

    def handle(self, messages: Iterable[Message]) -> None:
        messages = list(messages)
        for message in messages:
            if isinstance(message, Submit):
                assert message.id not in self.open_ids, "an id is used twice"
                self.open_ids.add(message.id)
                self.counts["submitted"] += 1
        super().handle(messages)

    def finish(self, launched: Launched | None) -> list[Message]:
        messages = super().finish(launched)
        self._note(messages)
        if time.monotonic() > self._checked + CHECK_SECONDS:
            self._checked = time.monotonic()
            self.check()
        return messages

    def close(self) -> list[Message]:
        messages = super().close()
        self._note(messages)
        return messages

    @property
    def num_evicted(self) -> int:
        """Pages that left the prefix cache for others."""
        return self._cache.num_evicted

    def check(self) -> None:
        super().check()
        stats, scheduler = self.stats(), self._scheduler
        finished = sum(count for name, count in stats.items() if name.startswith("finished_"))
        assert stats["accepted"] == finished + scheduler.num_running + scheduler.num_waiting
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_private"] == stats["pages"]
        self.counts["checks"] += 1

    def _note(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                assert message.id in self.open_ids, "a token after the end"
            elif isinstance(message, (Done, Failed)):
                self.open_ids.remove(message.id)
                self.counts["done" if isinstance(message, Done) else "failed"] += 1


def _replace(module: ModuleType, name: str, value: Any) -> None:
    """Replace what a module has under a name. Raises AttributeError if it has nothing there."""
    getattr(module, name)
    setattr(module, name, value)


def engine(fd: str, liveness: str, folder: str, options: str) -> int:
    """The engine process. At its end it writes what it counted, and whether everything was given back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    process_memory.share_heap()
    torch.set_num_threads(1)
    _replace(structured_output, "CompileService", partial(CompileService, cache_bytes=GRAMMAR_BYTES))
    _replace(vocabulary, "CACHE_BYTES", MASK_BYTES)
    adapters = AdapterPool(
        small_reader(Path(folder) / "adapters"), max_loras=SLOTS, max_adapters=256, max_cpu_bytes=8000, patience=8
    )
    worker = Device(PAGES, PAGE, vocab_size=VOCAB, max_model_len=MAX_LEN, eos=(EOS,), adapters=adapters)
    core = CheckedCore(engine_process.parse_config(options), worker)
    channel = Channel(socket.socket(fileno=int(fd)))
    channel.send(encode([core.ready]))
    process_memory.freeze()
    engine_process.serve(core, channel, LivenessThread(int(liveness)))
    core.check()
    stats = core.stats()
    left = {
        "open": len(core.open_ids), "running": stats["running"], "waiting": stats["waiting"],
        "private_pages": stats["pages_private"], "pinned_slots": adapters.slots.num_pinned,
        "pins": sum(version.pins for version in adapters.registry),
    }  # fmt: skip
    counts = core.counts | {"evicted_pages": core.num_evicted}
    (Path(folder) / REPORT).write_text(json.dumps({"counts": counts, "left": left, "stats": stats}))
    return 0


def spawn_soak_engine(fd: int, liveness: int, model_path: str, options: str) -> subprocess.Popen[bytes]:
    """Start the engine process above in place of the real one."""
    command = [sys.executable, "-m", "benchmarks.soaking.device", "engine", str(fd), str(liveness), model_path, options]
    return subprocess.Popen(command, pass_fds=[fd, liveness], cwd=ROOT)


def api(folder: str, port: str, tiers: str = "") -> int:
    """The API process: the server, with the functions replaced that get at a model, and one bound lower."""
    kept: dict[str, Any] = {"kv_disk": str(kv_folder(Path(folder))), "kv_disk_gib": DISK_GIB} if tiers else {}
    files = ModelFiles(Path(folder), "soak")
    _replace(model_service, "resolve_served_model", lambda config: files)
    _replace(model_engine, "Tokenizer", SimpleNamespace(load=lambda *_args, **_options: Characters()))
    _replace(engine_client, "spawn_engine", spawn_soak_engine)
    _replace(output_check, "MOST_BYTES", VALIDATOR_BYTES)
    config = EngineConfig(
        max_num_seqs=32, max_num_batched_tokens=256, block_size=PAGE, enable_lora=True, max_loras=SLOTS,
        lora_dir=str(Path(folder) / "adapters"), **kept,
    )  # fmt: skip
    options = ServerConfig(
        port=int(port), log_level="info", log_format="json", usage_ledger=str(Path(folder) / "usage.db"),
        max_stored_response_bytes=RESPONSE_BYTES,
    )  # fmt: skip
    return server.serve(config, options)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    programs: dict[str, Callable[..., int]] = {"engine": engine, "api": api}
    sys.exit(programs[sys.argv[1]](*sys.argv[2:]))
