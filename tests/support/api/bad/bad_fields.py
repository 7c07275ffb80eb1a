"""Families of wrong requests, over every route with a body: each field with each wrong type, names nobody knows, sizes.

A row is as in ``bad_inputs``: path, fields that make a good body wrong, and the param and code to expect.
"""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any], str | None, str | None]

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
DECISIONS, SYSTEM_ONE, SCORE = "/v1/decisions", "/v1/systemone", "/v1/score"
EMBEDDINGS, CLASSIFY, RERANK = "/v1/embeddings", "/v1/classify", "/v1/rerank"
POOLING, PAIRS = "/pooling", "/score"
RESPONSES, LOAD, UNLOAD = "/v1/responses", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HI = [{"role": "user", "content": "hi"}]

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "ab"},
    RESPONSES: {"input": "hi"},
    DECISIONS: {"input": "ab", "questions": [{"type": "predicate", "instructions": "x"}]},
    SYSTEM_ONE: {"state": "ab", "questions": {"q": {"type": "noul", "instructions": "x"}}},
    SCORE: {"query": "ab", "items": ["c"], "label_token_ids": [97]},
    EMBEDDINGS: {"input": "ab"},
    CLASSIFY: {"input": ["ab", "c"]},
    RERANK: {"query": "ab", "documents": ["c", {"text": "d"}]},
    POOLING: {"input": ["ab", "c"]},
    PAIRS: {"text_1": "ab", "text_2": ["c", "d"]},
    TOKENIZE: {"prompt": "ab"},
    DETOKENIZE: {"tokens": [97]},
    LOAD: {"lora_name": "new", "lora_path": "new"},
    UNLOAD: {"lora_name": "new"},
}
"""A good body for each route."""

ANY: dict[str, list[Any]] = {
    "boolean": [True, False],
    "integer": [5, 0, -1, 1 << 62],
    "number": [1.5, -0.5, 1e308],
    "string": ["5", "", "true", "null", "x" * 1000],
    "list": [[], [5], ["a"], [[]], [None]],
    "object": [{}, {"a": 5}, {"type": "text"}],
}


def wrong_for(*right: str) -> list[Any]:
    """Values of every JSON type but these."""
    return [value for kind, values in ANY.items() if kind not in right for value in values]


# Field and what is right for it, by route. The code for a wrong type is "invalid_type".
SHARED = {
    "model": ("string",),
    "include_stop_str_in_output": ("boolean",),
    "ignore_eos": ("boolean",),
    "skip_special_tokens": ("boolean",),
    "stop_token_ids": ("list",),
    "logit_bias": ("object",),
    "cache_salt": ("string",),
    "stream": ("boolean",),
    "guided_regex": ("string",),
    "guided_choice": ("list",),
    "guided_grammar": ("string",),
    "regex": ("string",),
    "ebnf": ("string",),
    "response_format": ("object",),
    "structured_outputs": ("object",),
}
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    CHAT: SHARED
    | {
        "messages": ("list",),
        "tools": ("list",),
        "parallel_tool_calls": ("boolean",),
        "logprobs": ("boolean",),
        "add_generation_prompt": ("boolean",),
        "continue_final_message": ("boolean",),
        "add_special_tokens": ("boolean",),
        "chat_template_kwargs": ("object",),
    },
    COMPLETIONS: SHARED | {"echo": ("boolean",), "add_special_tokens": ("boolean",)},
    RESPONSES: dict.fromkeys(
        ("stream", "store", "background", "generate", "parallel_tool_calls", "ignore_eos"), ("boolean",)
    ),
    DECISIONS: {
        "model": ("string",),
        "questions": ("list",),
        "prompt_cache_key": ("string",),
        "prompt_cache_options": ("object",),
        "cache_salt": ("string",),
    },
    SYSTEM_ONE: {
        "model": ("string",),
        "questions": ("object",),
        "instructions": ("string",),
        "chat_template_kwargs": ("object",),
        "cache_salt": ("string",),
    },
    SCORE: {
        "model": ("string",),
        "label_token_ids": ("list",),
        "apply_softmax": ("boolean",),
        "item_first": ("boolean",),
        "logprobs": ("boolean",),
        "prompt_cache_key": ("string",),
        "cache_salt": ("string",),
    },
    EMBEDDINGS: {
        "model": ("string",),
        "normalize": ("boolean",),
        "prompt_name": ("string",),
        "cache_salt": ("string",),
    },
    CLASSIFY: {"model": ("string",), "cache_salt": ("string",)},
    POOLING: {"model": ("string",), "normalize": ("boolean",), "cache_salt": ("string",)},
    PAIRS: {"model": ("string",), "cache_salt": ("string",), "instruction": ("string",)},
    RERANK: {
        "model": ("string",),
        "query": ("string",),
        "documents": ("list",),
        "return_documents": ("boolean",),
        "instruction": ("string",),
        "cache_salt": ("string",),
    },
    TOKENIZE: {
        "model": ("string",),
        "prompt": ("string",),
        "messages": ("list",),
        "tools": ("list",),
        "add_special_tokens": ("boolean",),
        "return_token_strs": ("boolean",),
        "add_generation_prompt": ("boolean",),
        "continue_final_message": ("boolean",),
        "chat_template_kwargs": ("object",),
    },
    DETOKENIZE: {"model": ("string",), "tokens": ("list",)},
    LOAD: {"lora_name": ("string",), "lora_path": ("string",), "load_inplace": ("boolean",)},
    UNLOAD: {"lora_name": ("string",)},
}

