"""Fields of other servers and of clients: each is mapped, changes nothing, or is refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.reply_checks import check_error
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.protocol.foreign_fields import foreign_table
from rootgraft.engine.types import AdapterInfo

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}
PLACES = {CHAT: ("generation", "chat"), COMPLETIONS: ("generation", "completions"), RESPONSES: ("responses",)}
ROWS = [(path, row) for path, places in PLACES.items() for place in places for row in foreign_table()[place]]
ODD = {"odd": 1}


def inside(place: str, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A chat with these fields at a place inside it; the path of that place."""
    match place:
        case "message":
            return {"messages": [*HI, {"role": "assistant", "content": "Yes", **fields}, *HI]}, "messages[1]"
        case "part":
            return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **fields}]}]}, (
                "messages[0].content[0]"
            )
        case "tool_call":
            return {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL | fields]}, *HI]}, (
                "messages[1].tool_calls[0]"
            )
        case "tool":
            return {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}, **fields}]}, "tools[0]"
    raise AssertionError(place)


INSIDE = [(place, row) for place in ("message", "part", "tool_call", "tool") for row in foreign_table()[place]]


@pytest.mark.parametrize("path", BODIES)
def test_what_has_no_effect_has_none_and_what_would_have_one_is_refused(live: Live, path: str) -> None:
    with live.http() as http:
        assert http.post(path, json=BODIES[path]).status_code == 200
        for row in (row for where, row in ROWS if where == path):
            for value in (ODD, *row.same):
                reply = http.post(path, json={**BODIES[path], row.name: value})
                if row.refuse and value is ODD:
                    message = check_error(reply, 400, row.name, "unsupported_parameter")
                    assert message == f"'{row.name}' is not supported: {row.refuse}"
                elif not row.mapped:
                    assert reply.status_code == 200, reply.text
    plain = live.async_engine.seen[0]
    assert len(live.async_engine.seen) > 10 or path == RESPONSES
    assert all(request == plain for request in live.async_engine.seen)


def test_fields_inside_a_chat_are_taken_or_refused_too(live: Live) -> None:
    with live.http() as http:
        for place, row in INSIDE:
            for value in (ODD, None, *row.same):
                fields, where = inside(place, {row.name: value})
                reply = http.post(CHAT, json=fields)
                if row.refuse and value is ODD:
                    check_error(reply, 400, f"{where}.{row.name}", "unsupported_parameter")
                elif not row.mapped:
                    assert reply.status_code == 200, reply.text
                    plain, _ = inside(place, {})
                    assert http.post(CHAT, json=plain).status_code == 200
                    first, second = live.async_engine.seen[-2:]
                    assert first == second, (place, row.name)


ANSWERS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Yes", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"role": "assistant", "content": "Yes", "tool_calls": None, "reasoning_content": None, "reasoning": None},
    {"role": "assistant", "content": "Yes", "provider_specific_fields": {"x": 1}, "thinking_blocks": None},
    {"role": "assistant", "content": "Yes", "annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}]},
    {"role": "assistant", "content": "Yes", "model": "other", "images": [], "name": None},
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_sent_back_as_it_came(live: Live, answer: dict[str, Any]) -> None:
    with live.http() as http:
        assert http.post(CHAT, json={"messages": [*HI, answer, *HI]}).status_code == 200
    assert live.async_engine.tokenizer.rendered[-1]["messages"][1] == {"role": "assistant", "content": "Yes"}


def test_the_clients_answer_of_ours_is_sent_back(live: Live) -> None:
    with live.openai() as client:
        asked: list[Any] = list(HI)
        for _ in range(2):
            answer = client.chat.completions.create(model="tiny", messages=asked)
            message: Any = answer.choices[0].message
            assert message.reasoning_content is None and message.reasoning is None and not message.tool_calls
            asked += [message.model_dump(), *HI]
    assert [message["role"] for message in live.async_engine.tokenizer.rendered[-1]["messages"]] == [
        *("user", "assistant", "user")
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Well."},
        {"reasoning": "Well."},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "We"},
                {"type": "reasoning.summary", "summary": "ll."},
            ]
        },
        {
            "reasoning_details": [
                {"type": "reasoning.encrypted", "data": "x"},
                {"type": "reasoning.text", "text": "Well."},
            ]
        },
        {"thinking_blocks": [{"type": "thinking", "thinking": "Well.", "signature": "x"}]},
        {"reasoning": "Well.", "reasoning_details": [{"type": "reasoning.text", "text": "Other."}]},
    ],
)
def test_a_thought_comes_back_under_any_name(live: Live, fields: dict[str, Any]) -> None:
    with live.http() as http:
        message = {"role": "assistant", "content": "Yes", **fields}
        assert http.post(CHAT, json={"messages": [*HI, message, *HI]}).status_code == 200
    rendered = live.async_engine.tokenizer.rendered[-1]["messages"][1]
    assert rendered["reasoning"] == rendered["reasoning_content"] == "Well."


