"""Map-reduce over a long text: each part is summarised in its own branch, then the summaries are combined.

python map_reduce.py [URL [FILE]]
"""

import sys
from pathlib import Path

from rootgraft.programs import Branch, Session

TEXT = Path(__file__).parents[1] / "docs" / "guide" / "keys-and-limits.md"
INSTRUCTIONS = (
    "You sum up technical texts for busy readers. Keep names of options as they are, leave out examples, and never add "
    "what the text does not say. One short sentence, in plain words. "
) * 2
PART = 1500  # characters


def parts_of(text: str) -> list[str]:
    """Combine paragraphs into parts of similar length."""
    parts = [""]
    for paragraph in text.split("\n\n"):
        if len(parts[-1]) + len(paragraph) > PART and parts[-1]:
            parts.append("")
        parts[-1] += paragraph[:PART] + "\n\n"
    return parts


def sum_up(branch: Branch, part: str) -> str:
    """Summarise a part in one sentence."""
    return branch.user(part).gen("sum", max_tokens=40, stop="\n")


def main(url: str = "http://127.0.0.1:8000/v1", file: str = str(TEXT)) -> None:
    """Print the summary and the token report."""
    with Session(url) as session:
        session.system(INSTRUCTIONS)
        sums = session.map(sum_up, parts_of(Path(file).read_text()))
        for number, text in enumerate(sums, 1):
            print(f"{number}. {text.strip()}")
        print("All:", session.user("\n".join(sums)).gen("summary", max_tokens=60))
        print(session.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