TYPES: list[Case] = [
    (path, {name: value}, name, "invalid_type")
    for path, fields in FIELDS.items()
    for name, right in fields.items()
    for value in wrong_for(*right)
]

PRIORITIES: list[Case] = [
    (path, {"priority": value}, "priority", "invalid_value")
    for path in (CHAT, COMPLETIONS)
    for value in (0, 1, -1, 5, True, 1.5, "", "high", "REALTIME", "realtime ", "default", [], ["batch"], {})
]

# Fields of internals, and of nobody: none may be passed over in silence.
STRANGERS = (
    *(
        "foo",
        "Model",
        "MAX_TOKENS",
        "max-tokens",
        "maxTokens",
        "temperature ",
        " temperature",
        "__class__",
        "__proto__",
    ),
    *("constructor", "mm_processor", "dill", "lora_path_x", "bootstrap_host", "sampling_params", "image_data"),
    *("best_of_x", "tenant", "cache_tenant", "salt", "adapter", "timeout", "grammar", "path"),
    *("\u0000", "a.b", "a[0]", "ä", "x" * 300),
)
UNKNOWN: list[Case] = [
    (path, {name: value}, name, "unknown_parameter")
    for path in GOOD
    for name, value in zip(STRANGERS, (1, "x", [1], {"a": 1}, True) * len(STRANGERS), strict=False)
]

LONG = "x" * 257
SIZES: list[Case] = [
    *((path, {"model": LONG}, "model", "invalid_value") for path in (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE)),
    *((path, {"model": "x" * 1_000_000}, "model", "invalid_value") for path in (CHAT, COMPLETIONS)),
    (LOAD, {"lora_name": ""}, "lora_name", "invalid_value"),
    (LOAD, {"lora_path": ""}, "lora_path", "invalid_value"),
    (LOAD, {"lora_name": LONG}, "lora_name", "invalid_value"),
    (LOAD, {"lora_path": "x" * 4097}, "lora_path", "invalid_value"),
    (UNLOAD, {"lora_name": ""}, "lora_name", "invalid_value"),
    (UNLOAD, {"lora_name": LONG}, "lora_name", "invalid_value"),
    (LOAD, {"lora_name": None}, "lora_name", "missing_required_parameter"),
    (LOAD, {"lora_path": None}, "lora_path", "missing_required_parameter"),
    (UNLOAD, {"lora_name": None}, "lora_name", "missing_required_parameter"),
    (DETOKENIZE, {"tokens": None}, "tokens", "missing_required_parameter"),
    (DETOKENIZE, {"tokens": [97] * ((1 << 20) + 1)}, "tokens", "invalid_value"),
    (CHAT, {"messages": HI * 4097}, "messages", "invalid_value"),
    (TOKENIZE, {"prompt": None, "messages": HI * 4097}, "messages", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {str(n): n for n in range(33)}}, "chat_template_kwargs", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
        "messages[0].content",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": LONG}]}, "messages[0].name", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": LONG}]},
        "messages[0].tool_call_id",
        "invalid_value",
    ),
]

_FAR = (-1, -(1 << 31), -(1 << 63), 260, 261, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1)
IDS: list[Case] = [
    *((path, {"stop_token_ids": [97, far]}, "stop_token_ids", "invalid_value") for path in (CHAT, COMPLETIONS)
      for far in _FAR),
    *((path, {"logit_bias": {str(far): 1}}, "logit_bias" if 0 <= far < 10**10 else f"logit_bias.{far}", "invalid_value")
      for path in (CHAT, COMPLETIONS) for far in _FAR),
    *((COMPLETIONS, {"prompt": [97, far]}, "prompt", "invalid_value") for far in _FAR),
    *((COMPLETIONS, {"prompt": [[97], [97, far]]}, "prompt[1]", "invalid_value") for far in _FAR),
    *((DETOKENIZE, {"tokens": [97, far]}, "tokens", "invalid_value") for far in _FAR),
    *((SCORE, {"query": [97], "items": [[97, far]]}, "items[0]" if far > 0 else "items[0][1]", "invalid_value")
      for far in _FAR),
]  # fmt: skip

