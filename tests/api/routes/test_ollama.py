"""Ollama's routes as its own client sees them; what the engine is asked for is what the chat route asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api.api_live import Live
from support.api.messages_asks import prompt, say
from support.api.tool_asks import ONE, TOOLS, TWO
from support.machine.thoroughness import repeats

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import EngineDead, RequestError
from rootgraft.engine.types import AdapterInfo

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def client(live: Live) -> Iterator[ollama.Client]:
    made = ollama.Client(live.url, trust_env=False)
    yield made
    made._client.close()


def post(live: Live, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    with live.http() as http:
        reply = http.post(path, json={"stream": False, **body})
    assert reply.status_code == status, reply.text
    return dict(reply.json())


def lines(live: Live, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    with live.http() as http:
        reply = http.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson", reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def same_request(live: Live, chat: dict[str, Any]) -> None:
    """The last request of the engine is the one that a chat with these fields makes."""
    asked = live.async_engine.seen[-1]
    with live.http() as http:
        assert http.post("/v1/chat/completions", json={"messages": HI, **chat}).status_code == 200
    assert live.async_engine.seen[-1] == asked


def test_a_whole_answer(live: Live, client: ollama.Client) -> None:
    answer = client.chat("tiny", HI)
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "stop")
    assert (answer.message.role, answer.message.content, answer.message.thinking) == ("assistant", "answer 0", None)
    assert (answer.prompt_eval_count, answer.eval_count) == (len(live.async_engine.seen[0].tokens), 8)
    assert (answer.prompt_eval_duration, answer.eval_duration, answer.load_duration) == (500_000_000, 2_000_000_000, 0)
    assert answer.total_duration and answer.created_at and answer.created_at.endswith("Z")
    same_request(live, {})


def test_a_stream(live: Live, client: ollama.Client) -> None:
    found = list(client.chat("tiny", HI, stream=True))
    assert "".join(part.message.content or "" for part in found) == "answer 0"
    assert [bool(part.done) for part in found] == [False] * 8 + [True]
    assert found[-1].eval_count == 8 and found[0].eval_count is None
    assert lines(live, messages=HI)[-1]["done_reason"] == "stop", "a stream is what a request gets that says nothing"


def test_an_answer_that_is_cut(client: ollama.Client) -> None:
    answer = client.chat("tiny", HI, options={"num_predict": 3})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("ans", "length", 3)


def test_a_prompt_gets_the_chat_template(live: Live, client: ollama.Client) -> None:
    answer = client.generate("tiny", "hi", system="Be brief.")
    assert answer.response == "answer 0" and answer.done_reason == "stop"
    assert prompt(live) == "<system>Be brief.\n<user>hi\n<assistant>"
    assert "".join(part.response or "" for part in client.generate("tiny", "hi", stream=True)) == "answer 0"
    same_request(live, {})


def test_a_raw_prompt_gets_none(live: Live, client: ollama.Client) -> None:
    assert client.generate("tiny", "Once upon", raw=True, options={"num_predict": 5}).response == "answe"
    asked = live.async_engine.seen[-1]
    with live.http() as http:
        assert http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 5}).status_code == 200
    assert live.async_engine.seen[-1] == asked
    client.generate("tiny", "Once upon", raw=True)
    assert live.async_engine.seen[-1].params.max_tokens > 1000, "as many as fit"


def test_an_empty_request_loads_the_model(live: Live, client: ollama.Client) -> None:
    assert client.chat("tiny", []).done_reason == client.generate("tiny", "").done_reason == "load"
    (line,) = lines(live, messages=[])
    assert line["done"] is True and line["message"] == {"role": "assistant", "content": ""}
    assert not live.async_engine.seen
    with pytest.raises(ollama.ResponseError, match="nope"):
        client.chat("nope", [])


OPTIONS: dict[str, Any] = {
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "seed": 11,
    "stop": ["wer"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
}


@pytest.mark.parametrize("name", [*OPTIONS, None])
def test_each_option_reaches_the_engine(live: Live, client: ollama.Client, name: str | None) -> None:
    options = OPTIONS if name is None else {name: OPTIONS[name]}
    client.chat("tiny", HI, options={**options, "num_ctx": 8192, "num_thread": 4, "num_gpu": 1, "num_predict": 4})
    same_request(live, {**options, "max_tokens": 4})
    client.chat("tiny", HI, options=ollama.Options(**{k: v for k, v in options.items() if k != "min_p"}))
    same_request(live, {k: v for k, v in options.items() if k != "min_p"})


def test_penalties_look_at_all_of_the_text_or_at_none(live: Live, client: ollama.Client) -> None:
    client.chat("tiny", HI, options={"repeat_penalty": 1.5})
    same_request(live, {"repetition_penalty": 1.5})
    client.chat("tiny", HI, options={"repeat_penalty": 1.5, "repeat_last_n": -1})
    same_request(live, {"repetition_penalty": 1.5})
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    client.chat("tiny", HI, options={**penalties, "repeat_last_n": 0, "penalize_newline": False})
    same_request(live, {"repetition_penalty": 1.0})
    client.chat("tiny", HI, options={"repeat_penalty": 1.0, "repeat_last_n": 64, "penalize_newline": False})
    same_request(live, {"repetition_penalty": 1.0})
    for more, name in ({"repeat_last_n": 64}, "repeat_last_n"), ({"penalize_newline": False}, "penalize_newline"):
        with pytest.raises(ollama.ResponseError, match=f"'options.{name}' must be") as caught:
            client.chat("tiny", HI, options={"repeat_penalty": 1.5, **more})  # type: ignore[arg-type]
        assert caught.value.status_code == 400


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"options": {"mirostat": 1}}, "options.mirostat"),
    (CHAT, {"options": {"typical_p": 0.5}}, "options.typical_p"),
    (CHAT, {"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
    (CHAT, {"options": {"temperature": 2.5}}, "options.temperature"),
    (CHAT, {"options": {"repeat_penalty": 0.0}}, "options.repeat_penalty"),
    (CHAT, {"options": {"top_k": -2}}, "options.top_k"),
    (CHAT, {"options": {"top_p": 0.0}}, "options.top_p"),
    (CHAT, {"options": {"warmth": 1}}, "options.warmth"),
    (CHAT, {"options": {"stop": [""]}}, "options.stop"),
    (CHAT, {"format": "yaml"}, "format"),
    (CHAT, {"think": "hard"}, "think"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "images": ["QUJD"]}]}, "messages[0].images"),
    (CHAT, {"messages": [{"role": "critic", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "7"}]}, "messages[1].tool_name"),
    (CHAT, {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages[0].tool_calls"),
    (CHAT, {"nonsense": 1}, "nonsense"),
    (GENERATE, {"images": ["QUJD"]}, "images"),
    (GENERATE, {"suffix": "x"}, "suffix"),
    (GENERATE, {"template": "x"}, "template"),
    (GENERATE, {"context": [1, 2]}, "context"),
    (GENERATE, {"raw": True, "system": "x"}, "system"),
    (GENERATE, {"raw": True, "think": True}, "think"),
    (GENERATE, {"prompt": "x" * 3000}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "field"), REFUSED)
def test_what_is_not_done_is_refused_by_name(live: Live, path: str, fields: dict[str, Any], field: str) -> None:
    asked = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    error = post(live, path, 400, **{**asked, **fields})
    assert isinstance(error["error"], str) and error["param"] == field and field in error["error"], error
    assert not live.async_engine.seen


def test_neutral_values_change_nothing(live: Live) -> None:
    options = {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1, "num_predict": -1, "num_ctx": 4096}
    fields = {"images": [], "suffix": "", "template": "", "context": [], "format": "", "keep_alive": "5m"}
    post(live, GENERATE, prompt="hi", options={**options, "num_keep": 5}, **fields)
    same_request(live, {})


@pytest.mark.parametrize("stream", [False, True])
def test_structured_outputs(live: Live, client: ollama.Client, stream: bool) -> None:
    say(live, '{"city":"Ulm"}')
    found: Any = client.chat("tiny", HI, format=SCHEMA, stream=stream)
    text = "".join(part.message.content for part in found) if stream else found.message.content
    assert json.loads(text) == {"city": "Ulm"}
    same_request(live, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}})
    assert live.async_engine.seen[-1].grammar is not None
    assert client.generate("tiny", "hi", format="json").response == '{"city":"Ulm"}'
    same_request(live, {"response_format": {"type": "json_object"}})


def test_numbers_in_a_schema_are_exact(live: Live) -> None:
    whole = 12345678901234567890123
    with live.http() as http:
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": false, "format": {"const": %d}}' % whole
        say(live, str(whole))
        assert http.post(CHAT, content=body, headers={"content-type": "application/json"}).status_code == 200
    assert str(whole).encode() in live.async_engine.seen[-1].grammar.content


@pytest.mark.parametrize("stream", [False, True])
def test_calls(live: Live, client: ollama.Client, stream: bool) -> None:
    say(live, f"Well. {TWO}")
    found: Any = client.chat("tiny", HI, tools=TOOLS, options={"num_predict": 400}, stream=stream)
    parts = list(found) if stream else [found]
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(each.name, each.arguments) for each in calls] == [("weather", {"city": "Ulm"}), ("ping", {})]
    assert "".join(part.message.content or "" for part in parts) == "Well." and parts[-1].done_reason == "stop"
    asked = {"messages": HI, "tools": TOOLS, "options": {"num_predict": 400}}
    assert len({call["id"] for call in post(live, CHAT, **asked)["message"]["tool_calls"]}) == 2
    same_request(live, {"tools": TOOLS, "max_tokens": 400})


def test_a_call_that_is_cut(live: Live, client: ollama.Client) -> None:
    say(live, ONE)
    cut = len(ONE[: ONE.index("Ulm") + 2])
    answer = client.chat("tiny", HI, tools=TOOLS, options={"num_predict": cut})
    assert answer.done_reason == "length" and answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].function.arguments == {}
    long = '<tool_call>\n{"name": "weather", "arguments": {"n": 123456789012345678901, "city": "Ulm"}}'
    say(live, long)
    for stream in (False, True):
        body = {"messages": HI, "tools": TOOLS, "options": {"num_predict": len(long) - 4}, "stream": stream}
        with live.http() as http:
            reply = http.post(CHAT, json=body)
        assert reply.status_code == 200 and '{"n": 123456789012345678901}' in reply.text


def test_functions_of_python_are_tools(live: Live, client: ollama.Client) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: whose weather it is.
        """
        return city

    say(live, ONE)
    answer = client.chat("tiny", HI, tools=[weather], options={"num_predict": 400})
    assert answer.message.tool_calls and answer.message.tool_calls[0].function.arguments == {"city": "Ulm"}


