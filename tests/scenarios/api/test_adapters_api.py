"""Adapters over HTTP and offline: a real server on a tiny model, and OpenAI's client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.api.real_server import RealServer, tiny_server
from support.engine.core_hooks import core_of, known_vocabularies
from support.machine.waits import HANG_SECONDS
from support.models.lora_models import LINEARS, base, make_adapter
from support.models.resized_base import KINDS, ResizedOracle, make_resized_adapter
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM, SamplingParams
from rootgraft.api.config import ServerConfig
from rootgraft.api.routes.dependencies import shown_path
from rootgraft.engine.errors import AdapterUnavailable, RequestError, UnknownModel
from rootgraft.engine.offline.prompt_texts import AdapterTexts
from rootgraft.engine.types import AdapterInfo
from rootgraft.grammar.spec import GrammarSpec

NAMES = ("base", "one", "two")
FILLERS = [f"<|filler{number}|>" for number in range(20)]  # up to the base's 440 rows
ADDED = ["<|user|>", "<|bot|>", "<|end|>", "foxes"]  # tokens 440 to 443
CHAT_TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|bot|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(bases: Path) -> Path:
    """A tiny model with a tokenizer, and two adapters of it."""
    base("worded", bases)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    write_folder(bases / "worded", train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=template)
    for seed, name in enumerate(NAMES[1:]):
        make_adapter("worded", bases, bases / "adapters" / name, seed, r=2 + seed, target_modules=LINEARS)
    chatty = make_resized_adapter("worded", bases, bases / "adapters" / "chatty", 7, len(ADDED), **KINDS["saved both"])
    shutil.copytree(chatty, bases / "adapters" / "unfit", dirs_exist_ok=True)
    for model, added in ((chatty, ADDED), (bases / "adapters" / "unfit", [*ADDED, "<|more|>"])):
        tokenizer = train_byte_level()
        tokenizer.add_special_tokens([*FILLERS, *(token for token in added if token != "foxes")])
        tokenizer.add_tokens(["foxes"])
        write_folder(model, tokenizer.to_str(), eos_token="<|end|>", chat_template=CHAT_TEMPLATE)
    for name in ("two", "chatty"):
        shutil.copytree(bases / "adapters" / name, bases / "elsewhere" / name, dirs_exist_ok=True)
    return bases


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    options = (
        "--served-model-name base alias --num-gpu-blocks-override 60 --enable-lora "
        f"--lora-dir {folder / 'adapters'} --lora-modules one=one sourced=file://{folder}/adapters/two "
        f"--adapter-cache-dir {folder / 'cache'} --adapter-sources file://{folder}/elsewhere"
    )
    with tiny_server(folder / "worded", *options.split()) as started:
        yield started
        started.process.terminate()
        assert started.process.wait(HANG_SECONDS) == 0


def ask(client: openai.OpenAI, model: str) -> str:
    extra: dict[str, Any] = {"ignore_eos": True}
    answer = client.completions.create(model=model, prompt="the fox", max_tokens=8, temperature=0, extra_body=extra)
    assert answer.model == model
    return answer.choices[0].text


def test_what_can_be_asked_for_is_listed(client: openai.OpenAI, http: httpx.Client, folder: Path) -> None:
    """Folders below ``--lora-dir``, before anybody has asked for them: clients choose from this list."""
    (folder / "adapters" / "no-adapter").mkdir(exist_ok=True)
    shutil.copytree(folder / "adapters" / "two", folder / "adapters" / "team" / "sql@2", dirs_exist_ok=True)
    shutil.copytree(folder / "adapters" / "two", folder / "adapters" / ".hidden", dirs_exist_ok=True)
    try:
        cards = [card for card in client.models.list() if card.id == "team/sql@2"]
        assert [(card.parent, card.root) for card in cards] == [("base", "team/sql@2")]  # type: ignore[attr-defined]
        assert client.models.retrieve("team/sql@2").parent == "base"  # type: ignore[attr-defined]
        names = [card.id for card in client.models.list()]
        assert not {"no-adapter", ".hidden"} & {*names} and len(names) == len({*names})
        assert ask(client, "team/sql@2") == ask(client, "two")
        assert [card.id for card in client.models.list()].count("team/sql@2") == 1
        assert http.get("/v1/models/no-adapter").status_code == 404
    finally:
        http.post("/v1/unload_lora_adapter", json={"lora_name": "team/sql@2"})
        shutil.rmtree(folder / "adapters" / "team")
        shutil.rmtree(folder / "adapters" / ".hidden")


def test_codex_gets_a_list_of_models_in_its_form(http: httpx.Client) -> None:
    """Which it asks for with its version; an empty one leaves what it knows by itself."""
    plain = http.get("/v1/models").json()
    assert "models" not in plain
    assert http.get("/v1/models", params={"client_version": "0.99.0"}).json() == {**plain, "models": []}


def test_the_model_field_chooses_the_adapter(client: openai.OpenAI, folder: Path) -> None:
    """``one`` was loaded at the start, ``two`` is found in the folder: both say what the offline face says."""
    texts = [ask(client, name) for name in NAMES]
    assert len(set(texts)) == 3
    llm = LLM(str(folder / "worded"), dtype="float32", device="cpu", threads=1, enable_lora=True,
              num_gpu_blocks_override=60, adapter_cache_dir=str(folder / "cache"))  # fmt: skip
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for name, text in zip(NAMES, texts, strict=True):
        if name != "base":
            llm.load_adapter(name, str(folder / "adapters" / name))
        adapter = None if name == "base" else name
        [output] = llm.generate("the fox", params, adapter=adapter, use_tqdm=False)
        assert output.outputs[0].text == text
    with pytest.raises(RequestError, match="already loaded"):
        llm.load_adapter("one", str(folder / "adapters" / "two"))
    llm.load_adapter("sourced", f"file://{folder}/adapters/two")
    [output] = llm.generate("the fox", params, adapter="sourced", use_tqdm=False)
    assert output.outputs[0].text == texts[2]
    llm.unload_adapter("one")
    for call in (lambda: llm.unload_adapter("one"), lambda: llm.generate("a", adapter="one", use_tqdm=False)):
        with pytest.raises(UnknownModel):
            call()
    llm.close()


def test_chat_streams_with_an_adapter(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "one", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}
    whole = client.chat.completions.create(**asked, temperature=0)
    parts = list(client.chat.completions.create(**asked, temperature=0, stream=True))
    assert {part.model for part in parts} == {"one"}
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_names_are_404(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="a", stream=stream)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no/body", messages=[{"role": "user", "content": "a"}], stream=stream)


def test_load_replace_and_unload(client: openai.OpenAI, http: httpx.Client, folder: Path) -> None:
    body = {"lora_name": "new", "lora_path": "one"}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert ask(client, "new") == ask(client, "one")
    again = http.post("/v1/load_lora_adapter", json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    replaced = http.post("/v1/load_lora_adapter", json={**body, "lora_path": "two", "load_inplace": True})
    assert replaced.status_code == 200
    assert ask(client, "new") == ask(client, "two")
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() >= {"base", "one", "new"}
    assert (cards["new"].parent, cards["base"].parent) == ("base", None)  # type: ignore[attr-defined]
    assert client.models.retrieve("new").root == "two"  # type: ignore[attr-defined]
    listed = {entry["name"]: entry for entry in http.get("/v1/adapters").json()["data"]}
    fields = ["name", "path", "state", "tier", "rank", "bytes", "activated", "pins", "running", "requests", "hits"]
    assert list(listed["new"]) == [*fields, "digest", "vocab_size", "loaded", "num_classes"]
    assert listed["new"]["digest"] == listed["two"]["digest"] != listed["one"]["digest"]
    assert (listed["new"]["state"], listed["new"]["tier"], listed["new"]["rank"]) == ("ready", "device", 3)
    assert listed["new"]["requests"] >= listed["new"]["hits"] and listed["new"]["bytes"] > 0
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")
    assert "new" not in {card.id for card in client.models.list()}


@pytest.mark.parametrize(("name", "told"), [("base", "'base' is the base model"), ("alias", "also called base,")])
def test_the_base_model_is_not_unloaded(client: openai.OpenAI, http: httpx.Client, name: str, told: str) -> None:
    refused = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "lora_name", "invalid_value")
    assert told in error["message"]
    assert ask(client, name)


def test_adapters_from_sources_answer_as_those_from_folders(
    client: openai.OpenAI, http: httpx.Client, folder: Path
) -> None:
    """One named at the start, and one loaded by a call, from a folder that ``--lora-dir`` does not reach."""
    assert ask(client, "sourced") == ask(client, "two")
    path = f"file://{folder}/elsewhere/two"
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "called", "lora_path": path})
    assert answer.status_code == 200 and ask(client, "called") == ask(client, "two")
    listed = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}
    assert listed["called"]["path"] == listed["sourced"]["path"] == "two"
    outside = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": f"file://{folder}/adapters/two"})
    assert (outside.status_code, outside.json()["error"]["code"]) == (400, "adapter_source_not_allowed")
    for name in ("called", "sourced"):
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    assert not list((folder / "cache" / "users").glob("*/*"))


def test_without_a_folder_of_adapters_nothing_is_loaded_over_http(serve_with: Any, folder: Path) -> None:
    """Whoever may send requests could otherwise have any folder read."""
    with serve_with(ServerConfig()).http() as http:
        body = {"lora_name": "x", "lora_path": str(folder / "adapters" / "one")}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400 and "--lora-dir" in answer.text and str(folder) not in answer.text
        absent = http.post("/v1/load_lora_adapter", json={**body, "lora_path": "/no/such/folder"})
        assert absent.text == answer.text


@pytest.mark.parametrize(("path", "shown"), [("team/a", "team/a"), ("/srv/secret/a", "a"), ("../secret/a", "a")])
def test_where_an_adapter_lies_outside_the_folder_is_nobodys_business(path: str, shown: str) -> None:
    assert shown_path(AdapterInfo("a", path, "ready", "host")) == shown


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": ".."}, "lora_path"),
        ({"lora_name": "x", "lora_path": "none"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "one\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "o" * 300}, "lora_path"),
        ({"lora_name": "base", "lora_path": "one"}, "lora_name"),
        ({"lora_name": "no name", "lora_path": "one"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "one", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
def test_what_is_wrong_with_a_load_is_said(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def greedy(folder: Path, prompt: list[int], count: int, banned: range = range(0)) -> list[int]:
    """The adapter ``chatty``'s continuation as peft computes it."""
    oracle, tokens = ResizedOracle("worded", folder), list(prompt)
    for _ in range(count):
        logits = oracle.logits(folder / "adapters" / "chatty", tokens)[-1]
        logits[list(banned)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_an_adapter_is_served_with_its_own_tokens_and_template(
    client: openai.OpenAI, http: httpx.Client, folder: Path
) -> None:
    """Encoding, chat, stop strings, end tokens, logprobs and limits are the adapter's; the base's stay as they were."""

    def tokenize(model: str, **body: Any) -> list[int]:
        return http.post("/tokenize", json={"model": model, **body}).json()["tokens"]

    own = tokenize("chatty", prompt="<|user|>foxes")
    assert own == [440, 443] and min(tokenize("base", prompt="<|user|>foxes")) < 440 <= max(own)
    back = [http.post("/detokenize", json={"model": name, "tokens": own}) for name in ("chatty", "base")]
    assert back[0].json()["prompt"] == "<|user|>foxes" and back[1].status_code == 400
    messages: list[Any] = [{"role": "user", "content": "foxes run"}]
    prompt = tokenize("chatty", messages=messages)
    assert prompt[:2] == [440, 443] and prompt[-1] == 441
    bias = {str(token): -100 for token in range(420, 440)}  # rows without tokens
    expected = greedy(folder, prompt, 6, range(420, 440))
    text = http.post("/detokenize", json={"model": "chatty", "tokens": expected}).json()["prompt"]
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    asked: dict[str, Any] = {"model": "chatty", "messages": messages, "max_tokens": 6, "temperature": 0}
    asked |= {"logit_bias": bias, "extra_body": extra}
    answer = client.chat.completions.create(**asked, logprobs=True)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.content or ()) == 6
    cut = client.chat.completions.create(**asked, stop=[text[2:5]])
    assert cut.choices[0].message.content == text[: text.index(text[2:5])]
    ended = client.chat.completions.create(**{**asked, "logit_bias": {"442": 100}, "extra_body": {}})
    assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", "")
    for body in (
        {"prompt": [444]},
        {"prompt": "a", "logit_bias": {"444": 1}},
        {"prompt": "a", "stop_token_ids": [444]},
    ):
        refused = http.post("/v1/completions", json={"model": "chatty", **body})
        assert refused.status_code == 400 and "443" in refused.text, refused.text
    assert http.post("/v1/completions", json={"model": "base", "prompt": [440]}).status_code == 400
    counted = http.post("/v1/messages/count_tokens", json={"model": "chatty", "messages": messages})
    assert counted.json()["input_tokens"] == len(prompt)
    response = http.post("/v1/responses", json={"model": "chatty", "input": "foxes run", "max_output_tokens": 16})
    assert response.json()["usage"]["input_tokens"] == len(prompt)
    listed = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}
    assert listed["chatty"]["vocab_size"] == 444 and listed["one"]["vocab_size"] == 0
    assert listed["chatty"]["bytes"] > 2 * 444 * 40 * 4 > listed["one"]["bytes"]


