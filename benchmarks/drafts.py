"""What drafts bring and cost: ``python -m benchmarks.drafts``. Offline, one engine, its drafts switched on and off.

It answers the same prompts with and without in turn, and forgets in between, so that no answer is known from an earlier
run. Every answer must be the same with drafts as without, token by token; the program ends with an error if one is not.
Two engines would not do: by where its weights lie in memory one is a few per cent faster than the other.

    schema   an object with long names is filled in under its JSON schema, greedy
    edit     a document is given and to be repeated with one change, greedy: what agents do all day
    judge    a claim, each time another, is graded under the same rules, greedy: answers are alike, and prompts are not
    free     open-ended text at temperature 1: nothing can be guessed, so this is what drafts cost
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.offline.request_output import RequestOutput
from rootgraft.engine.scheduling.draft_budget import DraftBudget
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.radix.namespace import Namespace

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


@dataclass(frozen=True)
class Workload:
    """What is asked: ``prompt(draw)`` makes one, each time another."""

    name: str
    prompt: Callable[[random.Random], str]
    params: SamplingParams
    grammar: GrammarSpec | None = None


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


WORKLOADS = (
    Workload(
        "schema",
        schema_prompt,
        SamplingParams(max_tokens=200, temperature=0.0),
        GrammarSpec.json_schema(SCHEMA),
    ),
    Workload("edit", edit_prompt, SamplingParams(max_tokens=320, temperature=0.0)),
    Workload("judge", judge_prompt, SamplingParams(max_tokens=96, temperature=0.0)),
    Workload("free", free_prompt, SamplingParams(max_tokens=128, temperature=1.0, ignore_eos=True)),
)


class Run:
    """An engine with drafts or without, and what it has done for a workload."""

    def __init__(self, llm: LLM, drafts: DraftBudget | None) -> None:
        self._llm = llm
        self._drafts = drafts
        self.rates: list[float] = []
        self.steps = self.answers = self.tokens = 0
        self.drafted = self.accepted = self.forced = 0

    def answer(self, workload: Workload, prompts: Sequence[str], seed: int) -> list[tuple[int, ...]]:
        """Answer prompts together and note how long it took. Returns the tokens of each answer."""
        core = self._llm._core
        core._scheduler._drafts = self._drafts
        core._cache.drop(Namespace(core.ready.base_digest))
        before = core.stats()
        params = [replace(workload.params, seed=seed + number) for number in range(len(prompts))]
        start = time.perf_counter()
        outputs: list[RequestOutput] = self._llm.chat(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            params,
            grammar=workload.grammar,
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        after = core.stats()
        answers = [tuple(output.outputs[0].token_ids) for output in outputs]
        tokens = sum(map(len, answers))
        self.rates.append(tokens / seconds)
        self.answers, self.tokens = self.answers + len(answers), self.tokens + tokens
        self.steps += int(after["steps"] - before["steps"])
        self.drafted += int(after["draft_tokens"] - before["draft_tokens"])
        self.accepted += int(after["draft_tokens_accepted"] - before["draft_tokens_accepted"])
        self.forced += int(after["forced_tokens"] - before["forced_tokens"])
        return answers

    def figures(self) -> dict[str, Any]:
        """For the report."""
        return {
            "output_tok_s": round(statistics.median(self.rates), 1),
            "runs_output_tok_s": [round(rate, 1) for rate in self.rates],
            "steps": self.steps,
            "answers": self.answers,
            "output_tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "forced": self.forced,
        }


def measure(llm: LLM, drafts: DraftBudget, workload: Workload, concurrency: int, repeats: int) -> dict[str, Any]:
    """The same prompts with drafts and without, in turn, ``repeats`` times with others."""
    draw = random.Random(f"{workload.name} {concurrency}")
    runs = {"on": Run(llm, drafts), "off": Run(llm, None)}
    for repeat in range(repeats):
        prompts = [workload.prompt(draw) for _ in range(concurrency)]
        order = list(runs) if repeat % 2 else list(runs)[::-1]
        answers = {name: runs[name].answer(workload, prompts, 1000 * repeat) for name in order}
        if answers["on"] != answers["off"]:
            sys.exit(f"{workload.name} at {concurrency}: an answer with drafts is not the one without")
    on, off = runs["on"].figures(), runs["off"].figures()
    # The median of quotients: both runs of a pair saw the same prompts and, nearly, the same machine.
    pairs = zip(runs["on"].rates, runs["off"].rates, strict=True)
    gain = statistics.median(with_ / without for with_, without in pairs)
    return {"workload": workload.name, "concurrency": concurrency, "gain": round(gain, 3), "on": on, "off": off}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those that `make_engine` reads."""
    parser.add_argument("--model", help="folder or file; default: the default model")
    parser.add_argument("--quantization", help="as of the server")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of the server")


def make_engine(options: argparse.Namespace) -> LLM:
    """An engine that drafts."""
    return LLM(
        options.model,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory=0.5,
        max_model_len=2048,
    )


def main() -> None:
    """Print one line of JSON for each workload and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--workloads", nargs="+", default=[each.name for each in WORKLOADS])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    llm = make_engine(options)
    drafts = llm._core._scheduler._drafts
    assert drafts is not None
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4), use_tqdm=False)
    llm.generate("a", SamplingParams(max_tokens=2), grammar=GrammarSpec.json_schema(SCHEMA), use_tqdm=False)
    for workload in WORKLOADS:
        if workload.name in options.workloads:
            for concurrency in options.concurrency:
                print(json.dumps(measure(llm, drafts, workload, concurrency, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