def test_results_go_back_to_their_calls(live: Live, client: ollama.Client) -> None:
    say(live, TWO)
    asked = client.chat("tiny", HI, tools=TOOLS, options={"num_predict": 400}).message
    results = [{"role": "tool", "tool_name": "ping", "content": "pong"}, {"role": "tool", "content": "rain"}]
    client.chat("tiny", [*HI, asked, *results], tools=TOOLS)
    shown = live.async_engine.tokenizer.rendered[-1]["messages"]
    assert [(each["role"], each["content"]) for each in shown[2:]] == [("tool", "rain"), ("tool", "pong")]
    assert [each["name"] for each in shown[2:]] == ["weather", "ping"]
    twice = [*HI, asked, {"role": "tool", "tool_name": "ping", "content": "x"}, results[0]]
    with pytest.raises(ollama.ResponseError, match="does not match a call of 'ping'"):
        client.chat("tiny", twice)


def test_a_last_message_of_the_assistant_is_continued(live: Live, client: ollama.Client) -> None:
    begun = [*HI, {"role": "assistant", "content": "The sky is"}]
    client.chat("tiny", begun)
    assert prompt(live) == "<user>hi\n<assistant>The sky is"
    same_request(live, {"messages": begun, "continue_final_message": True})


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(live: Live, client: ollama.Client, stream: bool) -> None:
    live.async_engine.tokenizer.thinks = "qwen3"
    say(live, "<think>\nhm\n</think>\n\nyes")
    found: Any = client.chat("tiny", HI, think=True, stream=stream)
    parts = list(found) if stream else [found]
    assert "".join(part.message.thinking or "" for part in parts).strip() == "hm"
    assert "".join(part.message.content or "" for part in parts) == "yes"
    same_request(live, {"enable_thinking": True})
    client.generate("tiny", "hi", think="low")
    same_request(live, {"reasoning_effort": "low"})
    client.chat("tiny", HI, think=False)
    same_request(live, {"enable_thinking": False})


