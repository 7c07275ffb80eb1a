"""Judge with one rubric for many essays: rubric and essay are computed once, each criterion is a branch.

python judge_with_rubric.py [URL]
"""

import sys
from typing import Literal

from pydantic import BaseModel

from rootgraft.programs import Branch, Session

RUBRIC = (
    "You grade essays. Clarity: is each sentence easy to follow? Evidence: is each claim supported? Structure: does "
    "each paragraph have one idea? A grade of A is excellent, B is good, C is fair and D is poor. "
) * 3
ESSAYS = {
    "bees": "Bees matter. They pollinate a third of what we eat. Without them, apples and almonds would be rare.",
    "rain": "Rain is wet and sometimes it rains. I think that rain is good, because rain. Also clouds.",
}
CRITERIA = ["clarity", "evidence", "structure"]


class Grade(BaseModel):
    """Answer of the judge."""

    criterion: Literal["clarity", "evidence", "structure"]
    grade: Literal["A", "B", "C", "D"]


def grade_essay(branch: Branch, name: str) -> list[Grade]:
    """Grade all criteria in parallel branches over the same essay."""
    branch.user(f"The essay:\n{ESSAYS[name]}")
    return branch.map(grade_criterion, CRITERIA)


def grade_criterion(branch: Branch, criterion: str) -> Grade:
    """Grade one criterion."""
    return branch.user(f"Grade its {criterion}. Answer in JSON.").gen("grade", schema=Grade, max_tokens=40)


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the grades and the token report."""
    with Session(url) as session:
        for name, grades in zip(ESSAYS, session.system(RUBRIC).map(grade_essay, ESSAYS), strict=True):
            print(name, {criterion: grade.grade for criterion, grade in zip(CRITERIA, grades, strict=True)})
        print(session.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
