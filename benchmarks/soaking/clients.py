"""The clients of the soak: honest ones, of which some leave early or read slowly, and those who only do harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from support.engine.fake_worker import expected_tokens

from benchmarks.soaking.device import EOS, VOCAB, Characters

SCHEMAS = 40  # Schemas that many clients share. The same number of requests has a schema of its own.
TEXT = Characters()


def schema_of(number: int) -> dict[str, Any]:
    """One schema for each number."""
    return {
        "type": "object",
        "properties": {f"field_{number}": {"enum": ["a", "b", number]}, "ok": {"type": "boolean"}},
        "required": [f"field_{number}", "ok"],
        "additionalProperties": False,
    }


@dataclass
class Tally:
    """Tally of the answers that the clients received.

    Attributes:
        counts: of requests and answers, by what became of them.
        wrong: what must not be, as sentences; the first hundred.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def complain(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 100:
            self.wrong.append(what)


@dataclass(frozen=True)
class Asked:
    """A request, and what is known of its answer beforehand."""

    body: dict[str, Any]
    code: int
    schema: dict[str, Any] | None
    leaves_after: int | None  # chunks, -1 before the head; None stays
    slow: bool

    @classmethod
    def draw(cls, rng: random.Random, codes: Mapping[str, int]) -> Asked:
        """30 % leave early, 20 % want JSON, half use one of 64 adapters; prompts share beginnings."""
        stem = [rng.randrange(4)] * rng.choice([0, 8, 40, 120])
        prompt = [*stem, *(rng.randrange(EOS) for _ in range(rng.randint(1, 60)))]
        longest = rng.choice([80, 400])
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, longest), "stream": rng.random() < 0.7}
        body["n"] = rng.choice([1, 1, 1, 1, 2])
        body["priority"] = rng.choice(["realtime", "interactive", "interactive", "batch", "batch"])
        code, schema = 0, None
        if rng.random() < 0.5:
            body["model"] = rng.choice(list(codes))
            code = codes[body["model"]]
        if rng.random() < 0.2:
            schema = schema_of(rng.randrange(SCHEMAS) if rng.random() < 0.5 else rng.randrange(SCHEMAS, 1 << 30))
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body["max_tokens"] = 80
        leaves = rng.choice([-1, 0, 1, 3, 10]) if rng.random() < 0.3 else None
        return cls(body, code, schema, leaves, rng.random() < 0.03)

    def check(self, text: str, reason: str) -> str:
        """Return what is wrong with an answer; "" if it is correct."""
        if self.schema is not None:
            value = json.loads(text) if reason == "stop" else {}
            fits = reason == "length" or set(value) == set(self.schema["required"])
            return "" if fits else f"{text!r} breaks its schema"
        expected = answer(self.body["prompt"], self.body["max_tokens"], self.code)
        return "" if (text, reason) == expected else f"{text!r} ({reason}) is not {expected}"


def answer(prompt: Sequence[int], limit: int, code: int) -> tuple[str, str]:
    """The text that must come, and its finish reason."""
    tokens = expected_tokens(prompt, limit, VOCAB, code)
    end = tokens.index(EOS) if EOS in tokens else limit
    return TEXT.decode(tokens[:end]), "stop" if end < limit else "length"


