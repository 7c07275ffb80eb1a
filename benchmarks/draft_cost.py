"""What looking for drafts costs where there are none: ``python -m benchmarks.draft_cost``. Offline, one engine.

Open-ended text at temperature 1, in which next to nothing can be guessed. Drafts are switched on and off every 16 steps
of the same answers, and the speed of each stretch is compared with that of the next one: a machine whose cores are
shared changes its speed less within 0.2 seconds than between whole runs. Prompts' steps are not counted. A stretch with
drafts also catches up with the tokens of the one without, so what is told is rather too much than too little. Told are
the median, the geometric mean with its 95 % confidence interval, and what that shows, as ``benchmarks.drafts`` does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

from benchmarks.drafts import add_engine_options, free_prompt, interval, make_engine, verdict
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.types import SamplingParams

STRETCH = 16  # steps
TOKENS = 256  # of an answer


@dataclass
class Stretch:
    """Steps one after another, in all of which every row draws."""

    has_drafts: bool
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def stretches(llm: LLM, concurrency: int, repeat: int) -> list[Stretch]:
    """Answer once, with drafts in every other stretch."""
    core = llm._core
    scheduler = core._scheduler
    drafts = scheduler._drafts
    draw = random.Random(f"{concurrency} {repeat}")
    for number in range(concurrency):
        messages = [{"role": "user", "content": free_prompt(draw)}]
        prompt = llm.tokenizer.encode(
            llm.tokenizer.render_chat(messages, add_generation_prompt=True), add_special_tokens=False
        )
        params = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=1000 * repeat + number)
        llm.begin(prompt, params)
    while scheduler.num_waiting or any(each.prefilling for each in scheduler.running):
        llm.step()
    found = []
    while scheduler.num_running == concurrency:
        stretch = Stretch(has_drafts=(len(found) + repeat) % 2 == 0)
        found.append(stretch)
        scheduler._drafts = drafts if stretch.has_drafts else None
        before, start = core.stats()["generation_tokens"], time.perf_counter()
        while stretch.steps < STRETCH and scheduler.num_running == concurrency:
            llm.step()
            stretch.steps += 1
        stretch.seconds = time.perf_counter() - start
        stretch.tokens = int(core.stats()["generation_tokens"] - before)
    scheduler._drafts = drafts
    while llm.step():
        pass
    return [stretch for stretch in found if stretch.steps == STRETCH]


def kept(llm: LLM, concurrency: int, repeats: int) -> list[float]:
    """Speed with drafts by that without, of pairs of stretches next to each other."""
    quotients = []
    for repeat in range(repeats + 1):
        found = stretches(llm, concurrency, repeat)
        for first, second in zip(found[::2], found[1::2], strict=False):  # each in one pair: an interval asks for that
            with_, without = (first, second) if first.has_drafts else (second, first)
            if repeat:  # the first one records steps of new sizes
                quotients.append(with_.speed / without.speed)
    return quotients


def main() -> None:
    """Print one line of JSON for each concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--repeats", type=int, default=16)
    options = parser.parse_args()
    llm = make_engine(options)
    for concurrency in options.concurrency:
        quotients = kept(llm, concurrency, options.repeats)
        mean, *ends = interval(quotients)
        figures = {
            "median": round(statistics.median(quotients), 4),
            "mean": round(mean, 4),
            "interval": [round(end, 4) for end in ends],
            "quartiles": [round(each, 4) for each in statistics.quantiles(quotients, n=4)[::2]],
            "verdict": verdict(*ends),
        }
        print(json.dumps({"concurrency": concurrency, "pairs": len(quotients), "kept": figures}), flush=True)


if __name__ == "__main__":
    main()
