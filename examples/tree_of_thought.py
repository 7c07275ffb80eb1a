"""Tree of thought: three steps are proposed and judged, the best is continued; all over one cached prompt.

python tree_of_thought.py [URL]
"""

import sys

from rootgraft.programs import Branch, Session

PROBLEM = (
    "You plan step by step. A farmer has a wolf, a goat and a cabbage and must cross a river in a boat that carries "
    "him and one of the three. Left alone, the wolf eats the goat, and the goat eats the cabbage. "
) * 3
VERDICTS = ["sure", "likely", "impossible"]


def propose(branch: Branch, number: int) -> Branch:
    """Propose one next step with its own seed, and judge it."""
    branch.user(f"Proposal {number}: what is the next step? One sentence.")
    branch.gen("thought", max_tokens=30, temperature=0.8, seed=number, stop="\n")
    judge = branch.fork(1)[0].user("Does this step lead to the goal?")
    judge.select("verdict", VERDICTS, normalise=True)
    branch.scores["verdict"] = judge.scores["verdict"]
    return branch


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the best path and what sharing saved."""
    with Session(url) as session:
        path: Branch = session.system(PROBLEM)
        for depth in range(1, 3):
            grown = path.map(propose, range(3))
            path = max(grown, key=lambda branch: branch.scores["verdict"]["sure"])
            print(f"Step {depth}: {path['thought'].strip()}")
        print(session.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
