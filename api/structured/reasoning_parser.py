"""Streaming reasoning parser: separates the reasoning from the answer in a request's deltas, and counts its tokens.

BEGIN --start mark--> THOUGHT --end mark--> GAP --newlines, lead--> ANSWER
  '----------------------------------------- no mark ---------------^

If the reasoning consists of separate messages, another one may follow: THOUGHT --end mark--> BEGIN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.text.reasoning_formats import ReasoningFormat
from .thought_plan import ThoughtPlan

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

_BLANKS = " \t\n\r\x0b\x0c"


class ReasoningParser:
    """Separates the reasoning from the answer, for all answers to one request.

    Args:
        token_bytes: returns the bytes of a token.
    """

    def __init__(self, plan: ThoughtPlan, token_bytes: Callable[[int], bytes]) -> None:
        self._plan = plan
        self._token_bytes = token_bytes
        self._sequences: dict[tuple[int, int], tuple[_TextSplit, _ThoughtCount]] = {}

    def parse(self, delta: TextDelta) -> TextDelta:
        """Return the delta with its reasoning text separated.

        The last delta contains the number of reasoning tokens.
        """
        key = delta.prompt, delta.index
        if key not in self._sequences:
            self._sequences[key] = _TextSplit(self._plan), _ThoughtCount(self._plan.format, self._plan.is_open)
        split, count = self._sequences[key]
        for token in delta.tokens:
            count.add(self._token_bytes(token))
        thought, answer = split.push(delta.text)
        finish = delta.finish
        if finish is not None:
            more_thought, more_answer = split.finish()
            thought, answer = thought + more_thought, answer + more_answer
            finish = replace(finish, usage=replace(finish.usage, reasoning=count.num_tokens))
        return replace(delta, text=answer, reasoning=thought if self._plan.shown else "", finish=finish)


class _TextSplit:
    """Splits the text of one answer into reasoning and content. White space around the reasoning is dropped."""

    def __init__(self, plan: ThoughtPlan) -> None:
        self._plan = plan
        self._buffer = ""
        self._thought: list[str] = []
        self._answer: list[str] = []
        self._has_thought = False
        self._state: Callable[[], bool] = self._begin

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning text and the new content that later text cannot change."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._pop()

    def finish(self) -> tuple[str, str]:
        """Return the texts that were held back. Must be called at the end of the output."""
        if self._state == self._think or (self._state == self._begin and self._plan.is_open):
            self._thought.append(self._buffer.strip("\n"))
        elif self._state == self._begin:
            self._answer.append(self._buffer)
        self._buffer = ""
        return self._pop()

    def _pop(self) -> tuple[str, str]:
        thought, answer = "".join(self._thought), "".join(self._answer)
        self._thought, self._answer = [], []
        return thought, answer

    # Each state consumes as much of the buffer as it can. It returns whether the next state can continue at once.

    def _begin(self) -> bool:
        start = self._plan.format.start.lstrip(_BLANKS)
        text = self._buffer.lstrip(_BLANKS)
        if text.startswith(start):
            self._buffer = text[len(start) :]
            self._state = self._think
        elif not start.startswith(text):
            self._state = self._think if self._plan.is_open else self._drop_lead
        return self._state != self._begin

    def _think(self) -> bool:
        end = self._plan.format.end
        if not self._has_thought:
            self._buffer = self._buffer.lstrip("\n")
            self._has_thought = bool(self._buffer)
        thought, found, rest = self._buffer.partition(end)
        if found:
            self._thought.append(thought.rstrip("\n"))
            self._buffer = rest
            self._state = self._gap if self._plan.strips else self._drop_lead
            if self._plan.format.in_messages:
                self._state = self._next_message
            return True
        kept = next((size for size in range(len(end) - 1, 0, -1) if thought.endswith(end[:size])), 0)
        certain = thought[: len(thought) - kept].rstrip("\n")
        self._thought.append(certain)
        self._buffer = thought[len(certain) :]
        return False

    def _next_message(self) -> bool:
        start = self._plan.format.start
        if self._buffer.startswith(start):
            self._thought.append("\n")
            self._buffer, self._state = self._buffer[len(start) :], self._think
        elif not start.startswith(self._buffer):
            self._state = self._drop_lead
        return self._state != self._next_message

    def _gap(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._drop_lead
        return bool(self._buffer)

    def _drop_lead(self) -> bool:
        lead = self._plan.lead
        if len(self._buffer) < len(lead) and lead.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(lead)
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        self._answer.append(self._buffer)
        self._buffer = ""
        return False


class _ThoughtCount:
    """Counts the reasoning tokens of one answer by their bytes. Tokens of the marks are not counted."""

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        self._num_tokens = 0
        self._start, self._end = form.start.lstrip(_BLANKS).encode(), form.end.encode()
        self._is_open = is_open
        self._may_follow = form.in_messages  # Whether more reasoning may follow after reasoning has ended.
        # Tokens of a possible start mark; None once it is known whether they are the mark.
        self._first: list[bytes] | None = []
        self._begun = b""  # Text of these tokens without the white space at its beginning.
        self._tail = b""  # Last bytes of the reasoning, in which the end mark may have begun.
        # Offsets in the reasoning's bytes at which the last tokens start.
        self._starts: deque[int] = deque(maxlen=len(self._end))
        self._num_bytes = 0
        self._has_ended = False

    @property
    def num_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._num_tokens + (len(self._first) if self._first and self._is_open else 0)

    def add(self, data: bytes) -> None:
        """Add the bytes of the next token."""
        if self._has_ended:
            return
        if self._first is None:
            self._think(data)
            return
        self._first.append(data)
        # An answer may begin with any amount of white space, so it is not joined again for each token.
        self._begun = text = (self._begun + data).lstrip(_BLANKS.encode())
        if text.startswith(self._start):
            self._first = None
            if rest := text[len(self._start) :]:
                self._think(rest)
        elif not self._start.startswith(text):
            first, self._first, self._has_ended = self._first, None, not self._is_open
            for each in first if self._is_open else ():
                self.add(each)

    def _think(self, data: bytes) -> None:
        self._starts.append(self._num_bytes)
        window = self._tail + data
        at = window.find(self._end)
        self._num_tokens += 1
        if at >= 0:
            mark = self._num_bytes - len(self._tail) + at
            self._num_tokens -= sum(start >= mark for start in self._starts)
            self._has_ended = not self._may_follow
            if self._may_follow:
                self._first, self._begun, self._is_open = [], b"", False
                self._starts.clear()
                window = b""
        self._num_bytes += len(data)
        self._tail = window[-(len(self._end) - 1) :]
