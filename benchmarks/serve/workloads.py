"""Seven loads that differ in what they stress. The same name, repeat, seed and adapters give the same requests.

W1  one stream: 2 requests one after another, about 128 tokens in the prompt, 128 out
W2  batch: 32 requests at once, about 100 tokens each, nothing shared, 128 out
W3  shared prefix: 64 requests, 16 at a time, about 1,500 common tokens and a short question each, 32 out
W4  agents: 8 conversations of 6 turns over about 800 common tokens; a turn extends the last, up to 64 out
W5  structure: 48 requests, 16 at a time, over 8 JSON schemas, up to 200 out
W6  adapters: W2 spread over the base model and the adapters
W7  all of it: W3, W5 and W6 mixed, 24 at a time

Every prompt begins with words of its own repeat, so each starts with a cold cache, and hits come from inside the repeat
alone. How a server is to draw its tokens is not part of a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.serve.schemas import SCHEMAS
from rootgraft.api.cli.bench_requests import words

NAMES = ("W1", "W2", "W3", "W4", "W5", "W6", "W7")
WITH_ADAPTERS = ("W6", "W7")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after another. A single request is a conversation of one turn.

    Attributes:
        turns: what the user says, turn by turn.
        fields: the rest of every request.
        system: the system message, or nothing.
        adapter: number of the adapter; None for the base model.
        schema: what each answer follows, or None.
    """

    turns: Sequence[str]
    fields: dict[str, Any]
    system: str = ""
    adapter: int | None = None
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, so many of them at a time."""

    concurrency: int
    conversations: Sequence[Conversation]


def workload(name: str, repeat: int, seed: int, adapters: int = 0) -> Workload:
    """One repeat of a load over so many adapters. Raises ``KeyError`` for an unknown name."""
    rng = Random(f"{name} {repeat} {seed}")
    if name == "W6":
        return _adapters(rng, adapters)
    if name == "W7":
        return _mixed(rng, adapters)
    return {"W1": _one_stream, "W2": _batch, "W3": _shared_prefix, "W4": _agents, "W5": _structure}[name](rng)


def _fixed(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


def _reference(rng: Random) -> str:
    """Return the first words of a prompt, which occur in no other repeat."""
    return f"Ref {rng.getrandbits(32):08x}."


def _one_stream(rng: Random) -> Workload:
    return Workload(1, [Conversation([f"{_reference(rng)} {words(rng, 107)}"], _fixed(128)) for _ in range(2)])


def _batch(rng: Random) -> Workload:
    return Workload(32, [Conversation([f"{_reference(rng)} {words(rng, 80)}"], _fixed(128)) for _ in range(32)])


def _shared_prefix(rng: Random) -> Workload:
    system = f"{_reference(rng)} Answer from these notes alone. {words(rng, 1490)}"
    return Workload(16, [Conversation([f"What of {words(rng, 10)}?"], _fixed(32), system) for _ in range(64)])


def _agents(rng: Random) -> Workload:
    system = f"{_reference(rng)} Plan the next step in a full paragraph. {words(rng, 790)}"
    turns = [[f"Result {turn}: {words(rng, 40)}. What next?" for turn in range(6)] for _ in range(8)]
    return Workload(8, [Conversation(said, {"max_tokens": 64}, system) for said in turns])


def _structure(rng: Random) -> Workload:
    def conversation(schema: dict[str, Any]) -> Conversation:
        form = {"type": "json_schema", "json_schema": {"name": "example", "schema": schema, "strict": True}}
        fields = {"max_tokens": 200, "response_format": form}
        keys = ", ".join(schema["properties"])
        text = f"{_reference(rng)} Make up an example with {keys}, of: {words(rng, 30)}."
        return Conversation([text], fields, schema=schema)

    return Workload(16, [conversation(SCHEMAS[i % len(SCHEMAS)]) for i in range(48)])


def _adapters(rng: Random, adapters: int) -> Workload:
    spread = [
        replace(conversation, adapter=i % (adapters + 1) - 1 if i % (adapters + 1) else None)
        for i, conversation in enumerate(_batch(rng).conversations)
    ]
    return Workload(32, spread)


def _mixed(rng: Random, adapters: int) -> Workload:
    parts = (_shared_prefix(rng), _structure(rng), _adapters(rng, adapters))
    conversations = [conversation for part in parts for conversation in part.conversations]
    rng.shuffle(conversations)
    return Workload(24, conversations)
