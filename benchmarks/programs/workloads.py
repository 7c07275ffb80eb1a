"""Five programs of the shapes that agents and pipelines have. The same name, repeat and seed give the same texts.

judge       6 essays, 4 criteria each, one rubric of about 600 words: a tree of depth two
thoughts    tree of thought: 3 levels of 3 thoughts, each judged; the best one is carried on
map-reduce  12 parts of a long text under one instruction of about 300 words, and a summary of the 12 summaries
agents      6 agents side by side, 5 turns each, over a common system message of about 700 words
extraction  24 short texts under one instruction with 8 examples, about 700 words, into objects

All answers are greedy. No repeat shares more than the chat template's first tokens with another.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rootgraft.api.cli.bench_requests import words
from rootgraft.programs import Branch, Session

CRITERIA = ("clarity", "evidence", "structure", "style")
OBJECT = r'\{"name": "[a-z]{3,10}", "number": [1-9][0-9]{0,2}\}'


def judge(session: Session, rng: Random) -> None:
    session.system(f"Grade essays by this rubric. {words(rng, 600)}")
    essays = [words(rng, 250) for _ in range(6)]

    def grade(branch: Branch, criterion: str) -> str:
        return branch.user(f"Its {criterion}?").gen("grade", regex=r"Grade: [1-5]\. Because [a-z ]{20,40}\.")

    def read(branch: Branch, essay: str) -> list[str]:
        return branch.user(f"The essay: {essay}").assistant("I have read it.").map(grade, CRITERIA)

    session.map(read, essays)


def thoughts(session: Session, rng: Random) -> None:
    branch: Branch = session.system(f"Think in steps. {words(rng, 400)}").user(f"The problem: {words(rng, 100)}")
    for level in range(3):
        fork = branch.fork(3)

        def think(each: Branch, number: int, level: int = level) -> int:
            each.user(f"Step {level}, idea {number}?").gen("thought", max_tokens=40)
            verdicts = ("good", "fair", "poor")
            return verdicts.index(each.user("How good is it?").gen("verdict", choices=verdicts))

        marks = fork.map(think, range(3))
        branch = fork[marks.index(min(marks))]


def map_reduce(session: Session, rng: Random) -> None:
    session.system(f"Summarise as told here. {words(rng, 300)}")
    parts = [words(rng, 300) for _ in range(12)]
    summaries = session.map(lambda branch, part: branch.user(f"Part: {part}").gen("summary", max_tokens=32), parts)
    session.user("Summarise these: " + " ".join(summaries)).gen("whole", max_tokens=48)


def agents(session: Session, rng: Random) -> None:
    session.system(f"You have these tools. {words(rng, 700)}")
    results = [[words(rng, 50) for _ in range(5)] for _ in range(6)]

    def act(branch: Branch, own: list[str]) -> None:
        for turn, result in enumerate(own):
            branch.user(f"Result {turn}: {result}. What next?").gen("action", max_tokens=40)

    session.map(act, results)


def extraction(session: Session, rng: Random) -> None:
    examples = " ".join(f'{words(rng, 60)} -> {{"name": "{words(rng, 1)}", "number": {n}}}' for n in range(1, 9))
    session.system(f"Extract as in these examples. {words(rng, 150)} {examples}")
    texts = [words(rng, 60) for _ in range(24)]
    session.map(lambda branch, text: branch.user(text).gen("found", regex=OBJECT), texts)


PROGRAMS: dict[str, Callable[[Session, Random], None]] = {
    "judge": judge,
    "thoughts": thoughts,
    "map-reduce": map_reduce,
    "agents": agents,
    "extraction": extraction,
}


def run(name: str, repeat: int, seed: int, session: Session) -> None:
    """One repeat of a program. KeyError for a name that is none."""
    PROGRAMS[name](session, Random(f"{name} {repeat} {seed}"))
