"""Parts of prompts encoded once: the tokens of the whole text, for every kind of tokenizer; whose they are; bounds."""

from __future__ import annotations

import json
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from support.machine.waits import HANG_SECONDS
from support.models.tiny_tokenizers import SPECIAL, TEXTS, sentencepiece_definition, train_byte_level, write_folder

from rootgraft.engine.errors import RequestError
from rootgraft.engine.text.prompt_cache import Owner, PromptCache, PromptEncoder
from rootgraft.engine.text.tokenizer import Tokenizer

US, THEM = Owner("us"), Owner("them")
LONG = "<|im_start|>system\n" + "the quick brown fox " * 20


class Counting(Tokenizer):
    """Notes what it is asked to encode."""

    encoded: list[str]

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        self.encoded.append(text)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def counting(tiny_folder: Path) -> Counting:
    tokenizer = Counting.load(tiny_folder)
    assert isinstance(tokenizer, Counting)
    tokenizer.encoded = []
    return tokenizer


def byte_level(**changes: Any) -> dict[str, Any]:
    return json.loads(train_byte_level().to_str()) | changes


def metaspace(scheme: str) -> dict[str, Any]:
    mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return sentencepiece_definition() | {"normalizer": None, "pre_tokenizer": mark, "decoder": mark}


def flagged(**flags: bool) -> dict[str, Any]:
    """A tokenizer whose last special token has these flags."""
    definition = byte_level()
    definition["added_tokens"][-1] |= flags
    return definition


def with_overlaps() -> dict[str, Any]:
    """Special tokens that begin, end and contain each other."""
    definition = byte_level()
    for name in ("<|im_start|>user", "|><|", "<|im", "end|><|im_start|>"):
        number = 1 + max(*definition["model"]["vocab"].values(), *(token["id"] for token in definition["added_tokens"]))
        definition["added_tokens"].append(definition["added_tokens"][0] | {"id": number, "content": name})
    return definition


KINDS = {
    "byte level": byte_level(),
    "a space before": byte_level(
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    ),
    "normalized": byte_level(normalizer={"type": "NFC"}),
    "stripped": byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "sentencepiece": sentencepiece_definition(),
    "sentencepiece, plain": sentencepiece_definition(prefix=False),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "takes spaces before": flagged(lstrip=True),
    "takes spaces after": flagged(rstrip=True),
    "stands alone": flagged(single_word=True),
    "found in normalized text": flagged(normalized=True) | {"normalizer": {"type": "Lowercase"}},
    "overlaps": with_overlaps(),
}
PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<s>", "</s>", "<unk>", "<|im_start|>user", "<|im", "end|>", "<", "|>", " ", "\n"]),
    st.sampled_from(TEXTS),
    st.text(max_size=5),
    st.sampled_from(["the fox", " two  spaces"]).map(lambda text: text * 50),
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {name: Tokenizer.load(write_folder(folder / name, definition)) for name, definition in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=repeats(100))
@given(texts=st.lists(st.lists(PIECES, max_size=12).map("".join), min_size=1, max_size=3))
def test_tokens_are_those_of_the_whole_text(tokenizers: dict[str, Tokenizer], kind: str, texts: list[str]) -> None:
    encoder = PromptEncoder(tokenizers[kind], PromptCache(1000))
    conversation = ""
    for text in texts * 2:
        conversation += text
        for whole in (text, conversation):
            parts = encoder.cut(whole)
            assert "".join(parts) == whole
            assert encoder.encode(parts, US) == tokenizers[kind].encode(whole, False)


