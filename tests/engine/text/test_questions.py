"""Questions in words and in tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.errors import RequestError
from rootgraft.engine.text.questions import (
    YES_NO,
    Labels,
    Option,
    QuestionEncoder,
    QuestionKind,
    TypedQuestion,
)
from rootgraft.engine.text.tokenizer import Tokenizer

HEADER = "<|im_end|>\n<|im_start|>assistant\n"


def asked(kind: QuestionKind, count: int, labels_by: Labels = Labels.LETTERS) -> TypedQuestion:
    return TypedQuestion(kind, "Which?", tuple(Option(f"value {at}") for at in range(count)), labels_by, "questions[0]")


@given(st.sampled_from([QuestionKind.CHOICE, QuestionKind.SCORE]), st.integers(2, 255))
def test_no_label_begins_another_one(kind: QuestionKind, count: int) -> None:
    labels = asked(kind, count).labels
    assert len(set(labels)) == count
    assert len({len(label) for label in labels}) == 1
    assert list(labels) == sorted(labels)


def test_bounds_of_short_labels() -> None:
    for kind, most in ((QuestionKind.CHOICE, 26), (QuestionKind.SCORE, 10)):
        assert {len(label) for label in asked(kind, most).labels} == {1}
        assert {len(label) for label in asked(kind, most + 1).labels} == {2}


def test_a_predicate_is_answered_in_words() -> None:
    question = TypedQuestion(QuestionKind.PREDICATE, " It is. ", tuple(map(Option, YES_NO, ("so", ""))))
    assert question.labels == YES_NO
    assert question.text == "Question: It is.\nYes: so\nAnswer with Yes or No only."


@given(
    st.lists(st.sampled_from([QuestionKind.CHOICE, QuestionKind.SCORE]), min_size=1, max_size=5), st.text(max_size=40)
)
def test_prompts_are_those_of_whole_texts(tiny: Tokenizer, kinds: list[QuestionKind], text: str) -> None:
    encoder = QuestionEncoder(tiny, tiny.eos_ids)
    for number, kind in enumerate(kinds):
        question = asked(kind, 2 + number)
        whole = f"<|im_start|>user\n{text}\n\n{question.text}{HEADER}"
        tokens = encoder.encode(whole, question)
        assert tokens.prompt == tiny.encode(whole, False)
        for label, ending in zip(question.labels, tokens.endings, strict=True):
            assert tokens.prompt.tolist() + list(ending) == tiny.encode(whole + label, False).tolist()
        assert tokens.num_ends == 1


def test_ends_count_where_a_label_begins_another_one(tiny: Tokenizer) -> None:
    options = (Option("return"), Option("return it"), Option("x"))
    question = TypedQuestion(QuestionKind.CHOICE, "Which?", options, Labels.VALUES)
    tokens = QuestionEncoder(tiny, (1, 2)).encode(question.text + HEADER, question)
    assert tokens.num_ends == 2
    assert [ending[-1] for ending in tokens.endings] == [1, 2] * 3


def test_labels_of_the_same_tokens_are_refused(tiny: Tokenizer) -> None:
    question = TypedQuestion(QuestionKind.CHOICE, "x", (Option("a"), Option("b"), Option("a")), Labels.VALUES, "here")
    with pytest.raises(RequestError, match="0 and 2 are the same tokens") as caught:
        QuestionEncoder(tiny, ()).encode(question.text + HEADER, question)
    assert caught.value.param == "here"
