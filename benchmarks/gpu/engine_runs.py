"""The engine driven step by step with token ids, on random weights, by default in the shape of Llama-3.1-8B."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import Ceilings, Machine, synchronize
from benchmarks.gpu.waiting import WaitingTimes
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Abort, Done, Failed, Submit, TokenOut, TokenTexts
from rootgraft.engine.scheduling.chunk_budget import usual_chunk
from rootgraft.engine.types import FinishReason, Logprob, SamplingParams

PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes, with what its steps must read and compute."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear module of a layer."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        attention = {"q_proj": (self.hidden, q), "k_proj": (self.hidden, kv), "v_proj": (self.hidden, kv)}
        attention["o_proj"] = (q, self.hidden)
        up = (self.hidden, self.inner)
        mlp = {"gate_proj": up, "up_proj": up, "down_proj": (self.inner, self.hidden)}
        return {f"self_attn.{n}": s for n, s in attention.items()} | {f"mlp.{n}": s for n, s in mlp.items()}

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.layers * sum(a * b for a, b in self.projections.values())

    def step_floor(self, ceilings: Ceilings, kv_tokens: int, itemsize: int, rows: int) -> float:
        """Seconds of a decode step that reads all weights and the KV of so many tokens."""
        weights = self.layer_weights + self.hidden * self.vocab
        kv = 2 * self.layers * self.kv_heads * self.dim * kv_tokens
        return ceilings.seconds(read=(weights + kv) * itemsize, flops=2 * rows * weights)

    def prefill_floor(self, ceilings: Ceilings, tokens: int) -> float:
        """Seconds of the products of a prompt."""
        attention = 2 * tokens * tokens * self.layers * self.heads * self.dim
        return ceilings.seconds(flops=2 * tokens * self.layer_weights + attention)

    def write(self, folder: Path) -> Path:
        """The config that a model of this shape would have. Returns the folder."""
        fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": self.vocab - 2,
            "eos_token_id": self.vocab - 1,
        }
        (folder / "config.json").write_text(json.dumps(fields))
        return folder


LLAMA_8B = Shape(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, dim=128, vocab=128256)
LLAMA_1B = Shape(layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8, dim=64, vocab=128256)
SMALL = Shape(layers=4, hidden=256, inner=512, heads=8, kv_heads=2, dim=64, vocab=1024)
TINY = Shape(layers=1, hidden=64, inner=96, heads=2, kv_heads=1, dim=32, vocab=300)


@dataclass(frozen=True)
class StepTime:
    """A step's time, and the part of it in which the device waits for the host: seconds, both medians."""

    seconds: float
    waiting: float


@dataclass
class Answer:
    """A prompt and what an engine gave for it, with the log probabilities of both.

    Attributes:
        adapter: its name, None for the base model.
        is_greedy: whether its tokens are the likeliest.
        is_cut: whether it ended by its length.
    """

    prompt: array[int]
    adapter: str | None
    is_greedy: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    is_cut: bool = False

    def positions(self) -> Iterator[tuple[int, Logprob]]:
        """Each log probability with its token's position; the prompt's last ones come first, if there are any."""
        yield from enumerate(self.prompt_logprobs, len(self.prompt) - len(self.prompt_logprobs))
        yield from enumerate(self.logprobs, len(self.prompt))


