"""Tokenizers in adapters' folders: which are used, which are shared, and which are refused."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers as transformers_tokenizers
from support.machine.waits import HANG_SECONDS
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.adapter_checks import VocabularyCheck
from rootgraft.engine.errors import RequestError
from rootgraft.engine.serving import adapter_tokenizers
from rootgraft.engine.serving.adapter_tokenizers import AdapterTokenizers, ServedTokenizer
from rootgraft.engine.text import adapter_vocabulary, tokenizer
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import AdapterInfo
from rootgraft.lora.errors import AdapterError

ROWS = 424
BASE_TEMPLATE, OWN_TEMPLATE = "base {{ messages[0].content }}", "own {{ messages[0].content }}"
PLAIN = train_byte_level().to_str()


def extended(*added: str) -> str:
    tokenizer = train_byte_level()
    tokenizer.add_special_tokens(list(added))
    return tokenizer.to_str()


@pytest.fixture
def tokenizers(tmp_path: Path) -> AdapterTokenizers:
    """Of a base with 424 rows; adapters lie below ``adapters``."""
    (tmp_path / "adapters").mkdir()
    write_folder(tmp_path / "base", PLAIN, eos_token="<|im_end|>", chat_template=BASE_TEMPLATE)
    config = EngineConfig(
        enable_lora=True, lora_dir=str(tmp_path / "adapters"), adapter_cache_dir=str(tmp_path / "cache")
    )
    return AdapterTokenizers(ServedTokenizer(Tokenizer.load(tmp_path / "base"), ROWS), config)


def adapter(
    folder: Path, name: str, definition: str, vocab_size: int = 0, digest: str = "d", **config: str
) -> AdapterInfo:
    write_folder(folder / "adapters" / name, definition, **{"eos_token": "<|im_end|>", **config})
    return AdapterInfo(name, name, "ready", "host", digest=digest, vocab_size=vocab_size)


def render(served: ServedTokenizer) -> str:
    return served.tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_equal_tokens_share_the_models_vocabulary_and_keep_their_template(tokenizers, tmp_path):
    base = tokenizers.known(None, None)
    same = tokenizers.find("same", adapter(tmp_path, "same", PLAIN, chat_template=OWN_TEMPLATE))
    assert (same.key, same.vocab_size, render(same), same.ends) == ("", ROWS, "own x", ())
    plain = tokenizers.find("plain", adapter(tmp_path, "plain", PLAIN))
    assert (plain.key, render(plain)) == ("", "base x")
    smaller = tokenizers.find("smaller", adapter(tmp_path, "smaller", PLAIN, 423))
    assert smaller.key and smaller.vocab_size == 423
    ended = tokenizers.find("ended", adapter(tmp_path, "ended", PLAIN, eos_token="<|im_start|>"))
    assert ended.key and ended.ends == (1,) and base.ends == ()


def test_added_tokens_have_a_vocabulary_of_their_own(tokenizers, tmp_path):
    fields = {"chat_template": OWN_TEMPLATE, "eos_token": "<|end|>"}
    definition = extended("<|user|>", "<|end|>", "<|pad|>", "<|more|>", "<|last|>")
    info = adapter(tmp_path, "a", definition, 425, **fields)
    found = tokenizers.find("a", info)
    assert found.tokenizer.encode("<|last|>", False).tolist() == [424]
    texts = found.texts()
    assert len(texts.lengths) == found.vocab_size == 425 and texts.vocabulary == found.key
    assert texts.ends == found.ends == (421,)
    assert tokenizers.known("a", info) is found
    assert tokenizers.known("a", adapter(tmp_path, "a", PLAIN, 425, digest="other")) is None
    again = adapter(tmp_path, "b", definition, 425, **fields)
    assert tokenizers.find("b", again).tokenizer is found.tokenizer, "equal files are loaded once"
    other = adapter(tmp_path, "c", definition, 425, **fields | {"chat_template": BASE_TEMPLATE})
    assert tokenizers.find("c", other).tokenizer is not found.tokenizer
    assert tokenizers.find("c", other).key == found.key, "grammars are compiled once for equal tokens"


def test_tokens_beyond_the_base_models_rows_are_cut_from_grammars_and_ends(tokenizers, tmp_path):
    """An adapter without an embedding of its own may come with a padding token that nothing embeds."""
    info = adapter(tmp_path, "a", extended("<|1|>", "<|2|>", "<|3|>", "<|4|>", "<|end|>"), eos_token="<|end|>")
    found = tokenizers.find("a", info)
    assert found.vocab_size == ROWS < found.tokenizer.vocab_size
    assert len(found.texts().lengths) == ROWS and found.ends == ()


def test_folders_without_a_tokenizer_have_the_models(tokenizers, tmp_path):
    (tmp_path / "adapters" / "bare").mkdir()
    base = tokenizers.known(None, None)
    assert not any(tokenizers.read_own(name, name) for name in ("bare", "none", "../base"))
    assert tokenizers.find("bare", AdapterInfo("bare", "bare", "ready", "host")) is base
    assert tokenizers.find("gone", AdapterInfo("gone", "gone", "ready", "host")) is base
    wide = tokenizers.find("bare", AdapterInfo("bare", "bare", "ready", "host", vocab_size=430))
    assert (wide.tokenizer, wide.vocab_size, wide.key) == (base.tokenizer, 430, "@430")
    assert (base.identity, wide.identity) == ("", "@430")
    adapter(tmp_path, "own", PLAIN)
    assert tokenizers.read_own("own", "own")


def test_the_engine_knows_a_tokenizer_by_the_same_identity(tokenizers, tmp_path):
    """Whatever tells two adapters' tokens apart, and their templates: files, or the size of the vocabulary."""
    config = EngineConfig(enable_lora=True, lora_dir=str(tmp_path / "adapters"))

    def known(name: str, definition: str | None, rows: int = 0, **fields: str) -> str:
        (tmp_path / "adapters" / name).mkdir()
        info = AdapterInfo(name, name, "ready", "host", digest="d", vocab_size=rows)
        if definition is not None:
            info = adapter(tmp_path, name, definition, rows, **fields)
        prepared = SimpleNamespace(own=SimpleNamespace(vocab_size=rows) if rows else None)
        check = VocabularyCheck(config, name, ROWS)
        assert check(prepared) == tokenizers.find(name, info).identity
        return check(prepared)

    bare, plain = known("bare", None), known("plain", PLAIN)
    assert (bare, known("wide", None, 430)) == ("", "@430") and known("again", PLAIN) == plain
    others = (
        known("added", extended("<|a|>")),
        known("told", PLAIN, chat_template=OWN_TEMPLATE),
        known("wider", PLAIN, 430),
        known("ended", PLAIN, eos_token="<|im_start|>"),
    )
    assert len({bare, "@430", plain, *others}) == 7
    (tmp_path / "adapters/plain/tokenizer.json").unlink()
    (tmp_path / "adapters/plain/tokenizer.json").symlink_to(tmp_path / "base" / "tokenizer.json")
    with pytest.raises(AdapterError, match="a link that leads outside"):
        VocabularyCheck(config, "plain", ROWS)(SimpleNamespace(own=None))


