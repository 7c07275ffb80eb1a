"""A sequence that another engine began goes on as it would have there: same tokens, scores and end, on a cold cache."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.adapter_engine import write
from support.engine.core_hooks import (
    alive_sequences,
    evict_all,
    set_structured_output,
    structured_output_in_process,
    tiers_of,
)
from support.engine.fake_worker import FakeWorker
from support.engine.thinking_engine import END, EOS, EXTRA, QWEN, R1, START, TEXT_MARKS, VOCAB
from support.machine.thoroughness import repeats
from support.models.lora_folders import small_reader

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Abort, Done, Failed, Submit, TokenOut, decode, encode
from rootgraft.engine.types import FinishReason, SamplingParams
from rootgraft.fleet.dispatcher import Dispatcher, DispatcherLimits
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules
from rootgraft.grammar.vocabulary import Vocabulary
from rootgraft.lora.adapter_pool import AdapterPool

ADAPTERS = ("one", "two")
VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), *EXTRA), frozenset((EOS, START)), (EOS,), VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
# A short budget takes its first property or leaves it out, by what was planned before the first token.
ITEM = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OPTIONAL = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 30, "pattern": "^[a-z]+ [a-z]+$"},
        "b": {"type": "array", "items": ITEM, "minItems": 1},
    },
    "required": ["b"],
    "additionalProperties": False,
}
CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TOOLS = {"format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [CALL]}}
GRAMMARS = (
    None,
    GrammarSpec.json_schema(SCHEMA),
    GrammarSpec.json_schema(OPTIONAL),
    GrammarSpec.json_object(),
    GrammarSpec.regex("[a-f]{3}-[0-9]+(, (yes|no))*"),
    GrammarSpec.choice(["the first one", "the second one"]),
    GrammarSpec.structural_tag(TOOLS),
)


def make_core(adapters: Path | None = None, **options: Any) -> EngineCore:
    """Make an engine, which loads the adapters of a folder."""
    pool = None
    if adapters is not None:
        pool = AdapterPool(small_reader(adapters), max_loras=2, max_adapters=8, max_cpu_bytes=1 << 20, patience=5)
        options |= {"enable_lora": True, "lora_dir": str(adapters)}
    config = EngineConfig(block_size=4, max_num_seqs=3, max_num_batched_tokens=32, **options)
    worker = FakeWorker(400, 4, vocab_size=VOCAB, eos=(EOS,), max_model_len=400, adapters=pool)
    core = EngineCore(config, worker)
    set_structured_output(core, structured_output_in_process(config.most_seqs + config.max_drafts, VOCABULARY))
    return core


@dataclass
class Heard:
    """What came of a sequence."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: int = 0
    end: Done | Failed | None = None


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineCore]:
    core = make_core()
    yield core
    core.close()


def run(core: EngineCore, *submits: Submit) -> list[Heard]:
    """Run sequences on a cold cache, as they come over the wire."""
    evict_all(core)
    heard = {submit.id: Heard() for submit in submits}
    core.handle(decode(encode(submits)))
    while core.has_work:
        for message in core.step():
            if isinstance(message, TokenOut):
                heard[message.id].tokens += message.tokens
                heard[message.id].prompt_logprobs += len(message.prompt_logprobs)
            elif isinstance(message, (Done, Failed)):
                heard[message.id].end = message
        core.check()
    return list(heard.values())


def ended(heard: Heard) -> tuple[Any, ...]:
    """Return what does not depend on the cache and on drafts."""
    assert isinstance(heard.end, Done), heard.end
    usage = heard.end.usage
    return heard.end.reason, heard.end.stop_token, usage.prompt, usage.completion, usage.shortest


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    grammar = draw(st.sampled_from(GRAMMARS))
    thought = draw(st.sampled_from((None, QWEN, R1, TEXT_MARKS)))
    budget = draw(st.none() | st.integers(0, 30))
    if thought is not None and budget is not None:
        thought = replace(thought, budget=budget)
    if grammar is None and (thought is None or budget is None):
        thought = None
    params = SamplingParams(
        max_tokens=draw(st.integers(2, 120)),
        min_tokens=draw(st.sampled_from((0, 0, 2))),
        ignore_eos=draw(st.booleans()) and grammar is None,
        stop_token_ids=draw(st.sampled_from(((), (ord("a"), ord("}")), (END,)))) if grammar is None else (),
        prompt_logprobs=draw(st.sampled_from((None, None, 0))),
    )
    prompt = draw(st.lists(st.integers(0, 255), min_size=1, max_size=20))
    form = None if grammar is None else (grammar.kind.value, grammar.content)
    return Submit(1, array("i", prompt), params, grammar=form, reasoning=thought)


