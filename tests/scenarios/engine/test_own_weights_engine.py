"""Adapters with own embeddings, heads, norms, biases and vocabularies in the engine: tokens are PEFT's.

In batches with the base model, chunks, over prefix hits, with drafts, logprobs, grammars and penalties.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.core_hooks import known_vocabularies
from support.engine.draft_engine import drafting_despite_others
from support.models.lora_models import VOCAB, base, make_adapter
from support.models.resized_base import ADDED, KINDS, ResizedOracle, make_resized_adapter

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, Failed, ForgetTokens, Submit, TokenOut, TokenTexts
from rootgraft.engine.text.adapter_vocabulary import tokenizer_identity
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec

WIDE = VOCAB + ADDED
NEW_END = VOCAB + 1  # the end token of the larger vocabulary
LENGTHS = [5, 5, 5, *[1] * 98]
BYTES = b"<pad><bos><eos>" + bytes(range(32, 127)) + b"\n\t\x80"
TEXTS = TokenTexts(array("i", LENGTHS), BYTES, (0, 1, 2))
# Two of the new tokens are special, the others spell words.
WIDE_TEXTS = TokenTexts(
    array("i", [*LENGTHS, 5, 5, 3, 3, 3]), BYTES + b"<new><end>abcxyz123", (0, 1, 2, VOCAB, NEW_END), "wide", (NEW_END,)
)
ROWS = {"embed_tokens": [7, 40], "lm_head": [30, 31]}
KIND_NAMES = ("saved both", "trl")
PROMPT = [(3 * i + i * i) % 90 + 9 for i in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and adapters of it of all kinds."""
    made = tmp_path_factory.mktemp("own")
    base("llama", made)
    for seed, kind in enumerate(KIND_NAMES):
        make_resized_adapter("llama", made, made / kind.replace(" ", "_"), seed, **KINDS[kind])
    make_adapter("llama", made, made / "lora", 3, r=4)
    make_adapter("llama", made, made / "norms", 4, modules_to_save=["norm"], bias="all")
    make_adapter(
        "llama", made, made / "rows", 5, trainable_token_indices={"embed_tokens": [7, 40], "lm_head": [30, 31]}
    )
    return made


WIDER = ("saved_both", "trl")
NAMES = (None, "saved_both", "trl", "lora", "norms", "rows")


class Engine:
    """A core over the base."""

    def __init__(self, folder: Path, **options: Any) -> None:
        fields: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_num_seqs": 16, "block_size": 4, **options}
        config = EngineConfig(
            dtype="float32", device="cpu", threads=1, enable_lora=True, lora_dir=str(folder), **fields
        )
        self.core = EngineCore.load(config, folder / "llama")
        self.core.handle([TEXTS, WIDE_TEXTS])

    def run(self, submits: list[Submit]) -> dict[int, list[TokenOut | Done | Failed]]:
        """All messages of sequences that come together."""
        found: dict[int, list[TokenOut | Done | Failed]] = {submit.id: [] for submit in submits}
        self.core.handle(submits)
        while self.core.has_work:
            for message in self.core.step():
                if isinstance(message, (TokenOut, Done, Failed)):
                    found[message.id].append(message)
            self.core.check()
        return found


def submit(number: int, prompt: list[int], adapter: str | None, **fields: Any) -> Submit:
    grammar = fields.pop("grammar", None)
    keys = {key: fields.pop(key) for key in ("vocabulary", "ends") if key in fields}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})
    packed = grammar and (grammar.kind.value, grammar.content)
    keys["tokenizer"] = tokenizer_identity("", WIDE if adapter in WIDER else VOCAB, VOCAB)
    return Submit(number, array("i", prompt), params, adapter, grammar=packed, **keys)


def tokens_of(messages: list[Any]) -> list[int]:
    assert not any(isinstance(message, Failed) for message in messages), messages
    return [token for message in messages if isinstance(message, TokenOut) for token in message.tokens]