def test_a_grammar_over_the_larger_vocabulary(http: httpx.Client) -> None:
    """The new word is one token of the answer, where the base spells it; both in one batch."""
    asked = {
        "prompt": "the",
        "max_tokens": 40,
        "temperature": 0,
        "structured_outputs": {"choice": ["foxes", "foxes run"]},
    }
    answers = [http.post("/v1/completions", json={"model": name, **asked}).json() for name in ("chatty", "base", "one")]
    assert all(answer["choices"][0]["text"] in ("foxes", "foxes run") for answer in answers)
    biased = http.post("/v1/completions", json={"model": "chatty", **asked, "logit_bias": {"443": 100}}).json()
    assert biased["choices"][0]["text"] in ("foxes", "foxes run")
    assert biased["usage"]["completion_tokens"] < answers[1]["usage"]["completion_tokens"]


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(http: httpx.Client) -> None:
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "unfit", "lora_path": "unfit"})
    assert loaded.status_code == 400
    assert "tokenizer.json" in loaded.text and "445 tokens" in loaded.text and "444 rows" in loaded.text
    assert "unfit" not in {each["name"] for each in http.get("/v1/adapters").json()["data"]}
    asked = http.post("/v1/completions", json={"model": "unfit", "prompt": "a"})
    assert asked.status_code == 400 and asked.json()["error"]["param"] == "model"