def test_what_is_wrong_is_said(tokenizers, tmp_path, monkeypatch):
    def refused(name: str, info: AdapterInfo) -> str:
        with pytest.raises(RequestError) as error:
            tokenizers.find(name, info)
        assert error.value.param == "model" and str(tmp_path) not in str(error.value)
        return str(error.value)

    more = adapter(tmp_path, "more", extended("<|a|>", "<|b|>"), 421)
    assert "422 tokens, but its embed_tokens has 421 rows" in refused("more", more)
    broken = adapter(tmp_path, "broken", PLAIN)
    (tmp_path / "adapters/broken/tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read as JSON" in refused("broken", broken)
    template = adapter(tmp_path, "template", PLAIN, chat_template="{% if %}")
    assert "not valid Jinja" in refused("template", template)
    linked = adapter(tmp_path, "linked", PLAIN)
    (tmp_path / "adapters/linked/tokenizer.json").unlink()
    (tmp_path / "adapters/linked/tokenizer.json").symlink_to(tmp_path / "base/tokenizer.json")
    assert "leads outside" in refused("linked", linked)
    size = sum(file.stat().st_size for file in (tmp_path / "adapters/more").iterdir())
    monkeypatch.setattr(adapter_vocabulary, "MOST_BYTES", size - 1)
    assert f"{size:,} bytes; the limit is {size - 1:,}" in refused("more", more)
    monkeypatch.setattr(adapter_vocabulary, "MOST_BYTES", size)
    assert "422 tokens" in refused("more", more)
    far = tmp_path / "cache" / "content"
    far.mkdir(parents=True)
    info = AdapterInfo("far", str(far), "ready", "host", vocab_size=ROWS + 2)
    assert "2 more tokens" in refused("far", info)


def test_few_unused_tokenizers_stay_in_memory(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_tokenizers, "MOST_TOKENIZERS", 2)
    infos = [adapter(tmp_path, f"a{number}", extended(f"<|{number}|>"), 421) for number in range(3)]
    first, *_ = [tokenizers.find(info.name, info) for info in infos]
    assert len(tokenizers._loaded) == 2
    assert tokenizers.find("a0", infos[0]).tokenizer is not first.tokenizer


def test_a_load_of_the_same_weights_may_bring_another_template(tokenizers, tmp_path):
    first = replace(adapter(tmp_path, "a", PLAIN, chat_template=OWN_TEMPLATE), loaded=1.0)
    assert render(tokenizers.find("a", first)) == "own x"
    second = replace(adapter(tmp_path, "a", PLAIN, chat_template="new {{ messages[0].content }}"), loaded=2.0)
    assert tokenizers.known("a", second) is None
    assert render(tokenizers.find("a", second)) == "new x"


def test_a_malformed_tokenizer_is_found_before_the_load(tokenizers, tmp_path):
    adapter(tmp_path, "a", PLAIN)
    assert tokenizers.read_own("a", "a")
    assert not any(tokenizers.read_own("a", path) for path in ("none", "../base", "/"))  # which the load will tell
    (tmp_path / "adapters" / "a" / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        tokenizers.read_own("x", "a")


def test_tokenizers_of_all_adapters_that_were_ever_served_do_not_pile_up(tokenizers, tmp_path, monkeypatch):
    """The one that no request has asked for longest makes room, whichever was read first."""
    monkeypatch.setattr(adapter_tokenizers, "MOST_TOKENIZERS", 3)
    infos = [adapter(tmp_path, f"a{number}", extended(f"<|{number}|>"), 421) for number in range(8)]
    alive = []
    for info in infos:
        alive.append(weakref.ref(tokenizers.find(info.name, info).tokenizer))
        assert tokenizers.known("a0", infos[0]) is not None
    gc.collect()
    assert [number for number, each in enumerate(alive) if each() is not None] == [0, 6, 7]
    assert tokenizers.known("a1", infos[1]) is None
    assert tokenizers.find("a1", infos[1]).tokenizer.encode("<|1|>", False).tolist() == [420]


def test_names_of_adapters_that_were_ever_served_do_not_pile_up(tmp_path):
    write_folder(tmp_path / "base", PLAIN, eos_token="<|im_end|>", chat_template=BASE_TEMPLATE)
    config = EngineConfig(enable_lora=True, max_adapters=4, adapter_cache_dir=str(tmp_path / "cache"))
    tokenizers = AdapterTokenizers(ServedTokenizer(Tokenizer.load(tmp_path / "base"), ROWS), config)
    infos = [AdapterInfo(f"a{number}", str(tmp_path), "ready", "host", digest="d") for number in range(9)]
    for info in infos:
        tokenizers.find(info.name, info)
    assert [info.name for info in infos if tokenizers.known(info.name, info)] == ["a5", "a6", "a7", "a8"]


def with_steps(**steps: object) -> str:
    return json.dumps(json.loads(PLAIN) | steps)


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+x"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("levels", [2, 4])
def test_steps_other_than_the_models_run_in_another_process(tokenizers, tmp_path, levels):
    definition = with_steps(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * levels})
    own = tokenizers.find("own", adapter(tmp_path, "own", definition)).tokenizer
    assert own.waits and not tokenizers.known(None, None).tokenizer.waits
    expected = oracle_tokens(definition, "banana")
    assert own.encode("banana", False).tolist() == expected
    assert own.decode(own.encode("banana", False)) == "banana".replace("a", "a" * 2**levels)
    assert own.pieces(expected[:1]) and own.token_bytes(expected[0]) == b"b"


def oracle_tokens(definition: str, text: str) -> list[int]:
    return transformers_tokenizers.Tokenizer.from_str(definition).encode(text, add_special_tokens=False).ids


def test_the_models_steps_with_other_tokens_run_here(tokenizers, tmp_path):
    own = tokenizers.find("own", adapter(tmp_path, "own", extended("<|more|>"))).tokenizer
    assert not own.waits


@pytest.mark.parametrize("levels", [32, 34])
def test_a_tokenizer_that_doubles_its_text_is_refused(tokenizers, tmp_path, monkeypatch, levels):
    monkeypatch.setattr(tokenizer, "TOKENIZER_SECONDS", 1.0)
    definition = with_steps(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * levels})
    with pytest.raises(
        RequestError, match=r"folder of the adapter 'own': The tokenizer (takes longer|needs more) than"
    ):
        tokenizers.find("own", adapter(tmp_path, "own", definition))
    # Others load their tokenizers as before.
    assert tokenizers.find("other", adapter(tmp_path, "other", PLAIN)).key == ""


