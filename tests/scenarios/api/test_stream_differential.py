"""Streams against whole answers: the same request twice, put together by the clients' own accumulators.

An answer arrives in other chunks of tokens each time, so that nothing may depend on where the chunks are cut. Ids and
times differ, and nothing else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anthropic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from support.api.api_fakes import ByteTokenizer
from support.api.api_live import Live, make_state, serve
from support.api.bad.bad_structured import named, schema_format
from support.api.chunked_frontend import ChunkedFrontend
from support.api.messages_asks import TOOLS as BLOCK_TOOLS
from support.api.messages_asks import client_of
from support.api.responses_asks import flat
from support.api.tool_asks import FORCED, ONE, SHORT, TOOLS, TWO
from support.machine.thoroughness import repeats

HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FORM = schema_format(SCHEMA)
# OpenAI's client itself reads the arguments of strict functions, and raises where an answer was cut off in them.
ITEM_TOOLS: Any = [{"type": "function", **one["function"], "strict": False} for one in TOOLS]
PLAIN = [
    "",
    "Yes.",
    "Naïve 😀 – ok, ähm.\n\nSTOP here",
    " \n lead",
    "a </think> b <tool_",
    "x" * 60,
    "\ufffd\x00\u2028\x85",
]
CALLS = [ONE, TWO, "Well 😀. " + TWO, ONE + "\n\nAnd so on. ", ONE + " between " + ONE, TWO[:60], "Well. <tool_call>\n"]
THOUGHTS = [
    "",
    "<think>\nHm 😀, or\n\nso.\n</think>\n\n",
    "<think></think>",
    "<think>never ends",
    " \n<think>a</think>",
]
STOPS = ["STOP", "😀 –", "</tool_call>", "Ulm", "\n\n", "so", ".", "ends", "no such"]
ANY_STOP: list[Any] = [*STOPS, STOPS[:3], ["s", "ss", "</"]]
LENGTHS = [1, 2, 9, 30, 200]
SHARED: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "stop": ANY_STOP,
    "min_tokens": [1, 5, 20],
    "max_tokens": LENGTHS,
    "include_stop_str_in_output": [True],
    "return_token_ids": [True],
    "skip_special_tokens": [False],
}
USAGES = [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
# What the clients add, and what differs from answer to answer.
VOLATILE = {"id", "call_id", "item_id", "created_at", "completed_at", "parsed", "parsed_arguments", "stop_details"}


@pytest.fixture(scope="module")
def chunked() -> Iterator[Live]:
    state = make_state()
    state.engine.async_engine = ChunkedFrontend()  # type: ignore[assignment]
    yield from serve(state)


class Pairs:
    """Asks for answers twice, and keeps the differences."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._found: list[Any] = []
        self.num_asked = 0

    def ask(self, texts: list[str], seed: int, asked: Any, ask: Callable[[Any, bool], Any]) -> None:
        """Ask for answers with these texts, whole and streamed."""
        answers = []
        for is_streamed in (False, True):
            frontend: Any = self._live.async_engine
            frontend.say = lambda request, index: texts[index]
            frontend.draws = random.Random(2 * seed + is_streamed)
            answers.append(ask(asked, is_streamed))
        self.num_asked += 1
        if unlike := differences(*answers):
            self._found.append((seed, unlike, texts, asked))

    def check(self) -> None:
        assert self.num_asked
        told = [repr(each)[:1_500] for each in self._found[:3]]
        assert not self._found, "\n\n".join([f"{len(self._found)} differences", *told])


