"""Compute the hits of an ideal cache that evicts nothing and knows all requests in advance, from the traffic.

A request could find the longest beginning of its prompt that any request begun before it brings in, prompt and answer.
One that runs beside it counts too: the common part is computed once, and the other waits for it. Its last token is
always computed, since it is asked what comes after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.programs.branch_calls import CallParams, Completion, ModelBackend, Prompt
from rootgraft.programs.token_report import Report


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it was: when it began, and what was asked and answered."""

    began: float
    prompt: Prompt
    answer: Completion


class Recorder:
    """A backend that keeps what goes through it. See ``rootgraft.programs.branch_calls.ModelBackend``."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self.calls: list[Call] = []

    def stream(self, prompt: Prompt, params: CallParams) -> Generator[str, None, Completion]:
        began = time.perf_counter()
        answer = yield from self._backend.stream(prompt, params)
        with self._lock:
            self.calls.append(Call(began, prompt, answer))
        return answer

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        return self._backend.score(prompt, choices)

    def warm(self, prompt: Prompt, pin: int) -> Report:
        return self._backend.warm(prompt, pin)

    def close(self) -> None:
        self._backend.close()


class Optimum:
    """All that was computed so far, as a trie of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._root: dict[int, Any] = {}

    def hits(self, calls: Sequence[Call]) -> int:
        """Tokens of these prompts that could have been found, and take them in."""
        found = 0
        for call in sorted(calls, key=lambda call: call.began):
            tokens = self._tokens(call.prompt)
            found += min(self._depth(tokens), len(tokens) - 1)
            self._enter(tokens)
            self._enter(self._tokens(call.prompt.followed_by(call.answer.text)))
        return found

    def _tokens(self, prompt: Prompt) -> list[int]:
        text = self._tokenizer.render_chat(
            prompt.messages,
            add_generation_prompt=not prompt.is_open,
            continue_final_message=prompt.is_open,
            tools=None,
            kwargs=None,
        )
        return list(self._tokenizer.encode(text, False))

    def _depth(self, tokens: Sequence[int]) -> int:
        node, depth = self._root, 0
        for token in tokens:
            if token not in node:
                break
            node, depth = node[token], depth + 1
        return depth

    def _enter(self, tokens: Sequence[int]) -> None:
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})