def test_an_older_function_call_is_a_tool_call(live: Live) -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    with live.http() as http:
        asked = [*HI, {"role": "assistant", "content": None, "function_call": function}]
        result = {"role": "function", "name": "f", "content": "2"}
        assert http.post(CHAT, json={"messages": [*asked, result]}).status_code == 200
        both = [*HI, {"role": "assistant", "function_call": function, "tool_calls": [CALL]}]
        check_error(http.post(CHAT, json={"messages": both}), 400, "messages[1].function_call", "invalid_value")
        user = [{"role": "user", "content": "x", "function_call": function}]
        check_error(http.post(CHAT, json={"messages": user}), 400, "messages[0].tool_calls", "invalid_value")
    first, second, third = live.async_engine.tokenizer.rendered[-1]["messages"]
    assert second["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert (first["role"], third) == ("user", {"role": "function", "content": "2", "name": "f"})


REASONING: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    ({"effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}, None),
    ({"effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}, None),
    ({"enabled": False}, {"enable_thinking": False, "thinking": False}, None),
    ({"max_tokens": 7, "enabled": True}, {"enable_thinking": True, "thinking": True}, 7),
    ({}, {}, None),
]


@pytest.mark.parametrize(("given", "variables", "budget"), REASONING)
def test_openrouters_reasoning_is_ours(live: Live, given: dict[str, Any], variables: Any, budget: int | None) -> None:
    live.async_engine.tokenizer.thinks = "qwen3"
    thinks = variables.get("enable_thinking", True)
    live.async_engine.say = lambda request, index: "<think>\nWell.\n</think>\n\nYes" if thinks else "Yes"
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "reasoning": {**given, "exclude": True}})
        assert "Well" not in reply.text and reply.json()["choices"][0]["message"]["reasoning"] is None
        assert http.post(CHAT, json={"messages": HI, "reasoning": given}).status_code == 200
    request = live.async_engine.seen[-1]
    assert live.async_engine.tokenizer.rendered[-1]["kwargs"] == variables
    assert (None if request.reasoning is None else request.reasoning.budget) == budget


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "reasoning.enabled", "invalid_value"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens", "invalid_value"),
        ({"reasoning": {"max_tokens": (1 << 20) + 1}}, "reasoning.max_tokens", "invalid_value"),
        ({"reasoning": {"max_tokens": "5"}}, "reasoning.max_tokens", "invalid_type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"deep": True}}, "reasoning.deep", "unknown_parameter"),
        ({"reasoning": True}, "reasoning", "invalid_type"),
        ({"session_id": "x" * 257}, "session_id", "invalid_value"),
        ({"usage": {"include": 1}}, "usage.include", "invalid_type"),
        ({"lora_path": ["a"]}, "lora_path", "invalid_type"),
    ],
)
def test_wrong_values_are_named(live: Live, fields: dict[str, Any], param: str, code: str) -> None:
    with live.http() as http:
        check_error(http.post(CHAT, json={"messages": HI, **fields}), 400, param, code)


def test_a_session_and_usage_by_their_other_names(live: Live) -> None:
    with live.http() as http:
        for fields in ({"session_id": "s" * 256}, {"session_id": "s", "prompt_cache_key": "k"}):
            assert http.post(CHAT, json={"messages": HI, **fields}).status_code == 200
        streamed = http.post(CHAT, json={"messages": HI, "stream": True, "usage": {"include": True}})
    assert [request.session for request in live.async_engine.seen] == ["s" * 256, "k", ""]
    last = json.loads(streamed.text.split("\n\n")[-3].removeprefix("data: "))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("asked", "counts"), [(True, True), (False, False)])