def differences(first: Any, second: Any, place: str = "") -> list[Any]:
    """Places at which two answers differ, with both values."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [each for key in first for each in differences(first[key], second[key], f"{place}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [each for at, pair in pairs for each in differences(*pair, f"{place}[{at}]")]
    return [] if first == second else [(place, first, second)]


def drawn(draw: random.Random, options: dict[str, list[Any]], share: float = 0.4) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in options.items() if draw.random() < share}


def set_formats(live: Live, draw: random.Random) -> bool:
    """Draw whether the model thinks. Formats are found once for a tokenizer, so there is a new one."""
    live.async_engine.tokenizer = ByteTokenizer()
    live.async_engine.tokenizer.thinks = draw.choice(["", "qwen3", "deepseek_r1"])
    return bool(live.async_engine.tokenizer.thinks)


def draw_answers(draw: random.Random, n: int, choice: Any, *, thinks: bool, calls: bool, form: bool) -> list[str]:
    """Texts as a model may write them under what was asked."""

    def one() -> str:
        text = draw.choice(CALLS + PLAIN[:3]) if calls else draw.choice(PLAIN)
        if form:
            text = '{"a": "Ulm 😀 – STOP"}'
        if calls and choice in ("required", SHORT):
            text = FORCED
        elif calls and isinstance(choice, dict):
            text = '{"city": "Ulm \\n STOP"}'
        return (draw.choice(THOUGHTS) if thinks else "") + text

    return [one() for _ in range(n)]


def unmarked(value: Any) -> Any:
    """An answer without ids and times."""
    if isinstance(value, dict):
        return {name: unmarked(each) for name, each in value.items() if name not in VOLATILE}
    return [unmarked(each) for each in value] if isinstance(value, list) else value


def test_completions(chunked: Live) -> None:
    pairs = Pairs(chunked)
    with chunked.http() as http:
        for seed in range(repeats(150)):
            draw = random.Random(seed)
            options = {
                **SHARED,
                "logprobs": [0, 2],
                "echo": [True],
                "prompt": [["a😀", "b"], [97, 98], [[97], [98, 99]]],
                "max_tokens": [0, *LENGTHS],
            }
            asked = {"model": "tiny", "prompt": "hi", "max_tokens": 16, **drawn(draw, options)}
            asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
            texts = draw_answers(draw, 3, None, thinks=False, calls=False, form=False)
            pairs.ask(texts, seed, asked, partial(completion, http, draw.choice(USAGES)))
    pairs.check()


def completion(http: Any, usage: Any, asked: Any, is_streamed: bool) -> Any:
    if not is_streamed:
        body = http.post("/v1/completions", json=asked).json()
        return {"choices": body["choices"], "usage": body["usage"]}
    reply = http.post("/v1/completions", json={**asked, "stream": True, "stream_options": usage})
    *lines, last = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert last == "[DONE]"
    return joined_completion([json.loads(line) for line in lines])


def joined_completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream of completions: OpenAI's client has no accumulator for it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for new in chunk["choices"]:
            old = choices.setdefault(new["index"], {"index": new["index"], "text": "", "logprobs": None})
            old["text"] += new["text"]
            for name, values in (new["logprobs"] or {}).items():
                old["logprobs"] = old["logprobs"] or {}
                old["logprobs"].setdefault(name, []).extend(values)
            if "token_ids" in new:
                old.setdefault("token_ids", []).extend(new["token_ids"])
                old.setdefault("prompt_token_ids", new["prompt_token_ids"])
            old |= {name: new[name] for name in ("finish_reason", "stop_reason") if name in new}
    used, whole = chunks[-2]["usage"], chunks[-1]["usage"]
    assert used is None or all(whole[name] == count for name, count in used.items()), (used, whole)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": whole}


EXTRA = ("min_tokens", "include_stop_str_in_output", "return_token_ids", "skip_special_tokens", "include_reasoning")
EXTRA = (*EXTRA, "continue_final_message", "echo")


def test_chats(chunked: Live) -> None:
    pairs = Pairs(chunked)
    with chunked.openai() as client:
        for seed in range(repeats(300)):
            draw = random.Random(seed)
            thinks = set_formats(chunked, draw)
            options = {**SHARED, "logprobs": [True], "include_reasoning": [False], "parallel_tool_calls": [False]}
            asked: dict[str, Any] = {"model": "tiny", "messages": HI, **drawn(draw, options)}
            calls, form = draw.random() < 0.5, draw.random() < 0.2
            choice: Any = draw.choice(["auto", "auto", "required", named("weather"), SHORT])
            if calls:
                asked |= {"tools": TOOLS, "tool_choice": choice}
                asked.pop("include_stop_str_in_output", None)
            form = form and choice == "auto"
            if form:
                asked |= FORM
                asked.pop("include_stop_str_in_output", None)
            if asked.get("logprobs") and draw.random() < 0.5:
                asked["top_logprobs"] = 2
            if not calls and draw.random() < 0.2:
                begun = [*HI, {"role": "assistant", "content": "So "}]
                asked |= {"messages": begun, "continue_final_message": True, "echo": True}
            if not calls and not thinks and draw.random() < 0.1:
                asked["max_tokens"] = 0
            asked["min_tokens"] = min(asked.get("min_tokens", 0), asked.get("max_tokens", 200))
            texts = draw_answers(draw, 3, choice, thinks=thinks, calls=calls, form=form)
            pairs.ask(texts, seed, asked, partial(chat, client, draw.choice(USAGES)))
    pairs.check()


def chat(client: Any, usage: Any, asked: Any, is_streamed: bool) -> Any:
    extra = {name: asked[name] for name in EXTRA if name in asked}
    asked = {name: value for name, value in asked.items() if name not in extra}
    if not is_streamed:
        return chat_view(client.chat.completions.create(**asked, extra_body=extra))
    # Without formats and tools, as the client raises where an answer was cut off in one.
    state: Any = ChatCompletionStreamState()
    ids: dict[int, list[int]] = {}
    reasons: dict[int, Any] = {}
    used = None
    for chunk in client.chat.completions.create(**asked, extra_body=extra, stream=True, stream_options=usage):
        state.handle_chunk(chunk)
        for each in chunk.choices:
            ids.setdefault(each.index, []).extend(getattr(each, "token_ids", None) or [])
            if each.finish_reason:
                reasons[each.index] = getattr(each, "stop_reason", None)
        used = chunk.usage if chunk.choices else used
    found = state.current_completion_snapshot
    assert used is None or used.completion_tokens == found.usage.completion_tokens, (used, found.usage)
    for each in found.choices:
        each.stop_reason = reasons[each.index]
        if extra.get("return_token_ids"):
            each.token_ids = ids[each.index]
    return chat_view(found)


def chat_view(found: Any) -> Any:
    """What must be the same of two chat completions: null, "" and no logprobs at all are the same."""
    choices = []
    for choice in found.choices:
        message = choice.message
        choices.append(
            {
                "index": choice.index,
                "role": message.role,
                "content": message.content or "",
                "reasoning": getattr(message, "reasoning", None) or "",
                "reasoning_content": getattr(message, "reasoning_content", None) or "",
                "refusal": message.refusal,
                "calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
                "finish": choice.finish_reason,
                "stop": getattr(choice, "stop_reason", None),
                "ids": getattr(choice, "token_ids", None),
                "logprobs": [each.to_dict() for each in (choice.logprobs and choice.logprobs.content) or []],
            }
        )
    prompt = getattr(found, "prompt_token_ids", None)
    return {"choices": choices, "usage": found.usage.to_dict(), "prompt": prompt}


def test_responses(chunked: Live) -> None:
    pairs = Pairs(chunked)
    options: dict[str, list[Any]] = {
        "max_output_tokens": LENGTHS,
        "parallel_tool_calls": [False],
        "top_logprobs": [2],
        "include": [["message.output_text.logprobs"]],
        "stop": ANY_STOP,
        "store": [False],
    }
    with chunked.openai() as client:
        for seed in range(repeats(180)):
            draw = random.Random(seed)
            thinks = set_formats(chunked, draw)
            asked: dict[str, Any] = {"model": "tiny", "input": "hi", **drawn(draw, options)}
            calls, form = draw.random() < 0.5, draw.random() < 0.2
            choice: Any = draw.choice(["auto", "auto", "required", named("weather"), SHORT])
            if calls:
                asked |= {"tools": ITEM_TOOLS, "tool_choice": flat(choice)}
            form = form and choice == "auto"
            if form:
                asked["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
            texts = draw_answers(draw, 1, choice, thinks=thinks, calls=calls, form=form)
            pairs.ask(texts, seed, asked, partial(response, client))
    pairs.check()


def response(client: Any, asked: Any, is_streamed: bool) -> Any:
    extra = {"stop": asked["stop"]} if "stop" in asked else {}
    asked = {name: value for name, value in asked.items() if name != "stop"}
    if not is_streamed:
        return unmarked(client.responses.create(**asked, extra_body=extra).to_dict())
    items: list[dict[str, Any]] = []
    with client.responses.stream(**asked, extra_body=extra) as events:
        for event in events:
            join_item(items, event)
        last = event.response.to_dict()
        if event.type == "response.completed":
            assert unmarked(events.get_final_response().to_dict()) == unmarked(last)
    assert [{name: item[name] for name in ("id", "type")} for item in last["output"]] == [
        {name: item[name] for name in ("id", "type")} for item in items
    ]
    for whole, item in zip(last["output"], items, strict=True):
        content = (whole.get("content") or [{}])[0]
        assert item["text"] == content.get("text", "") and item["logprobs"] == (content.get("logprobs") or [])
        assert item["arguments"] == whole.get("arguments", ""), (item, whole)
    return unmarked(last)


def join_item(items: list[dict[str, Any]], event: Any) -> None:
    """Join the deltas of a stream's items: what a client shows that reads deltas alone."""
    match event.type:
        case "response.output_item.added":
            assert event.output_index == len(items)
            items.append({"type": event.item.type, "id": event.item.id, "text": "", "arguments": "", "logprobs": []})
        case "response.output_text.delta" | "response.reasoning_text.delta":
            assert items[event.output_index]["id"] == event.item_id
            items[event.output_index]["text"] += event.delta
            items[event.output_index]["logprobs"] += [each.to_dict() for each in getattr(event, "logprobs", None) or []]
        case "response.function_call_arguments.delta":
            items[event.output_index]["arguments"] += event.delta


