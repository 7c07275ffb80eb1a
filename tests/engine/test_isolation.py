"""A row's tokens are its own: whoever else joins and leaves the batch, it says what it says alone.

On a real model (tiny, random) with real adapters and real grammars. The rows differ in all that could leak from one
to another: masks, biases, penalties, adapters, draws, namespaces. Sequences come and go at random, are aborted and
preempted, and find each other's prefixes in the cache.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.core_hooks import worker_of
from support.models.lora_models import VOCAB

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import RequestError
from rootgraft.engine.messages import Abort, Failed, Message, Submit, TokenOut, TokenTexts
from rootgraft.engine.serving.request import RequestLimits, TextRequest
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec

NAMES = (None, "small", "large")
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def core(adapted_llama: Path) -> Iterator[EngineCore]:
    """One engine with few pages and two slots, so that rows are preempted and slots change hands."""
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=6, enable_lora=True, max_loras=1,
        lora_dir=str(adapted_llama), block_size=4, num_gpu_blocks_override=24, max_num_batched_tokens=24,
    )  # fmt: skip
    made = EngineCore.load(config, adapted_llama / "llama")
    # All tokens but the end are one printable character, so that grammars of plain text can be followed.
    [end] = worker_of(made).eos_ids
    texts = [b"<end>" if token == end else bytes([32 + token % 95]) for token in range(VOCAB)]
    made.handle([TokenTexts(array("i", map(len, texts)), b"".join(texts), (end,))])
    yield made
    made.close()


def random_submit(rng: random.Random, number: int) -> Submit:
    """A sequence of some kind; its prompt may begin as those of others do."""
    stem = [rng.choice((3, 5))] * rng.randrange(12)
    prompt = [*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
    fields: dict[str, object] = {"max_tokens": rng.randint(1, 30), "temperature": 0.0}
    kind = rng.choice(("plain", "drawn", "biased", "penalised", "stopped", "constrained"))
    grammar = None
    if kind == "drawn":
        fields |= {"temperature": 1.0, "seed": rng.randrange(9), "top_k": rng.choice((0, 5)), "top_p": 0.9}
    elif kind == "biased":
        fields["logit_bias"] = ((rng.randrange(VOCAB), 100.0), (0, -100.0), (VOCAB - 1, 50.0))
    elif kind == "penalised":
        fields |= PENALTIES
    elif kind == "stopped":
        fields["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 30))
    elif kind == "constrained":
        spec = GrammarSpec.regex(rng.choice(("[0-9]{4}", "(a|b)+", "yes|no")))
        grammar = (spec.kind.value, spec.content)
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return Submit(number, array("i", prompt), params, rng.choice(NAMES), grammar=grammar, tenant=rng.choice("ab"))


def tokens_of(messages: list[Message], into: dict[int, list[int]]) -> None:
    for message in messages:
        assert not isinstance(message, Failed), message
        if isinstance(message, TokenOut):
            into.setdefault(message.id, []).extend(message.tokens)


def alone(core: EngineCore, submit: Submit) -> list[int]:
    """What a sequence says with the engine to itself, under a salt that nobody else has."""
    said: dict[int, list[int]] = {}
    core.handle([Submit(submit.id, submit.tokens, submit.params, submit.adapter, "alone", submit.grammar)])
    while core.has_work:
        tokens_of(core.step(), said)
    return said.get(submit.id, [])


@pytest.mark.parametrize("seed", range(6))
def test_each_row_says_what_it_says_alone(core: EngineCore, seed: int) -> None:
    rng = random.Random(seed)
    submits: list[Submit] = []
    aborted: set[int] = set()
    said: dict[int, list[int]] = {}
    for number in range(24):
        submits.append(random_submit(rng, number))
        core.handle([submits[-1]])
        if rng.random() < 0.15:
            aborted.add(rng.randrange(len(submits)))
            core.handle([Abort(tuple(aborted))])
        for _ in range(rng.randrange(4)):
            tokens_of(core.step(), said)
            core.check()
    while core.has_work:
        tokens_of(core.step(), said)
        core.check()
    for submit in submits:
        expected, heard = alone(core, submit), said.get(submit.id, [])
        assert heard == (expected[: len(heard)] if submit.id in aborted else expected), submit


OUTSIDE = (-1, -(1 << 31), VOCAB, VOCAB + 1, 1 << 30)


@pytest.mark.parametrize("token", OUTSIDE)
def test_no_id_outside_of_the_vocabulary_comes_further_than_the_check(token: int) -> None:
    limits = RequestLimits(100, VOCAB)
    prompt, plain = array("i", [1, 2]), SamplingParams()
    for params, tokens in (
        (SamplingParams(stop_token_ids=(1, token)), prompt),
        (SamplingParams(logit_bias=((1, 1.0), (token, 1.0))), prompt),
        (plain, array("i", [1, token, 2])),
    ):
        with pytest.raises(RequestError, match=str(VOCAB - 1)):
            limits.check(TextRequest(tokens, params))
    for inside in (0, VOCAB - 1):
        params = SamplingParams(stop_token_ids=(inside,), logit_bias=((inside, 1.0),))
        assert limits.check(TextRequest(array("i", [inside]), params))


def test_rows_were_preempted_and_slots_changed_hands(core: EngineCore) -> None:
    """Otherwise the tests above have shown less than they say."""
    stats = core.stats()
    counts = {name: stats[name] for name in ("preemptions", "prompt_tokens_cached", "grammar_compiled")}
    assert min(counts.values()) > 0, counts
