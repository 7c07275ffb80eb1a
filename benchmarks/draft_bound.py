"""What drafts from lookups could bring at best: ``python -m benchmarks.draft_bound``. Offline, one engine, one stream.

It measures what steps with some drafts take, lets the model answer the prompts of a workload of ``benchmarks.drafts``
without drafts, and looks up every position of every answer. A line for each temperature tells, over all positions, how
often the tokens that followed the longest earlier match were the ones drawn, by the length of the match; and how many
times as fast answers would be, the geometric mean:

    free        if drafts cost nothing
    foreknown   at what steps take, if as many drafts were computed as will be accepted: no rule reaches that
    by_length   at what steps take, if of each match's length it is known how often its drafts are accepted

All three know one candidate for a position, the one that prompt lookup proposes, and nothing of other answers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.drafts import OWN, Talk, add_engine_options, edit_prompt, make_engine, run, talks
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.scheduling.step_plan import Drafting, StepPlan, lease_of
from rootgraft.engine.sequence.sequence import Sequence as Stream
from rootgraft.engine.speculation.prompt_lookup import NgramIndex
from rootgraft.engine.types import SamplingParams

MOST = 16  # drafts of a step
COUNTS = (0, 1, 2, 3, 5, 7, 11, 15)  # drafts of the steps that are timed
AT_ONCE = 16
LONGEST = 16  # match that is told apart


class Place(NamedTuple):
    """A position of an answer: the length of the match, and how many of the tokens behind it are drawn next."""

    length: int
    hits: int


class FixedDrafts:
    """Gives each row of a step so many drafts, which are wrong, in place of ``DraftBudget``."""

    def __init__(self, llm: LLM) -> None:
        self._cache = llm._core._cache
        self.count = 0

    def add(self, plan: StepPlan, drawing: Sequence[Stream]) -> Drafting:
        for sequence in drawing:
            if self.count and self._cache.grow(lease_of(sequence), sequence.num_tokens + self.count):
                plan.add_drafts(sequence, [0] * self.count)
        return Drafting()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None  # it learns nothing and keeps nothing


def step_seconds(llm: LLM, repeats: int) -> tuple[float, list[float]]:
    """Return the seconds of a prompt's step, and of a lone stream's step by its drafts, 0 to MOST: medians."""
    scheduler, draw = llm._core._scheduler, random.Random(0)
    drafts, fixed = scheduler._drafts, FixedDrafts(llm)
    scheduler._drafts = fixed  # type: ignore[assignment]
    taken: dict[int, list[float]] = defaultdict(list)
    prompts = []
    for repeat in range(repeats + 1):
        fixed.count = 0
        start = time.perf_counter()
        llm.begin(encode(llm, edit_prompt(draw)), SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True))
        llm.step()
        prompts.append(time.perf_counter() - start)
        while scheduler.num_running:
            fixed.count = draw.choice(COUNTS)
            start = time.perf_counter()
            llm.step()
            if repeat:  # the first one records steps of new sizes
                taken[fixed.count].append(time.perf_counter() - start)
    scheduler._drafts = drafts
    medians = {count: statistics.median(taken[count]) for count in COUNTS}
    return statistics.median(prompts[1:]), [interpolated(medians, count) for count in range(MOST + 1)]


def interpolated(medians: Mapping[int, float], count: int) -> float:
    """Return the value at ``count`` on the line through its neighbours, or through the last two."""
    upper = next((each for each in COUNTS if each >= count), COUNTS[-1])
    lower = COUNTS[max(0, COUNTS.index(upper) - 1)]
    share = (count - lower) / (upper - lower) if upper > lower else 0.0
    return medians[lower] + share * (medians[upper] - medians[lower])


def encode(llm: LLM, text: str) -> array[int]:
    """The tokens of a prompt of one turn."""
    rendered = llm.tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True)
    return llm.tokenizer.encode(rendered, add_special_tokens=False)


def answer_all(llm: LLM, name: str, temperature: float, count: int, seed: int) -> list[Talk]:
    """Answer prompts without drafts, whose tokens would be the same with them."""
    scheduler = llm._core._scheduler
    drafts, scheduler._drafts = scheduler._drafts, None
    each = [talks(name, 1, repeat, seed, temperature, whole=True)[1][0] for repeat in range(count)]
    run(llm, AT_ONCE, each)
    scheduler._drafts = drafts
    return each


def look_up(prompt: array[int], answer: Sequence[int]) -> list[Place]:
    """Look up each position of an answer."""
    tokens = array("i", prompt)
    index, places = NgramIndex(tokens), []
    for at, token in enumerate(answer):
        length, found = index.lookup(MOST)
        pairs = zip(found, answer[at:], strict=False)
        hits = next((place for place, (draft, drawn) in enumerate(pairs) if draft != drawn), None)
        places.append(Place(length, min(len(found), len(answer) - at) if hits is None else hits))
        tokens.append(token)
    return places


def rates_by_length(answers: Sequence[Sequence[Place]]) -> dict[int, tuple[int, float]]:
    """Return how many positions have a match of each length, and the share of them at which the next token is right."""
    counts: dict[int, list[int]] = defaultdict(list)
    for places in answers:
        for place in places:
            if place.length:
                counts[place.length].append(place.hits > 0)
    return {length: (len(hits), sum(hits) / len(hits)) for length, hits in sorted(counts.items())}


def foreknown_seconds(places: Sequence[Place], seconds: Sequence[float]) -> float:
    """Return the least seconds of an answer whose accepted drafts are known beforehand, by dynamic programming."""
    least = [0.0] * (len(places) + 1)
    for at in range(len(places) - 1, -1, -1):
        most = min(places[at].hits, len(places) - at - 1, MOST)
        least[at] = min(seconds[count] + least[at + 1 + count] for count in range(most + 1))
    return least[0]


def by_length_seconds(places: Sequence[Place], seconds: Sequence[float], rates: Mapping[int, float]) -> float:
    """Return the seconds of an answer if each step has the drafts that bring most for what they take."""
    at, total = 0, 0.0
    while at < len(places):
        place, count, best, gain, chance = places[at], 0, 0.0, 0.0, 1.0
        for place_of in range(1, min(MOST, len(places) - at - 1) + 1 if place.length else 1):
            chance *= rates.get(min(LONGEST, place.length + place_of - 1), 0.5)
            gain += chance
            net = gain - (seconds[place_of] - seconds[0]) / seconds[0]
            if net > best:
                count, best = place_of, net
        total += seconds[count]
        at += 1 + min(count, place.hits)
    return total


def gain(answers: Sequence[Sequence[Place]], prompt: float, plain: float, seconds: Sequence[float]) -> float:
    """Return how many times as fast answers are that take ``seconds``, the geometric mean."""
    quotients = [
        (prompt + plain * len(places)) / (prompt + took) for places, took in zip(answers, seconds, strict=True)
    ]
    return round(math.exp(statistics.mean(math.log(each) for each in quotients)), 3)


def bounds(answers: Sequence[Sequence[Place]], prompt: float, seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of a temperature."""
    lengths = rates_by_length(answers)
    rates = {length: share for length, (_, share) in lengths.items()}
    plain, num_positions = seconds[0], sum(map(len, answers))
    taken = {
        "free": [foreknown_seconds(each, [plain] * (MOST + 1)) for each in answers],
        "foreknown": [foreknown_seconds(each, seconds) for each in answers],
        "by_length": [by_length_seconds(each, seconds, rates) for each in answers],
    }
    return {
        "positions": num_positions,
        "has_match": round(sum(place.length > 0 for each in answers for place in each) / num_positions, 3),
        "right": round(sum(place.hits > 0 for each in answers for place in each) / num_positions, 3),
        "right_by_length": {length: [count, round(share, 2)] for length, (count, share) in lengths.items()},
        "gain": {name: gain(answers, prompt, plain, each) for name, each in taken.items()},
    }


def main() -> None:
    """Print the seconds of steps, and a line of JSON for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--workload", default="edit", choices=list(OWN))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.6, 0.3, 0.0])
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8, help="answers whose steps are timed")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: a new one")
    options = parser.parse_args()
    llm = make_engine(options)
    prompt, seconds = step_seconds(llm, options.repeats)
    told = {count: round(1000 * seconds[count], 2) for count in COUNTS}
    print(json.dumps({"seed": options.seed, "prompt_ms": round(1000 * prompt, 2), "step_ms_by_drafts": told}))
    for temperature in options.temperatures:
        asked = answer_all(llm, options.workload, temperature, options.answers, options.seed)
        places = [look_up(encode(llm, talk.turns[0]), talk.answers[0]) for talk in asked]
        found = bounds(places, prompt, seconds)
        print(json.dumps({"workload": options.workload, "temperature": temperature, **found}), flush=True)


if __name__ == "__main__":
    main()
