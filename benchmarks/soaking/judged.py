"""Mixed requests to the real model whose answers are known beforehand, or follow a schema: each is judged.

What a request must be answered with is asked of a server beforehand that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from benchmarks.fleet.mixed_requests import Answer, ask, first_difference, is_whole, request
from benchmarks.hostile_programs import doubling
from benchmarks.serve.schemas import is_valid
from benchmarks.soaking.doors import Streamed, is_expected, over_grpc, over_socket
from rootgraft.api.cli.remote_server import RemoteServer

REQUESTS, TOKENS, BATCH_LINES = 36, 24, 6
GUESTS = (6, 7, 16)
"""Numbers of requests that name an adapter of ``examples/adapters``, of which a guest is a copy."""
ALONE = (0, 9, 18, 27, 1, 10, 19, 28)
"""Numbers of requests whose answers have one choice of text and no schema, for doors other than HTTP."""
POLL_SECONDS = 1.0
_ENDED = {"completed", "failed", "cancelled", "incomplete", "expired"}


class Unexpected(Exception):
    """An answer that must not be; the message says which."""


@dataclass
class Known:
    """Expected answers, from a server without other load.

    Attributes:
        facts: choices and token counts, by the number of a request.
        talks: texts of a first and a second turn, by the number of the question.
        pooled: answers of routes whose answers are not text, by path.
    """

    facts: dict[int, Any] = field(default_factory=dict)
    talks: dict[int, tuple[str, str]] = field(default_factory=dict)
    pooled: dict[str, Any] = field(default_factory=dict)


def fresh_schema(number: int) -> dict[str, Any]:
    """Return one schema for each number."""
    return {
        "type": "object",
        "properties": {f"field_{number}": {"enum": ["a", "b", number]}, "ok": {"type": "boolean"}},
        "required": [f"field_{number}", "ok"],
        "additionalProperties": False,
    }


POOLED: dict[str, dict[str, Any]] = {
    "score": {"query": "The sky is ", "items": ["blue", "made of"], "label_token_ids": [10, 20, 30]},
    "embeddings": {"input": ["the sea", "a fox and a hen"]},
}


class Clients:
    """All kinds of requests of the soak.

    Args:
        server: a connection to the server.
        http: a session for requests that ``server`` does not know.
        rpc: a channel to its gRPC port.
        adapters: the server's ``--lora-dir``.
    """

    def __init__(
        self,
        server: RemoteServer,
        http: aiohttp.ClientSession,
        rpc: grpc.aio.Channel,
        url: str,
        adapters: Path,
        known: Known,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._server = server
        self._http = http
        self._rpc = rpc
        self._url = url
        self._adapters = adapters
        self._known = known
        self._guest = 0
        self._kinds: tuple[tuple[int, Callable[[random.Random], Awaitable[None]]], ...] = (
            (30, self._chat), (8, self._leave), (6, self._fresh), (2, self._doubling), (8, self._guest_adapter),
            (8, self._background), (4, self._cancelled), (4, self._batch), (8, self._pooled), (4, self._refused),
            (6, self._socket), (6, self._grpc),
        )  # fmt: skip

    async def one(self, rng: random.Random) -> None:
        """Send what is drawn, and judge the answer. What must not be is counted as wrong."""
        kinds = self._kinds
        [(_, kind)] = rng.choices(kinds, [weight for weight, _ in kinds])
        name = kind.__name__.lstrip("_")
        try:
            await kind(rng)
            self.counts[name] += 1
        except (Unexpected, aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            self.counts["wrong"] += 1
            if len(self.wrong) < 50:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}"[:600])

    async def learn(self) -> None:
        """Ask for what must come, one request after the other. Raises Unexpected."""
        for number in range(REQUESTS):
            answer = await ask(self._server, self._body(number))
            if answer.error:
                raise Unexpected(answer.error)
            self._known.facts[number] = answer.facts()
        for number in range(4):
            first = await self._respond(number, None)
            second = await self._respond(number + 10, first["id"])
            self._known.talks[number] = _text_of(first), _text_of(second)
        for path, body in POOLED.items():
            self._known.pooled[path] = _pooled_facts(await self._call("POST", path, body))

    def _body(self, number: int) -> dict[str, Any]:
        return {"model": self._server.model, **request(number, TOKENS)}

    async def _chat(self, rng: random.Random) -> None:
        number = rng.randrange(REQUESTS)
        await self._ask(self._body(number), number)

    async def _ask(self, body: dict[str, Any], number: int | None) -> Answer:
        answer = await ask(self._server, body)
        if answer.error:
            raise Unexpected(answer.error)
        if number is not None and answer.facts() != self._known.facts[number]:
            raise Unexpected(f"request {number}: {first_difference(self._known.facts[number], answer.facts())}")
        if not is_whole(body, answer):
            raise Unexpected(f"{answer.choices} breaks its schema")
        return answer

    async def _leave(self, rng: random.Random) -> None:
        """Leave in the middle: what came must be the begin of what was to come."""
        number, most = rng.randrange(REQUESTS), rng.randrange(1, 12)
        texts: Counter[int] = Counter()
        said: dict[int, str] = {}
        body = {**self._body(number), "stream": True}
        async with self._http.post(f"{self._url}/chat/completions", json=body) as reply:
            if reply.status != 200:
                raise Unexpected(f"{reply.status}: {await reply.text()}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices") or ():
                    said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
                    texts[choice["index"]] += 1
                if texts.total() >= most:
                    break
            reply.close()
        for index, text in said.items():
            whole = self._known.facts[number][0][index]["text"]
            if not whole.startswith(text):
                raise Unexpected(f"request {number}: {text!r} is no begin of {whole!r}")

    async def _fresh(self, rng: random.Random) -> None:
        await self._structured(fresh_schema(rng.randrange(1 << 30)))

    async def _doubling(self, rng: random.Random) -> None:
        text = await self._structured(doubling("allOf", rng.choice([8, 12, 22])), is_checked=False)
        value = json.loads(text)
        if not isinstance(value, str) or len(value) > 3:
            raise Unexpected(f"{text!r} is no string of three characters at most")

    async def _structured(self, schema: dict[str, Any], *, is_checked: bool = True) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "An answer, please."}]
        body = {"messages": messages, "response_format": form, "max_tokens": 60, "temperature": 1}
        reply = await self._call("POST", "chat/completions", {"model": self._server.model, **body})
        text = str(reply["choices"][0]["message"]["content"])
        if is_checked and not is_valid(text, schema):
            raise Unexpected(f"{text!r} breaks {schema}")
        return text

    async def _guest_adapter(self, rng: random.Random) -> None:
        """An adapter comes, is loaded, answers as its twin, is unloaded, and goes; then nobody knows it."""
        number = rng.choice(GUESTS)
        original = self._body(number)["model"]
        self._guest += 1
        name = f"guest-{self._guest}"
        folder = self._adapters / name
        await asyncio.to_thread(shutil.copytree, self._adapters / original, folder)
        try:
            if rng.random() < 0.5:
                await self._text("load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            for _ in range(rng.randint(1, 2)):
                await self._ask({**self._body(number), "model": name}, number)
            await self._text("unload_lora_adapter", {"lora_name": name})
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)
        await self._text("chat/completions", {**self._body(number), "model": name}, 404)

    async def _respond(self, number: int, previous: str | None, **more: Any) -> Any:
        asked = request(number, TOKENS)["messages"][0]["content"]
        body = {"model": self._server.model, "input": asked, "max_output_tokens": TOKENS, "temperature": 0}
        return await self._call("POST", "responses", {**body, "previous_response_id": previous, **more})

    async def _background(self, rng: random.Random) -> None:
        """A background response, and mostly a second turn after it; some are deleted then."""
        number = rng.choice(list(self._known.talks))
        first, second = self._known.talks[number]
        response = await self._until_ended("responses", await self._respond(number, None, background=True))
        if _text_of(response) != first:
            raise Unexpected(f"talk {number}: {_text_of(response)!r} is not {first!r}")
        if rng.random() < 0.7:
            follower = await self._respond(number + 10, response["id"])
            if _text_of(follower) != second:
                raise Unexpected(f"talk {number}, second turn: {_text_of(follower)!r} is not {second!r}")
        if rng.random() < 0.5:
            await self._call("DELETE", f"responses/{response['id']}")

    async def _cancelled(self, rng: random.Random) -> None:
        number = rng.choice(list(self._known.talks))
        begun = await self._respond(number, None, background=True)
        ended = await self._call("POST", f"responses/{begun['id']}/cancel")
        if ended["status"] == "cancelled":
            return
        if _text_of(ended) != self._known.talks[number][0]:
            raise Unexpected(f"a response that was cancelled is {ended['status']}: {_text_of(ended)!r}")

    async def _batch(self, rng: random.Random) -> None:
        """Upload requests, have them answered, compare each, delete both files."""
        numbers = rng.sample(range(REQUESTS), BATCH_LINES)
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": self._body(number)}
            for number in numbers
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="requests.jsonl")
        async with self._http.post(f"{self._url}/files", data=form) as reply:
            if reply.status != 200:
                raise Unexpected(f"{reply.status}: {await reply.text()}")
            source = (await reply.json())["id"]
        body = {"input_file_id": source, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await self._until_ended("batches", await self._call("POST", "batches", body))
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != BATCH_LINES:
            raise Unexpected(f"a batch is {batch['status']} with {batch['request_counts']}")
        async with self._http.get(f"{self._url}/files/{batch['output_file_id']}/content") as reply:
            answers = [json.loads(line) for line in (await reply.text()).splitlines()]
        for answer in answers:
            number = int(answer["custom_id"])
            found, wanted = _choices_of(answer["response"]["body"]), self._known.facts[number][0]
            if any(found[index] != (each["text"], each["calls"], each["reason"]) for index, each in wanted.items()):
                raise Unexpected(f"request {number} of a batch: {found} is not {wanted}")
        for file in (source, batch["output_file_id"]):
            await self._call("DELETE", f"files/{file}")

    async def _pooled(self, rng: random.Random) -> None:
        path = rng.choice(list(self._known.pooled))
        found, wanted = _pooled_facts(await self._call("POST", path, POOLED[path])), self._known.pooled[path]
        if found != wanted:
            raise Unexpected(f"{path}: {first_difference(wanted, found)}")

    async def _socket(self, rng: random.Random) -> None:
        """Three chats over one WebSocket at the same time, one of which the client cancels."""
        numbers = {f"r{place}": number for place, number in enumerate(rng.sample(ALONE, 3))}
        bodies = {name: self._body(number) for name, number in numbers.items()}
        came = await over_socket(self._http, self._url, bodies, rng.choice(list(numbers)))
        for name, number in numbers.items():
            self._compare(came[name], number)

    async def _grpc(self, rng: random.Random) -> None:
        number = rng.choice(ALONE)
        self._compare(await over_grpc(self._rpc, self._body(number), rng, leaves=rng.random() < 0.4), number)

    def _compare(self, came: Streamed, number: int) -> None:
        wanted = self._known.facts[number][0][0]
        if not is_expected(came, wanted):
            raise Unexpected(f"request {number}: {came} is not {wanted['text']!r} ({wanted['reason']})")

    async def _refused(self, rng: random.Random) -> None:
        body = self._body(0)
        wrong: tuple[tuple[int, Mapping[str, Any]], ...] = (
            (404, {"model": "nobody"}),
            (400, {"temperature": -1}),
            (400, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}}),
            (400, {"messages": [{"role": "user", "content": "word " * 5000}]}),
        )
        status, change = rng.choice(wrong)
        await self._text("chat/completions", {**body, **change}, status)

    async def _until_ended(self, path: str, thing: dict[str, Any]) -> dict[str, Any]:
        while thing["status"] not in _ENDED:
            await asyncio.sleep(POLL_SECONDS)
            thing = await self._call("GET", f"{path}/{thing['id']}")
        return thing

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._http.request(method, f"{self._url}/{path}", json=body) as reply:
            if reply.status != 200:
                raise Unexpected(f"{method} {path}: {reply.status}: {await reply.text()}")
            return await reply.json()

    async def _text(self, path: str, body: Mapping[str, Any], status: int = 200) -> None:
        async with self._http.post(f"{self._url}/{path}", json=body) as reply:
            if reply.status != status:
                raise Unexpected(f"{path}: {reply.status} in place of {status}: {await reply.text()}")


def _text_of(response: Mapping[str, Any]) -> str:
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    return "".join(part["text"] for part in parts)


def _choices_of(body: Mapping[str, Any]) -> dict[int, Any]:
    """Return text, calls and reason of each choice, as they are kept of a stream."""
    found = {}
    for choice in body["choices"]:
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = {index: each["name"] + each["arguments"] for index, each in enumerate(functions)}
        found[choice["index"]] = (message.get("content") or "", calls, choice["finish_reason"])
    return found


def _pooled_facts(body: Mapping[str, Any]) -> Any:
    return body.get("scores") or [each["embedding"] for each in body["data"]]