def test_logprobs(live: Live, client: ollama.Client) -> None:
    whole = client.chat("tiny", HI, logprobs=True, top_logprobs=2, options={"num_predict": 2})
    assert whole.logprobs is not None and [each.token for each in whole.logprobs] == ["a", "n"]
    assert all(each.logprob == -0.25 and len(each.top_logprobs or ()) == 2 for each in whole.logprobs)
    raw = client.generate("tiny", "hi", raw=True, logprobs=True, stream=True)
    assert [each.token for part in raw for each in part.logprobs or ()] == list("answer 0")


def test_names_of_models(live: Live, client: ollama.Client) -> None:
    live.client.adapters["sql"] = AdapterInfo("sql", "adapters/sql", "ready", "host", digest="d" * 8, loaded=1.5e9)
    tags = client.list().models
    assert [each.model for each in tags] == ["tiny", "org/alias", "sql"]
    assert tags[2].digest == "d" * 8 and tags[2].details and tags[2].details.parent_model == "tiny"
    assert [each.model for each in client.ps().models] == ["tiny", "org/alias", "sql"]
    assert client.ps().models[0].context_length == 2048
    assert client.chat("tiny:latest", HI).model == "tiny"
    assert client.chat("sql", HI).model == "sql" and live.async_engine.seen[-1].adapter == "sql"
    assert client.chat("sql:latest", HI).model == "sql"
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"] and shown.template
    assert shown.modelinfo and shown.modelinfo["rootgraft.context_length"] == 2048
    for call in (client.show, lambda name: client.chat(name, HI), lambda name: client.embed(name, "x")):
        with pytest.raises(ollama.ResponseError) as caught:
            call("nope")
        assert caught.value.status_code == 404 and "nope" in caught.value.error