def test_a_load_in_place_brings_the_template_of_now_or_changes_nothing(http: httpx.Client, folder: Path) -> None:
    """The weights are the same; a tokenizer that cannot be used leaves the name what it was."""
    shutil.copytree(folder / "adapters" / "chatty", folder / "adapters" / "retold")
    template, definition = (folder / "adapters" / "retold" / name for name in ("chat_template.jinja", "tokenizer.json"))
    load = {"lora_name": "retold", "lora_path": "retold", "load_inplace": True}
    messages = [{"role": "user", "content": "foxes run"}]

    def rendered() -> str:
        tokens = http.post("/tokenize", json={"model": "retold", "messages": messages}).json()["tokens"]
        return http.post("/detokenize", json={"model": "retold", "tokens": tokens}).json()["prompt"]

    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    before = rendered()
    template.write_text("<|user|>the{{ messages[0].content }}")
    assert rendered() == before
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert rendered() == "<|user|>thefoxes run" != before
    definition.write_text("{")
    refused = http.post("/v1/load_lora_adapter", json=load)
    assert refused.status_code == 400 and "tokenizer.json" in refused.text
    assert rendered() == "<|user|>thefoxes run"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "retold"}).status_code == 200
    asked = http.post("/v1/completions", json={"model": "retold", "prompt": "a"})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "model")
    assert "retold" not in {entry["name"] for entry in http.get("/v1/adapters").json()["data"]}