BLOCK_CHOICES: dict[str, Any] = {
    "auto": {"type": "auto"},
    "required": {"type": "any"},
    "tool": {"type": "tool", "name": "weather"},
}


def test_messages(chunked: Live) -> None:
    pairs = Pairs(chunked)
    options: dict[str, list[Any]] = {
        "stop_sequences": [[stop] for stop in STOPS if stop.strip()],
        "thinking": [{"type": "adaptive", "display": display} for display in ("omitted", "summarized")],
    }
    with client_of(chunked.url) as client:
        for seed in range(repeats(120)):
            draw = random.Random(seed)
            thinks = set_formats(chunked, draw)
            asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": draw.choice(LENGTHS)}
            asked |= drawn(draw, options)
            calls, form = draw.random() < 0.5, draw.random() < 0.2
            choice = draw.choice(["auto", "auto", "required", "tool"])
            if calls:
                asked |= {"tools": BLOCK_TOOLS, "tool_choice": BLOCK_CHOICES[choice]}
            form = form and choice == "auto"
            if form:
                asked["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
            told = named("weather") if choice == "tool" else choice
            texts = draw_answers(draw, 1, told, thinks=thinks, calls=calls, form=form)
            pairs.ask(texts, seed, asked, partial(message, client))
    pairs.check()


def message(client: Any, asked: Any, is_streamed: bool) -> Any:
    try:
        if not is_streamed:
            return unmarked(client.messages.create(**asked).to_dict())
        with client.messages.stream(**asked) as events:
            return unmarked(events.get_final_message().to_dict())
    except anthropic.APIStatusError as error:
        return str(error.body and error.body["error"])  # type: ignore[index]


def test_text_generation_inference(chunked: Live) -> None:
    pairs = Pairs(chunked)
    options: dict[str, list[Any]] = {
        "max_new_tokens": LENGTHS,
        "stop": [[stop] for stop in STOPS],
        "return_full_text": [True],
        "top_n_tokens": [2],
        "seed": [3],
    }
    with chunked.http() as http:
        for seed in range(repeats(120)):
            draw = random.Random(seed)
            asked = {"inputs": "hi", "parameters": {"details": True, **drawn(draw, options)}}
            texts = draw_answers(draw, 1, None, thinks=False, calls=False, form=False)
            pairs.ask(texts, seed, asked, partial(generation, http))
    pairs.check()


def generation(http: Any, asked: Any, is_streamed: bool) -> Any:
    if not is_streamed:
        body = http.post("/generate", json=asked).json()
        text, details, tokens = body["generated_text"], body["details"], body["details"]["tokens"]
    else:
        lines = http.post("/generate_stream", json=asked).text.splitlines()
        events = [json.loads(line.removeprefix("data:")) for line in lines if line]
        assert all(each["generated_text"] is None for each in events[:-1])
        text, details, tokens = events[-1]["generated_text"], events[-1]["details"], [each["token"] for each in events]
    ends = {name: details[name] for name in ("finish_reason", "generated_tokens", "seed")}
    # The text of several tokens is in the last of them. An end that comes alone is a special token.
    ids, written = [each["id"] for each in tokens if not each["special"]], "".join(each["text"] for each in tokens)
    return {"text": text, "ids": ids, "written": written, **ends}


def test_ollama(chunked: Live) -> None:
    pairs = Pairs(chunked)
    with chunked.http() as http:
        for seed in range(repeats(120)):
            draw = random.Random(seed)
            thinks = set_formats(chunked, draw)
            asked: dict[str, Any] = {"model": "tiny"}
            asked["options"] = drawn(draw, {"num_predict": LENGTHS, "stop": ANY_STOP})
            path = draw.choice(["/api/chat", "/api/chat", "/api/generate"])
            asked |= {"messages": HI} if path == "/api/chat" else {"prompt": "hi"}
            calls, form = path == "/api/chat" and draw.random() < 0.5, draw.random() < 0.2
            form = form and not calls
            asked |= {"tools": TOOLS} if calls else {}
            asked |= {"format": SCHEMA} if form else {}
            asked |= drawn(draw, {"logprobs": [True], "think": [True, False] if thinks else [None]})
            if asked.get("logprobs"):
                asked["top_logprobs"] = 2
            texts = draw_answers(draw, 1, "auto", thinks=thinks, calls=calls, form=form)
            pairs.ask(texts, seed, asked, partial(lines_of, http, path))
    pairs.check()


def lines_of(http: Any, path: str, asked: Any, is_streamed: bool) -> Any:
    """Join the objects of Ollama's stream; a whole answer is a single one."""
    lines = [json.loads(line) for line in http.post(path, json={**asked, "stream": is_streamed}).text.splitlines()]
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True], lines
    parts = [line.get("message") or {"content": line["response"], "thinking": line.get("thinking")} for line in lines]
    return {
        "content": "".join(part["content"] for part in parts),
        "thinking": "".join(part.get("thinking") or "" for part in parts),
        "calls": [call["function"] for part in parts for call in part.get("tool_calls", ())],
        "logprobs": [each for line in lines for each in line.get("logprobs", ())],
        **{name: lines[-1][name] for name in ("done_reason", "prompt_eval_count", "eval_count")},
    }
