"""tiktoken's vocabularies, against tiktoken with the words and special tokens of the models' code."""

from __future__ import annotations

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from support.models.tiny_tokenizers import CORPUS, TEXTS
from support.models.word_patterns import GLM_4, KIMI_K2, QWEN_1
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from rootgraft.engine.errors import ModelError
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.text.tokenizer_files import has_definition


def ranks() -> dict[bytes, int]:
    """All bytes, then pieces in the order of their merges, as a tiktoken vocabulary is trained."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS * 5, trainer)
    bpe = json.loads(trained.to_str())["model"]
    alphabet = {character: byte for byte, character in transformers_alphabet().items()}
    merged = [bytes(alphabet[character] for character in left + right) for left, right in bpe["merges"]]
    pieces = [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(merged)]
    return {piece: rank for rank, piece in enumerate(pieces)}


def transformers_alphabet() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


RANKS = ranks()
SIZE = len(RANKS)
NAMED = {SIZE: "[BOS]", SIZE + 1: "[EOS]", SIZE + 3: "<|im_end|>", SIZE + 7: "<|im_user|>"}
SPECIAL = {NAMED.get(token, f"<|reserved_token_{token}|>"): token for token in range(SIZE, SIZE + 256)}
THEIRS = tiktoken.Encoding(name="kimi", pat_str=KIMI_K2, mergeable_ranks=RANKS, special_tokens=SPECIAL)


def write(folder: Path, lines: list[str] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    own = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(own if lines is None else lines) + "\n")
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {str(token): {"content": text, "special": True} for token, text in NAMED.items()},
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("kimi")))


@settings(max_examples=repeats(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text()
    | st.lists(st.sampled_from([*CORPUS, *TEXTS, "the", "aa", " ", "日本", *NAMED.values()])).map("".join)
)
def test_ids_equal_those_of_tiktoken(ours: Tokenizer, text: str) -> None:
    try:
        expected = THEIRS.encode(text, allowed_special="all")
    except UnicodeEncodeError:
        return
    ids = ours.encode(text, True).tolist()
    assert ids == expected
    assert ours.decode(ids, False) == text


def test_facts(ours: Tokenizer, tmp_path: Path) -> None:
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (SIZE + 256, SIZE, (SIZE + 1,))
    assert ours.special_ids == set(range(SIZE, SIZE + 256))
    assert has_definition(write(tmp_path / "folder"))


QWEN_NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))]
GLM_NAMES = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"]


@pytest.fixture(scope="module", params=["qwen", "glm"])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tiktoken.Encoding, str]:
    """A tokenizer, tiktoken's, and what stands in front of texts."""
    folder = tmp_path_factory.mktemp(request.param)
    names, pattern = {"qwen": (QWEN_NAMES, QWEN_1), "glm": (GLM_NAMES, GLM_4)}[request.param]
    special = {name: SIZE + index for index, name in enumerate(names)}
    theirs = tiktoken.Encoding(request.param, pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)
    if request.param == "qwen":
        write(folder, tokenizer_class="QWenTokenizer", bos_token=None, eos_token=None, added_tokens_decoder={})
        (folder / "tiktoken.model").rename(folder / "qwen.tiktoken")
        return Tokenizer.load(folder), theirs, ""
    named = {str(token): {"content": name, "special": True} for name, token in special.items()}
    changes = {"bos_token": None, "eos_token": "<|endoftext|>", "added_tokens_decoder": named}
    write(folder, tokenizer_class="ChatGLM4Tokenizer", **changes)
    (folder / "tiktoken.model").rename(folder / "tokenizer.model")
    return Tokenizer.load(folder), theirs, "[gMASK]<sop>"


@settings(max_examples=repeats(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text()
    | st.lists(st.sampled_from([*CORPUS, *TEXTS, "the", "12345", "e\u0301", " ", "日本", *GLM_NAMES[:5]])).map("".join)
)
def test_ids_of_others(other: tuple[Tokenizer, tiktoken.Encoding, str], text: str) -> None:
    """Qwen 1 composes texts first, GLM-4 has two tokens in front of them."""
    ours, theirs, prefix = other
    try:
        composed = text if prefix else unicodedata.normalize("NFC", text)
        expected = theirs.encode(prefix + composed, allowed_special="all")
    except UnicodeEncodeError:
        return
    ids = ours.encode(text, True).tolist()
    assert ids == expected
    assert ours.decode(ids, False) == prefix + composed


def test_special_tokens_of_qwen_are_in_no_file(other: tuple[Tokenizer, tiktoken.Encoding, str]) -> None:
    ours, theirs, _ = other
    assert (ours.vocab_size, ours.special_ids) == (theirs.n_vocab, set(range(SIZE, theirs.n_vocab)))


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (None, {"tokenizer_class": "XTokenizer"}, "class 'XTokenizer' is not known; TikTokenTokenizer, QWenTokenizer"),
        (
            None,
            {"tokenizer_class": "QWenTokenizer"},
            "QWenTokenizer' needs qwen.tiktoken, but the folder has tikto",
        ),
        (["x"], {}, "line 1 is not a token in base64 and its rank"),
        (["YQ== 0", "*** 1"], {}, "line 2 is not a token"),
        (["YQ== 0"], {}, "no token for the byte 0"),
        (
            [f"{base64.b64encode(bytes([byte])).decode()} {2 * byte}" for byte in range(256)],
            {},
            "each rank from 0 to 255",
        ),
    ],
)
def test_refused_files(tmp_path: Path, lines: list[str] | None, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write(tmp_path / "folder", lines, **changes))
