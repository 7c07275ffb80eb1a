"""Tokenizers from folders, against transformers and the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny_tokenizers import SPECIAL, TEXTS, sentencepiece_definition, train_byte_level, write_folder
from tokenizers import processors

from rootgraft.engine.errors import ConfigError, ModelError, RequestError
from rootgraft.engine.text.tokenizer import Tokenizer


def oracle(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_byte_level_folder_equals_transformers(tiny_folder: Path, text: str, add_special_tokens: bool) -> None:
    ours, theirs = Tokenizer.load(tiny_folder), oracle(tiny_folder)
    ids = ours.encode(text, add_special_tokens).tolist()
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module", params=["prefix", "plain", "metaspace"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    definition = sentencepiece_definition(prefix=request.param != "plain")
    if request.param == "metaspace":
        definition["normalizer"] = None
        mark: dict[str, Any] = {"replacement": "\u2581", "prepend_scheme": "first", "split": False}
        definition["pre_tokenizer"] = definition["decoder"] = {"type": "Metaspace", **mark}
    folder = write_folder(tmp_path_factory.mktemp("spm"), definition, bos_token="<s>", eos_token="</s>")
    return Tokenizer.load(folder), oracle(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_folder_equals_transformers(sentencepiece: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = sentencepiece
    ids = ours.encode(text, True).tolist()
    assert ids == theirs.encode(text)
    assert ours.bos_id == 1
    if "Metaspace" not in str(theirs.backend_tokenizer.decoder):  # which knows no byte pieces
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["Hello world", "  two", "", " ", "the\u2581fox"])
def test_metaspace_decoder(text: str, tmp_path: Path) -> None:
    definition = sentencepiece_definition()
    mark: dict[str, Any] = {"replacement": "\u2581", "prepend_scheme": "always", "split": False}
    definition |= {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", **mark}}
    definition["decoder"] = {"type": "Metaspace", **mark}
    ours = Tokenizer.load(write_folder(tmp_path, definition))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(definition))
    ids = ours.encode(text, False).tolist()
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == theirs.decode(ids)


@given(st.text(max_size=60))
def test_bytes_of_tokens_join_to_the_text(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, False)
    assert b"".join(tiny.token_bytes(token) for token in ids) == text.encode()
    assert tiny.decode(ids, False) == text


def test_every_byte_level_token_decodes_as_the_library_does(tiny: Tokenizer, tiny_folder: Path) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    for token in range(tiny.vocab_size):
        assert tiny.token_bytes(token).decode(errors="replace") == theirs.decode([token], skip_special_tokens=False)
        assert tiny.decode([token, 50, token], False) == theirs.decode([token, 50, token], skip_special_tokens=False)


def test_facts(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == 420
    assert tiny.eos_ids == (2,)
    assert tiny.bos_id == 0
    assert tiny.special_ids == {0, 1, 2}
    assert tiny.token_bytes(1) == b"<|im_start|>"
    assert tiny.token_bytes(419 + 50) == b""  # rows of logits beyond the vocabulary
    assert tiny.decode([419 + 50, -1]) == ""
    assert tiny.has_chat_template
    assert tiny.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_in_user_text_are_special_tokens(tiny: Tokenizer) -> None:
    assert tiny.encode("".join(SPECIAL), False).tolist() == [0, 1, 2]


def test_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate, U\+D83D, at position 2"):
        tiny.encode("ab\ud83d", True)


def test_further_end_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train_byte_level().to_str(), eos_token={"content": "<|im_end|>"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert Tokenizer.load(folder).eos_ids == (0, 2)


def test_configuration_completes_the_definition(tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json knows, and special tokens that tokenizer.json holds as plain ones."""
    definition = json.loads(train_byte_level().to_str())
    definition["added_tokens"] = definition["added_tokens"][:1]
    folder = write_folder(
        tmp_path,
        definition,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        added_tokens_decoder={"420": {"content": "<tool>", "special": False, "lstrip": False, "normalized": False}},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_start|>a<tool><|im_end|>", False).tolist()[-2:] == [420, 2]
    assert tokenizer.decode([1, 420, 2]) == "<tool>"


FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
AROUND = [
    "Hello<|im_end|>  there",
    "a <|im_end|> b",
    "a<|im_end|>b",
    "A <|IM_END|> b",
    "<|im_end|>",
    " <|im_end|>\n\n<|im_end|>",
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        *({flag: value} for flag in FLAGS for value in (False, True)),
        {"lstrip": True, "rstrip": True, "special": True},
        {"single_word": True, "normalized": False, "special": False},
    ],
    ids=str,
)
def test_flags_of_the_configuration_win(tmp_path: Path, flags: dict[str, bool], named: bool) -> None:
    """Over those of a token that tokenizer.json has; ``named``: the token also has a role."""
    definition = json.loads(train_byte_level().to_str()) | {"normalizer": {"type": "Lowercase"}}
    decoder = {"2": {"content": "<|im_end|>", **flags}}
    roles = {"eos_token": "<|im_end|>"} if named else {}
    folder = write_folder(tmp_path, definition, added_tokens_decoder=decoder, **roles)
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in AROUND:
        ids = ours.encode(text, False).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "tokens", [["<|im_end|>", "the"], {"end": "<|im_end|>", "word": "the"}], ids=["list", "object"]
)
@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_without_a_role(tmp_path: Path, name: str, tokens: Any) -> None:
    """A piece that the configuration calls special is found whole in every text, and is none when it is decoded."""
    definition = json.loads(train_byte_level().to_str())
    definition["added_tokens"] = definition["added_tokens"][:1]
    if name == "additional_special_tokens" and isinstance(tokens, dict):
        return  # transformers knows the older name with a list alone
    folder = write_folder(tmp_path, definition, **{name: tokens})
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in ("a<|im_end|>other", "the fox", "<|im_start|>"):
        ids = ours.encode(text, False).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_flags_of_a_token_that_only_the_configuration_has(tmp_path: Path) -> None:
    """Without ``normalized`` a plain token is found in normalized text, as in transformers."""
    definition = json.loads(train_byte_level().to_str()) | {"normalizer": {"type": "Lowercase"}}
    decoder = {"420": {"content": "<Tool>", "special": False}, "421": {"content": "<End>", "special": True}}
    folder = write_folder(tmp_path, definition, added_tokens_decoder=decoder)
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in ("a<Tool>b<End>c", "a<tool>b<end>c", "a<TOOL>b<END>c"):
        assert ours.encode(text, False).tolist() == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False, "add_eos_token": False}])
