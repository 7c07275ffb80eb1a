"""Requests that are wrong: path, fields that make an otherwise good body wrong, and the param and code to expect."""

from __future__ import annotations

from typing import Any

from support.api.api_fakes import MAX_LEN, VOCAB
from support.api.bad import bad_structured

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

# Field, kind, lowest and highest value that is taken (None: no bound that a test could reach).
NUMBERS: list[tuple[str, str, float | None, float | None]] = [
    ("temperature", "float", 0, 2),
    ("top_p", "float", None, 1),
    ("top_k", "int", -1, 1 << 20),
    ("min_p", "float", 0, 1),
    ("presence_penalty", "float", -2, 2),
    ("frequency_penalty", "float", -2, 2),
    ("repetition_penalty", "float", None, 2),
    ("seed", "int", None, (1 << 63) - 1),  # any 64 bits; an integer beyond them is none for the parser
    ("n", "int", 1, 16),
    ("min_tokens", "int", 0, None),
    ("prompt_logprobs", "int", 0, 20),
]
CHAT_NUMBERS = [*NUMBERS, ("max_tokens", "int", 0, None), ("max_completion_tokens", "int", 0, None)]
COMPLETION_NUMBERS = [*NUMBERS, ("max_tokens", "int", 0, None), ("logprobs", "int", 0, 20)]

Case = tuple[str, dict[str, Any], str | None, str | None]


def number_cases(path: str, numbers: list[tuple[str, str, float | None, float | None]]) -> list[Case]:
    """Every number with each wrong type, and one beyond each of its bounds."""
    cases: list[Case] = []
    for name, kind, low, high in numbers:
        wrong: list[Any] = [True, False, "5", "", [], [1], {}]
        beyond = [low - 1] if low is not None else []
        beyond += [high + 1] if high is not None else []
        if kind == "int":
            wrong += [1.5, 1e308, -0.5]
            beyond += [] if name.startswith("max") else [(1 << 64) - 1]
            beyond += [-(1 << 63)] if low is not None else []
        else:
            beyond += [1e308, -1e308, 1 << 63]
        cases += [(path, {name: value}, name, "invalid_type") for value in wrong]
        cases += [(path, {name: value}, name, "invalid_value") for value in beyond]
    return cases