def test_usage_in_every_chunk_needs_usage(live: Live, asked: bool, counts: bool) -> None:
    options = {"include_usage": asked, "continuous_usage_stats": True}
    with live.http() as http:
        for path in (CHAT, COMPLETIONS):
            reply = http.post(path, json={**BODIES[path], "stream": True, "stream_options": options})
            assert ('"usage":{' in reply.text) is counts


class TestRoles:
    def test_what_the_template_renders_passes(self, live: Live) -> None:
        roles = ["developer", "function", "ipython", "environment", "tool_response"]
        with live.http() as http:
            messages = [*({"role": role, "content": "x"} for role in roles), *HI]
            assert http.post(CHAT, json={"messages": messages}).status_code == 200
        rendered = live.async_engine.tokenizer.rendered[-1]["messages"]
        assert [message["role"] for message in rendered] == ["system", *roles[1:], "user"]

    def test_the_longest_name_passes(self, live: Live) -> None:
        with live.http() as http:
            assert http.post(CHAT, json={"messages": [{"role": "r" * 64, "content": "x"}]}).status_code == 200

    def test_what_it_does_not_render_is_refused(self, live: Live) -> None:
        live.async_engine.tokenizer.named_roles = frozenset({"user", "ipython", "judge", "developer"})
        with live.http() as http:
            reply = http.post(CHAT, json={"messages": [*HI, {"role": "critic", "content": "x"}]})
            message = check_error(reply, 400, "messages[1].role", "invalid_value")
            assert http.post(CHAT, json={"messages": [{"role": "developer", "content": "x"}]}).status_code == 200
        known = "'system', 'developer', 'user', 'assistant', 'tool', 'ipython'"
        assert message == (
            f"'messages[1].role' must be one of {known}: the model's chat template does not render 'critic'."
        )
        assert live.async_engine.tokenizer.rendered[-1]["messages"][0]["role"] == "developer"


class TestModels:
    @pytest.fixture
    def adapted(self, live: Live) -> Live:
        live.client.adapters = {name: AdapterInfo(name, name, 8, 1) for name in ("sql", "tiny:odd")}
        return live

    @pytest.mark.parametrize(
        ("fields", "adapter"),
        [
            ({"model": ""}, None),
            ({"model": "tiny:sql"}, "sql"),
            ({"model": "org/alias:sql"}, "sql"),
            ({"model": "tiny:odd"}, "tiny:odd"),
            ({"model": "tiny:"}, None),
            ({"model": "tiny", "lora_path": "sql"}, "sql"),
            ({"lora_path": "sql"}, "sql"),
            ({"model": "tiny:", "lora_path": "sql"}, "sql"),
            ({"model": "tiny:sql", "lora_path": "nobody"}, "sql"),
            ({"model": "sql"}, "sql"),
        ],
    )
    def test_names_of_adapters(self, adapted: Live, fields: dict[str, str], adapter: str | None) -> None:
        with adapted.http() as http:
            for path in (CHAT, COMPLETIONS):
                reply = http.post(path, json={**BODIES[path], **fields})
                assert reply.status_code == 200, reply.text
                assert reply.json()["model"] == adapter or (adapter is None and reply.json()["model"] == "tiny")
        assert {request.adapter for request in adapted.async_engine.seen} == {adapter}

    @pytest.mark.parametrize("fields", [{"model": "tiny:nobody"}, {"lora_path": "nobody"}, {"model": "other:sql"}])
    def test_names_that_are_not_there(self, adapted: Live, fields: dict[str, str]) -> None:
        with adapted.http() as http:
            check_error(http.post(CHAT, json={"messages": HI, **fields}), 404, "model", "model_not_found")


