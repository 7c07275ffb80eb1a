"""Four loads that differ in what they stress. The same name, repeat and seed give the same requests.

W1  one stream: 2 requests one after another, about 128 tokens in the prompt, 128 out
W2  batch: 32 requests at once, about 100 tokens each, nothing shared, 128 out
W3  shared prefix: 64 requests, 16 at a time, about 1,500 common tokens and a short question each, 32 out
W4  agents: 8 conversations of 6 turns over about 800 common tokens; a turn extends the last, up to 64 out

No repeat shares a prefix with another, so each starts with a cold cache, and hits come from inside the repeat alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from api.bench_prompts import words

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, so many of them at a time. A single request is a conversation of one turn.

    Attributes:
        system: the system message of each conversation, or nothing.
        turns: what the user says, turn by turn, for each conversation.
        fields: the rest of every request.
    """

    concurrency: int
    system: str
    turns: Sequence[Sequence[str]]
    fields: dict[str, Any]


def workload(name: str, repeat: int, seed: int) -> Workload:
    """One repeat of W1, W2, W3 or W4. Raises ``KeyError`` for any other name."""
    return _MAKERS[name](Random(f"{name} {repeat} {seed}"))


def _fixed(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _one_stream(rng: Random) -> Workload:
    return Workload(1, "", [[words(rng, 115)] for _ in range(2)], _fixed(128))


def _batch(rng: Random) -> Workload:
    return Workload(32, "", [[words(rng, 88)] for _ in range(32)], _fixed(128))


def _shared_prefix(rng: Random) -> Workload:
    system = f"Answer from these notes alone. {words(rng, 1490)}"
    return Workload(16, system, [[f"What of {words(rng, 10)}?"] for _ in range(64)], _fixed(32))


def _agents(rng: Random) -> Workload:
    system = f"Plan the next step in a full paragraph. {words(rng, 790)}"
    turns = [[f"Result {turn}: {words(rng, 40)}. What next?" for turn in range(6)] for _ in range(8)]
    return Workload(8, system, turns, {"max_tokens": 64, "temperature": 0})


_MAKERS = {"W1": _one_stream, "W2": _batch, "W3": _shared_prefix, "W4": _agents}