def test_tokenizer_json_alone_says_what_stands_around_a_text(tmp_path: Path, flags: dict[str, bool]) -> None:
    trained = train_byte_level()
    trained.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
    )
    folder = write_folder(tmp_path, trained.to_str(), bos_token="<|endoftext|>", eos_token="<|im_end|>", **flags)
    ours = Tokenizer.load(folder)
    plain = ours.encode("the fox", False).tolist()
    assert ours.encode("the fox", True).tolist() == [0, *plain, 2] == oracle(folder).encode("the fox")


def test_truncation_and_padding_in_the_file_are_not_followed(tmp_path: Path) -> None:
    trained = train_byte_level()
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    ours = Tokenizer.load(write_folder(tmp_path, trained.to_str()))
    assert ours.decode(ours.encode("a longer text than that", True)) == "a longer text than that"
    assert len(ours.encode("a", True)) == 1


def test_templates_of_a_folder(tmp_path: Path, tiny_folder: Path) -> None:
    definition = train_byte_level().to_str()
    named = [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "with tools"}]
    folder = write_folder(tmp_path / "named", definition, chat_template=named)
    tokenizer = Tokenizer.load(folder)
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(message) == "usual"
    assert tokenizer.render_chat(message, tools=[{"type": "function"}]) == "with tools"
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.load(folder).render_chat(message) == "from json"
    (folder / "chat_template.jinja").write_text("\ufefffrom jinja", "utf-8")
    assert Tokenizer.load(folder).render_chat(message) == "from jinja"
    (tmp_path / "mine.jinja").write_text("\ufeffmine", "utf-8")
    assert Tokenizer.load(folder, chat_template=str(tmp_path / "mine.jinja")).render_chat(message) == "mine"
    assert Tokenizer.load(folder, chat_template="{{ 'given' }}").render_chat(message) == "given"
    assert Tokenizer.load(folder, tokenizer_path=tiny_folder).render_chat(message).startswith("<|im_start|>")
    with pytest.raises(ConfigError, match=r"--chat-template: .*/none\.jinja cannot be read: No such file"):
        Tokenizer.load(folder, chat_template=str(tmp_path / "none.jinja"))
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"mine\.jinja cannot be read: it is not text in UTF-8"):
        Tokenizer.load(folder, chat_template=str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "the folder has none"),
        ({"tokenizer.model": ""}, "tokenizer.model"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read as JSON"),
        ({"tokenizer.json": "[]"}, "does not hold a JSON object"),
        ({"tokenizer.json": "{}"}, "not a definition"),
        ({"tokenizer.json": '{"model": {"type": "None"}}'}, "is not valid"),
        ({"tokenizer.json": '{"model": {}, "added_tokens": [{}]}'}, "malformed: KeyError"),
        ({"tokenizer.json": '{"model": {"vocab": [[1]]}}'}, "malformed: ValueError"),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["code.Slow", null]}}'}, "code.Slow"),
        ({"tokenizer_config.json": '{"tokenizer_class": "QwenTok"}', "vocab.json": ""}, "QwenTok with vocab.json"),
    ],
)
def test_refused_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) not in str(caught.value)


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"added_tokens": [{LONG: 1}]}, {}),
        ({"model": {"type": LONG}}, {}),
        ({"decoder": {"type": LONG}}, {}),
        ({}, {"added_tokens_decoder": {"999": {"content": LONG, "special": True}}}),
    ],
)
def test_texts_of_the_files_are_quoted_shortened(tmp_path: Path, changes: Any, config: Any) -> None:
    definition = json.loads(train_byte_level().to_str()) | changes
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(write_folder(tmp_path, definition, **config))
    assert len(str(caught.value)) < 500


