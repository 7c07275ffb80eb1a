"""Requests of all kinds to a small real model whose tokens are drafted: masks, adapters, draws, penalties, scores.

The draft comes from a small model, an EAGLE-3 head or the checkpoint's MTP module, and lookups draft as well. An
answer is compared as a whole: tokens, logprobs, prompt logprobs and end.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Done, Failed, LoadAdapter, Reply, Submit, TokenOut
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary
from support.engine.core_hooks import set_structured_output, structured_output_in_process
from support.models.lora_models import LINEARS, VOCAB, base, make_adapter
from support.speculation.eagle_heads import save_head
from support.speculation.mtp_models import save_mtp, save_mtp_adapter

EOS = 2
# Printable ASCII from token 6 on.
VOCABULARY = Vocabulary(
    (b"<pad>", b"<bos>", b"<eos>", *(bytes([token + 26]) for token in range(3, VOCAB))), frozenset((0, 1, EOS)), (EOS,)
)
_SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
)
_REGEX = GrammarSpec.regex("(ab|c){1,3}-[0-9]{2,5}")
_SHARED = [7 * i % 90 + 5 for i in range(13)]


@dataclass(frozen=True)
class Ask:
    """A request: an adapter is named by its number."""

    prompt: Sequence[int]
    params: SamplingParams
    adapter: int | None = None
    grammar: GrammarSpec | None = None


ASKS = (
    Ask(_SHARED, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=1)),
    Ask([*_SHARED, 9], SamplingParams(temperature=0.0, max_tokens=18), grammar=_SCHEMA),
    Ask([*_SHARED, 8], SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=2, ignore_eos=True), 0),
    Ask([5, 6], SamplingParams(temperature=0.7, seed=4, top_p=0.9, max_tokens=14), 1, _REGEX),
    Ask(
        [*_SHARED, 8],
        SamplingParams(
            temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, max_tokens=5, logprobs=0, ignore_eos=True
        ),
        1,
    ),
    Ask([4, 4, 4], SamplingParams(temperature=1.1, seed=9, min_p=0.05, frequency_penalty=0.4, max_tokens=6)),
)
"""Of each kind one: beside each other, and behind a shared prefix."""


@dataclass(frozen=True)
class Drafted:
    """A target, the options that have it drafted for, and two adapters: one plain, one of another rank."""

    target: Path
    speculative: Mapping[str, Any]
    adapters: tuple[Path, ...]


def save_drafted(kind: str, folder: Path) -> Drafted:
    """Save a target with a draft of this kind (model, head, mtp), and its adapters; that of rank 8 has DoRA."""
    if kind == "mtp":
        target = save_mtp("mimo", folder / "mimo", shared=True)
        return Drafted(target, {"method": "mtp"}, (save_mtp_adapter("mimo", folder / "plain"),) * 2)
    base("native_llama", folder)
    target = folder / "native_llama"
    adapters = (
        make_adapter("native_llama", folder, folder / "plain", r=4, target_modules=LINEARS),
        make_adapter("native_llama", folder, folder / "dora", 1, r=8, target_modules=LINEARS, use_dora=True),
    )
    if kind == "model":
        base("native_qwen2", folder)
        return Drafted(target, {"model": str(folder / "native_qwen2")}, adapters)
    return Drafted(target, {"model": str(save_head(folder / "head", target))}, adapters)


@dataclass
class Answer:
    """What a client gets of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    end: tuple[str, int | None] = ("", None)

    def take(self, message: TokenOut | Done | Failed) -> None:
        if isinstance(message, TokenOut):
            self.tokens += message.tokens
            self.logprobs += message.logprobs
            self.prompt_logprobs += message.prompt_logprobs
        elif isinstance(message, Done):
            self.end = (str(message.reason), message.stop_token)
        else:
            self.end = (message.kind, None)


def assert_same(found: Mapping[int, Answer], expected: Mapping[int, Answer], tolerance: float = 1e-4) -> None:
    """Assert that tokens and ends are equal, and logprobs but for sums in another order."""
    assert {n: (each.tokens, each.end) for n, each in found.items()} == {
        n: (each.tokens, each.end) for n, each in expected.items()
    }
    for number, wanted in expected.items():
        for one, other in (("logprobs", wanted.logprobs), ("prompt_logprobs", wanted.prompt_logprobs)):
            scores = getattr(found[number], one)
            assert [each.token for each in scores] == [each.token for each in other], (number, one)
            for score, right in zip(scores, other, strict=True):
                assert abs(score.logprob - right.logprob) < tolerance and score.rank == right.rank, (number, one)
                assert [token for token, _ in score.top] == [token for token, _ in right.top]


def make_core(
    drafted: Drafted, *, drafts: bool, overlaps: bool, num_pages: int = 80, slots: int = 2, **options: Any
) -> EngineCore:
    """Make a core whose adapters are loaded."""
    speculative = drafted.speculative if drafts else {"method": "off"}
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, block_size=4, max_num_seqs=4, max_num_batched_tokens=24,
        num_gpu_blocks_override=num_pages, enable_lora=True, max_loras=slots, max_lora_rank=8,
        speculative_config=json.dumps(speculative), **options,
    )  # fmt: skip
    worker = Worker(config, drafted.target)
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    set_structured_output(core, structured_output_in_process(4 + config.max_drafts, VOCABULARY))
    load(core, drafted, range(len(drafted.adapters)))
    return core


def load(core: EngineCore, drafted: Drafted, numbers: Iterable[int]) -> None:
    """Load adapters, each under its name, an ``a`` and its number."""
    core.handle([LoadAdapter(1_000_000 + each, f"a{each}", str(drafted.adapters[each])) for each in numbers])
    while core.has_work:
        for message in core.step():
            assert not isinstance(message, Reply) or message.failure is None, message


def answers(
    core: EngineCore, asks: Sequence[Ask] = ASKS, *, first: int = 0, at_once: bool = False
) -> dict[int, Answer]:
    """Return the answers; requests come two steps after one another unless all come ``at_once``.

    Raises:
        AssertionError: pages, slots or pins are inconsistent after a step.
    """
    got = {number: Answer() for number in range(len(asks))}
    for number, ask in enumerate(asks):
        grammar = ask.grammar and (ask.grammar.kind.value, ask.grammar.content)
        adapter = None if ask.adapter is None else f"a{ask.adapter}"
        core.handle([Submit(first + number, array("i", ask.prompt), ask.params, adapter, grammar=grammar)])
        for _ in range(0 if at_once else 2):
            _step(core, got, first)
    limit = 3_000
    while core.has_work:
        _step(core, got, first)
        limit -= 1
        assert limit, "does not come to an end"
    assert core.stats()["pages_private"] == 0
    return got


def _step(core: EngineCore, got: Mapping[int, Answer], first: int) -> None:
    for message in core.step():
        if isinstance(message, TokenOut | Done | Failed):
            got[message.id - first].take(message)
    core.check()
