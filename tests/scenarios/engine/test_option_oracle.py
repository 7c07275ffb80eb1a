"""Mixed requests of an ``LLM`` against the documented meaning of their options, over logits of transformers.

The engine is cramped: chunks, few pages, prefix hits, drafts. The oracle follows an answer token by token. At each
position it edits the logits of the whole text so far, in plain numpy, and asks whether the token could have been drawn
from them with the position's random number, whether the answer should have ended before, and what its text, logprobs
and counts should be.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.core_hooks import core_of
from support.engine.draft_engine import compute_all_drafts
from support.engine.sampler_oracle import Request, edited, may_draw, may_win
from support.engine.tiny_llm import make_model, open_llm, write_model

from rootgraft import LLM, SamplingParams
from rootgraft.engine.offline.request_output import CompletionOutput, RequestOutput
from rootgraft.engine.sampling.top_k_top_p import exponentials, num_noise, uniforms
from rootgraft.engine.serving.request import RequestLimits

SLACK = 2e-3  # what probabilities may be off, as the two models round differently
MARGIN = 2e-3  # the same of logits
PAGE = 8
EOS = 2
MAX_LEN = 96
NUM_REQUESTS = 48
SEEDS = range(40)


@dataclass(frozen=True)
class MixedAsk:
    """A prompt in tokens and what is asked of it."""

    prompt: list[int]
    params: SamplingParams


def draw_ask(rng: random.Random, vocab: int, stems: list[list[int]]) -> MixedAsk:
    """Draw prompts of few lengths, most of them at the ends of pages, and options of all kinds beside each other."""
    length = rng.choice((1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, rng.randint(2, 60)))
    prompt = [*rng.choice(stems)[:length]]
    prompt += [rng.randrange(3, vocab) for _ in range(length - len(prompt))]
    most = rng.choice((1, 2, 5, 12, 20))
    fields: dict[str, Any] = {"max_tokens": most, "temperature": 0.0}
    if rng.random() < 0.5:
        fields |= {"temperature": rng.choice((0.5, 1.0, 1.7)), "seed": rng.randint(-(1 << 40), 1 << 40)}
        fields |= {"top_k": rng.choice((0, 0, 3, 40)), "top_p": rng.choice((1.0, 1.0, 0.8))}
        fields["min_p"] = rng.choice((0.0, 0.0, 0.1))
        fields["n"] = rng.choice((1, 1, 1, 3))
    if rng.random() < 0.4:
        fields["presence_penalty"] = rng.choice((0.0, -1.5, 1.5))
        fields["frequency_penalty"] = rng.choice((0.0, -1.0, 1.0))
        fields["repetition_penalty"] = rng.choice((1.0, 0.7, 1.6))
    if rng.random() < 0.3:
        fields["logit_bias"] = {rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(4)} | {EOS: rng.choice((0, 9))}
    if rng.random() < 0.3:
        fields["min_tokens"] = rng.randint(0, most)
    if rng.random() < 0.3:
        fields["stop_token_ids"] = rng.sample(range(3, vocab), 40)
    if rng.random() < 0.25:
        fields["stop"] = rng.sample(["e", "th", "a b", " ", "\ufffd", "qu"], 2)
    kind = rng.random()
    if kind < 0.15:
        fields["allowed_token_ids"] = rng.sample(range(vocab), 30)
    elif kind < 0.3:
        fields["bad_words"] = rng.sample(["the", "e", "qu", " a", "don't", "日本"], 3)
    if rng.random() < 0.5:
        fields["logprobs"] = rng.choice((0, 1, 5, 20))
        if rng.random() < 0.3:
            fields["logprob_token_ids"] = rng.sample(range(vocab), 3)
    if rng.random() < 0.25:
        fields["prompt_logprobs"] = rng.choice((0, 2))
    fields["ignore_eos"] = rng.random() < 0.3
    fields["include_stop_str_in_output"] = rng.random() < 0.3
    fields["skip_special_tokens"] = rng.random() < 0.7
    return MixedAsk(prompt, SamplingParams(**fields))


class OptionOracle:
    """Says what is wrong with an answer."""

    def __init__(self, llm: LLM) -> None:
        self._model = make_model()
        self._tokenizer = llm.tokenizer
        self.num_tokens = 0

    def check(self, ask: MixedAsk, output: RequestOutput) -> None:
        """Check all answers to a prompt."""
        assert output.finished and len(output.outputs) == ask.params.n
        for index, answer in enumerate(output.outputs):
            usage = output.usage[index]
            # An end token is not among the tokens of an answer, but is counted.
            end = self._end_token(ask, answer, usage.completion)
            tokens = [*answer.token_ids, *end]
            assert usage.prompt == len(ask.prompt) and usage.completion == len(tokens)
            logits = self._logits([*ask.prompt, *tokens])
            first = len(ask.prompt) - 1
            if index == 0:
                self._check_prompt(ask, output, logits[:first])
            for count, token in enumerate(tokens):
                self._check_token(ask, index, tokens[:count], token, logits[first + count])
            self._check_end(ask, answer, tokens, end)
            self._check_scores(ask, answer, logits[first:])
            self.num_tokens += len(tokens)

    def _logits(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0].float().numpy()

    def _end_token(self, ask: MixedAsk, answer: CompletionOutput, completion: int) -> list[int]:
        if completion == len(answer.token_ids):
            return []
        assert completion == len(answer.token_ids) + 1 and answer.finish_reason == "stop"
        return [EOS if answer.stop_reason is None else int(answer.stop_reason)]

    def _ends(self, params: SamplingParams) -> set[int]:
        return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}

    def _check_token(self, ask: MixedAsk, index: int, before: list[int], token: int, logits: np.ndarray) -> None:
        params = ask.params
        words = [word.lstrip() for word in params.bad_words or ()]
        spelled = [self._tokenizer.encode(space + word, False) for word in words for space in ("", " ")]
        own = params.engine_params(len(ask.prompt), RequestLimits(MAX_LEN, len(logits)))
        own = replace(own, bad_words=tuple(tuple(each) for each in spelled))
        banned = (*self._ends(params), EOS)  # EOS is no token of an answer before ``min_tokens``, ignored or not
        asked = Request(own, tuple(ask.prompt), tuple(before), banned)
        scores = edited(logits, asked)
        assert scores[token] > -np.inf, "a token that is excluded"
        if params.temperature == 0:
            assert scores[token] >= scores.max() - MARGIN, "not the likeliest token"
            return
        seed = np.array([(params.seed + index) % (1 << 64)], np.uint64)
        place = np.array([len(before)], np.uint64)
        own = replace(own, top_k=0 if own.top_k >= len(logits) else own.top_k)
        if own.top_k or own.top_p < 1:
            assert may_draw(token, float(uniforms(seed, place)[0]), scores, own, SLACK)
        else:
            assert may_win(token, exponentials(seed, place, num_noise(len(logits)))[0], scores, own, SLACK)

    def _check_end(self, ask: MixedAsk, answer: CompletionOutput, tokens: list[int], end: list[int]) -> None:
        """Check that the answer ended where it should, neither before nor later, and check its text."""
        params, text = ask.params, ""
        found: tuple[int, str] | None = None
        for count, token in enumerate(tokens, 1):
            is_end = token in self._ends(params) and count > (params.min_tokens or 0)
            assert not (is_end and count < len(tokens)), "goes on after an end token"
            assert not is_end or end == [token]
            shown = tokens[:count] if not is_end or params.include_stop_str_in_output else tokens[: count - 1]
            text = self._text(shown, params, final=count == len(tokens))
            if count > (params.min_tokens or 0) and (not is_end or params.include_stop_str_in_output):
                found = self._first_stop(text, self._text(tokens[: count - 1], params, final=False), params)
                if found is not None:
                    assert count == len(tokens), "goes on after a stop string"
        if end:
            assert tokens[-1] in self._ends(params) and answer.finish_reason == "stop"
            is_asked = tokens[-1] in (params.stop_token_ids or ())
            assert answer.stop_reason == (tokens[-1] if is_asked else None)
        elif found is not None:
            at, stop = found
            assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
            text = text[: at + len(stop)] if params.include_stop_str_in_output else text[:at]
        else:
            assert answer.finish_reason == "length" and len(tokens) == params.max_tokens
        assert answer.text == text

    def _text(self, tokens: list[int], params: SamplingParams, *, final: bool) -> str:
        """Return the text of tokens; without the bytes that a later token could complete, unless ``final``."""
        special = self._tokenizer.special_ids if params.skip_special_tokens else ()
        data = b"".join(self._tokenizer.token_bytes(each) for each in tokens if each not in special)
        if final:
            return data.decode(errors="replace")
        for cut in range(4):
            kept = data[: len(data) - cut]
            whole = kept.decode(errors="replace")
            rest = data[len(kept) :]
            if not cut and not whole.endswith("\ufffd"):
                return whole
            if cut and rest.decode(errors="ignore") == "" and _is_open(rest):
                return whole
        return data.decode(errors="replace")

    @staticmethod
    def _first_stop(text: str, before: str, params: SamplingParams) -> tuple[int, str] | None:
        """Return place and text of the stop string that ends first in the last token's text; the longest of several."""
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        for end in range(len(before) + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending:
                longest = max(ending, key=len)
                return end - len(longest), longest
        return None

    def _check_scores(self, ask: MixedAsk, answer: CompletionOutput, logits: np.ndarray) -> None:
        params = ask.params
        if params.logprobs is None and not params.logprob_token_ids:
            assert answer.logprobs is None and answer.cumulative_logprob is None
            return
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        total = 0.0
        for token, scores, line in zip(answer.token_ids, answer.logprobs, logits, strict=False):
            expected = _log_softmax(line)
            total += expected[token]
            names = params.logprob_token_ids
            most = params.logprobs or 0
            assert set(scores) == {token, *names} if names else most <= len(scores) <= most + 1
            if most and not names:
                found = sorted((score.logprob for score in scores.values()), reverse=True)
                assert found[:most] == pytest.approx(np.sort(expected)[::-1][:most], abs=MARGIN)
            for each, score in scores.items():
                assert score.logprob == pytest.approx(expected[each], abs=MARGIN)
            ranks = {each: score.rank for each, score in scores.items() if score.rank is not None}
            assert token in ranks and (not names or set(ranks) == {token})
            for each, rank in ranks.items():
                assert abs(rank - 1 - (line > line[each]).sum()) <= (abs(line - line[each]) < MARGIN).sum()
        assert answer.cumulative_logprob == pytest.approx(total, abs=MARGIN * max(1, len(answer.token_ids)))

    def _check_prompt(self, ask: MixedAsk, output: RequestOutput, logits: np.ndarray) -> None:
        if ask.params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            return
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(ask.prompt)
        for token, scores, line in zip(ask.prompt[1:], output.prompt_logprobs[1:], logits, strict=True):
            assert scores is not None
            expected = _log_softmax(line)
            assert token in scores and ask.params.prompt_logprobs <= len(scores) <= ask.params.prompt_logprobs + 1
            for each, score in scores.items():
                assert score.logprob == pytest.approx(expected[each], abs=MARGIN)


def _is_open(data: bytes) -> bool:
    """Whether bytes are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data) == ""


def _log_softmax(line: np.ndarray) -> np.ndarray:
    wide = line.astype(np.float64) - float(line.max())
    return wide - np.log(np.exp(wide).sum())


OPTIONS: dict[str, dict[str, Any]] = {
    "cramped": {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 14, "max_num_seqs": 6},
    "without drafts and cache": {"speculative_config": '{"method": "off"}', "enable_prefix_caching": False},
}


@pytest.fixture(scope="module", params=OPTIONS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        compute_all_drafts(patch)
        folder = write_model(tmp_path_factory.mktemp("oracle") / "model")
        made = open_llm(folder, block_size=PAGE, max_model_len=MAX_LEN, **OPTIONS[request.param])
        yield made
        made.close()


def run(llm: LLM, seed: int, count: int) -> None:
    rng, vocab = random.Random(f"options {seed}"), llm.tokenizer.vocab_size
    own = [rng.randrange(3, vocab) for _ in range(5)]
    stems = [[rng.randrange(3, vocab) for _ in range(60)], own * 12]
    asks = [draw_ask(rng, vocab, stems) for _ in range(count)]
    oracle = OptionOracle(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": ask.prompt} for ask in asks], [ask.params for ask in asks], use_tqdm=False
    )
    for number, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
        try:
            oracle.check(ask, output)
        except AssertionError as error:
            raise AssertionError(f"request {number} of seed {seed}: {error}; {ask}; {output.outputs}") from error
    assert oracle.num_tokens > 2 * count
    core_of(llm).check()


def test_answers_are_what_their_options_say(llm: LLM, request: pytest.FixtureRequest) -> None:
    # Among them is an end token that is ignored and likely before min_tokens, and named tokens with logprobs.
    run(llm, 6, NUM_REQUESTS)
    is_cramped = "cramped" in request.node.callspec.id
    assert (core_of(llm).stats()["draft_tokens_accepted"] > 0) == is_cramped


@pytest.mark.heavy
@pytest.mark.parametrize("seed", SEEDS)
def test_many_answers_are_what_their_options_say(llm: LLM, seed: int) -> None:
    run(llm, seed, NUM_REQUESTS)
