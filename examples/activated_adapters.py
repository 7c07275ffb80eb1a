"""Activated adapters over one long context, which is computed once by the base model and shared by all adapters.

rootgraft serve --enable-lora --lora-modules NAME=FOLDER ...  (adapters with alora_invocation_tokens)
python activated_adapters.py URL NAME [NAME ...]
"""

import sys
from pathlib import Path

from rootgraft.programs import Branch, Session

CONTEXT = (Path(__file__).parents[1] / "docs" / "guide" / "adapters.md").read_text()


def ask(branch: Branch, adapter: str) -> str:
    """Return one adapter's answer."""
    return branch.user("What is this text about?").gen("answer", adapter=adapter, max_tokens=30, stop="\n")


def main(url: str, *adapters: str) -> None:
    """Print each adapter's answer and the token report."""
    if not adapters:
        raise SystemExit("Name the adapters to ask: python activated_adapters.py URL NAME [NAME ...]")
    with Session(url) as session:
        session.system(CONTEXT).warm()
        before = session.report()
        for adapter, answer in zip(adapters, session.map(ask, adapters), strict=True):
            print(f"{adapter}: {answer.strip()}")
        print(f"the context: {before.prompt} tokens, computed once by the base model")
        print(session.report() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
