"""What drafts bring and cost: ``python -m benchmarks.drafts``. Offline, one engine, its drafts switched on and off.

It answers the same prompts with and without in turn, and forgets in between, so that no answer is known from an earlier
run. Every answer must be the same with drafts as without, token by token; the program ends with an error if one is not.
Two engines would not do: by where its weights lie in memory one is a few per cent faster than the other.

    W1 to W7  the loads of ``benchmarks.serve.workloads``, cut short to some seconds, W7 without adapters
    edit      a document is given and to be repeated with one change: what agents do all day
    schema    an object with long names is filled in under its JSON schema
    judge     a claim, each time another, is graded under the same rules: answers are alike, and prompts are not
    free      open-ended text: next to nothing can be guessed, so this is what drafts cost

each greedy and at temperature 1 with a new seed. A line tells the gain, speed with drafts by speed without: the median
and the geometric mean over the pairs, and the mean's 95 % confidence interval (Student's t on the logarithms).
``verdict`` is what the interval shows: "gains" (all of it above 1), "holds" (all of it above 0.98), "costs" (all of it
below 0.98), or "open". Without options these are ten pairs of each of W1 to W5 and W7, in some 12 minutes.

With a draft model: ``--speculative-config '{"model": PATH}'``; ``benchmarks.draft_targets`` makes models for it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.serve.workloads import workload as served_workload
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.offline.running_request import RunningRequest
from rootgraft.engine.process_memory import freeze
from rootgraft.engine.scheduling.draft_budget import DraftBudget
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.radix.namespace import Namespace

SERVED = ("W1", "W2", "W3", "W4", "W5", "W7")
KEPT = {"W1": (1, 1), "W3": (32, 1), "W4": (8, 2), "W5": (16, 1), "W7": (24, 1)}
"""Conversations and turns of loads that are cut short."""

T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)  # by degrees of freedom
NAMES = (
    "Alice Moore",
    "Bilal Khan",
    "Carla Diaz",
    "Dmitri Orlov",
    "Emi Sato",
    "Farah Aziz",
    "Greta Holm",
    "Hugo Leroy",
)
PLACES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Riga", "Sydney", "Tunis", "Vienna")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "primary_contact_full_name": {"type": "string", "maxLength": 24},
        "preferred_delivery_location": {"enum": list(PLACES)},
        "has_active_premium_subscription": {"type": "boolean"},
        "number_of_outstanding_invoices": {"type": "integer", "minimum": 0, "maximum": 99},
        "requires_manual_credit_verification": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
TOPICS = ("a lighthouse keeper", "the history of bread", "a robot gardener", "rain in a large city", "an old violin")


@dataclass
class Talk:
    """A conversation: what the user says, turn by turn, and what was answered."""

    turns: Sequence[str]
    params: SamplingParams
    system: str = ""
    grammar: GrammarSpec | None = None
    answers: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    def next_messages(self) -> list[dict[str, str]] | None:
        """The messages of the next turn, None behind the last."""
        if len(self.answers) == len(self.turns):
            return None
        if self.system and not self.messages:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.turns[len(self.answers)]})
        return self.messages


def record(draw: random.Random) -> dict[str, Any]:
    """One entry of a document."""
    return {
        "id": draw.randrange(1000, 10_000),
        "name": draw.choice(NAMES),
        "city": draw.choice(PLACES),
        "balance": draw.randrange(10, 900),
        "active": draw.random() < 0.5,
    }


def schema_prompt(draw: random.Random) -> str:
    """Facts to be put into the form of SCHEMA, whose names the prompt tells, as they should."""
    entry = record(draw)
    names = json.dumps(dict.fromkeys(SCHEMA["properties"], "..."), indent=2)
    return (
        f"Fill in the customer record as JSON. Customer {entry['id']} is {entry['name']} from {entry['city']}, with "
        f"{draw.randrange(9)} open invoices{' and a premium subscription' if entry['active'] else ''}.\n\n{names}"
    )


def edit_prompt(draw: random.Random) -> str:
    """A document and a change to it."""
    entries = [record(draw) for _ in range(5)]
    city = draw.choice(PLACES)
    document = json.dumps({"customers": entries}, indent=2)
    return f"Repeat this JSON document exactly, but change every city to {city}.\n\n{document}"


def judge_prompt(draw: random.Random) -> str:
    """A claim to be graded."""
    who, where, number = draw.choice(NAMES), draw.choice(PLACES), draw.randrange(2, 90)
    return (
        "You grade claims. Say whether the claim is plausible, give a grade from one to five, and one short reason.\n\n"
        f"Claim: {who} moved {number} crates to {where} before noon."
    )


def free_prompt(draw: random.Random) -> str:
    """Something to write about."""
    return f"Write a story about {draw.choice(TOPICS)} and {draw.choice(NAMES)} in {draw.choice(PLACES)}."


OWN: dict[str, tuple[Callable[[random.Random], str], SamplingParams, GrammarSpec | None]] = {
    "edit": (edit_prompt, SamplingParams(max_tokens=320), None),
    "schema": (schema_prompt, SamplingParams(max_tokens=200), GrammarSpec.json_schema(SCHEMA)),
    "judge": (judge_prompt, SamplingParams(max_tokens=96), None),
    "free": (free_prompt, SamplingParams(max_tokens=128, ignore_eos=True), None),
}


def talks(
    name: str, concurrency: int, repeat: int, seed: int, temperature: float, *, whole: bool
) -> tuple[int, list[Talk]]:
    """How many at a time, and the conversations of one repeat; the same ones for the same arguments."""
    draw = random.Random(f"{name} {concurrency} {repeat} {seed}")

    def params(most: int, *, ignore_eos: bool) -> SamplingParams:
        return SamplingParams(
            max_tokens=most, ignore_eos=ignore_eos, temperature=temperature, seed=draw.getrandbits(32)
        )

    if name in OWN:
        prompt, own, grammar = OWN[name]
        asked = [(prompt(draw), params(own.max_tokens, ignore_eos=own.ignore_eos)) for _ in range(concurrency)]
        return concurrency, [Talk([text], each, grammar=grammar) for text, each in asked]
    load = served_workload(name, repeat, seed)
    most, turns = (None, None) if whole else KEPT.get(name, (None, None))
    found = []
    for each in load.conversations[:most]:
        fields = each.fields
        grammar = GrammarSpec.json_schema(each.schema) if each.schema else None
        sampling = params(fields["max_tokens"], ignore_eos=fields.get("ignore_eos", False))
        found.append(Talk(each.turns[:turns], sampling, each.system, grammar))
    return load.concurrency, found


def run(llm: LLM, concurrency: int, conversations: Sequence[Talk]) -> None:
    """Hold conversations, so many at a time, each turn once the one before is answered."""
    waiting, running = list(reversed(conversations)), dict[int, tuple[Talk, RunningRequest]]()
    while waiting or running:
        while waiting and len(running) < concurrency:
            talk = waiting.pop()
            running[id(talk)] = talk, begin(llm, talk)
        llm.step()
        for key, (talk, request) in list(running.items()):
            if request.is_done:
                answer = request.output().outputs[0]
                talk.answers.append(tuple(answer.token_ids))
                talk.messages.append({"role": "assistant", "content": answer.text})
                del running[key]
                if len(talk.answers) < len(talk.turns):
                    running[key] = talk, begin(llm, talk)


def begin(llm: LLM, talk: Talk) -> RunningRequest:
    """Begin the next turn."""
    messages = talk.next_messages()
    assert messages is not None
    text = llm.tokenizer.render_chat(messages, add_generation_prompt=True)
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    turn = len(talk.answers)
    return llm.begin(tokens, replace(talk.params, seed=(talk.params.seed or 0) + turn), grammar=talk.grammar)


class Side:
    """The engine with drafts or without, and what it has done for a workload."""

    def __init__(self, llm: LLM, drafts: DraftBudget | None) -> None:
        self._llm = llm
        self._drafts = drafts
        self.rates: list[float] = []
        self.counts: dict[str, int] = {}

    def answer(self, concurrency: int, conversations: Sequence[Talk]) -> list[list[tuple[int, ...]]]:
        """Hold conversations and note how long it took. Returns the tokens of each answer."""
        core = self._llm._core
        core._scheduler._drafts = self._drafts
        core._cache.drop(Namespace(core.ready.base_digest))
        if self._drafts is not None and self._drafts._drafter is not None:
            self._drafts._drafter.clear()
        before, start = core.stats(), time.perf_counter()
        run(self._llm, concurrency, conversations)
        seconds, after = time.perf_counter() - start, core.stats()
        answers = [talk.answers for talk in conversations]
        self.rates.append(sum(len(answer) for each in answers for answer in each) / seconds)
        for name in after:
            if name.startswith(("steps", "generation_tokens", "draft", "forced_tokens")):
                self.counts[name] = self.counts.get(name, 0) + round(after[name] - before.get(name, 0))
        return answers

    def figures(self) -> dict[str, Any]:
        """For the report."""
        rates = [round(rate, 1) for rate in self.rates]
        return {"output_tok_s": round(statistics.median(rates), 1), "runs_output_tok_s": rates, **self.counts}


def interval(quotients: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and the ends of its 95 % confidence interval."""
    logs = [math.log(each) for each in quotients]
    mean, free = statistics.mean(logs), len(logs) - 1
    wide = T95[min(free, len(T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs)) if free else math.inf
    return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)