OTHERS: list[Case] = [
    # Fields that nobody knows.
    (CHAT, {"foo": 1}, "foo", "unknown_parameter"),
    (CHAT, {"echo": 1}, "echo", "invalid_type"),
    (CHAT, {"prompt": "x"}, "prompt", "unknown_parameter"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    (CHAT, {"": 1}, None, "unknown_parameter"),
    (COMPLETIONS, {"messages": HI}, "messages", "unknown_parameter"),
    (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs", "unknown_parameter"),
    # Fields that would change the answer.
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    (CHAT, {"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    (CHAT, {"modalities": []}, "modalities", "unsupported_parameter"),
    (CHAT, {"moderation": {"model": "x"}}, "moderation", "unsupported_parameter"),
    (CHAT, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
    (CHAT, {"thinking_token_budget": "5"}, "thinking_token_budget", "invalid_type"),
    (CHAT, {"verbosity": "none"}, "verbosity", "invalid_value"),
    (CHAT, {"logits_processors": ["x"]}, "logits_processors", "unsupported_parameter"),
    (COMPLETIONS, {"best_of": 2}, "best_of", "unsupported_parameter"),
    (COMPLETIONS, {"best_of": True}, "best_of", "unsupported_parameter"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "unsupported_parameter"),
    # Messages.
    (CHAT, {"messages": None}, "messages", "missing_required_parameter"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": {}}, "messages", "invalid_type"),
    (CHAT, {"messages": "hi"}, "messages", "invalid_type"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [None]}, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
    (CHAT, {"messages": [*HI, {"role": "user"}]}, "messages[1].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "system", "tool_calls": []}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal", "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user\n", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": "r" * 65, "content": "x"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "invalid_type"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": True}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "invalid_type"),
    (CHAT, {"messages": [{"role": "user", "content": [[]]}]}, "messages[0].content[0]", "invalid_type"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
        "invalid_type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        "messages[0].content[0].type",
        "missing_required_parameter",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
        "messages[0].content[0].y",
        "unknown_parameter",
    ),
    *(
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]}]},
            "messages[0].content[1].type",
            "invalid_value",
        )
        for kind in ("image_url", "input_audio", "file", "refusal", "video", "")
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y", "unknown_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "invalid_type"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].custom",
        "invalid_value",
    ),
    # Pairs that contradict each other.
    (CHAT, {"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    (CHAT, {"top_logprobs": 1, "logprobs": False}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs", "invalid_type"),
    (CHAT, {"logprobs": 1}, "logprobs", "invalid_type"),
    (CHAT, {"logprobs": "true"}, "logprobs", "invalid_type"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    (CHAT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "invalid_value"),
    (
        CHAT,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
    ),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
    (CHAT, {"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
    (CHAT, {"stream": 1}, "stream", "invalid_type"),
    (CHAT, {"stream": "true"}, "stream", "invalid_type"),
    (COMPLETIONS, {"max_tokens": 0, "min_tokens": 1}, "min_tokens", "invalid_value"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "invalid_value"),
    # Models.
    (CHAT, {"model": 5}, "model", "invalid_type"),
    (COMPLETIONS, {"model": ["tiny"]}, "model", "invalid_type"),
    # Stops, biases, salts.
    (CHAT, {"stop": 5}, "stop", "invalid_value"),
    (CHAT, {"stop": [5]}, "stop[0]", "invalid_type"),
    (CHAT, {"stop": ["a", None]}, "stop[1]", "invalid_type"),
    (CHAT, {"stop": {}}, "stop", "invalid_value"),
    (CHAT, {"stop": ""}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a", ""]}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "invalid_value"),
    (CHAT, {"stop": ["a"] * 10_000}, "stop", "invalid_value"),
    (CHAT, {"stop": "x" * 257}, "stop", "invalid_value"),
    (CHAT, {"stop": "x" * 1_000_000}, "stop", "invalid_value"),
    (CHAT, {"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
    (CHAT, {"stop_token_ids": ["5"]}, "stop_token_ids[0]", "invalid_type"),
    (CHAT, {"stop_token_ids": [1, True]}, "stop_token_ids[1]", "invalid_type"),
    (CHAT, {"stop_token_ids": [1.5]}, "stop_token_ids[0]", "invalid_type"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": [VOCAB]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": [1 << 31]}, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": [1] * 129}, "stop_token_ids", "invalid_value"),
    (CHAT, {"logit_bias": []}, "logit_bias", "invalid_type"),
    (CHAT, {"logit_bias": "x"}, "logit_bias", "invalid_type"),
    *((CHAT, {"logit_bias": {key: 1}}, f"logit_bias.{key}", "invalid_value") for key in ("-1", "1e3", " 5", "05", "x")),
    (CHAT, {"logit_bias": {"": 1}}, "logit_bias.", "invalid_value"),
    (CHAT, {"logit_bias": {"٥": 1}}, "logit_bias.٥", "invalid_value"),
    (CHAT, {"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
    (CHAT, {"logit_bias": {"5": True}}, "logit_bias.5", "invalid_type"),
    (CHAT, {"logit_bias": {"5": None}}, "logit_bias.5", "invalid_type"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"5": -1e6}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {str(VOCAB): 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"9999999999": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {str(token): 1 for token in range(10_000)}}, "logit_bias", "invalid_value"),
    (CHAT, {"max_tokens": 0, "min_tokens": 1}, "min_tokens", "invalid_value"),
    (CHAT, {"prompt_cache_key": "x" * 257}, "prompt_cache_key", "invalid_value"),
    (CHAT, {"prompt_cache_key": 5}, "prompt_cache_key", "invalid_type"),
    (CHAT, {"cache_control": "ephemeral"}, "cache_control", "invalid_type"),
    (CHAT, {"cache_control": {}}, "cache_control.type", "missing_required_parameter"),
    (CHAT, {"cache_control": {"type": "persistent"}}, "cache_control.type", "invalid_value"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": 300}}, "cache_control.ttl", "invalid_type"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "0s"}}, "cache_control.ttl", "invalid_value"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "25h"}}, "cache_control.ttl", "invalid_value"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "86401s"}}, "cache_control.ttl", "invalid_value"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "5 m"}}, "cache_control.ttl", "invalid_value"),
    (CHAT, {"cache_control": {"type": "ephemeral", "scope": "all"}}, "cache_control.scope", "unknown_parameter"),
    (CHAT, {"cache_salt": ""}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "x" * 129}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "é"}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "a\nb"}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "a\x00"}, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": 5}, "cache_salt", "invalid_type"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    (CHAT, {"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs.a", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"tools": True}}, "chat_template_kwargs.tools", "invalid_value"),
    (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "invalid_value"),
    *(
        (CHAT, {name: "yes"}, name, "invalid_type")
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
        )
    ),
    (COMPLETIONS, {"echo": 1}, "echo", "invalid_type"),
    # Prompts.
    (COMPLETIONS, {"prompt": None}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": True}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": {}}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]", "invalid_value"),
    (COMPLETIONS, {"prompt": [[97], []]}, "prompt[1]", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": [5, [5]]}, "prompt[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": [[5], 5]}, "prompt[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    (COMPLETIONS, {"prompt": [None]}, "prompt[0]", "invalid_type"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [VOCAB]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1 << 31]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [(1 << 64) - 1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [[97], [VOCAB]]}, "prompt[1]", "invalid_value"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [[97]] * 65}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "x" * MAX_LEN}, "prompt", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * MAX_LEN}]}, "messages", "context_length_exceeded"),
    # Tokens.
    ("/tokenize", {}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", "invalid_value"),
    ("/tokenize", {"prompt": ["x"]}, "prompt", "invalid_type"),
    ("/tokenize", {"messages": []}, "messages", "invalid_value"),
    ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message", "invalid_value"),
    ("/tokenize", {"prompt": "x", "foo": 1}, "foo", "unknown_parameter"),
    ("/detokenize", {}, "tokens", "missing_required_parameter"),
    ("/detokenize", {"tokens": "x"}, "tokens", "invalid_type"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]", "invalid_type"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
    ("/detokenize", {"tokens": [VOCAB]}, "tokens", "invalid_value"),
]

CASES = [
    *number_cases(CHAT, CHAT_NUMBERS),
    *number_cases(COMPLETIONS, COMPLETION_NUMBERS),
    *OTHERS,
    *bad_structured.CASES,
]


RAW: list[tuple[bytes, str | None]] = [
    (b"", "missing_required_parameter"),
    (b"{", "invalid_json"),
    (b"{}x", "invalid_json"),
    (b"nul", "invalid_json"),
    (b"[", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"a":' * 2_000, "invalid_json"),
    (b'"x"', "invalid_type"),
    (b"5", "invalid_type"),
    (b"true", "invalid_type"),
    (b"[]", "invalid_type"),
    (b"null", "invalid_type"),
    (b"\xff\xfe", "invalid_json"),
    (b"\xef\xbb\xbf", "invalid_json"),
    (b"\xef\xbb\xbf\xef\xbb\xbf{}", "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"),
    (b'{"prompt": "x\\udc00"}', "invalid_json"),
    (b'{"prompt": "\\ud800\\u0041"}', "invalid_json"),
    (b'{"\\ud800": 1}', "invalid_json"),
    (b'{"prompt": "x", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "x", "temperature": Infinity}', "invalid_json"),
    (b'{"prompt": "x", "temperature": -Infinity}', "invalid_json"),
    (b'{"prompt": "x", "temperature": 1e999}', "invalid_json"),
    (b'{"prompt": "x", "temperature": 01}', "invalid_json"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"prompt": "x", "seed": 18446744073709551616}', "invalid_value"),
    (b'{"prompt": "x", "seed": -9223372036854775809}', "invalid_value"),
    (b'{"prompt": "x", "max_tokens": 1e1}', "invalid_type"),
    (b'{"prompt": [1e999]}', "invalid_json"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "invalid_json"),
    (b'{"prompt": "a\x00b"}', "invalid_json"),
    (b"{'prompt': 'x'}", "invalid_json"),
    (b'{"prompt": "x",}', "invalid_json"),
    (b'{"prompt": "x"} {"prompt": "x"}', "invalid_json"),
]