class TestUnknownFields:
    @pytest.fixture
    def lax(self, serve_with: Any) -> Live:
        return serve_with(ServerConfig(unknown_fields="ignore"))  # type: ignore[no-any-return]

    def test_they_are_left_alone_and_named(self, lax: Live, caplog: pytest.LogCaptureFixture) -> None:
        asked = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "tone": "dry"}], "mood": 1}],
            "foo": {"bar": [1]},
            "stream_options": {"pad": 1},
            "stream": True,
        }
        with caplog.at_level(logging.INFO, "rootgraft.access"), lax.http() as http:
            reply = http.post(CHAT, json=asked)
            wait_until(lambda: any(CHAT in record.message for record in caplog.records))
        assert reply.status_code == 200 and "[DONE]" in reply.text
        named = set(reply.headers["x-ignored-fields"].split(", "))
        assert named == {"messages[0].content[0].tone", "messages[0].mood", "foo", "stream_options.pad"}
        [line] = [json.loads(record.message) for record in caplog.records if CHAT in record.message]
        assert set(line["ignored_fields"].split(", ")) == named
        assert lax.async_engine.tokenizer.rendered[-1]["messages"] == HI

    @pytest.mark.parametrize("path", [*BODIES, "/v1/messages", "/tokenize"])
    def test_on_every_route(self, lax: Live, path: str) -> None:
        bodies = BODIES | {
            "/v1/messages": {"messages": HI, "model": "tiny", "max_tokens": 5},
            "/tokenize": {"prompt": "Hi"},
        }
        with lax.http() as http:
            assert http.post(path, json={**bodies[path], "foo": 1}).headers["x-ignored-fields"] == "foo"
            assert "x-ignored-fields" not in http.post(path, json=bodies[path]).headers

    def test_what_is_known_is_refused_as_ever(self, lax: Live) -> None:
        with lax.http() as http:
            for fields, param, code in (
                ({"foo": 1, "top_a": 5}, "top_a", "unsupported_parameter"),
                ({"foo": 1, "temperature": "x"}, "temperature", "invalid_type"),
                ({"foo": 1, "model": "nobody"}, "model", "model_not_found"),
            ):
                check_error(
                    http.post(CHAT, json={"messages": HI, **fields}), 404 if "model" in fields else 400, param, code
                )

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("a\r\nx-evil: 1", "a??x-evil??1"),
            ("ä\u2028", "??"),
            ("<script>", "?script?"),
            ("", ""),
            ("x" * 5000, f"{'x' * 31}...{'x' * 30}"),
        ],
    )
    def test_a_name_is_no_header_of_its_own(self, lax: Live, name: str, shown: str) -> None:
        with lax.http() as http:
            reply = http.post(CHAT, json={"messages": HI, name: 1})
        assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == shown
        assert "x-evil" not in reply.headers

    def test_many_are_counted(self, lax: Live) -> None:
        with lax.http() as http:
            reply = http.post(CHAT, json={"messages": HI, **{f"f{number}": 1 for number in range(20_000)}})
        assert reply.headers["x-ignored-fields"] == "f0, f1, f2, f3, f4, f5, f6, f7 and 19992 more"

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
    @pytest.mark.parametrize("each", [12, 200])
    def test_those_of_a_long_history_are_counted(self, lax: Live, path: str, each: int) -> None:
        odd = {f"odd{number}": number for number in range(each)}
        history = [{"role": ("user", "assistant")[turn % 2], "content": "Hi", **odd} for turn in range(100)]
        with lax.http() as http:
            fields = {"options": {}} if path == "/api/chat" else {"max_tokens": 5}
            reply = http.post(path, json={"model": "tiny", "messages": [*history, *HI], **fields})
        assert reply.headers.get("x-ignored-fields", "").endswith(f" and {100 * each - 8} more"), reply.text[:200]

    def test_nothing_is_named_where_nothing_was_left_alone(self, lax: Live, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "rootgraft.access"), lax.http() as http:
            check_error(http.post(CHAT, json={"messages": HI, "temperature": "x"}), 400, "temperature", "invalid_type")
            wait_until(lambda: any(CHAT in record.message for record in caplog.records))
        assert not any("ignored_fields" in record.message for record in caplog.records)

    def test_they_are_refused_by_default(self, live: Live) -> None:
        with live.http() as http:
            check_error(http.post(CHAT, json={"messages": HI, "foo": 1}), 400, "foo", "unknown_parameter")


