"""``bad_words`` of ``LLM.generate`` against the processor of transformers, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from support.engine.tiny_llm import make_model
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import RequestError


def greedy(prompt: list[int], banned: list[list[int]], steps: int) -> list[int]:
    """The likeliest tokens after a prompt, without those that the processor bans; it sees the answer alone."""
    model, answer = make_model(), list[int]()
    processor = NoBadWordsLogitsProcessor(banned) if banned else None
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[:, -1]
        # The processor bans words of one token from the first step on, and wants a sequence of at least one.
        scores = logits if processor is None else processor(torch.tensor([answer or [-1]]), logits)
        answer.append(int(scores.argmax()))
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_greedy_ones_without_the_words(llm: LLM, seed: int) -> None:
    """The words are parts of what would come without them, so that each is met; more follow from each answer."""
    tokenizer, rng = llm.get_tokenizer(), random.Random(seed)
    prompt, words, answers = tokenizer.encode("the quick brown fox"), list[str](), set[tuple[int, ...]]()
    for _ in range(4):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=words)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        spelled = [space + word.lstrip() for word in words for space in ("", " ")]
        banned = [tokenizer.encode(each, add_special_tokens=False) for each in spelled]
        assert answer == greedy(prompt, banned, 12)
        answers.add(tuple(answer))
        parts = [answer[begin : begin + length] for begin in range(10) for length in (1, 2, 3)]
        texts = {tokenizer.decode(part): part for part in parts}
        own = [text for text, part in texts.items() if text.strip() and tokenizer.encode(text, False) == part]
        words.append(rng.choice(own))
    assert len(answers) == 4, "words were banned that would have come"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fox", "bad_words must be a list of strings"),
        ([5], "bad_words must be a list of strings"),
        (["a"] * 257, "bad_words must be at most 256 entries"),
        (["a" * 257], "bad_words must be at most 256, not 257 characters long"),
        (["\n "], "bad_words must hold words with more than white space"),
    ],
)
def test_what_is_no_word_is_refused(llm: LLM, words: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate("the fox", SamplingParams(bad_words=words), use_tqdm=False)


def test_words_beside_a_form_are_refused(llm: LLM) -> None:
    params = SamplingParams(bad_words=["a"], structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="bad_words and the form of the answer"):
        llm.generate("the fox", params, use_tqdm=False)
