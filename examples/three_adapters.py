"""The same question to the base model and to three adapters, in one batch, each a branch.

rootgraft serve --enable-lora --lora-modules pirate=examples/adapters/pirate \
    --lora-modules contact-card=examples/adapters/contact-card --lora-modules shell=examples/adapters/shell
python three_adapters.py [URL]
"""

import sys

from rootgraft.programs import Branch, Session

ADAPTERS = [None, "pirate", "contact-card", "shell"]
QUESTIONS = ["How do I make a cup of tea?", "Show the last 15 lines of the file debug.log"]


def ask(branch: Branch, adapter: str | None) -> list[str]:
    """Ask two questions in one conversation; the second reuses the adapter's cached first turn."""
    return [
        branch.user(question).gen(question, adapter=adapter, max_tokens=40, stop="\n").strip() for question in QUESTIONS
    ]


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the answers and the token report."""
    with Session(url) as session:
        for adapter, answers in zip(ADAPTERS, session.map(ask, ADAPTERS), strict=True):
            for question, answer in zip(QUESTIONS, answers, strict=True):
                print(f"{adapter or 'base model'} | {question} | {answer}")
        print(session.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
