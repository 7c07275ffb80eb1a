"""A frontend and an engine client that need no model: what they answer follows from the request alone."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.serving.output_processor import Finish, TextDelta, TokenLogprob, TopLogprob
from rootgraft.engine.serving.request import RequestLimits, TextRequest
from rootgraft.engine.snapshot import EngineSnapshot
from rootgraft.engine.text.chat_template import rendered
from rootgraft.engine.text.prompt_cache import Owner
from rootgraft.engine.text.reasoning_formats import FORMATS as THOUGHTS
from rootgraft.engine.types import (
    AdapterInfo,
    FinishReason,
    Pooler,
    SamplingDefaults,
    SamplingParams,
    SequenceStats,
    Usage,
)

BOS, EOS, VOCAB = 256, 257, 260
MAX_LEN = 2048


class ByteTokenizer:
    """One token for each byte; 256 is BOS, 257 EOS."""

    has_chat_template = True
    eos_ids = (EOS,)
    bos_id = BOS
    special_ids = frozenset({BOS, EOS})

    def __init__(self) -> None:
        self.rendered: list[dict[str, Any]] = []
        self.speaks = "hermes"  # how the chat template writes tool calls; "" if it knows none
        self.thinks = ""  # "qwen3": the model begins thoughts; "deepseek_r1": the prompt does; "" if there are none

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        return array("i", [*([BOS] if add_special_tokens else []), *text.encode()])

    def cuts(self, text: str) -> Iterator[int]:
        yield from ()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else {BOS: b"<s>", EOS: b"</s>"}.get(token, b"")

    def join_bytes(self, tokens: Sequence[int], skip_special_tokens: bool) -> bytes:
        return b"".join(self.token_bytes(t) for t in tokens if not (skip_special_tokens and t in self.special_ids))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.join_bytes(tokens, skip_special_tokens).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [f"piece {token}" for token in tokens]

    special_tokens: ClassVar = {"bos_token": "<s>", "eos_token": "</s>"}
    chat_template = "{{ messages }}"
    named_roles: frozenset[str] = frozenset()

    def renders_role(self, role: str) -> bool:
        return role not in ("critic", "judge")

    def template_mentions(self, text: str) -> bool:
        return bool(self.thinks) and text == THOUGHTS[self.thinks].mention

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.rendered.append({"messages": list(messages), **options})
        tools = options.get("tools") if self.speaks else None
        text = f"<tools>{json.dumps(tools)}\n" if tools else ""
        text += "".join(f"<{m['role']}>{m.get('content') or ''}{self._calls(m)}\n" for m in messages)
        if options.get("continue_final_message"):
            return text.removesuffix("\n")
        if not options["add_generation_prompt"]:
            return text
        thinks = (options.get("kwargs") or {}).get("enable_thinking", True)
        opened = {"qwen3": "" if thinks else "<think>\n\n</think>\n\n", "deepseek_r1": "<think>\n"}
        mark = FORMATS[self.speaks].recipient_mark if self.speaks in FORMATS else ""
        return f"{text}<assistant>{opened.get(self.thinks, mark)}"

    def _calls(self, message: dict[str, Any]) -> str:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        match self.speaks:
            case "hermes":
                return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            case "llama3_json":
                return "".join(call.replace('"arguments"', '"parameters"') for call in calls)
            case "mistral" if calls:
                return f"[TOOL_CALLS] [{', '.join(calls)}]"
        if not calls or self.speaks not in FORMATS:
            return ""
        called = [call["function"] for call in message["tool_calls"]]
        form = FORMATS[self.speaks]
        return form.recipient_mark + form.calls([(each["name"], json.dumps(each["arguments"])) for each in called])


class FakeFrontend:
    """Answers with the text of ``say``, every sequence of a request in the same frame.

    Attributes:
        say: makes the answer's text out of request and index.
        fail_after: raise this error once so many frames are out.
        step_tokens: tokens of a sequence in one frame, as many as a step with drafts brings.
        ends_apart: whether the end is a delta of its own, as the engine's ``Done`` makes one: "" for no, "frame" for
            one in the frame of the last tokens, "later" for one in a frame of its own.
        gate: when set, every frame waits for it.
        shortest: what the engine says of the shortest answer.
        seen: requests that were started.
        checked: lengths of the texts that were looked at before they were encoded.
        aborted: those whose stream was left before its end.
    """

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_model_len = MAX_LEN
        self.vocab_size = VOCAB
        self.limits = RequestLimits(MAX_LEN, VOCAB)
        self.pooler = Pooler(size=4, labels=("bad", "good"), prompts=(("query", "Q: "),))
        self.defaults = SamplingDefaults()
        self.say: Callable[[TextRequest, int], str] = lambda request, index: f"answer {index}"
        self.fail_after: tuple[int, Exception] | None = None
        self.step_tokens = 1
        self.ends_apart = ""
        self.gate: asyncio.Event | None = None
        self.shortest: int | None = None
        self.seen: list[TextRequest] = []
        self.checked: list[int] = []
        self.aborted: list[TextRequest] = []

    def set_max_len(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.limits = RequestLimits(max_model_len, VOCAB)

    def check_length(self, text: str) -> None:
        self.checked.append(len(text))

    async def render(self, call: Callable[[], str], *, at_once: bool) -> str:
        return await rendered(call, at_once=at_once)

    async def encode(self, text: str, *, add_special_tokens: bool, owner: Owner) -> array[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def stream(self, *requests: TextRequest) -> AsyncIterator[list[TextDelta]]:
        self.seen += requests
        finished = False
        try:
            async for frame in self._frames(requests):
                yield frame
            finished = True
        finally:
            if not finished:
                self.aborted += requests

    async def _frames(self, requests: Sequence[TextRequest]) -> AsyncIterator[list[TextDelta]]:
        answers = {
            (prompt, index): self.say(request, index).encode()
            for prompt, request in enumerate(requests)
            for index in range(request.n)
        }
        live = set(answers)
        step = 0
        while live:
            if self.gate is not None:
                await self.gate.wait()
            if self.fail_after is not None and step >= self.fail_after[0]:
                raise self.fail_after[1]
            frame = [
                self._delta(requests[prompt], prompt, index, answers[prompt, index], step)
                for prompt, index in sorted(live)
            ]
            live -= {(delta.prompt, delta.index) for delta in frame if delta.finish is not None}
            if self.ends_apart:
                ends = [replace(delta, text="", tokens=(), logprobs=()) for delta in frame if delta.finish is not None]
                frame = [replace(delta, finish=None) for delta in frame]
                if self.ends_apart == "later":
                    yield frame
                    frame = []
                frame += ends
            if frame:
                yield frame
            await asyncio.sleep(0)
            step += 1

    def _delta(self, request: TextRequest, prompt: int, index: int, answer: bytes, step: int) -> TextDelta:
        params = request.params
        limit = min(len(answer), params.max_tokens)
        tokens = answer[step * self.step_tokens : min((step + 1) * self.step_tokens, limit)]
        finish = None
        if (step + 1) * self.step_tokens >= limit:
            reason = FinishReason.STOP if limit == len(answer) else FinishReason.LENGTH
            usage = Usage(len(request.tokens), len(request.tokens) // 2 + index, limit, self.shortest)
            stop = request.stop[0] if request.stop and reason == "stop" else None
            finish = Finish(reason, usage, stop, SequenceStats(0.25, 0.5, 2.0, 1, 3.5, 7 + index))
        return TextDelta(
            index=index,
            text="".join(chr(token) for token in tokens if token < 128),
            tokens=tuple(tokens),
            logprobs=() if params.logprobs is None else tuple(_logprob(token, params) for token in tokens),
            prompt_logprobs=_prompt_logprobs(request) if step == 0 else (),
            finish=finish,
            prompt=prompt,
            pooled=_pooled(request) if step == 0 else b"",
        )


def _pooled(request: TextRequest) -> bytes:
    """The number of tokens, and as many further values as the kind has."""
    sizes = {"": 0, "embed": 4, "classify": 2}
    return array("f", [float(len(request.tokens)), 1.0, 2.0, 3.0][: sizes[request.params.pooling]]).tobytes()


def _logprob(token: int, params: SamplingParams) -> TokenLogprob:
    """The k best, or the tokens that are named."""
    return _scored(token, params.logprobs or 0, params.logprob_token_ids)


def _scored(token: int, count: int, named: Sequence[int] = ()) -> TokenLogprob:
    def data(other: int) -> bytes:
        return bytes([other]) if other < 256 else b""

    def text(other: int) -> str:
        return data(other).decode("utf-8", "replace")

    others = list(named) or [token, *(other for other in range(97, 123) if other != token)][:count]
    top = tuple(TopLogprob(other, text(other), data(other), -0.25 - rank) for rank, other in enumerate(others))
    return TokenLogprob(token, text(token), data(token), -0.25, 1, top)


def _prompt_logprobs(request: TextRequest) -> tuple[TokenLogprob, ...]:
    count = request.params.prompt_logprobs
    if count is None:
        return ()
    return tuple(_scored(token, count) for token in request.tokens[max(1, request.params.logprob_start_len) :])


class FakeClient:
    """An engine that is alive as long as the test says so.

    Attributes:
        snapshot: what it shows of itself, when ``gate`` lets it.
        num_snapshots: how often it was asked to.
        sessions: files by tenant and name.
        num_resets: how often its cache was reset.
        killed: whether it was ended without being asked.
    """

    def __init__(self) -> None:
        self.is_alive = True
        self.death: EngineDead | None = None
        self.silent_seconds = 0.0
        self.adapters: dict[str, AdapterInfo] = {}
        self.snapshot = EngineSnapshot(16, {}, (), (), 0, ())
        self.num_snapshots = 0
        self.num_resets = 0
        self.sessions: dict[tuple[str, str], bytes] = {}
        self.killed = False
        self.gate: asyncio.Event | None = None
        self.stats: dict[str, float] = {"num_requests_running": 3.0, "prompt_tokens": 40.0, "kv_cache_usage_perc": 0.5}

    async def take_snapshot(self) -> EngineSnapshot:
        self.num_snapshots += 1
        if self.gate is not None:
            await self.gate.wait()
        return self.snapshot

    async def reset_cache(self) -> None:
        self.num_resets += 1

    async def release_session(self, tenant: str, session: str) -> bool:
        return self.sessions.pop((tenant, session), None) is not None

    async def export_session(self, tenant: str, session: str) -> tuple[int, bytes]:
        data = self.sessions.get((tenant, session), b"")
        return len(data), data

    async def import_session(self, data: bytes) -> int:
        return 16 if data == b"known" else 0

    def kill(self) -> None:
        self.killed = True

    def hang(self) -> None:
        """As the client is once its watchdog has found that the engine hangs."""
        self.is_alive, self.silent_seconds = False, 5.0
        self.death = EngineDead("The engine process hangs: it gives no sign of life.")