@pytest.fixture
def engine(folder: Path):
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(folder, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.core.close()


class Oracle:
    """Greedy continuations as peft computes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner = ResizedOracle("llama", folder)
        self._known: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}

    def logits(self, adapter: str | None, tokens: list[int]) -> torch.Tensor:
        key = adapter, tuple(tokens)
        if key not in self._known:
            self._known[key] = self._inner.logits(None if adapter is None else self._folder / adapter, tokens)
        return self._known[key]

    def greedy(self, adapter: str | None, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(adapter, tokens)[-1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-4, "the oracle itself is undecided"
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def prompt_of(name: str | None) -> list[int]:
    """A prompt with tokens that only the adapter has."""
    return [*PROMPT[:9], *([WIDE - 1, VOCAB] if name in WIDER else [7, 40]), *PROMPT[9:]]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16}, {"enforce_eager": True, "max_loras": 2}],
    ids=["recorded", "chunked", "eager_two_slots"],
)
def test_tokens_are_pefts_beside_others_and_over_prefix_hits(engine, oracle, options) -> None:
    ours = engine(**options)
    wanted = {name: oracle.greedy(name, prompt_of(name), 6) for name in NAMES}
    for again in range(2):
        asked = [submit(number, prompt_of(name), name, max_tokens=6) for number, name in enumerate(NAMES)]
        found = ours.run(asked)
        assert {name: tokens_of(found[number]) for number, name in enumerate(NAMES)} == wanted
        cached = [message.usage.cached for each in found.values() for message in each if isinstance(message, Done)]
        assert all(count >= 20 for count in cached) if again else not any(cached)
    longer = [*prompt_of("trl"), *wanted["trl"], 11]
    [messages] = ours.run([submit(0, longer, "trl", max_tokens=4)]).values()
    assert tokens_of(messages) == oracle.greedy("trl", longer, 4)


def test_drafts_logprobs_and_prompt_logprobs(engine, oracle) -> None:
    """Drafts of a text that repeats, beside the base; scores are those of the adapter's own head."""
    prompt = [*[WIDE - 1, 50, 51, 52, VOCAB] * 4, WIDE - 1, 50]
    fields = {"logprobs": 3, "prompt_logprobs": 1, "max_tokens": 8}
    speculative = '{"method": "ngram", "num_speculative_tokens": 4}'
    found = engine(speculative_config=speculative).run(
        [submit(0, prompt, "saved_both", **fields), submit(1, [9, 10, 11] * 6, None, **fields)]
    )
    tokens = tokens_of(found[0])
    assert tokens == oracle.greedy("saved_both", prompt, 8)
    logits = oracle.logits("saved_both", [*prompt, *tokens])
    logprobs = torch.log_softmax(logits, 1)
    prompted = [each for message in found[0] if isinstance(message, TokenOut) for each in message.prompt_logprobs]
    drawn = [each for message in found[0] if isinstance(message, TokenOut) for each in message.logprobs]
    for at, each in enumerate((*prompted, *drawn), 1):
        assert each.token == [*prompt, *tokens][at]
        assert math.isclose(each.logprob, float(logprobs[at - 1, each.token]), abs_tol=1e-3)
    assert tokens_of(found[1]) == oracle.greedy(None, [9, 10, 11] * 6, 8)


def test_a_row_draws_the_same_beside_any_vocabulary(engine) -> None:
    """Sampled, with penalties, biases, min_tokens and top_k beyond the base's vocabulary, alone or beside others."""
    fields: dict[str, Any] = {
        "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 3,
        "ignore_eos": False, "logit_bias": ((5, 2.0), (90, -3.0)), "top_k": VOCAB + 2,
    }  # fmt: skip
    asked = [
        submit(
            number,
            prompt_of(name),
            name,
            **fields,
            seed=number,
            ends=(NEW_END,) if name in ("saved_both", "trl") else (),
        )
        for number, name in enumerate(NAMES)
    ]
    alone = {each.id: tokens_of(engine(enable_prefix_caching=False).run([each])[each.id]) for each in asked}
    together = engine().run(asked)
    assert {number: tokens_of(messages) for number, messages in together.items()} == alone


def test_what_names_added_tokens_is_drawn_beside_a_draft_model_that_lacks_them(engine, folder, monkeypatch) -> None:
    """A draft model has the base's vocabulary: what a request names beyond it must not reach its logits."""
    drafting_despite_others(monkeypatch, 3)
    prompt, added, likely = PROMPT[:9], (VOCAB, WIDE - 1), (40, 100.0)  # so that the draft model can read what is drawn
    asked = [
        submit(0, prompt, "trl", logit_bias=((WIDE - 1, -100.0), likely)),
        submit(1, prompt, "trl", logit_bias=(likely,), allowed_token_ids=(*range(30, 60), *added)),
        submit(2, prompt, "trl", logit_bias=(likely,), logprobs=0, logprob_token_ids=(7, *added)),
        submit(3, prompt, "trl", allowed_token_ids=added),
        submit(4, prompt, None),
    ]
    plain, drafted = (
        engine(speculative_config=json.dumps(each)) for each in ({"method": "off"}, {"model": str(folder / "llama")})
    )
    wanted = {number: tokens_of(messages) for number, messages in plain.run(asked).items()}
    assert {number: tokens_of(messages) for number, messages in drafted.run(asked).items()} == wanted
    assert drafted.core.stats()["drafted_model"]


def test_grammars_over_both_vocabularies_in_one_batch(engine) -> None:
    """Each answer follows its grammar over its own tokens; new tokens that spell text may be drawn."""
    grammar = GrammarSpec.regex("(abc|xyz|[0-9]){6}")
    wide = {"vocabulary": "wide", "ends": (NEW_END,), "grammar": grammar, "ignore_eos": False, "max_tokens": 40}
    own = {"grammar": grammar, "ignore_eos": False, "max_tokens": 40}
    bias = tuple((token, 100.0) for token in (VOCAB + 2, VOCAB + 3, VOCAB + 4))  # abc, xyz and 123
    asked = [
        submit(0, prompt_of("trl"), "trl", **wide),
        submit(1, PROMPT, None, **own),
        submit(2, PROMPT, "lora", **own),
        submit(3, prompt_of("trl"), "trl", **wide, logit_bias=bias),
        submit(4, PROMPT, "trl", **{**wide, "grammar": GrammarSpec.json_schema({"enum": ["abcxyz123", 5]})}),
        submit(5, PROMPT, None),
    ]
    found = engine().run(asked)

    def text(number: int) -> str:
        texts, at = [], 0
        for length in WIDE_TEXTS.lengths:
            texts.append(WIDE_TEXTS.data[at : at + length].decode(errors="replace"))
            at += length
        return "".join(texts[token] for token in tokens_of(found[number]))

    for number in range(4):
        assert re.fullmatch("(abc|xyz|[0-9]){6}", text(number)), text(number)
    assert {VOCAB + 2, VOCAB + 3, VOCAB + 4} & set(tokens_of(found[3]))
    assert text(4) in ('"abcxyz123"', "5")
    assert all(token < VOCAB for number in (1, 2, 5) for token in tokens_of(found[number]))
    ends = {
        number: message.stop_token for number, each in found.items() for message in each if isinstance(message, Done)
    }
    assert ends[1] == ends[2] == 2 and ends[0] in (2, NEW_END)


def test_a_vocabulary_is_given_up_when_its_last_answer_has_ended(engine) -> None:
    """Bytes go at once, grammars with the sequence that uses them, which ends as it would have."""
    core = engine().core
    asked = {"vocabulary": "wide", "ends": (NEW_END,), "grammar": GrammarSpec.regex("[0-9]{6}"), "ignore_eos": False}
    core.handle([submit(0, prompt_of("trl"), "trl", **asked, max_tokens=40)])
    found: list[Any] = []
    while not tokens_of(found):
        found += [each for each in core.step() if isinstance(each, (TokenOut, Done, Failed))]
    core.handle([ForgetTokens("wide"), ForgetTokens("never told")])
    assert known_vocabularies(core) == ({""}, {"", "wide"})
    while core.has_work:
        found += [each for each in core.step() if isinstance(each, (TokenOut, Done, Failed))]
    assert isinstance(found[-1], Done) and len(tokens_of(found)) >= 2
    assert known_vocabularies(core) == ({""}, {""})
    core.handle([submit(1, prompt_of("trl"), "trl", **asked, max_tokens=40)])
    assert any(isinstance(each, Failed) for each in core.step()), "a client tells the tokens first"
    core.handle([WIDE_TEXTS, submit(2, prompt_of("trl"), "trl", **asked, max_tokens=40)])
    again: list[Any] = []
    while core.has_work:
        again += [each for each in core.step() if isinstance(each, (TokenOut, Done, Failed))]
    assert tokens_of(again) == tokens_of(found)


@pytest.mark.parametrize("adapter", [None, "lora", "trl"])
def test_tokens_beyond_a_vocabulary_fail_alone(engine, adapter) -> None:
    """The engine itself checks what an adapter's own vocabulary has: nothing that a client sends ends a step."""
    ours = engine()
    beyond = WIDE if adapter == "trl" else VOCAB
    others = [submit(7, prompt_of("trl"), "trl"), submit(8, PROMPT, None)]
    bad = [] if adapter is None else [
        submit(0, [5, beyond], adapter), submit(1, [5, 6], adapter, logit_bias=((beyond, 1.0),))
    ]  # fmt: skip
    found = ours.run([*bad, *others])
    for each in bad:
        [failed] = found[each.id]
        assert isinstance(failed, Failed) and f"tokens 0 to {beyond - 1}" in failed.message
    for each in others:
        assert len(tokens_of(found[each.id])) == 12
