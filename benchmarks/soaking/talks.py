"""Clients of ``/v1/responses``: conversations that the server remembers, for a while."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import aiohttp

from benchmarks.soaking.clients import TEXT, Tally, answer

TURNS = 6
FINISHED = {"completed": "stop", "incomplete": "length"}


class Talker:
    """Holds one conversation after the other. Of each it sends the new message alone, and knows the whole."""

    def __init__(self, url: str, codes: Mapping[str, int], tally: Tally, seed: int) -> None:
        self._url = f"{url}/v1/responses"
        self._codes = codes
        self._tally = tally
        self._rng = random.Random(seed)

    async def run(self, session: aiohttp.ClientSession, end: float) -> None:
        """Until the loop's clock says ``end``."""
        while asyncio.get_running_loop().time() < end:
            try:
                await self._talk(session)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._tally.complain(f"{type(error).__name__}: {error}")

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        model = self._rng.choice(["soak", *self._codes])
        messages: list[dict[str, str]] = []
        last = None
        for _ in range(self._rng.randint(1, TURNS)):
            asked = "".join(chr(self._rng.randrange(32, 127)) for _ in range(self._rng.randint(1, 40)))
            limit = self._rng.randint(1, 40)
            body = {"model": model, "input": asked, "max_output_tokens": limit, "previous_response_id": last}
            response = await self._ask(session, {**body, "stream": self._rng.random() < 0.5})
            if response is None:
                return
            messages.append({"role": "user", "content": asked})
            wanted = answer(TEXT.encode(TEXT.render_chat(messages), False), limit, self._codes.get(model, 0))
            text, reason = _text_of(response), FINISHED.get(response["status"], response["status"])
            if (text, reason) != wanted:
                self._tally.complain(f"{text!r} ({reason}) is not {wanted}, turn {len(messages)} of a conversation")
            self._tally.counts[f"finished_{reason}"] += 1
            self._tally.counts["turns of conversations"] += 1
            messages.append({"role": "assistant", "content": text})
            last = response["id"]

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any] | None:
        """The response; None if the server does not know the one before it any more."""
        async with session.post(self._url, json=body) as reply:
            if reply.status == 400 and (await reply.json())["error"]["code"] == "previous_response_not_found":
                self._tally.counts["conversations forgotten"] += 1
                return None
            if reply.status != 200:
                self._tally.complain(f"{reply.status}: {await reply.text()}")
                return None
            if not body["stream"]:
                return dict(await reply.json())
            *_, last = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: ")]
            return dict(last["response"])


def _text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] for part in item["content"]]
    return "".join(part["text"] for part in parts)
