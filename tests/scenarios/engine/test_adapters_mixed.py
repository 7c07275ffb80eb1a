"""Adapters beside grammars, penalties and seeds in one batch, and activated adapters over several turns."""

from __future__ import annotations

import re
import shutil
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.engine.core_hooks import preempt, scheduler_of
from support.models.adapted_llama import INVOCATION
from support.models.lora_models import greedy_by_peft

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, LoadAdapter, Reply, Submit, TokenOut, TokenTexts
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec

EOS = 2
# Tokens 3 to 97 are the printable characters; those before them are special, those behind them bytes of their own.
TEXTS = TokenTexts(
    array("i", [5, 5, 5] + [1] * 98), b"<pad><bos><eos>" + bytes(range(32, 127)) + b"\n\t\x80", (0, 1, EOS)
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@dataclass
class Asked:
    """One request."""

    prompt: list[int]
    adapter: str | None = None
    grammar: GrammarSpec | None = None
    params: dict[str, Any] = field(default_factory=dict)


class Engine:
    """A core on the tiny model with a vocabulary of bytes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        fields: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_loras": 4, "max_num_seqs": 16, **options}
        config = EngineConfig(
            dtype="float32", device="cpu", threads=1, enable_lora=True, lora_dir=str(folder), **fields
        )
        self.core = EngineCore.load(config, folder / "llama")
        self.core.handle([TEXTS])
        self.cached: dict[int, int] = {}

    def run(self, asked: list[Asked], preempt_every: int = 0) -> list[list[int]]:
        """Tokens of requests that come together; every so many steps all with an adapter are preempted."""
        steps = 0
        tokens: dict[int, list[int]] = {}
        for number, each in enumerate(asked):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **each.params})
            grammar = each.grammar and (each.grammar.kind.value, each.grammar.content)
            self.core.handle([Submit(number, array("i", each.prompt), params, each.adapter, grammar=grammar)])
            tokens[number] = []
        while self.core.has_work:
            for message in self.core.step():
                assert not isinstance(message, Failed), message
                if isinstance(message, TokenOut):
                    tokens[message.id] += message.tokens
                elif isinstance(message, Done):
                    self.cached[message.id] = message.usage.cached
            self.core.check()
            steps += 1
            if preempt_every and steps % preempt_every == 0:
                for sequence in [s for s in scheduler_of(self.core).running if s.spec.adapter >= 0]:
                    preempt(self.core, sequence)
        return list(tokens.values())

    def load(self, name: str, path: str) -> None:
        self.core.handle([LoadAdapter(1, name, path, replace=True)])
        replies: list[Reply] = []
        while not replies:
            replies = [message for message in self.core.step() if isinstance(message, Reply)]
        assert replies[0].failure is None


@pytest.fixture
def engine(adapted_llama: Path):
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(adapted_llama, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.core.close()


@pytest.fixture(scope="module")
def oracle(adapted_llama: Path):
    return greedy_by_peft("llama", adapted_llama)


def text(tokens: list[int]) -> str:
    return "".join(chr(token + 29) for token in tokens)


PROMPT = [(3 * i + i * i) % 90 + 9 for i in range(23)]


@pytest.mark.parametrize("name", ["twin_a", "headed"])
def test_a_grammar_and_an_adapter_in_one_request(engine, oracle, name):
    """The adapter's best token among those that the grammar allows, at each place."""
    letters = [ord(letter) - 29 for letter in "abcdefghijklmnopqrstuvwxyz"]
    params = {"max_tokens": 64}
    asked = [Asked(PROMPT, adapter, GrammarSpec.regex("[a-z]{9}"), params) for adapter in (name, None)]
    adapted, plain = engine().run(asked)
    assert adapted == oracle(name, PROMPT, 9, letters) != plain
    assert re.fullmatch("[a-z]{9}", text(adapted)) and re.fullmatch("[a-z]{9}", text(plain))


def mixed() -> list[Asked]:
    """All kinds of rows, so that each stands beside every other one; those of one adapter share a prefix."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    sampled = {**penalties, "temperature": 1.0, "max_tokens": 40}
    rows = []
    for at, adapter in enumerate([None, "twin_a", "headed", "activated"]):
        prompt = [*PROMPT[at:], *INVOCATION, 30 + at]
        rows += [
            Asked(prompt, adapter),
            Asked(prompt, adapter, GrammarSpec.json_schema(SCHEMA), {"max_tokens": 40}),
            Asked(prompt, adapter, None, {**penalties, "ignore_eos": True}),
            Asked(prompt, adapter, GrammarSpec.regex("[0-9a-f]{4,10}"), sampled | {"seed": at}),
        ]
    return rows


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 17, "block_size": 1, "num_gpu_blocks_override": 900}, {"max_loras": 1}],
    ids=["plain", "chunked", "one_slot"],
)
def test_a_row_of_a_mixed_batch_is_what_it_is_alone(engine, options):
    """Grammars, penalties, seeds and adapters, all at once and one after the other: the same tokens."""
    alone, together = engine(enable_prefix_caching=False), engine(**options)
    wanted = [alone.run([each])[0] for each in mixed()]
    assert together.run(mixed()) == wanted
    assert together.run(mixed()[::-1]) == wanted[::-1]
    assert len({tuple(tokens) for tokens in wanted}) > len(wanted) // 2


@pytest.mark.parametrize("second", ["twin_b", "activated"])
def test_reload_between_two_turns(engine, oracle, second):
    """The name stands for other weights in the second turn: nothing of the first one's KV is found."""
    ours = engine()
    ours.load("name", "twin_a")
    first = [*PROMPT, *INVOCATION, 31]
    [answer] = ours.run([Asked(first, "name")])
    assert answer == oracle("twin_a", first, 12)[: len(answer)]
    ours.load("name", second)
    turn = [*first, *answer, 40, *INVOCATION, 41]
    [again] = ours.run([Asked(turn, "name")])
    assert again == oracle(second, turn, 12)[: len(again)]
    assert ours.cached[0] == 0


def test_new_bytes_at_an_old_path(engine, oracle, adapted_llama):
    """A folder is written anew and loaded again under its name: answers and KV are the new weights'."""
    ours = engine()
    for source in ("twin_a", "twin_b"):
        shutil.copytree(adapted_llama / source, adapted_llama / "changing", dirs_exist_ok=True)
        ours.load("changing", "changing")
        [tokens] = ours.run([Asked(PROMPT, "changing")])
        assert tokens == oracle(source, PROMPT, 12)[: len(tokens)]
        assert ours.cached[0] == 0


def test_two_adapters_of_equal_rank_share_nothing(engine, oracle):
    ours = engine()
    for name in ("twin_a", "twin_b", "twin_a"):
        [tokens] = ours.run([Asked(PROMPT, name)])
        assert tokens == oracle(name, PROMPT, 12)[: len(tokens)]
    assert ours.cached[0] > 0
    together = ours.run([Asked(PROMPT, name) for name in ("twin_b", "twin_a")])
    assert together == [
        oracle(name, PROMPT, 12)[: len(t)] for name, t in zip(("twin_b", "twin_a"), together, strict=True)
    ]


@pytest.mark.parametrize("length", range(13, 22))
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4},
        {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"block_size": 4, "max_num_batched_tokens": 16},
    ],
    ids=["misaligned", "chunked", "preempted"],
)
def test_activated_over_two_turns(engine, oracle, options, length):
    """In the second turn the first one's answer is the base's to read: only what was before its activation is found.

    All positions of the activation within a page; in small chunks; and preempted every third step, in chunks as well.
    """
    ours = engine(**options)
    for name in ("activated", "twin_a"):  # before they are asked for: whether rows meet must not depend on the clock
        ours.load(name, name)
    context = [(5 * i) % 80 + 12 for i in range(length)]
    first = [*context, *INVOCATION, 30]
    greedy = {"ignore_eos": True, "max_tokens": 8}
    [answer] = ours.run([Asked(first, "activated", None, greedy)])
    assert answer == oracle("activated", first, 8)
    turn = [*first, *answer, 50, 51, *INVOCATION, 33]
    every = 3 if options == {"block_size": 4, "max_num_batched_tokens": 16} else 0
    crowd = [Asked([60 + i], name, None, {"ignore_eos": True, "max_tokens": 48}) for i, name in
             enumerate((None, "twin_a"))]  # fmt: skip
    *_, second = ours.run([*crowd, Asked(turn, "activated", None, {**greedy, "max_tokens": 16})], every)
    assert second == oracle("activated", turn, 16)
    assert ours.cached[2] == len(context)
    assert (ours.core.stats()["preemptions"] >= 5) == bool(every)
    [back] = ours.run([Asked(turn, None, None, greedy)])
    assert back == oracle(None, turn, 8)
    assert ours.cached[0] == len(turn) - 3
