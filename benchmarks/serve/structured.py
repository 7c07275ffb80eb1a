"""Measure the cost of structured answers: requests with a JSON schema, and the same without.

    python -m benchmarks.serve.structured --repeats 5
    python -m benchmarks.serve.structured --serve '--speculative-config {"method":"off"}'

48 requests over 8 schemas, 16 at a time. Every request is asked twice in a repeat: with its schema, and as free text of
as many tokens as the structured answer had. Both passes thus generate the same number of tokens from the same prompts;
the ratio of their times is what masks, matchers and validation cost, or what forced tokens save. Prompts differ from
pass to pass in their first words, so that neither finds the other's in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai

from benchmarks.serve.schemas import SCHEMAS, is_valid
from benchmarks.serve.server import ROOT, Server, machine
from rootgraft.api.cli.bench_requests import words

MODEL = "benchmark"
REQUESTS, CONCURRENCY, MAX_TOKENS = 48, 16, 200


def main() -> int:
    args = _arguments()
    options = args.serve.replace("{", "{{").replace("}", "}}")
    serve = f"{shlex.quote(sys.executable)} -m rootgraft.api.cli.main serve"
    command = f"{serve} --served-model-name {MODEL} --port {{port}} {options}"
    with Server(command).running() as (url, _):
        runs = asyncio.run(_measure(url, args.repeats))
    ratio = statistics.median(run["ratio"] for run in runs)
    for run in runs:
        print(f"with schema {run['structured']:7.1f} tok/s   without {run['free']:7.1f} tok/s   {run['ratio']:.3f}")
    print(
        f"median of the ratios {ratio:.3f}; {sum(run['valid'] for run in runs)} of {REQUESTS * len(runs)} answers valid"
    )
    document = {"machine": machine(), "arguments": vars(args), "ratio": ratio, "runs": runs}
    Path(args.output).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default=str(ROOT / "structured.json"))
    return parser.parse_args()


async def _measure(url: str, repeats: int) -> list[dict[str, Any]]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
        await _wait(client)
        await _pass(client, "warm", None)  # compiles the schemas
        return [await _repeat(client, repeat) for repeat in range(repeats)]


async def _wait(client: openai.AsyncOpenAI) -> None:
    """Until the model is loaded."""
    async with httpx.AsyncClient() as http:
        for _ in range(1200):
            try:
                if (await http.get(f"{str(client.base_url).removesuffix('/v1/')}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit("the server did not become ready")


async def _repeat(client: openai.AsyncOpenAI, repeat: int) -> dict[str, Any]:
    seconds, answers = await _pass(client, f"s{repeat}", None)
    counts = [answer.usage.completion_tokens for answer in answers]
    free_seconds, free = await _pass(client, f"f{repeat}", counts)
    structured, plain = sum(counts) / seconds, sum(answer.usage.completion_tokens for answer in free) / free_seconds
    choices = [answer.choices[0] for answer in answers]
    valid = sum(
        choice.finish_reason == "stop" and is_valid(choice.message.content, SCHEMAS[i % len(SCHEMAS)])
        for i, choice in enumerate(choices)
    )
    return {"structured": structured, "free": plain, "ratio": structured / plain, "valid": valid, "tokens": sum(counts)}


async def _pass(client: openai.AsyncOpenAI, nonce: str, counts: list[int] | None) -> tuple[float, list[Any]]:
    """Seconds and answers of all requests: structured, or free text of so many tokens each."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask(i: int) -> Any:
        schema = SCHEMAS[i % len(SCHEMAS)]
        text = f"{nonce} {i}: make up an example with {', '.join(schema['properties'])}, of: {words(Random(i), 20)}."
        form = {"type": "json_schema", "json_schema": {"name": "example", "schema": schema, "strict": True}}
        fields: dict[str, Any] = (
            {"max_tokens": MAX_TOKENS, "response_format": form}
            if counts is None
            else {"max_tokens": counts[i], "extra_body": {"ignore_eos": True}}
        )
        messages: list[Any] = [{"role": "user", "content": text}]
        async with places:
            return await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)

    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(i) for i in range(REQUESTS)))
    return time.perf_counter() - started, list(answers)


if __name__ == "__main__":
    sys.exit(main())
