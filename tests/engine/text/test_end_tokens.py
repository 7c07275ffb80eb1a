"""Which tokens end an answer: the tokenizer's own and those that the files name, in the engine and under grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny_tokenizers import sentencepiece_definition, train_byte_level, write_folder, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.gguf_end_tokens import gguf_end_tokens
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError
from rootgraft.engine.text.end_tokens import read_end_tokens
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.grammar.spec import GrammarSpec

DOCUMENT, START, TURN = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
WORD = 300  # an ordinary token
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 420, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def model_folder(
    folder: Path, *, config: Any = None, generation: Any = None, definition: Any = None, **tokens: Any
) -> Path:
    write_folder(folder, definition or train_byte_level().to_str(), **tokens)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


def ends_of(model: Path, tokenizer: Path | None = None) -> tuple[int, ...]:
    return read_end_tokens(read_model_config(model), model, tokenizer)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": DOCUMENT, "generation": DOCUMENT, "eos_token": "<|im_end|>"}, (TURN, DOCUMENT)),
        ({"config": DOCUMENT, "eos_token": "<|im_end|>"}, (TURN, DOCUMENT)),
        ({"eos_token": {"content": "<|im_end|>"}}, (TURN,)),
        ({"config": TURN, "generation": [WORD, DOCUMENT]}, (WORD, DOCUMENT, TURN)),
        ({"config": WORD}, (WORD,)),
        ({"config": WORD, "generation": TURN}, (TURN,)),  # left over from another model's config
        ({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, (DOCUMENT,)),  # a base model
        ({"config": DOCUMENT, "pad_token": "<|im_end|>"}, (DOCUMENT,)),
        ({"config": DOCUMENT, "eos_token": "<|not there|>"}, (DOCUMENT,)),
        ({}, ()),
    ],
)
def test_union_of_tokenizer_generation_config_and_config(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert ends_of(model_folder(tmp_path, **files)) == ends


def test_end_token_that_only_the_older_file_names(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, config=DOCUMENT)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert ends_of(folder) == (TURN, DOCUMENT)


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", config=DOCUMENT, eos_token="<|endoftext|>")
    other = write_folder(tmp_path / "other", train_byte_level().to_str(), eos_token="<|im_end|>")
    assert ends_of(model, other) == (TURN, DOCUMENT)
    values = {"ggml__pre": "gpt-2", "ggml__eos_token_id": TURN}
    file = write_gguf(tmp_path / "a.gguf", json.loads(train_byte_level().to_str()), "gpt2", **values)
    assert ends_of(model, file) == (TURN, DOCUMENT)


def test_end_token_beyond_the_logits_is_left_out(tmp_path: Path) -> None:
    extra = {"420": {"content": "<end>", "special": True}}
    assert ends_of(model_folder(tmp_path, config=TURN, eos_token="<end>", added_tokens_decoder=extra)) == (TURN,)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, config=DOCUMENT, generation=TURN)
    (folder / "tokenizer.json").unlink()
    assert ends_of(folder) == (TURN,)


@pytest.mark.parametrize("added", [[{}], 3])
def test_malformed_tokenizer_is_refused(tmp_path: Path, added: Any) -> None:
    definition = json.loads(train_byte_level().to_str()) | {"added_tokens": added}
    with pytest.raises(ModelError, match="malformed"):
        ends_of(model_folder(tmp_path, definition=definition, eos_token="<|im_end|>"))


def with_texts(*texts: str) -> dict[str, Any]:
    """A tokenizer's definition whose last pieces are these control tokens."""
    definition = json.loads(train_byte_level().to_str())
    vocabulary = definition["model"]["vocab"]
    for text in texts:
        definition["added_tokens"].append(definition["added_tokens"][0] | {"id": len(vocabulary), "content": text})
        vocabulary[text] = len(vocabulary)
    return definition


@pytest.mark.parametrize(
    "text",
    [
        *(
            "<|eot_id|>",
            "<|end|>",
            "<end_of_turn>",
            "<|end_of_text|>",
            "<|eom_id|>",
            "</s>",
            "<EOT>",
            "_<EOT>",
            "[EOS]",
        ),
        *("<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|file_sep|>", "<reponame>"),
    ],
)
def test_ends_of_a_file_known_by_their_text(tmp_path: Path, text: str) -> None:
    """The file's keys name <|endoftext|> alone, as those of many conversions."""
    path = write_gguf(tmp_path / "a.gguf", with_texts(text), "gpt2", ggml__pre="gpt-2", ggml__eos_token_id=DOCUMENT)
    assert ends_of(path) == (DOCUMENT, TURN, 420)
    assert Tokenizer.load(path).eos_ids == (DOCUMENT, TURN, 420)