ECHOES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (HI, {}, ""),
    (HI, {"add_generation_prompt": False}, "Hi"),
    ([*HI, {"role": "assistant", "content": "So "}], {"continue_final_message": True}, "So "),
    ([*HI, {"role": "assistant", "content": "So "}], {}, "So "),
]


@pytest.mark.parametrize(("messages", "fields", "echoed"), ECHOES)
def test_a_chat_echoes_its_last_message(live: Live, messages: Any, fields: dict[str, Any], echoed: str) -> None:
    asked = {"messages": messages, "echo": True, "n": 2, **fields}
    with live.http() as http:
        whole = http.post(CHAT, json=asked).json()
        text = http.post(CHAT, json={**asked, "stream": True}).text
    assert [each["message"]["content"] for each in whole["choices"]] == [f"{echoed}answer {index}" for index in (0, 1)]
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    for index in (0, 1):
        deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"][0]["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == f"{echoed}answer {index}"


def test_tokens_have_the_vocabularys_strings(live: Live) -> None:
    with live.http() as http:
        told = http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert told["token_strs"] == [f"piece {token}" for token in told["tokens"]]


def test_the_tokenizer_is_told_of_behind_a_flag(live: Live, serve_with: Any) -> None:
    with live.http() as http:
        message = check_error(http.get("/tokenizer_info"), 404, None, "unknown_url")
    assert "--enable-tokenizer-info-endpoint" in message
    with serve_with(ServerConfig(enable_tokenizer_info_endpoint=True)).http() as http:
        told = http.get("/tokenizer_info").json()
    assert told == {
        "tokenizer_class": "ByteTokenizer",
        "model_max_length": 2048,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }


def test_a_cut_response_ends_as_openais_does(live: Live) -> None:
    """The SDK's own helper knows only ``response.completed``; the whole response is in the event."""
    with live.openai() as client, client.responses.stream(model="tiny", input="Hi", max_output_tokens=3) as events:
        last = list(events)[-1]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details is not None
        assert (last.response.output_text, last.response.incomplete_details.reason) == ("ans", "max_output_tokens")
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            events.get_final_response()


def test_openrouters_client(live: Live) -> None:
    """The real client, where it is installed: it sends its own fields, and our answer back as it came."""
    openrouter = pytest.importorskip("openrouter")
    live.async_engine.tokenizer.thinks = "qwen3"
    live.async_engine.say = lambda request, index: "<think>\nWell.\n</think>\n\nYes"
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "reasoning": {"effort": "low"},
        "provider": {"sort": "price"},
        "session_id": "s",
        "plugins": [{"id": "response-healing"}],
        "trace": {"trace_id": "t"},
    }
    with openrouter.OpenRouter(api_key="none", server_url=f"{live.url}/v1") as client:
        message = client.chat.send(**asked).choices[0].message
        assert (message.content, message.reasoning) == ("Yes", "Well.")
        asked["messages"] = [*HI, message.model_dump(by_alias=True), *HI]
        assert list(client.chat.send(**asked, stream=True))
    assert live.async_engine.tokenizer.rendered[-1]["messages"][1]["reasoning"] == "Well."