@settings(max_examples=repeats(120), deadline=None)
@given(submit=submits(), data=st.data())
def test_a_sequence_goes_on_after_any_of_its_tokens(engine: EngineCore, submit: Submit, data: st.DataObject) -> None:
    [whole] = run(engine, submit)
    most = min(len(whole.tokens), submit.params.max_tokens - 1)
    cut = data.draw(st.integers(0, most), label="cut")
    [rest] = run(engine, replace(submit, generated=array("i", whole.tokens[:cut])))
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert ended(rest) == ended(whole)
    assert rest.prompt_logprobs == (0 if cut else whole.prompt_logprobs)


class Halves:
    """A core for prompts and one for answers, behind a dispatcher.

    Attributes:
        num_killed: replicas in all.
    """

    def __init__(self, adapters: Path) -> None:
        self.num_killed = 0
        self.cores = {role: make_core(adapters, kv_peer_gib=0.01) for role in ("prefill", "decode")}

    def run(self, submit: Submit, victim: str = "", turns: int = 0) -> Heard:
        """Run a sequence on cold caches, as its messages come over the wire.

        Args:
            victim: role of the replica that is killed after so many turns, and started again; "" for none.
        """
        dispatcher, frames = Dispatcher(DispatcherLimits(least_prefill=4, least_fetched=1)), Counter[str]()
        for role, core in self.cores.items():
            evict_all(core)
            dispatcher.join(role, core.ready, 0.0, role=role)
        dispatcher.submit([submit], 0.0)
        heard, replaced = Heard(), ""
        while dispatcher.num_open:
            if victim and turns == 0:
                dispatcher.leave(victim, 0.0)
                self.num_killed += 1
                empty(self.cores[victim])
                replaced, victim = victim, ""
                dispatcher.join("another", self.cores[replaced].ready, 0.0, role=replaced)
            turns -= 1
            for name, message in dispatcher.take_sent():
                if name != replaced:
                    self.cores[replaced if name == "another" else name].handle(decode(encode([message])))
            for role, core in self.cores.items():
                name = "another" if role == replaced else role
                if core.has_work:
                    dispatcher.take(name, frames[name], decode(encode(core.step())), 0.0)
                    frames[name] += 1
                    core.check()
            for said in dispatcher.take_delivered():
                if isinstance(said, TokenOut):
                    heard.tokens += said.tokens
                    heard.prompt_logprobs += len(said.prompt_logprobs)
                elif isinstance(said, (Done, Failed)):
                    heard.end = said
            dispatcher.check()
        for core in self.cores.values():
            empty(core)
        return heard


def empty(core: EngineCore) -> None:
    """Leave an engine as one that has just been started."""
    core.handle([Abort(tuple(sequence.id for sequence in alive_sequences(core)))])
    while core.has_work:
        core.step()
    peers = tiers_of(core).peers
    assert peers is not None
    peers.reset()
    peers.store.clear()
    evict_all(core)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        write(root, name, seed)
    made = Halves(root)
    yield made
    for core in made.cores.values():
        core.close()


@pytest.mark.heavy
@settings(max_examples=15, deadline=None)
@given(submit=submits(), length=st.integers(1, 150), adapter=st.sampled_from((None, *ADAPTERS)))
def test_a_sequence_is_the_same_where_its_prompt_is_computed_elsewhere(
    halves: Halves, submit: Submit, length: int, adapter: str | None
) -> None:
    """With adapters, grammars, thoughts, drafts and logprobs of the prompt."""
    submit = replace(submit, tokens=(submit.tokens * length)[:length], adapter=adapter)
    [whole] = run(halves.cores["prefill"], submit)
    heard = halves.run(submit)
    assert (heard.tokens, heard.prompt_logprobs, ended(heard)) == (whole.tokens, whole.prompt_logprobs, ended(whole))
    assert isinstance(heard.end, Done) and heard.end.usage.cached == 0


