"""An engine core with drafts and grammars over the fake device, and random requests for it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, TokenOut
from rootgraft.engine.sequence.sequence import Sequence
from rootgraft.engine.speculation.draft_cost import DraftCost
from rootgraft.engine.speculation.proposer import Proposer
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.compile.compiler import CompiledGrammar, compile
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary
from rootgraft.radix.namespace import Namespace, Path
from support.engine.core_hooks import scheduler_of, set_structured_output, structured_output_in_process, worker_of
from support.engine.fake_worker import FakeWorker

VOCAB, EOS = 258, 256
GRAMMARS = [
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"customer": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
            "required": ["customer", "ok"],
            "additionalProperties": False,
        }
    ),
    GrammarSpec.regex("[a-f]{3}-long constant part-[0-9]{1,9}"),
    GrammarSpec.choice(["yes, of course", "yes, but", "no"]),
]
VOCABULARY = Vocabulary((*(bytes([i]) for i in range(256)), b"<eos>"), frozenset((EOS,)), (EOS,), VOCAB)


@cache
def compiled(number: int) -> CompiledGrammar:
    return compile(GRAMMARS[number], VOCABULARY)


def compute_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts be computed whatever they cost, so that what happens does not hang on this machine's speed."""
    monkeypatch.setattr(DraftCost, "threshold", lambda self, num_rows: 0.01)
    monkeypatch.setattr(DraftCost, "least_gain", lambda self, num_rows: 0.0)


def always_drafting(monkeypatch: pytest.MonkeyPatch, length: int = 4) -> None:
    """Let the draft model draft so many tokens for every row for which no source promises more, as if in no time."""
    compute_all_drafts(monkeypatch)
    monkeypatch.setattr(DraftCost, "tokens_in", lambda self, seconds, num_rows: 0.0)
    monkeypatch.setattr(DraftCost, "draft_length", lambda self, rates, rows, seconds, most: min(length, most))


def drafts_of(proposer: Proposer, sequence: Sequence, limit: int = 16) -> list[int]:
    """Return the drafts of the only row of a step."""
    proposal = proposer.propose(sequence, limit, 1)
    if proposal is None:
        return []
    [count] = proposer.choose([proposal], 1, limit).counts
    return list(proposer.use(sequence, proposal, count))


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: int | None = None


@dataclass
class Engine:
    """An engine that says what each sequence got: its tokens, and how it ended."""

    core: EngineCore
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Done | Failed] = field(default_factory=dict)

    @classmethod
    def make(cls, method: str = "auto", num_pages=200, page_size=4, max_num_seqs=4, budget=64, **worker) -> Engine:
        config = EngineConfig(
            block_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            speculative_config=f'{{"method": "{method}"}}',
        )
        core = EngineCore(config, FakeWorker(num_pages, page_size, vocab_size=VOCAB, eos=(EOS,), **worker))
        set_structured_output(core, structured_output_in_process(max_num_seqs + config.max_drafts, VOCABULARY))
        return cls(core)

    def submit(self, number: int, ask: Ask) -> None:
        matcher = None if ask.grammar is None else compiled(ask.grammar).matcher()
        ends = frozenset((*(() if ask.params.ignore_eos else (EOS,)), *ask.params.stop_token_ids))
        path = Path(Namespace("fake"))
        self.tokens[number] = []
        scheduler_of(self.core).add(
            Sequence(
                number, array("i", ask.prompt), ask.params, path, ends, number, 0.0, worker_of(self.core).max_model_len
            ),
            matcher,
        )

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
            else:
                assert message.id not in self.ends
                self.ends[message.id] = message
        self.core.check()
        for sequence in scheduler_of(self.core).running:
            assert sequence.matcher is None or sequence.matcher.lent.num_tokens == sequence.num_generated
            assert sequence.num_computed < sequence.num_tokens
            num_tokens = sequence.num_tokens + worker_of(self.core).overlaps  # one may be under way
            assert len(sequence.lease.pages) <= -(-num_tokens // self.page_size)

    @property
    def page_size(self) -> int:
        return worker_of(self.core).page_size

    def run(self) -> dict[int, tuple]:
        limit = 20_000
        while self.core.has_work:
            self.step()
            limit -= 1
            assert limit, "does not come to an end"
        assert self.core.stats()["pages_private"] == 0
        return {number: (self.tokens[number], *ending(self.ends[number])) for number in self.tokens}

    def close(self) -> None:
        self.core.close()


def ending(end: Done | Failed) -> tuple:
    return (end.reason, end.stop_token, end.usage.completion) if isinstance(end, Done) else (end.kind, end.message)


class MakeEngine(Protocol):
    """`Engine.make`, whose engines are closed when the test ends."""

    def __call__(self, method: str = "auto", **options: Any) -> Engine: ...


def open_engines() -> Iterator[MakeEngine]:
    """Yield a maker of engines, then close what it made: the body of a fixture."""
    made: list[Engine] = []

    def make(method: str = "auto", **options: Any) -> Engine:
        made.append(Engine.make(method, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pool_options(num_pages: int, page_size: int, budget: int) -> dict[str, int]:
    """Return options of `Engine.make` for a pool of ``num_pages`` pages of one token, in pages of another size."""
    return {"num_pages": num_pages // page_size + 4, "page_size": page_size, "budget": budget}


def answers_without(asks: list[Ask], options: dict[str, int]) -> dict[int, tuple]:
    """Return what each sequence gets without drafts."""
    plain = Engine.make("off", **options)
    for number, ask in enumerate(asks):
        plain.submit(number, ask)
    answers = plain.run()
    plain.close()
    return answers


def answers_with(drafted: Engine, asks: list[Ask], rng: random.Random) -> dict[int, tuple]:
    """Return what each sequence gets from an engine to which they come one after another, and check its counts."""
    for number, ask in enumerate(asks):
        drafted.submit(number, ask)
        for _ in range(rng.choice([0, 0, 1, 5])):
            drafted.step()
    answers = drafted.run()
    stats = drafted.core.stats()
    assert stats["draft_tokens_accepted"] <= stats["draft_tokens"]
    for end in drafted.ends.values():
        assert isinstance(end, Failed) or max(end.usage.drafted, end.usage.forced) <= end.usage.completion
    return answers


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    min_tokens=st.sampled_from([0, 0, 3, 12]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 250, 9))]),
)
ASKS = st.lists(
    st.builds(
        Ask,
        prompt=st.one_of(
            st.lists(st.integers(0, 5), min_size=1, max_size=30).map(tuple), st.integers(1, 50).map(lambda n: (3,) * n)
        ),
        params=PARAMS,
        grammar=st.sampled_from([None, None, 0, 1, 2]),
    ),
    min_size=1,
    max_size=6,
)

DRAWN = {  # arguments of a property: requests, when they come, and what they share
    "asks": ASKS,
    "seed": st.integers(0, 2**32),
    "page_size": st.sampled_from([1, 4, 16]),
    "budget": st.sampled_from([4, 9, 64]),
    "num_pages": st.sampled_from([100, 140, 1000]),
}
DRAWN_OF_DRAFTER = {  # beside these, of a draft model or head: its pages, how often it is right, drafts of a step
    "draft_pages": st.sampled_from([20, 60, 1000]),
    "right": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    "length": st.sampled_from([1, 3, 16]),
}