class Engine:
    """An engine, its answers, and the times of its steps.

    By default its weights are random and it drafts nothing: a step is to bring one token of each row.
    """

    def __init__(self, machine: Machine, shape: Shape, folder: Path, options: dict[str, Any]) -> None:
        self.machine = machine
        self.shape = shape
        self.ids = count(1)
        config = EngineConfig(
            device=machine.device.type,
            dtype=str(machine.dtype).removeprefix("torch."),
            block_size=PAGE_SIZE,
            **{"load_format": "dummy", "speculative_config": '{"method": "off"}', **options},
        )
        self.budget = config.most_tokens
        worker = Worker(config, folder)
        worker.overlaps = True  # a rehearsal on a CPU makes the calls that a GPU gets
        self.core = EngineCore(config, worker)
        self.random = random.Random(0)

    def close(self) -> None:
        """Close the engine and let go of it: a name that still stands for this object keeps no device memory."""
        self.core.close()
        del self.core

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.core.ready.num_pages * PAGE_SIZE

    def tokens(self, length: int) -> array[int]:
        """Random text."""
        return array("i", (self.random.randrange(256) for _ in range(length)))

    def learn_bytes(self) -> None:
        """Let the first 256 tokens be the bytes, and the others text of no use, so that grammars can be followed."""
        vocab = self.shape.vocab
        rest = b"".join(b"\x00%d" % i for i in range(256, vocab))
        lengths = array("i", [1] * 256 + [len(b"\x00%d" % i) for i in range(256, vocab)])
        self.core.handle([TokenTexts(lengths, bytes(range(256)) + rest, (vocab - 2, vocab - 1))])

    def answers(
        self,
        requests: Sequence[tuple[array[int], str | None, float]],
        most: int,
        grammar: tuple[str, bytes] | None = None,
    ) -> list[Answer]:
        """Answers to prompts with their adapters and temperatures, computed together, of so many tokens at most.

        Every other one also has the log probabilities of its prompt.
        """
        found: dict[int, Answer] = {}
        submits = []
        for number, (prompt, adapter, temperature) in enumerate(requests):
            params = SamplingParams(
                temperature=temperature,
                top_p=0.9,
                max_tokens=most,
                ignore_eos=grammar is None,
                logprobs=0,
                prompt_logprobs=0 if number % 2 else None,
            )
            submits.append(Submit(next(self.ids), prompt, params, adapter=adapter, grammar=grammar))
            found[submits[-1].id] = Answer(prompt, adapter, temperature == 0)
        self.core.handle(submits)
        alive = set(found)
        while alive:
            for message in self.core.step():
                if isinstance(message, Failed):
                    raise RuntimeError(f"the engine failed: {message}")
                if isinstance(message, TokenOut):
                    answer = found[message.id]
                    answer.tokens += message.tokens
                    answer.logprobs += message.logprobs
                    answer.prompt_logprobs += message.prompt_logprobs
                if isinstance(message, Done):
                    found[message.id].is_cut = message.reason is FinishReason.LENGTH
                    alive.remove(message.id)
        return list(found.values())

    def first_token(self, prompt: array[int]) -> float:
        """Seconds from a prompt to its first token."""
        synchronize(self.machine)
        begin = time.perf_counter()
        self._run([self._submit(prompt, 1)], 1)
        return time.perf_counter() - begin

    def answer_seconds(self, prompts: Sequence[array[int]], most: int) -> float:
        """Seconds in which all prompts get an answer of so many tokens."""
        submits = [self._submit(prompt, most) for prompt in prompts]
        synchronize(self.machine)
        begin = time.perf_counter()
        self.core.handle(submits)
        alive = {submit.id for submit in submits}
        while alive:
            messages = self.core.step()
            if failed := [message for message in messages if isinstance(message, Failed)]:
                raise RuntimeError(f"the engine failed: {failed[0]}")
            alive -= {message.id for message in messages if isinstance(message, Done)}
        return time.perf_counter() - begin

    def longest_answer(self, rows: int, context: int, steps: int) -> int:
        """Tokens for each row so that the first one still runs when the last prompt is computed, and some steps on."""
        return steps + 2 + -(-rows * context // min(self.budget - rows, usual_chunk(self.budget)))

    def decode_step(
        self,
        prompts: Sequence[array[int]],
        steps: int,
        adapters: Sequence[str | None] = (None,),
    ) -> StepTime:
        """The steps in which all prompts get a token each."""
        most = self.longest_answer(len(prompts), len(prompts[0]), steps)
        submits = [self._submit(prompt, most, adapters[i % len(adapters)]) for i, prompt in enumerate(prompts)]
        waiting = WaitingTimes(self.machine)
        with waiting.watch():
            times = self._run(submits, steps + 1)
        # The first of them may still hold the last piece of a prompt.
        return StepTime(statistics.median(times[1:]), waiting.median(steps))

    def _submit(self, prompt: array[int], most: int, adapter: str | None = None) -> Submit:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        return Submit(next(self.ids), prompt, params, adapter=adapter)

    def _run(self, submits: list[Submit], steps: int) -> list[float]:
        """Seconds of the first steps that brought a token of every sequence; then the sequences are aborted.

        A step begins where the last one that brought tokens ended: a call may launch what the next one waits for.
        """
        self.core.handle(submits)
        alive = {submit.id for submit in submits}
        times: list[float] = []
        begin = time.perf_counter()
        while alive:
            messages = self.core.step()
            got = {message.id for message in messages if isinstance(message, TokenOut)}
            if got:
                took, begin = time.perf_counter() - begin, time.perf_counter()
            if len(got) == len(submits):
                times.append(took)
                if len(times) == steps:
                    self.core.handle([Abort(tuple(alive))])
            if failed := [message for message in messages if isinstance(message, Failed)]:
                raise RuntimeError(f"the engine failed: {failed[0]}")
            alive -= {message.id for message in messages if isinstance(message, Done)}
        return times


@contextmanager
def engine(machine: Machine, shape: Shape, folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine for a while; its memory is free for the next one afterwards, whoever still holds the object."""
    made = Engine(machine, shape, folder, options)
    try:
        yield made
    finally:
        made.close()
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