REFUSED = {
    "tokenizer of more tokens than the embedding": ("chatty", lambda folder, root: _copy(root / "unfit", folder)),
    "broken weights": ("one", lambda folder, _: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99)),
    "no weights": ("one", lambda folder, _: (folder / "adapter_model.safetensors").unlink()),
    "broken configuration": ("one", lambda folder, _: (folder / "adapter_config.json").write_text("{")),
    "rank above the limit": ("one", lambda folder, _: make_adapter("worded", folder.parents[1], folder, 0, r=65)),
    "shapes of another rank": ("one", lambda folder, root: _copy(root / "two" / "adapter_config.json", folder)),
    "broken tokenizer": ("chatty", lambda folder, _: (folder / "tokenizer.json").write_text("{")),
    "broken template": ("chatty", lambda folder, _: (folder / "chat_template.jinja").write_text("{% if %}")),
}


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    else:
        shutil.copy(source, folder)


@pytest.mark.parametrize("fault", [*REFUSED, "more tokens than the base model, and no tokenizer"])
def test_a_load_in_place_that_is_refused_changes_nothing(
    client: openai.OpenAI, http: httpx.Client, folder: Path, fault: str
) -> None:
    """The version before goes on under its name, whatever is wrong with the one that was to come."""

    def listed() -> Any:
        infos = {each["name"]: each for each in http.get("/v1/adapters").json()["data"]}
        return [infos["kept"][name] for name in ("state", "digest", "loaded", "path")]

    root = folder / "adapters"
    base_of, spoil = REFUSED.get(fault, ("one", None))
    shutil.rmtree(root / "kept", ignore_errors=True)
    shutil.copytree(root / base_of, root / "kept")
    body = {"lora_name": "kept", "lora_path": "kept"}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    before, text = listed(), ask(client, "kept")
    if spoil is None:
        body["lora_path"] = f"file://{folder}/elsewhere/chatty"
    else:
        spoil(root / "kept", root)
    refused = http.post("/v1/load_lora_adapter", json={**body, "load_inplace": True})
    assert refused.status_code == 400, refused.text
    assert listed() == before and ask(client, "kept") == text
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "kept"}).status_code == 200


