"""One engine under faults: real frontend, frames, core, adapters and matchers over a device of integers.

Everything that a fault can be put into is a part made for it here; the code under test has no switch for any of them.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rootgraft.engine.batch import Batch
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import CapacityError, EngineDead, EngineError
from rootgraft.engine.messages import (
    Abort,
    Done,
    Failed,
    ForgetTokens,
    Heartbeat,
    Message,
    Submit,
    TokenOut,
    TokenTexts,
    decode,
    encode,
)
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.compile.compile_service import CompileQueueFull, CompileStats
from rootgraft.grammar.compile.compiler import compile as compile_grammar
from rootgraft.grammar.match.mask_buffer import MaskBuffer
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary
from rootgraft.lora.adapter_pool import AdapterPool
from support.engine.core_hooks import adapter_pins, free_rows, scheduler_of, set_clock
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.models.lora_folders import file_of, good_config, good_tensors, small_reader, write_folder

EOS, VOCAB = 256, 258
TEXTS = TokenTexts(array("i", [1] * 256 + [5]), bytes(range(256)) + b"<eos>", (EOS,))
SPECS = (GrammarSpec.choice(["yes", "no"]), GrammarSpec.regex("[a-f]{1,12}"), GrammarSpec.json_object())
FAULTY = (GrammarSpec.regex("broken[a-z]{4}"), GrammarSpec.regex("empty[a-z]{4}"))  # matchers that break in the middle
NAMES = tuple(f"a{number}" for number in range(5))


class Crash(Exception):
    """The engine process would end here."""


class Bytes:
    """A tokenizer of single bytes. Tokens in ``broken`` are a bug in it."""

    special_ids = frozenset({EOS})
    eos_ids = (EOS,)

    def __init__(self) -> None:
        self.broken: set[int] = set()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def join_bytes(self, tokens: Iterable[int], skip_special_tokens: bool) -> bytes:
        tokens = tuple(tokens)
        if self.broken.intersection(tokens):
            raise RuntimeError("a bug in the tokenizer")
        return b"".join(map(self.token_bytes, tokens))

    def texts(self) -> TokenTexts:
        return TEXTS


class Compiles:
    """Stands for the service with its child processes: compiled in this process, once, and answered as it is told."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.stats = CompileStats()
        self.errors: deque[Exception] = deque()  # what the next compiles end in
        self.held: list[tuple[GrammarSpec, Future[Any]]] = []  # while ``holding``
        self.holding = False
        self._known = {spec.key: compile_grammar(spec, vocabulary) for spec in (*SPECS, *FAULTY)}

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[Any]:
        future: Future[Any] = Future()
        if self.errors and isinstance(self.errors[0], CompileQueueFull):
            raise self.errors.popleft()
        if self.holding:
            self.held.append((spec, future))
        else:
            self._answer(spec, future)
        return future

    def take_seconds(self) -> list[float]:
        return []

    def go_on(self) -> None:
        self.holding = False
        for spec, future in self.held:
            self._answer(spec, future)
        self.held.clear()

    def _answer(self, spec: GrammarSpec, future: Future[Any]) -> None:
        if self.errors:
            future.set_exception(self.errors.popleft())
            return
        future.set_result(self._known[spec.key])

    def close(self) -> None:
        self.held.clear()


class FaultyWorker(FakeWorker):
    """Raises, or fails rows, in the step that it is told to."""

    raises: BaseException | None = None
    fail_next = 0  # rows of the next steps whose logits are NaN
    lacked_memory = False  # in a step, after which one request may fail

    def run(self, batch: Batch, masks: Any = None) -> Any:
        if self.raises is not None:
            error, self.raises = self.raises, None
            self.lacked_memory |= isinstance(error, MemoryError)
            if masks:
                masks()
            raise error
        self.failing_rows = {row.row for row in batch.rows[: self.fail_next]}
        self.fail_next = max(0, self.fail_next - len(batch.rows))
        return super().run(batch, masks)