@pytest.mark.parametrize("text", ["<|assistant|>", "<|eot_id|> ", "<|EOT_ID|>", "<start_of_turn>", "<mask>"])
def test_other_control_tokens_end_nothing(tmp_path: Path, text: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", with_texts(text), "gpt2", ggml__pre="gpt-2", ggml__eos_token_id=TURN)
    assert ends_of(path) == (TURN, DOCUMENT)


def test_phi3_vocabulary_ends_its_turns(tmp_path: Path) -> None:
    """Phi-3's files name <|endoftext|>; its turns end in <|end|>."""
    definition = sentencepiece_definition()
    vocabulary = definition["model"]["vocab"]
    for text in ("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"):
        definition["added_tokens"].append(definition["added_tokens"][0] | {"id": len(vocabulary), "content": text})
        vocabulary[text] = len(vocabulary)
    document, turn = vocabulary["<|endoftext|>"], vocabulary["<|end|>"]
    path = write_gguf(tmp_path / "a.gguf", definition, "llama", "phi3", ggml__eos_token_id=document)
    assert ends_of(path) == (document, 2, turn)  # 2 is </s>
    assert Tokenizer.load(path).eos_ids == tuple(sorted((2, document, turn)))


def test_markup_of_some_vocabularies_is_no_end() -> None:
    """Gemma's vocabulary has HTML's tags as tokens of its users, </s> among them."""
    metadata = {"tokenizer.ggml.tokens": ["a", "</s>", "<end_of_turn>"], "tokenizer.ggml.eos_token_id": 0}
    for kind, ends in ((4, [0, 2]), (1, [0, 2]), (3, [0, 1, 2])):
        types = {"tokenizer.ggml.token_type": np.array([1, kind, 4], np.int32)}
        assert gguf_end_tokens(metadata | types) == ends
    assert gguf_end_tokens(metadata) == [0, 2]
    assert gguf_end_tokens({"tokenizer.ggml.tokens": 7}) == []


def test_default_model(smollm2_gguf: Path) -> None:
    tokens = GgufFile.open(smollm2_gguf).metadata["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in ends_of(smollm2_gguf)] == ["<|im_end|>", "<|endoftext|>", "<reponame>"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model of random weights whose configs name <|endoftext|>, with a tokenizer that ends in <|im_end|>."""
    folder = tmp_path_factory.mktemp("chatml")
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(**sizes, vocab_size=420, max_position_embeddings=64, eos_token_id=DOCUMENT)
    LlamaForCausalLM(made).save_pretrained(folder)
    write_folder(folder, train_byte_level().to_str(), eos_token="<|im_end|>")
    llm = LLM(str(folder), dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=20)
    yield llm
    llm.close()


def towards(token: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, logit_bias=((token, 100.0),), **{"max_tokens": 5, **values})


@pytest.mark.parametrize("end", [TURN, DOCUMENT])
def test_the_engine_ends_at_each_of_them(llm: LLM, end: int) -> None:
    params = [
        towards(end),
        towards(end, ignore_eos=True),
        towards(end, min_tokens=3),
        towards(end, ignore_eos=True, stop_token_ids=(end,)),
        towards(WORD),
    ]
    answers = [output.outputs[0] for output in llm.generate([[9, 8, 7]] * len(params), params, use_tqdm=False)]
    assert [(answer.finish_reason, answer.stop_reason, len(answer.token_ids)) for answer in answers] == [
        ("stop", None, 0),
        ("length", None, 5),
        ("stop", None, 3),
        ("stop", end, 0),
        ("length", None, 5),
    ]
    assert not {TURN, DOCUMENT} & set(answers[2].token_ids)


def test_a_grammar_ends_with_any_of_them(llm: LLM) -> None:
    """The mask at the end of an answer permits them all, and none before."""
    grammar = GrammarSpec.regex("the")
    for end in (TURN, DOCUMENT):
        [output] = llm.generate([[9, 8, 7]], towards(end, max_tokens=20), grammar=grammar, use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("the", "stop", None)
