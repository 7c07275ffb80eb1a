"""An engine core with drafts and grammars over the fake device, fake draft models and heads, and random requests."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import pytest
from hypothesis import strategies as st

from rootgraft.engine.batch import Batch, Masks, Row, RowResult, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, TokenOut
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.speculation.draft_cost import DraftChoice, DraftCost
from rootgraft.engine.speculation.proposer import Proposal, Proposer
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.compile.compiler import CompiledGrammar, compile
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary
from rootgraft.kernels.device_memory import DeviceMemoryError, on_device
from rootgraft.radix.namespace import Namespace, Path
from support.engine.core_hooks import scheduler_of, set_structured_output, structured_output_in_process, worker_of
from support.engine.fake_worker import FakeWorker, chain, next_token

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
    GrammarSpec.regex("(ab|c){1,3}(-xyz)?"),
    GrammarSpec.structural_tag(
        {
            "format": {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "regex", "pattern": "a{1,3}|b{2}|no more"},
                "end": "</f>",
            }
        }
    ),
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


def drafting_despite_others(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """The same, for every row whatever other sources promise."""

    def all_of(proposals: Seq[Proposal], limit: int) -> DraftChoice:
        return DraftChoice([min(len(each.tokens), limit // len(proposals)) for each in proposals])

    monkeypatch.setattr(Proposer, "model_gain", lambda self, rate, limit, rows, seconds: math.inf)
    monkeypatch.setattr(Proposer, "choose", lambda self, proposals, rows, limit: all_of(proposals, limit))
    always_drafting(monkeypatch, length)


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
        spec = SequenceSpec(ends, number, 0.0, worker_of(self.core).max_model_len)
        scheduler_of(self.core).add(Sequence(number, array("i", ask.prompt), ask.params, path, spec), matcher)

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


class FakeDraft(FakeWorker):
    """A draft model that is right with a probability, and checks its pages as the fake device does.

    Where it is wrong it draws any token that the mask allows. Logits are as wide as the target's: a token that it lacks
    has none, and can be drawn only if the mask forces it.
    """

    num_skipped = 0

    def __init__(
        self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0, vocab_size: int = VOCAB
    ) -> None:
        super().__init__(num_pages, page_size, vocab_size=vocab_size, eos=(EOS,))
        self.num_logits = VOCAB
        self._right, self._random = right, random.Random(seed)

    def run(self, batch: Batch, pages: Any = None, masks: Callable[[], Masks] | None = None) -> Any:
        try:
            return on_device(self.compute, batch, pages, masks)
        except DeviceMemoryError:
            return None

    def compute(self, batch: Batch, pages: Any, masks: Callable[[], Masks] | None) -> StepResult:
        assert len(pages) == len(batch.rows)
        return super().run(batch, masks)

    def _content(self, row: Row, contents: list[int]) -> int:
        """What its next token follows from."""
        return contents[-1]

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        assert row.num_drafts == 0
        content = self._content(row, contents)
        if not row.draws:
            return RowResult()
        allowed = self.allowed.get(first, range(self.vocab_size))
        if first not in self.forced:
            allowed = [token for token in allowed if token < self.vocab_size]
        if not allowed:
            return RowResult(failed=True)
        if self._random.random() >= self._right:
            return RowResult((self._random.choice(allowed),))
        right = next_token(content, self.vocab_size)
        return RowResult((self.nearest(allowed, right, first),))


class FakeHead(FakeDraft):
    """A head that knows from the target's cell in front of a token what the target says after it.

    Its own cells hold a hash of all tokens but the first, each with the hidden state beside it. So a wrong page of
    either side, or a hit of its cache behind another first token, is found where it draws.

    Attributes:
        target: the target's worker, see `with_head`.
    """

    num_skipped = 1

    def __init__(self, num_pages: int, page_size: int, right: float = 1.0, seed: int = 0) -> None:
        super().__init__(num_pages, page_size, right, seed)
        self.target: FakeWorker
        self.base_digest = "head"
        self._tokens: dict[int, list[int]] = {}  # by line, all that are known or drafted
        self._beside: dict[int, list[int]] = {}  # by line, the hidden state in front of each but the first
        self._last: dict[int, int] = {}

    def compute(self, batch: Batch, pages: Any, masks: Callable[[], Masks] | None) -> StepResult:
        for start in batch.starts:
            self._tokens[start.row], self._beside[start.row] = list(start.tokens), []
        for row, held in zip(batch.rows, pages, strict=True):
            self._read(row, held)
        return super().compute(batch, pages, masks)

    def _read(self, row: Row, held: Seq[int]) -> None:
        tokens, beside = self._tokens[row.row], self._beside[row.row]
        tokens[row.start + 1 :] = row.tokens
        del beside[row.start :]
        truth = [0]
        for token in tokens:
            truth.append(chain(truth[-1], token))
        beside += truth[len(beside) + 1 : row.start + 1]  # of a hit: what was read then
        for position in range(row.start, row.start + len(row.tokens)):
            hidden = self.target.cells[self._cell(list(held), position)] if held else self._last[row.row]
            assert hidden == truth[position + 1], "not the hidden state in front of the token"
            beside.append(hidden)
        self._last[row.row] = chain(beside[-1], tokens[-1])

    def _weights(self, row: int, position: int) -> int:
        return self._beside[row][position]

    def _content(self, row: Row, contents: list[int]) -> int:
        content = 0
        for token, hidden in zip(self._tokens[row.row][1:], self._beside[row.row], strict=True):
            content = chain(content, token ^ hidden)
        assert content == contents[-1], "a cell of its own holds another prefix"
        return self._last[row.row]


def with_head(head: FakeHead, **options: Any) -> Engine:
    """Return an engine whose target the head reads."""
    made = Engine.make("auto", **options, draft=head)
    head.target = worker_of(made.core)
    return made