class Link:
    """The client's side of the channel: frames through the real encoding, delivered when the world says so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_alive = True
        self.to_core: deque[bytes] = deque()
        self.on_frame: Any = None
        self.on_death: Any = None

    def submit(self, submits: Sequence[Submit]) -> None:
        self._send(submits)
        self._world.open_ids.update(submit.id for submit in submits)

    def abort(self, ids: Iterable[int]) -> None:
        if self.is_alive:
            self._send([Abort(tuple(ids))])

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        self._send([message])

    def _send(self, messages: Sequence[Message]) -> None:
        if not self.is_alive:
            raise EngineDead("The engine is not running.")
        self.to_core.append(encode(messages))


@dataclass(eq=False)
class Reader:
    """One client: what it asked for and what became of it.

    Attributes:
        tokens: by index.
        ends: how many ends came, by index.
        leaves_after: it goes away after so many items; -1: it stays.
    """

    request: TextRequest
    leaves_after: int = -1
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, list[Any]] = field(default_factory=dict)
    error: Exception | None = None
    left: bool = False
    task: asyncio.Task[None] | None = None

    async def read(self, async_engine: AsyncEngine) -> None:
        items = 0
        try:
            async with aclosing(async_engine.stream(self.request)) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        assert delta.index not in self.ends, "something comes after the end"
                        self.tokens.setdefault(delta.index, []).extend(delta.tokens)
                        self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
                        if delta.finish:
                            self.ends[delta.index] = delta.finish
                    items += 1
                    if items == self.leaves_after:
                        self.left = True
                        return
        except (EngineError, RuntimeError) as error:
            self.error = error


class World:
    """The engine, its clients, and all that must hold whatever happens.

    Attributes:
        kills: engines that ended.
        now: the scheduler's clock.
        open_ids: sequences that the engine has been told of and that have not ended.
    """

    def __init__(self, root: Path, seed: int, monkeypatch: Any, *, overlaps: bool = False) -> None:
        self.rng = random.Random(seed)
        self.overlaps = overlaps
        self.root = root
        for number, name in enumerate(NAMES):
            self.write_adapter(name, number)
        self.tokenizer = Bytes()
        self.vocabulary = Vocabulary(
            (*tuple(bytes([byte]) for byte in range(256)), b"<eos>"), frozenset({EOS}), (EOS,), VOCAB
        )
        self.compiles = Compiles(self.vocabulary)
        monkeypatch.setattr(
            "rootgraft.engine.core.structured_output._build",
            lambda *_: (self.compiles, MaskBuffer(self.max_num_seqs, self.vocabulary), self.vocabulary),
        )
        self.max_num_seqs = 4
        self.kills = 0
        self.has_preempted = False
        self.open_ids: set[int] = set()
        self.ended: set[int] = set()
        self.readers: list[Reader] = []
        self.now = 0.0
        self.held_frames = 0  # steps for which the client's process is busy
        self.inbox: deque[bytes] = deque()
        self.later: list[Callable[[], object]] = []  # what ends a fault that lasts
        self.start()

    def write_adapter(self, name: str, seed: int) -> Path:
        return write_folder(self.root / name, good_config(), file_of(good_tensors(seed)))

    def start(self) -> None:
        """A new engine process and a frontend for it."""
        reader = small_reader(self.root)
        self.pool = AdapterPool(reader, max_loras=2, max_adapters=8, max_cpu_bytes=20_000, patience=3)
        self.worker = FaultyWorker(24, 4, vocab_size=VOCAB, eos=(EOS,), adapters=self.pool, overlaps=self.overlaps)
        config = EngineConfig(
            block_size=4,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=16,
            enable_lora=True,
            lora_dir=str(self.root),
        )
        self.core = EngineCore(config, self.worker)
        set_clock(self.core, lambda: self.now)
        self.link = Link(self)
        self.inbox.clear()
        self.async_engine = AsyncEngine(cast(EngineClient, self.link), cast(Tokenizer, self.tokenizer), self.core.ready)

    def die(self) -> None:
        """The engine process ends; what was not read is lost. A supervisor starts a new one."""
        self.kills += 1
        self.link.is_alive = False
        self.ended |= self.open_ids
        self.open_ids.clear()
        self.link.on_death(EngineDead("The engine process has ended."))
        self.core.close()
        self.start()

    def ask(self, *, leaves_after: int = -1, adapter: str | None = None, grammar: Any = None, **options: Any) -> Reader:
        """One more client."""
        rng = self.rng
        stem = [rng.randrange(4)] * rng.randint(0, 12)
        prompt = [*stem, *(rng.randrange(256) for _ in range(rng.randint(1, 20)))]
        params = {"max_tokens": rng.randint(1, 14), "prompt_logprobs": rng.choice([None, None, 0])}
        fields = {name: options.pop(name) for name in ("n", "stop", "salt") if name in options}
        request = TextRequest(
            array("i", prompt), SamplingParams(**{**params, **options}), adapter=adapter, grammar=grammar, **fields
        )
        reader = Reader(request, leaves_after)
        reader.task = asyncio.ensure_future(reader.read(self.async_engine))
        self.readers.append(reader)
        return reader

    def ask_anything(self) -> Reader:
        rng = self.rng
        kind = rng.random()
        if kind < 0.25:
            return self.ask(adapter=rng.choice(NAMES))
        if kind < 0.5:
            return self.ask(grammar=rng.choice(SPECS), max_tokens=rng.randint(1, 30))
        return self.ask(n=rng.choice([1, 1, 2, 3]), stop=rng.choice([(), (chr(rng.randrange(97, 123)),)]))

    async def step(self) -> None:
        """One turn of both processes, and all equations."""
        await self.let_run()
        try:
            while self.link.to_core:
                self.core.handle(decode(self.link.to_core.popleft()))
            out = self.core.step() if self.core.has_work else []
        except Exception:
            self.die()
            await self.let_run()
            return
        self.check_messages(out)
        self.inbox.append(encode([*out, Heartbeat(self.core.stats(), self.core.take_observations())]))
        self.now += 0.01
        self.check()
        if self.held_frames:
            self.held_frames -= 1
        else:
            self.deliver()
        await self.let_run()

    def deliver(self) -> None:
        while self.inbox:
            *messages, _ = decode(self.inbox.popleft())
            self.link.on_frame(messages)

    async def let_run(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    def check_messages(self, messages: Iterable[Message]) -> None:
        """Each sequence ends once, and nothing comes of it afterwards."""
        for message in messages:
            if isinstance(message, (TokenOut, Done, Failed)):
                assert message.id in self.open_ids, f"{message} of a sequence that has ended or never was"
                if not isinstance(message, TokenOut):
                    self.open_ids.remove(message.id)
                    self.ended.add(message.id)

    def check(self) -> None:
        """Pages, tree, leases, slots and pins; rows; and that what was accepted is somewhere."""
        core, scheduler = self.core, scheduler_of(self.core)
        core.check()
        stats = core.stats()
        self.has_preempted |= stats["preemptions"] > 0
        finished = sum(count for name, count in stats.items() if name.startswith("finished_"))
        assert stats["accepted"] == finished + scheduler.num_running + scheduler.num_waiting
        assert len(free_rows(core)) + scheduler.num_running == self.max_num_seqs
        assert len(set(free_rows(core))) == len(free_rows(core))
        pins = adapter_pins(core)
        assert set(pins) <= self.open_ids
        assert sum(version.pins for version in self.pool.registry) <= len(pins)
        assert self.pool.slots.num_pinned <= scheduler.num_running
        assert all((one.slot >= 0) == (one.spec.adapter >= 0) for one in scheduler.running)
        used = stats["pages_free"] + stats["pages_cached"] + stats["pages_private"]
        assert used == stats["pages"]

    async def settle(self, limit: int = 5000) -> None:
        """Run until every client has its end, and check that nothing is left of any."""
        self.compiles.go_on()
        while self.later:
            self.later.pop()()
        while any(not reader.task.done() for reader in self.readers if reader.task) or self.core.has_work:
            assert limit, "does not come to an end"
            limit -= 1
            await self.step()
        for reader in self.readers:
            assert reader.task is not None
            if not reader.task.cancelled():
                reader.task.result()
            self.check_reader(reader)
        self.readers.clear()
        self.tokenizer.broken.clear()
        assert not self.open_ids and self.async_engine.num_running == 0
        stats = self.core.stats()
        assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0
        assert not adapter_pins(self.core) and self.pool.slots.num_pinned == 0

    def check_reader(self, reader: Reader) -> None:
        """An end for each sequence, or one error, or the client left; and tokens as if it had been alone."""
        request = reader.request
        if reader.error is None and not reader.left:
            assert sorted(reader.ends) == list(range(request.n))
        # Lack of pages is nobody's error: who fits alone waits, or is preempted and comes back.
        may_lack = request.grammar is not None or self.worker.lacked_memory
        assert may_lack or not isinstance(reader.error, CapacityError)
        if request.adapter is None and request.grammar is None:
            for tokens in reader.tokens.values():
                assert tokens == expected_tokens(request.tokens, len(tokens), VOCAB)
        if request.grammar is not None:
            for index, finish in reader.ends.items():
                if finish.reason == "stop" and request.grammar is SPECS[0]:
                    assert reader.texts[index] in ("yes", "no")

    def close(self) -> None:
        self.core.close()