@pytest.mark.heavy
def test_prompts_that_were_computed_elsewhere_are_copied(halves: Halves) -> None:
    """Most are: threads copy, and what comes too late is computed again."""
    copied = 0
    for length in range(8, 128, 10):
        prompt = array("i", [(length + position) % 251 for position in range(length)])
        before = tiers_of(halves.cores["decode"]).stats()["kv_hits_peer"]
        halves.run(Submit(1, prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
        copied += tiers_of(halves.cores["decode"]).stats()["kv_hits_peer"] - before >= (length - 4) // 4
    assert copied >= 6, "of twelve prompts"


def killed_alike(halves: Halves, submit: Submit, victim: str, turns: int) -> int:
    """Check that a sequence is the same whether or not a replica is killed. Returns how many tokens it has."""
    [whole] = run(halves.cores["prefill"], submit)
    heard = halves.run(submit, victim, turns)
    assert (heard.tokens, heard.prompt_logprobs, ended(heard)) == (whole.tokens, whole.prompt_logprobs, ended(whole))
    return len(heard.tokens)


@pytest.mark.heavy
@settings(max_examples=repeats(15), deadline=None)
@given(
    submit=submits(),
    length=st.integers(1, 150),
    adapter=st.sampled_from((None, *ADAPTERS)),
    victim=st.sampled_from(("prefill", "decode")),
    turns=st.integers(0, 30),
)
def test_a_sequence_is_the_same_whichever_side_is_killed(
    halves: Halves, submit: Submit, length: int, adapter: str | None, victim: str, turns: int
) -> None:
    tokens = (submit.tokens * length)[:length]
    killed_alike(halves, replace(submit, tokens=tokens, adapter=adapter), victim, turns)


@pytest.mark.parametrize("adapter", [None, "one"])
@pytest.mark.parametrize(("victim", "turns"), [("prefill", 1), ("prefill", 3), ("decode", 4), ("decode", 6)])
def test_an_object_after_a_thought_survives_each_side(
    halves: Halves, adapter: str | None, victim: str, turns: int
) -> None:
    spec = GrammarSpec.json_schema(SCHEMA)
    submit = Submit(
        1,
        array("i", list(b"a prompt that takes three steps of thirty-two tokens, as it is a long one, is it not?")),
        SamplingParams(max_tokens=80),
        grammar=(spec.kind.value, spec.content),
        reasoning=replace(R1, budget=9),
        adapter=adapter,
    )
    before = halves.num_killed
    assert killed_alike(halves, submit, victim, turns) > 20 and halves.num_killed == before + 1


@pytest.mark.parametrize(
    ("schema", "max_tokens", "thought"),
    [
        (SCHEMA, 70, None),
        (SCHEMA, 80, replace(R1, budget=9)),
        (OPTIONAL, 17, None),
        (OPTIONAL, 35, replace(R1, budget=9)),
    ],
)
def test_the_end_within_the_budget_is_planned_alike_from_any_token(
    engine: EngineCore, schema: Any, max_tokens: int, thought: ThoughtRules | None
) -> None:
    """So are later masks: completions found while the tokens were drawn are found again."""
    spec = GrammarSpec.json_schema(schema)
    params = SamplingParams(max_tokens=max_tokens)
    submit = Submit(0, array("i", list(b"prompt")), params, grammar=(spec.kind.value, spec.content), reasoning=thought)
    [whole] = run(engine, submit)
    assert ended(whole)[0] is FinishReason.STOP
    # Every cut of a short answer, and of a long one every fourth.
    cuts = range(1, len(whole.tokens), 1 if len(whole.tokens) < 40 else 4)
    parts = [replace(submit, id=cut, generated=array("i", whole.tokens[:cut])) for cut in cuts]
    for part, rest in zip(parts, run(engine, *parts), strict=True):
        assert [*part.generated, *rest.tokens] == whole.tokens
        assert ended(rest) == ended(whole)


@pytest.mark.parametrize(
    ("generated", "params", "says"),
    [
        (3, SamplingParams(max_tokens=3), r"fewer tokens than max_tokens \(3\)"),
        (395, SamplingParams(max_tokens=1000), r"than the model has room for \(395\)"),
    ],
)
def test_an_output_that_is_whole_has_no_next_token(
    engine: EngineCore, generated: int, params: SamplingParams, says: str
) -> None:
    [heard] = run(engine, Submit(1, array("i", list(b"abcde")), params, generated=array("i", [97] * generated)))
    assert isinstance(heard.end, Failed) and heard.end.param == "generated"
    with pytest.raises(AssertionError, match=says):
        ended(heard)
    one_less = array("i", [97] * (generated - 1))
    [heard] = run(engine, Submit(1, array("i", list(b"abcde")), params, generated=one_less))
    assert len(heard.tokens) == 1 and ended(heard)[3] == generated


def test_tokens_that_the_grammar_refuses_end_the_sequence_alone(engine: EngineCore) -> None:
    spec = GrammarSpec.choice(["yes", "no"])
    params = SamplingParams(max_tokens=9)
    wrong = Submit(
        1, array("i", list(b"p")), params, grammar=(spec.kind.value, spec.content), generated=array("i", list(b"yxs"))
    )
    right = replace(wrong, id=2, generated=array("i", list(b"ye")))
    refused, answered = run(engine, wrong, right)
    assert isinstance(refused.end, Failed) and "refuses token 1" in refused.end.message
    assert bytes(answered.tokens) == b"s"


def test_the_usage_counts_the_prompt_alone_as_cached(engine: EngineCore) -> None:
    submit = Submit(1, array("i", list(b"a prompt")), SamplingParams(max_tokens=40, ignore_eos=True))
    [whole] = run(engine, submit)
    engine.handle([replace(submit, generated=array("i", whole.tokens[:30]))])
    [done] = [message for _ in range(40) for message in engine.step() if isinstance(message, Done)]
    assert (done.usage.prompt, done.usage.cached, done.usage.completion) == (8, 8, 40)


def test_an_aborted_sequence_has_the_tokens_that_it_came_with(engine: EngineCore) -> None:
    submit = Submit(1, array("i", list(b"p")), SamplingParams(max_tokens=40), generated=array("i", list(b"abc")))
    engine.handle([submit, Abort((1,))])
    [done] = [message for message in engine.step() if isinstance(message, Done)]
    assert done.reason is FinishReason.ABORT and done.usage.completion == 3