def test_of_a_source_no_tokenizer_is_read(http: httpx.Client, folder: Path) -> None:
    body = {"lora_name": "far", "lora_path": f"file://{folder}/elsewhere/chatty"}
    loaded = http.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.json()["error"]["code"]) == (400, "adapter_not_supported")
    assert "4 more tokens" in loaded.text
    assert "far" not in {each["name"] for each in http.get("/v1/adapters").json()["data"]}


def test_offline_an_adapter_has_its_own_tokens_too(folder: Path) -> None:
    llm = LLM(str(folder / "worded"), dtype="float32", device="cpu", threads=1, enable_lora=True,
              num_gpu_blocks_override=60, lora_dir=str(folder / "adapters"))  # fmt: skip
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    assert llm.get_tokenizer("chatty").encode("foxes", False) == [443]
    assert llm.get_tokenizer() is llm.get_tokenizer("one")
    [said] = llm.chat([{"role": "user", "content": "foxes"}], params, adapter="chatty", use_tqdm=False)
    assert list(said.prompt_token_ids) == [440, 443, 441]
    assert list(said.outputs[0].token_ids) == greedy(folder, [440, 443, 441], 6)
    [based] = llm.generate("the fox", params, use_tqdm=False)
    [adapted] = llm.generate("the fox", params, adapter="one", use_tqdm=False)
    assert based.outputs[0].text != adapted.outputs[0].text
    with pytest.raises(RequestError):
        llm.generate([[444]], params, adapter="chatty", use_tqdm=False)
    with pytest.raises(RequestError):
        llm.generate([[443]], params, adapter="one", use_tqdm=False)
    for replace, name in ((True, "chatty"), (False, "new")):
        with pytest.raises(RequestError, match="445 tokens, but its embed_tokens has 444 rows"):
            llm.load_adapter(name, "unfit", replace=replace)
    [still] = llm.chat([{"role": "user", "content": "foxes"}], params, adapter="chatty", use_tqdm=False)
    assert still.outputs[0].token_ids == said.outputs[0].token_ids
    with pytest.raises(UnknownModel):
        llm.generate("the fox", adapter="new", use_tqdm=False)
    llm.close()