def test_the_version(live: Live) -> None:
    with live.http() as http:
        assert http.get("/api/version").json() == {"version": "0.12.11"}


def test_embeddings(live: Live, client: ollama.Client) -> None:
    found = client.embed("tiny", ["one", "three"])
    assert found.model == "tiny" and len(found.embeddings) == 2
    assert all(abs(sum(value**2 for value in vector) - 1) < 1e-6 for vector in found.embeddings)
    assert found.prompt_eval_count == len("one") + len("three") + 2
    assert len(client.embed("tiny", "one", dimensions=2).embeddings[0]) == 2
    assert client.embed("tiny", "").embeddings == client.embed("tiny", []).embeddings == []
    with live.http() as http:
        for texts, param in ((["a", ""], "input[1]"), ([""], "input[0]")):
            reply = http.post("/api/embed", json={"input": texts})
            assert (reply.status_code, reply.json()["param"]) == (400, param), "a vector for each text, or none"
    assert len(client.embeddings("tiny", "one").embedding) == 4


def test_texts_that_are_too_long_are_cut(live: Live, client: ollama.Client) -> None:
    live.async_engine.tokenizer.fewest_tokens = len
    client.embed("tiny", ["x" * 5000, "short"])
    assert [len(each.tokens) for each in live.async_engine.seen] == [2047, 6]
    with pytest.raises(ollama.ResponseError, match=r"input\[0\]|2048"):
        client.embed("tiny", ["x" * 5000], truncate=False)


def test_of_a_text_that_was_cut_only_what_stands_behind_the_prompt_is_pooled(live: Live, client: ollama.Client) -> None:
    engine = live.async_engine
    engine.tokenizer.fewest_tokens = len
    engine.pooler = replace(engine.pooler, default_prompt="query", includes_prompt=False, max_length=50)
    client.embed("tiny", ["x" * 500, "short", "\u4e00" * 40])
    assert [len(each.tokens) for each in engine.seen] == [50, 9, 50]
    assert {each.params.pooled_from for each in engine.seen} == {len("Q: ") + 1}


def test_errors_before_and_in_a_stream(live: Live, client: ollama.Client) -> None:
    live.async_engine.fail_after = (0, RequestError("The prompt is odd.", param="prompt"))
    with pytest.raises(ollama.ResponseError, match="odd"):
        list(client.chat("tiny", HI, stream=True))
    live.async_engine.fail_after = (3, EngineDead("The engine process ended."))
    *before, last = lines(live, messages=HI)
    assert [each["done"] for each in before] == [False] * 3
    assert last == {"error": "The engine process ended.", "code": "engine_dead", "param": None}
    with pytest.raises(ollama.ResponseError, match="ended"):
        list(client.chat("tiny", HI, stream=True))


def test_keys_and_unknown_routes(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("k",), unknown_fields="ignore"))
    with live.http() as http:
        refused = http.post(CHAT, json={"messages": HI})
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        key = {"authorization": "Bearer k"}
        assert http.post("/api/pull", json={"model": "x"}, headers=key).json()["code"] == "unknown_url"
        asked = {"messages": HI, "stream": False, "options": {"warmth": 1}, "mood": 2}
        served = http.post(CHAT, json=asked, headers=key)
        assert served.status_code == 200 and served.json()["message"]["content"] == "answer 0"
    made = ollama.Client(live.url, trust_env=False, headers=key)
    assert made.chat("tiny", HI).message.content == "answer 0"
    made._client.close()


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(-3, 3), st.just(""), st.just([]), st.text(max_size=3)
)
NAMES = st.sampled_from(
    [*OPTIONS, "num_predict", "repeat_penalty", "repeat_last_n", "mirostat", "typical_p", "num_ctx", "penalize_newline"]
)


def test_any_options_are_served_or_refused_by_name(live: Live) -> None:
    @settings(max_examples=repeats(60), deadline=None)
    @given(options=st.dictionaries(NAMES, VALUES, max_size=4))
    def run(options: dict[str, Any]) -> None:
        reply = http.post(CHAT, json={"messages": HI, "stream": False, "options": options})
        assert reply.status_code in (200, 400)
        if reply.status_code == 400:
            assert reply.json()["param"].startswith("options."), reply.text

    with live.http() as http:
        run()