def test_a_text_that_takes_too_long_is_refused(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "TOKENIZER_SECONDS", 0.5)
    own = tokenizers.find("own", adapter(tmp_path, "own", with_steps(pre_tokenizer=SLOW))).tokenizer
    limit = r"^The adapter's tokenizer (takes longer than 0.5 s|needs|fails).* with this text"
    with pytest.raises(RequestError, match=limit):
        own.encode("a" * 40_000, False)
    assert own.encode("b", False)


def test_a_load_that_takes_long_keeps_no_other_load(tokenizers, tmp_path, monkeypatch):
    """Told by states: the other load is over before this one may go on."""
    held, entered = threading.Event(), threading.Event()
    load = AdapterTokenizers._load

    def slow(self, folder):
        if folder.name == "slow":
            entered.set()
            assert held.wait(HANG_SECONDS)
        return load(self, folder)

    monkeypatch.setattr(AdapterTokenizers, "_load", slow)
    info = adapter(tmp_path, "slow", extended("<|slow|>"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tokenizers.find, "slow", info)
        assert entered.wait(HANG_SECONDS)
        assert tokenizers.find("other", adapter(tmp_path, "other", PLAIN)).key == ""
        assert not first.done()
        held.set()
        assert first.result(HANG_SECONDS).tokenizer.encode("<|slow|>", False)


@pytest.mark.parametrize(
    ("definition", "named"),
    [
        ({"model": json.loads(PLAIN)["model"] | {"vocab": {"a": 4_000_000_000}, "merges": []}}, "token id"),
        ({"decoder": {"type": "Sequence", "decoders": [{**DOUBLED}] * 34}}, "decoder may make a piece"),
        ({"model": json.loads(PLAIN)["model"] | {"vocab": {"a": 0, '"' * 1_025: 1}, "merges": []}}, "1,025 bytes"),
        ({"model": json.loads(PLAIN)["model"] | {"vocab": {"a": 0, '"' * 1_024: 1}, "merges": []}}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": []}}, None),
    ],
)
def test_tables_of_a_tokenizer_are_bounded(tokenizers, tmp_path, definition, named):
    info = adapter(tmp_path, "own", json.dumps(json.loads(PLAIN) | {"added_tokens": []} | definition))
    if named is None:
        assert tokenizers.find("own", info)
        return
    with pytest.raises(RequestError, match=named):
        tokenizers.find("own", info)


def test_the_texts_of_all_tokens_are_bounded(tokenizers, tmp_path, monkeypatch):
    info = adapter(tmp_path, "own", PLAIN)
    total = sum(map(len, json.loads(PLAIN)["model"]["vocab"]))
    monkeypatch.setattr(adapter_vocabulary, "MOST_TEXT_BYTES", total // 2)
    with pytest.raises(RequestError, match="bytes together"):
        tokenizers.find("own", info)


def test_json_that_is_nested_too_deeply_is_malformed(tokenizers, tmp_path):
    info = adapter(tmp_path, "own", PLAIN)
    (tmp_path / "adapters" / "own" / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(RequestError, match=r"tokenizer.json cannot be read as JSON"):
        tokenizers.find("own", info)


def test_further_templates_are_a_part_of_the_files(tokenizers, tmp_path):
    one, other = (adapter(tmp_path, name, PLAIN, chat_template=OWN_TEMPLATE) for name in ("one", "other"))
    for info, text in ((one, "tools of one"), (other, "tools of other")):
        folder = tmp_path / "adapters" / info.name / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(text)
        found = tokenizers.find(info.name, info)
        assert found.tokenizer.render_chat([{"role": "user", "content": "x"}], tools=[{}]) == text


def test_further_templates_do_not_lead_out_of_the_folder(tokenizers, tmp_path):
    info = adapter(tmp_path, "own", PLAIN)
    folder = tmp_path / "adapters" / "own" / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "secret").write_text("a secret")
    (folder / "tool_use.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(RequestError, match=r"tool_use.jinja is a link that leads outside the folder of adapters"):
        tokenizers.find("own", info)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "generation_config.json"])
def test_a_pipe_is_no_file(tokenizers, tmp_path, name):
    info = adapter(tmp_path, "own", PLAIN)
    (tmp_path / "adapters" / "own" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "adapters" / "own" / name)
    with pytest.raises(RequestError, match=f"{name} is not a file"):
        tokenizers.find("own", info)