def test_a_prompt_made_before_a_load_in_place_is_not_read_by_the_tokens_of_after(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the answer. Both tokenizers have as many tokens, so that no id is out of range."""
    for name, word in (("before", "foxes"), ("after", "hound")):
        shutil.copytree(folder / "adapters" / "chatty", folder / "adapters" / name)
        definition = folder / "adapters" / name / "tokenizer.json"
        definition.write_text(definition.read_text().replace("foxes", word))
    llm = LLM(str(folder / "worded"), dtype="float32", device="cpu", threads=1, enable_lora=True,
              num_gpu_blocks_override=60, lora_dir=str(folder / "adapters"))  # fmt: skip
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    llm.load_adapter("word", "before")
    found: list[Any] = []
    texts_of = AdapterTexts.of
    monkeypatch.setattr(AdapterTexts, "of", lambda *asked: found.append(texts_of(*asked)) or found[0])
    [said] = llm.generate("foxes", params, adapter="word", use_tqdm=False)
    assert list(said.prompt_token_ids) == [443]
    llm.load_adapter("word", "after", replace=True)
    with pytest.raises(AdapterUnavailable, match="The tokenizer of the adapter 'word' differs"):
        llm.generate("foxes", params, adapter="word", use_tqdm=False)
    monkeypatch.setattr(AdapterTexts, "of", texts_of)
    [said] = llm.generate("hound", params, adapter="word", use_tqdm=False)
    assert list(said.prompt_token_ids) == [443]
    llm.close()


def test_the_engine_gives_up_the_tokens_of_an_adapter_that_goes(folder: Path) -> None:
    """Unloaded or replaced; they are sent again for the next answer with a grammar."""
    llm = LLM(str(folder / "worded"), dtype="float32", device="cpu", threads=1, enable_lora=True,
              num_gpu_blocks_override=60, lora_dir=str(folder / "adapters"))  # fmt: skip

    def known(name: str) -> set[str]:
        params, grammar = SamplingParams(max_tokens=9, temperature=0), GrammarSpec.choice(["foxes", "dogs"])
        [said] = llm.generate("the", params, adapter=name, grammar=grammar, use_tqdm=False)
        assert said.outputs[0].text in ("foxes", "dogs")
        return known_vocabularies(core_of(llm))[0]

    llm.load_adapter("again", "chatty")
    [own] = known("chatty") - {""}
    assert known("one") == known("again") == {"", own}
    llm.unload_adapter("chatty")
    assert known_vocabularies(core_of(llm))[0] == {"", own}, "the other name has the same tokens"
    llm.load_adapter("again", "one", replace=True)
    assert known_vocabularies(core_of(llm)) == ({""}, {""})
    llm.load_adapter("again", "chatty", replace=True)
    assert known("again") == {"", own}
    llm.close()