def test_code_of_a_folder_without_a_definition_is_quoted_shortened(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": LONG}}))
    with pytest.raises(ModelError, match="never run") as caught:
        Tokenizer.load(tmp_path)
    assert len(str(caught.value)) < 500


def test_a_definition_is_enough_beside_code(tmp_path: Path) -> None:
    """As fine-tunes keep ``auto_map`` of a tokenizer that was code once."""
    definition = json.loads(train_byte_level().to_str())
    plain = Tokenizer.load(write_folder(tmp_path / "plain", definition))
    coded = Tokenizer.load(write_folder(tmp_path / "coded", definition, auto_map={"AutoTokenizer": ["x.Y", None]}))
    for text in TEXTS:
        assert coded.encode(text, True) == plain.encode(text, True)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "x", "start": 1, "stop": 0}]},
        {"type": "Fuse"},
    ],
)
def test_refused_decoders(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    definition = json.loads(train_byte_level().to_str()) | {"decoder": decoder}
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer.load(write_folder(tmp_path, definition))


def test_added_token_whose_id_does_not_follow_is_refused(tmp_path: Path) -> None:
    definition = json.loads(train_byte_level().to_str())
    extra = {"999": {"content": "<far>", "special": True}}
    with pytest.raises(ModelError, match="'<far>' cannot have the id 999"):
        Tokenizer.load(write_folder(tmp_path, definition, added_tokens_decoder=extra))


def test_pieces_are_the_vocabularys_strings(sentencepiece: tuple[Tokenizer, Any]) -> None:
    ours, theirs = sentencepiece
    for text in TEXTS:
        ids = list(ours.encode(text, True))
        assert ours.pieces(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.pieces([ours.vocab_size + 5]) == [""]
    assert ours.special_tokens["eos_token"] == theirs.eos_token
    assert ours.chat_template is None