class Honest:
    """One of fifty that ask, read, check, and ask again."""

    def __init__(self, url: str, codes: Mapping[str, int], tally: Tally, seed: int) -> None:
        self._url = f"{url}/v1/completions"
        self._codes = codes
        self._tally = tally
        self._rng = random.Random(seed)

    async def run(self, session: aiohttp.ClientSession, end: float) -> None:
        """Until the loop's clock says ``end``."""
        while asyncio.get_running_loop().time() < end:
            asked = Asked.draw(self._rng, self._codes)
            self._tally.counts["asked"] += 1
            self._tally.counts["structured"] += asked.schema is not None
            try:
                await self._ask(session, asked)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._tally.complain(f"{type(error).__name__}: {error}")

    async def _ask(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        if asked.leaves_after == -1:
            self._tally.counts["left"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.random() * 0.05):
                    async with session.post(self._url, json=asked.body) as reply:
                        await reply.read()
            return
        async with session.post(self._url, json=asked.body) as reply:
            if reply.status != 200:
                self._tally.counts[f"status_{reply.status}"] += 1
                if reply.status != 503 or asked.schema is None:  # grammars may wait for a free compiler
                    self._tally.complain(f"{reply.status}: {await reply.text()}")
            elif asked.body["stream"]:
                await self._read_stream(reply, asked)
            elif asked.leaves_after is not None:
                self._tally.counts["left"] += 1
                reply.close()
            else:
                choices = (await reply.json())["choices"]
                self._judge(asked, {one["index"]: one["text"] for one in choices}, choices)

    async def _read_stream(self, reply: aiohttp.ClientResponse, asked: Asked) -> None:
        texts: dict[int, str] = {}
        ends: list[dict[str, Any]] = []
        chunks = 0
        done = False
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if done:
                self._tally.complain("something comes after [DONE]")
            if chunks == asked.leaves_after:
                self._tally.counts["left"] += 1
                reply.close()
                return
            chunks += 1
            if asked.slow and chunks < 20:
                await asyncio.sleep(0.1)
            if line == b"data: [DONE]\n":
                done = True
                continue
            data = json.loads(line[6:])
            if "error" in data:
                self._tally.complain(f"a stream ended in {data}")
                return
            for choice in data["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    ends.append(choice)
        if not done:
            self._tally.complain("a stream had no [DONE]")
        self._judge(asked, texts, ends)

    def _judge(self, asked: Asked, texts: Mapping[int, str], ends: list[dict[str, Any]]) -> None:
        if sorted(one["index"] for one in ends) != list(range(asked.body["n"])):
            self._tally.complain(f"{asked.body['n']} answers had the ends {ends}")
        for one in ends:
            self._tally.counts[f"finished_{one['finish_reason']}"] += 1
            if wrong := asked.check(texts.get(one["index"], ""), one["finish_reason"]):
                self._tally.complain(wrong)
        self._tally.counts["answered"] += 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LONG = b'{"prompt": [1, 2, 3], "max_tokens": 400, "stream": true, "n": 4}'
HARM = {
    "half a head": HEAD,
    "no body": HEAD + b"content-length: 100\r\n\r\n",
    "half a body": HEAD + b"content-length: 100\r\n\r\n" + b'{"prompt": ',
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    "reads nothing": HEAD + b"content-length: %d\r\n\r\n" % len(LONG) + LONG,
    "nothing": b"",
}


async def harm(port: int, rng: random.Random, tally: Tally, end: float) -> None:
    """Connections that are begun and not ended as they should be."""
    while asyncio.get_running_loop().time() < end:
        kind = rng.choice(list(HARM))
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HARM[kind])
            await asyncio.sleep(rng.random())
            writer.transport.abort()
        tally.counts[f"harm: {kind}"] += 1


WRONG: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("/v1/completions", {"prompt": [VOCAB]}, 400),
    ("/v1/completions", {"prompt": [1], "n": 1000}, 400),
    ("/v1/completions", {"prompt": [1] * 5000}, 400),
    ("/v1/completions", {"prompt": [1], "model": "nobody"}, 404),
    ("/v1/completions", {"prompt": [1], "response_format": {"type": "json_schema", "json_schema": {}}}, 400),
    ("/v1/completions", {"prompt": [1], "guided_regex": "(?=a)b"}, 400),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../.."}, 400),
)


async def wrong(session: aiohttp.ClientSession, url: str, rng: random.Random, tally: Tally, end: float) -> None:
    """Requests that must be refused, and an adapter that comes and goes under one name."""
    while asyncio.get_running_loop().time() < end:
        path, body, status = rng.choice(WRONG)
        async with session.post(url + path, json=body) as reply:
            if reply.status != status:
                tally.complain(f"{path} {str(body)[:80]}: {reply.status}, not {status}: {await reply.text()}")
        tally.counts["wrong requests"] += 1
        tally.counts["refused by the engine"] += status == 404 or "guided_regex" in body
        for call in ("load", "unload"):
            body = {"lora_name": "passing", **({"lora_path": "a0"} if call == "load" else {})}
            async with session.post(f"{url}/v1/{call}_lora_adapter", json=body) as reply:
                if reply.status != 200:
                    tally.complain(f"{call}: {await reply.text()}")
        await asyncio.sleep(0.2)