_YES = {"type": "predicate", "instructions": "x"}
_TWO = [{"value": "a"}, {"value": "b"}]
_IMAGE = {"type": "input_image", "image_url": "x"}


def _asked(question: dict[str, Any], param: str, code: str) -> Case:
    """A wrong question behind a right one."""
    return DECISIONS, {"questions": [_YES, question]}, f"questions[1].{param}", code


def _deep(levels: int) -> dict[str, Any]:
    return {"a": _deep(levels - 1)} if levels else {}


def _json(data: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_json", "data": data}]}]}


def _choice(**fields: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "x", **fields}


def _score(levels: Any) -> dict[str, Any]:
    return {"type": "score", "instructions": "x", "levels": levels}


def _named(question: dict[str, Any], param: str, code: str) -> Case:
    return SYSTEM_ONE, {"questions": {"q": question}}, f"questions.q{param}", code


SCORES: list[Case] = [
    (SCORE, {"query": None}, "query", "missing_required_parameter"),
    (SCORE, {"items": None}, "items", "missing_required_parameter"),
    (SCORE, {"items": []}, "items", "invalid_value"),
    (SCORE, {"items": ["c"] * 1001}, "items", "invalid_value"),
    (SCORE, {"items": ["c", [97]]}, "items[1]", "invalid_value"),
    (SCORE, {"label_token_ids": None}, "label_token_ids", "invalid_value"),
    (SCORE, {"label_token_ids": []}, "label_token_ids", "invalid_value"),
    (SCORE, {"label_token_ids": [97] * 4097}, "label_token_ids", "invalid_value"),
    (SCORE, {"labels": ["a"]}, "labels", "invalid_value"),
    (SCORE, {"label_token_ids": None, "labels": []}, "labels", "invalid_value"),
    (SCORE, {"label_token_ids": None, "labels": ["a"] * 4097}, "labels", "invalid_value"),
    (SCORE, {"label_token_ids": None, "labels": ["a", ""]}, "labels[1]", "invalid_value"),
]  # fmt: skip

POOLED: list[Case] = [
    *((path, {"input": None}, "input", "missing_required_parameter") for path in (EMBEDDINGS, CLASSIFY)),
    *((path, {"input": wrong}, "input", "invalid_value")
      for path in (EMBEDDINGS, CLASSIFY) for wrong in ("", [], {}, 5)),
    *((path, {"input": ["a"] * 2049}, "input", "invalid_value") for path in (EMBEDDINGS, CLASSIFY)),
    *((path, {"input": ["a", ""]}, "input[1]", "invalid_value") for path in (EMBEDDINGS, CLASSIFY)),
    *((path, {"input": [[97], []]}, "input[1]", "invalid_value") for path in (EMBEDDINGS, CLASSIFY)),
    *((path, {"input": ["a", "b" * 3000]}, "input[1]", "context_length_exceeded") for path in (EMBEDDINGS, CLASSIFY)),
    *((EMBEDDINGS, {"input": [[97, far]]}, "input[0]", "invalid_value") for far in _FAR if far > 0),
    *((EMBEDDINGS, {"dimensions": wrong}, "dimensions", "invalid_value") for wrong in (0, -1, 5, 1 << 62)),
    (EMBEDDINGS, {"encoding_format": "hex"}, "encoding_format", "invalid_value"),
    (EMBEDDINGS, {"prompt_name": "nobody"}, "prompt_name", "invalid_value"),
    (POOLING, {"task": "poem"}, "task", "invalid_value"),
    (POOLING, {"encoding_format": "hex"}, "encoding_format", "invalid_value"),
    *((POOLING, {"dimensions": wrong}, "dimensions", "invalid_value") for wrong in (0, -1, 5, 1 << 62)),
    (POOLING, {"input": ["a"] * 2049}, "input", "invalid_value"),
    *((PAIRS, {"text_2": wrong}, "text_2", "invalid_value") for wrong in ("", [], {}, 5, ["a"] * 2049)),
    (PAIRS, {"text_1": ["a", "b", "c"]}, "text_1", "invalid_value"),
    (PAIRS, {"text_1": None}, "text_1", "missing_required_parameter"),
    (PAIRS, {"instruction": " "}, "instruction", "invalid_value"),
    (RERANK, {"query": None}, "query", "missing_required_parameter"),
    (RERANK, {"query": ""}, "query", "invalid_value"),
    (RERANK, {"documents": []}, "documents", "invalid_value"),
    (RERANK, {"documents": ["a"] * 2049}, "documents", "invalid_value"),
    (RERANK, {"documents": ["a", ""]}, "documents[1]", "invalid_value"),
    (RERANK, {"documents": ["a", {"text": ""}]}, "documents[1].text", "invalid_value"),
    (RERANK, {"documents": ["a", {"title": "x", "text": "b"}]}, "documents[1].title", "unknown_parameter"),
    (RERANK, {"documents": ["a", "b" * 3000]}, "documents[1]", "context_length_exceeded"),
    (RERANK, {"top_n": 0}, "top_n", "invalid_value"),
    (RERANK, {"instruction": " "}, "instruction", "invalid_value"),
]  # fmt: skip

QUESTIONS: list[Case] = [
    (DECISIONS, {"questions": []}, "questions", "invalid_value"),
    (DECISIONS, {"questions": [_YES] * 401}, "questions", "invalid_value"),
    (DECISIONS, {"questions": None}, "questions", "missing_required_parameter"),
    (DECISIONS, {"input": None}, "input", "missing_required_parameter"),
    *((DECISIONS, {"input": wrong}, "input", "invalid_value") for wrong in ("", [])),
    (DECISIONS, {"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    (DECISIONS, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    (DECISIONS, {"input": [{"role": "user", "content": [_IMAGE]}]}, "input[0].content[0].type", "invalid_value"),
    (DECISIONS, {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id",
     "invalid_value"),
    (DECISIONS, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments",
     "invalid_value"),
    (DECISIONS, {"answer_with": "digits"}, "answer_with", "invalid_value"),
    (DECISIONS, {"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl", "invalid_value"),
    (DECISIONS, {"prompt_cache_key": "x" * 257}, "prompt_cache_key", "invalid_value"),
    (DECISIONS, _json(_deep(33)), "input[0].content[0].data", "invalid_value"),
    (DECISIONS, _json({"a": [0] * 10_000}), "input[0].content[0].data", "invalid_value"),
    (DECISIONS, _json({"a": "x" * (256 << 10)}), "input[0].content[0].data", "invalid_value"),
    _asked({"type": "noul", "instructions": "x"}, "type", "invalid_value"),
    _asked({"type": "predicate"}, "instructions", "missing_required_parameter"),
    _asked({"type": "predicate", "instructions": [_IMAGE]}, "instructions[0].type", "invalid_value"),
    _asked({**_YES, "name": "x" * 257}, "name", "invalid_value"),
    _asked({**_YES, "choices": _TWO}, "choices", "unknown_parameter"),
    _asked(_choice(), "choices", "missing_required_parameter"),
    *(_asked(_choice(choices=few), "choices", "invalid_value") for few in ([], _TWO[:1])),
    _asked(_choice(choices=[{"value": str(number)} for number in range(256)]), "choices", "invalid_value"),
    _asked(_choice(choices=[*_TWO, {"value": "a"}]), "choices[2].value", "invalid_value"),
    _asked(_choice(choices=[*_TWO, {"value": " "}]), "choices[2].value", "invalid_value"),
    *(_asked(_score(few), "levels", "invalid_value") for few in ([], [{"label": "a"}])),
    _asked(_score([{"label": str(number)} for number in range(101)]), "levels", "invalid_value"),
    _asked(_score([{"label": "a"}, {"label": "a"}]), "levels[1].label", "invalid_value"),
    _asked(_score([{"label": "a"}, {"label": ""}]), "levels[1].label", "invalid_value"),
    (SYSTEM_ONE, {"state": ""}, "state", "invalid_value"),
    (SYSTEM_ONE, {"state": None}, "state", "missing_required_parameter"),
    (SYSTEM_ONE, {"questions": {}}, "questions", "invalid_value"),
    (SYSTEM_ONE, {"questions": {"": {"type": "noul", "instructions": "x"}}}, "questions", "invalid_value"),
    *((SYSTEM_ONE, {name: ["x"]}, name, "unsupported_parameter") for name in ("images", "audio", "videos")),
    (SYSTEM_ONE, {"joint": True}, "joint", "unsupported_parameter"),
    _named({"type": "noul"}, ".instructions", "invalid_value"),
    _named({"type": "choice", "criteria": {"a": None}}, ".criteria", "invalid_value"),
    _named({"type": "choice", "criteria": {"a": None, "": None}}, ".criteria", "invalid_value"),
    _named({"type": "score", "criteria": ["a"]}, ".criteria", "invalid_value"),
    _named({"type": "score", "criteria": ["a", "a"]}, ".criteria[1]", "invalid_value"),
    _named({"type": "score", "criteria": ["a", ""]}, ".criteria[1]", "invalid_value"),
]  # fmt: skip

CASES: list[Case] = [*TYPES, *QUESTIONS, *SCORES, *POOLED, *PRIORITIES, *UNKNOWN, *SIZES, *IDS]
