"""Send hostile grammars to a running server while plain streams run on it, and see what that does to the streams.

    python -m benchmarks.grammar.hostile --url http://127.0.0.1:8000/v1 [--streams 4] [--inputs 40] [--json out.json]

Streams of plain text run in turns: alone, then with one hostile request after the other beside them, then with as many
harmless ones of that length, which says what any request costs the others. Reported are the inter-token times of the
plain streams in each, and what became of the hostile requests. A hostile request asks for no more than a few tokens, so
that what it costs is its compile and its masks. Before the first turn a plain grammar of either library is asked for,
as the first one of a server's life loads the library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.grammar.hostile_inputs import inputs
from benchmarks.grammar.times import percentiles

HOSTILE_TOKENS = 8


class Load:
    """The requests of one measurement."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, tokens: int) -> None:
        self._session = session
        self._url = f"{url}/completions"
        self._model = model
        self._tokens = tokens
        self._numbers = count()
        self.ends: Counter[str] = Counter()

    async def stream(self) -> list[float]:
        """Seconds between the tokens of one plain stream, each another one: a known text comes in drafts."""
        number = next(self._numbers)
        body = {"model": self._model, "prompt": f"Story {number}:", "max_tokens": self._tokens, "ignore_eos": True}
        times: list[float] = []
        async with self._session.post(self._url, json=body | {"stream": True, "seed": number}) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    async def join(self) -> None:
        """One harmless request, as long as a hostile one."""
        body = {"model": self._model, "prompt": "x", "max_tokens": HOSTILE_TOKENS, "ignore_eos": True}
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            await response.read()

    async def attack(self, fields: dict[str, Any]) -> None:
        """One hostile request; what became of it is counted."""
        body = {"model": self._model, "prompt": "x", "max_tokens": HOSTILE_TOKENS, **fields}
        async with self._session.post(
            self._url, data=orjson.dumps(_plain(body)), headers={"content-type": "application/json"}
        ) as response:
            answer = await response.json()
            kind = f"{response.status}"
            if response.status == 200:
                kind += f" {answer['choices'][0]['finish_reason']}"
            self.ends[kind] += 1


def _plain(value: Any) -> Any:
    """Integers beyond 64 bits as floats: orjson writes no others."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and abs(value) >= 1 << 63 else value


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of plain streams: alone, under attack, beside harmless requests."""
    chosen = inputs()[options.first :: max(1, len(inputs()) // options.inputs)][: options.inputs]
    times: dict[str, list[float]] = {"alone": [], "attacked": [], "beside": []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        async with session.get(f"{options.url}/models") as response:
            model = (await response.json())["data"][0]["id"]
        load = Load(session, options.url, model, options.tokens)
        await asyncio.gather(*(load.stream() for _ in range(options.streams)))
        for fields in ({"guided_json": {"type": "integer"}}, {"ebnf": 'root ::= "a"'}):
            await load.attack(fields)
        load.ends.clear()
        for turn in range(options.rounds):
            hostile: list[Callable[[], Awaitable[None]]] = [
                partial(load.attack, fields) for _, fields in chosen[turn :: options.rounds]
            ]
            for name, requests in (("alone", []), ("attacked", hostile), ("beside", [load.join] * len(hostile))):
                streams = asyncio.gather(*(load.stream() for _ in range(options.streams)))
                for request in requests:
                    await request()
                times[name] += [gap for gaps in await streams for gap in gaps]
    result: dict[str, Any] = {name: percentiles(gaps, 1e3) | {"gaps": len(gaps)} for name, gaps in times.items()}
    for name, other in (("p99_ratio", "alone"), ("p99_ratio_beside", "beside")):
        result[name] = round(result["attacked"]["p99"] / result[other]["p99"], 3)
    result["hostile"] = {"requests": len(chosen), "ends": dict(load.ends)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each plain stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--inputs", type=int, default=40, help="hostile requests in all")
    parser.add_argument("--first", type=int, default=0, help="where in the list of inputs to begin")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