def verdict(low: float, high: float) -> str:
    """What an interval of the gain shows."""
    if low > 1:
        return "gains"
    if low > 0.98:
        return "holds"
    return "costs" if high < 0.98 else "open"


def measure(
    llm: LLM, drafts: DraftBudget, name: str, temperature: float, concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The same conversations with drafts and without, in turn, ``pairs`` times with others, after one to warm up."""
    pairs, seed, whole = options.pairs, options.seed, options.whole
    sides = {"on": Side(llm, drafts), "off": Side(llm, None)}
    for pair in range(pairs + 1):
        order = list(sides) if pair % 2 else list(sides)[::-1]
        answers = {}
        for which in order:
            at_once, conversations = talks(name, concurrency, pair, seed, temperature, whole=whole)
            answers[which] = sides[which].answer(at_once, conversations)
        if answers["on"] != answers["off"]:
            sys.exit(f"{name} at temperature {temperature}: an answer with drafts is not the one without")
        if pair == 0:
            sides = {"on": Side(llm, drafts), "off": Side(llm, None)}
    quotients = [on / off for on, off in zip(sides["on"].rates, sides["off"].rates, strict=True)]
    gain, low, high = interval(quotients)
    return {
        "workload": name,
        "sampling": "sampled" if temperature else "greedy",
        "concurrency": at_once,
        "pairs": pairs,
        "median": round(statistics.median(quotients), 3),
        "gain": round(gain, 3),
        "interval": [round(low, 3), round(high, 3)],
        "verdict": verdict(low, high),
        "on": sides["on"].figures(),
        "off": sides["off"].figures(),
    }


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those that `make_engine` reads."""
    parser.add_argument("--model", help="folder or file; default: the default model")
    parser.add_argument("--quantization", help="as of the server")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of the server")
    parser.add_argument("--load-format", default="auto", help="as of the server")
    parser.add_argument("--speculative-config", default='{"method": "auto"}', help="as of the server")


def make_engine(options: argparse.Namespace) -> LLM:
    """An engine that drafts, whose objects no garbage collection visits, as in the engine process of a server.

    One takes 0.1 s, and what allocates more, as drafts do, has more of them.
    """
    llm = LLM(
        options.model,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        load_format=options.load_format,
        speculative_config=options.speculative_config,
        kv_cache_memory=1.0,
        max_model_len=4096,
    )
    freeze()
    return llm


def planned(options: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """Workload, temperature and concurrency of each measure; served workloads have their own concurrency."""
    for name in options.workloads:
        for temperature in options.temperatures:
            for concurrency in options.concurrency if name in OWN else (0,):
                yield name, temperature, concurrency


def main() -> None:
    """Print one line of JSON for each workload, temperature and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--workloads", nargs="+", default=SERVED, choices=[*SERVED, *OWN])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8], help="of edit, schema, judge and free")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--whole", action="store_true", help="W1 to W7 as they are")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: a new one")
    options = parser.parse_args()
    llm = make_engine(options)
    drafts = llm._core._scheduler._drafts
    assert drafts is not None
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4), use_tqdm=False)
    for name, temperature, concurrency in planned(options):
        figures = measure(llm, drafts, name, temperature, concurrency, options)
        print(json.dumps({"seed": options.seed, **figures}), flush=True)


if __name__ == "__main__":
    main()