@pytest.mark.parametrize("kind", ["takes spaces before", "takes spaces after", "stands alone"])
def test_where_a_cut_would_change_tokens_nothing_is_cut(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert len(PromptEncoder(tokenizers[kind]).cut((LONG + "<|im_end|>\n") * 3)) == 1


def test_a_conversation_that_grows_is_encoded_once(counting: Counting) -> None:
    encoder = PromptEncoder(counting)
    text, turn = LONG, "<|im_end|>\n<|im_start|>user\n" + "lazy dog. " * 20
    for number in range(8):
        text += turn + str(number)
        encoder.encode(encoder.cut(text + "<|im_end|>\n<|im_start|>assistant\n"), US)
    assert counting.encoded.count(LONG) == 1
    assert sum(map(len, counting.encoded)) < 2.5 * len(text)
    counting.encoded.clear()
    encoder.encode(encoder.cut(text), US)
    assert sum(map(len, counting.encoded)) < 2 * len(turn)


def test_nobody_notices_what_others_had_encoded(counting: Counting) -> None:
    encoder = PromptEncoder(counting)
    parts = encoder.cut(LONG)
    for owner in (US, THEM, Owner("us", "salt"), Owner("us", "pepper"), US):
        before = len(counting.encoded)
        encoder.encode(parts, owner)
        assert len(counting.encoded) - before == (0 if owner == US and before else 1)
    assert counting.encoded == [LONG] * 4


def test_new_are_parts_of_another_and_parts_that_are_being_encoded(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, meanwhile = PromptEncoder(counting), []
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    parts, others = encoder.cut(LONG + tail), encoder.cut(LONG + tail + LONG)
    encode = Counting.encode
    monkeypatch.setattr(
        Counting, "encode", lambda *given: (meanwhile.append(encoder.num_new(parts, US)), encode(*given))[1]
    )
    assert encoder.num_new(parts, US) == len(LONG + tail)
    encoder.encode(parts, US)
    assert meanwhile == [len(LONG + tail), len(tail)]
    assert (encoder.num_new(parts, US), encoder.num_new(parts, THEM)) == (len(tail), len(LONG + tail))
    assert encoder.num_new(others, US) == len(tail + LONG)


def test_parts_used_last_are_kept(counting: Counting) -> None:
    texts = [f"<|im_start|>{number}" + "x" * 300 for number in range(4)]
    encoder = PromptEncoder(counting, PromptCache(3 * len(texts[0])))
    for number in (0, 1, 2, 0, 3):
        encoder.encode(encoder.cut(texts[number]), US)
    counting.encoded.clear()
    for number in (0, 2, 3, 1):
        encoder.encode([texts[number]], US)
    assert counting.encoded == [texts[1]]
    huge = "y" * 2000  # more than may be kept
    counting.encoded.clear()
    for _ in range(2):
        assert encoder.encode([huge], US) == Tokenizer.encode(counting, huge, False)
    for text in texts:
        encoder.encode([text], US)
    assert counting.encoded == [huge, huge, *texts]


def test_the_parts_of_all_tokenizers_have_one_bound_and_no_tokens_in_common(
    counting: Counting, tokenizers: dict[str, Tokenizer]
) -> None:
    cache = PromptCache(3 * len(LONG))
    encoders = {name: PromptEncoder(each, cache, name) for name, each in tokenizers.items()}
    first = PromptEncoder(counting, cache)
    first.encode([LONG], US)
    for name, encoder in encoders.items():
        assert encoder.num_new([LONG], US) == len(LONG)
        assert encoder.encode([LONG], US) == tokenizers[name].encode(LONG, False)
        assert PromptEncoder(tokenizers[name], cache, name).num_new([LONG], US) == 0, "of the same one"
    assert len(encoders) >= 3 and first.num_new([LONG], US) == len(LONG), "it had to go for those of others"
    assert sum(not each.num_new([LONG], US) for each in encoders.values()) == 3


def test_what_another_thread_encodes_is_waited_for(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = counting.encode

    def slow(text: str, add_special_tokens: bool) -> array[int]:
        begun.set()
        go_on.wait(HANG_SECONDS)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(counting, "encode", slow)
    encoder, answers = PromptEncoder(counting), []
    threads = [threading.Thread(target=lambda: answers.append(encoder.encode([LONG], US))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(HANG_SECONDS)
    go_on.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert answers == [Tokenizer.encode(counting, LONG, False)] * 3
    assert counting.encoded == [LONG]


def test_what_cannot_be_encoded_is_not_kept(counting: Counting) -> None:
    encoder = PromptEncoder(counting)
    for _ in range(2):
        with pytest.raises(RequestError, match="lone surrogate"):
            encoder.encode([LONG + "\ud800"], US)
    assert len(counting.encoded) == 2
